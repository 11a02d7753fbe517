"""Longest-suffix lookup against a search that looks at everything."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.request import Request, SamplingParams, Speculation
from paceline.spec.proposer import NO_DRAFT
from paceline.spec.suffix import MAX_CANDIDATES, MAX_MATCH, MIN_MATCH, SuffixIndex, SuffixProposer


def request_of(token_ids: Sequence[int], name: str = "r") -> Request:
    return Request(name, list(token_ids), SamplingParams(), Speculation(), max_total_tokens=10**6)


def common_suffix(a: Sequence[int], b: Sequence[int]) -> int:
    length = 0
    while length < min(len(a), len(b)) and a[-1 - length] == b[-1 - length]:
        length += 1
    return length


def slow_match(tokens: Sequence[int], recent: Sequence[int]) -> tuple[int, int]:
    """The contract by brute force: compare with every position, keep the newest occurrences, take the longest."""
    if len(recent) < MIN_MATCH:
        return 0, 0
    lengths = {end: common_suffix(recent, tokens[:end]) for end in range(MIN_MATCH, len(tokens) + 1)}
    ends = [end for end, length in lengths.items() if length >= MIN_MATCH]
    # The occurrence at the very end counts as a candidate, though never as a match: nothing follows it.
    candidates = [end for end in ends[-MAX_CANDIDATES - 1 :] if end < len(tokens)]
    if not candidates:
        return 0, 0
    best = max(candidates, key=lambda end: (min(lengths[end], MAX_MATCH), end))
    return best, min(lengths[best], MAX_MATCH)


sequences = st.integers(1, 5).flatmap(lambda size: st.lists(st.integers(1, size), max_size=120))


@settings(max_examples=400)
@given(tokens=sequences)
def test_own_tail_is_matched_as_by_brute_force(tokens: list[int]) -> None:
    assert SuffixIndex(tokens).match(tokens[-MAX_MATCH:]) == slow_match(tokens, tokens[-MAX_MATCH:])


@settings(max_examples=400)
@given(tokens=sequences, recent=sequences)
def test_foreign_tokens_are_matched_as_by_brute_force(tokens: list[int], recent: list[int]) -> None:
    assert SuffixIndex(tokens).match(recent[-MAX_MATCH:]) == slow_match(tokens, recent[-MAX_MATCH:])


@settings(max_examples=100)
@given(tokens=sequences, cuts=st.lists(st.integers(0, 120), max_size=6))
def test_growing_and_building_at_once_are_the_same(tokens: list[int], cuts: list[int]) -> None:
    grown = SuffixIndex()
    for start, end in zip([0, *sorted(cuts)], [*sorted(cuts), len(tokens)], strict=True):
        grown.extend(tokens[start:end])
        grown.match(tokens[max(0, end - MAX_MATCH) : end])  # a lookup leaves no trace
    grown.extend(tokens[max([0, *cuts]) :][: len(tokens) - len(grown)])
    assert len(grown) == len(tokens)
    assert grown.match(tokens[-MAX_MATCH:]) == SuffixIndex(tokens).match(tokens[-MAX_MATCH:])


@pytest.mark.parametrize(
    ("tokens", "match"),
    [
        ([], (0, 0)),
        ([1], (0, 0)),
        ([1, 2], (0, 0)),
        ([1, 2, 3], (0, 0)),
        ([1, 1], (0, 0)),
        ([1, 1, 1], (2, 2)),
        ([1, 2, 1, 2], (2, 2)),
        ([1, 2, 3, 1, 2], (2, 2)),
        ([2, 3, 9, 1, 2, 3, 8, 1, 2, 3], (6, 3)),  # the longer one
        ([1, 2, 7, 1, 2, 8, 1, 2], (5, 2)),  # the newer of equals
        ([1, 2, 3, 7, 0, 2, 3, 8, 1, 2, 3], (3, 3)),  # longer beats newer
    ],
)
def test_examples(tokens: list[int], match: tuple[int, int]) -> None:
    assert SuffixIndex(tokens).match(tokens[-MAX_MATCH:]) == match


def test_a_match_is_no_longer_than_max_match() -> None:
    tokens = [*range(100), 7, *range(100), 8, *range(100)]
    assert SuffixIndex(tokens).match(tokens[-MAX_MATCH:]) == (201, MAX_MATCH)
    assert SuffixIndex(tokens).match(tokens) == (201, MAX_MATCH)


@pytest.mark.parametrize(("num_newer", "match"), [(MAX_CANDIDATES - 1, 3), (MAX_CANDIDATES, 2)])
def test_only_the_newest_candidates_are_compared(num_newer: int, match: int) -> None:
    tokens = [5, 1, 2, 0] + [9, 1, 2, 0] * num_newer + [5, 1, 2]
    assert SuffixIndex(tokens).match(tokens)[1] == match


@pytest.mark.parametrize("period", [1, 2, 3, 7, 40])
def test_a_period_is_continued(period: int) -> None:
    tokens = (list(range(period)) * 200)[:200]
    index = SuffixIndex(tokens)
    end, length = index.match(tokens[-MAX_MATCH:])
    assert (end, length) == (200 - period, MAX_MATCH)
    assert index.continuation(end, 64) == tokens[200 - period :]


# ---- cost ----------------------------------------------------------------------------------------------------------


class CountingList(list[int]):
    """Counts the elements read from it."""

    num_reads = 0

    def __getitem__(self, key: Any) -> Any:
        value = super().__getitem__(key)
        self.num_reads += len(value) if isinstance(value, list) else 1
        return value


def reads_per_token(tokens: Sequence[int], after: int) -> float:
    """Elements read per token once ``after`` tokens stand there, with a proposal at every token."""
    request = request_of(tokens[:after])
    proposer = SuffixProposer()
    proposer.propose([request], [8])
    index = proposer._indexes["r"]
    request.token_ids, index._tokens = CountingList(request.token_ids), CountingList(index._tokens)
    for token_id in tokens[after:]:
        request.token_ids.append(token_id)
        proposer.propose([request], [8])
    return (request.token_ids.num_reads + index._tokens.num_reads) / (len(tokens) - after)


@pytest.mark.parametrize(
    "text",
    [lambda i: 1, lambda i: i % 2, lambda i: i % 37, lambda i: i, lambda i: i * i % 11],
    ids=["constant", "alternating", "periodic", "all-different", "squares"],
)
def test_cost_does_not_grow_with_the_context(text: Any) -> None:
    early = reads_per_token(list(map(text, range(400))), after=200)
    late = reads_per_token(list(map(text, range(4200))), after=4000)
    assert 0 < late <= early * 1.1
    assert late <= (MAX_CANDIDATES + 3) * MAX_MATCH  # a full comparison for each candidate, and the tail itself


def test_the_index_stays_proportional_to_the_text() -> None:
    index = SuffixIndex([1] * 5000)
    assert sum(map(len, index._ends.values())) <= 2 * MAX_CANDIDATES


# ---- the proposer --------------------------------------------------------------------------------------------------


def test_silent_for_long_and_then_right() -> None:
    request = request_of([5, 6, 7])
    proposer = SuffixProposer()
    for token_id in range(100, 200):
        assert proposer.propose([request], [4]) == [NO_DRAFT]
        request.token_ids.append(token_id)
    request.token_ids += [100, 101]
    draft = proposer.propose([request], [4])[0]
    assert (draft.token_ids, draft.source, draft.draft_probs) == ([102, 103, 104, 105], "suffix", None)


@pytest.mark.parametrize("horizon", [1, 2, 5])
def test_drafts_respect_each_horizon_and_each_request(horizon: int) -> None:
    first, second = request_of([*range(9), 0, 1]), request_of([*range(20, 29), 20, 21], "s")
    drafts = SuffixProposer().propose([first, second], [horizon, 3])
    assert drafts[0].token_ids == list(range(2, 2 + horizon))
    assert drafts[1].token_ids == [22, 23, 24]


def test_a_released_request_starts_over() -> None:
    proposer = SuffixProposer()
    proposer.propose([request_of([1, 2, 3])], [4])
    proposer.release("r")
    proposer.release("never seen")
    assert proposer.propose([request_of([1, 2, 9, 1, 2])], [1])[0].token_ids == [9]


def test_tokens_that_were_rejected_are_not_remembered() -> None:
    request = request_of([1, 2, 3, 1, 2])
    proposer = SuffixProposer()
    assert proposer.propose([request], [1])[0].token_ids == [3]
    request.token_ids += [8, 1, 2]
    assert proposer.propose([request], [1])[0].token_ids == [8]

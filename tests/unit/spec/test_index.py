"""The index against a search that looks at everything, its ring, and its cost."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.spec.index import KEY_LENGTH, MAX_CANDIDATES, MAX_MATCH, SEPARATOR, TokenIndex


def index_of(tokens: Sequence[int], capacity: int | None = None) -> TokenIndex:
    index = TokenIndex(capacity)
    index.extend(tokens)
    return index


def common_suffix(a: Sequence[int], b: Sequence[int]) -> int:
    length = 0
    while length < min(len(a), len(b), MAX_MATCH) and a[-1 - length] == b[-1 - length]:
        length += 1
    return length


def slow_candidates(tokens: Sequence[int], recent: Sequence[int], oldest: int = 0) -> list[tuple[int, int]]:
    """The contract by brute force."""
    found = []
    for end in range(len(tokens) - 1, oldest, -1):
        length = common_suffix(recent, tokens[oldest:end])
        if length >= KEY_LENGTH and tokens[end] != SEPARATOR:
            found.append((end, length))
    return found[:MAX_CANDIDATES]


sequences = st.integers(1, 5).flatmap(lambda size: st.lists(st.integers(0, size), max_size=150))


@settings(max_examples=300)
@given(tokens=sequences)
def test_own_tail_is_found_as_by_brute_force(tokens: list[int]) -> None:
    expected = slow_candidates(tokens, tokens)
    assert index_of(tokens).candidates(tokens, MAX_CANDIDATES) == expected
    match = index_of(tokens).match(tokens)
    if not expected:
        assert match is None
        return
    assert match is not None
    assert match.length == max(length for _, length in expected)
    assert match.position == next(position for position, length in expected if length == match.length)
    assert match.num_candidates == len(expected)
    assert match.num_agreeing == sum(tokens[position] == tokens[match.position] for position, _ in expected)


@settings(max_examples=300)
@given(tokens=sequences, recent=sequences)
def test_foreign_tokens_are_found_as_by_brute_force(tokens: list[int], recent: list[int]) -> None:
    assert index_of(tokens).candidates(recent, MAX_CANDIDATES) == slow_candidates(tokens, recent)


@settings(max_examples=100)
@given(tokens=st.lists(st.integers(0, 3), max_size=400), cuts=st.lists(st.integers(0, 400), max_size=6))
def test_growing_and_building_at_once_are_the_same(tokens: list[int], cuts: list[int]) -> None:
    grown = TokenIndex()
    for start, end in pairwise([0, *sorted(min(cut, len(tokens)) for cut in cuts), len(tokens)]):
        grown.extend(tokens[start:end])
    singly = TokenIndex()
    for token in tokens:
        singly.extend([token])
    assert len(grown) == len(singly) == len(tokens)
    assert grown.match(tokens) == singly.match(tokens) == index_of(tokens).match(tokens)


@settings(max_examples=100)
@given(tokens=st.lists(st.integers(0, 2), max_size=120), pieces=st.integers(1, 90))
def test_a_ring_knows_its_newest_tokens_and_nothing_else(tokens: list[int], pieces: int) -> None:
    index = TokenIndex(16)
    for start in range(0, len(tokens), pieces):
        index.extend(tokens[start : start + pieces])
        known = tokens[: start + pieces]
        oldest = max(0, len(known) - 16)
        assert index.candidates(known, MAX_CANDIDATES) == slow_candidates(known, known, oldest)
        for position, _ in index.candidates(known, MAX_CANDIDATES):
            assert index.continuation(position, 5) == known[position : position + 5]


def test_growth_across_table_sizes_keeps_old_places() -> None:
    tokens = [*range(100, 140), *range(5000, 8000)]
    index = TokenIndex()
    for token in tokens:
        index.extend([token])
    match = index.match(list(range(100, 110)))
    assert match is not None
    assert (match.position, match.length) == (10, 10)
    index.extend(range(9000, 30000))  # at once, over several doublings
    assert index.match(list(range(100, 110))) == match


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([], None),
        ([1, 2, 3], None),
        ([1, 1], None),
        ([1, 1, 1], (2, 2)),
        ([1, 1, 1, 1], (3, 3)),
        ([1, 2, 3, 1, 2, 3], (3, 3)),
        ([1, 2, 3, 7, 1, 2, 3, 8, 1, 2, 3], (7, 3)),  # the newer of equals
        ([9, 1, 2, 3, 7, 0, 1, 2, 3, 8, 9, 1, 2, 3], (4, 4)),  # longer beats newer
    ],
)
def test_examples(tokens: list[int], expected: tuple[int, int] | None) -> None:
    match = index_of(tokens).match(tokens)
    assert (match and (match.position, match.length)) == expected


def test_no_match_and_no_continuation_crosses_a_separator() -> None:
    index = index_of([1, 2, 3, 4, SEPARATOR, 5, 6, 7, 8, SEPARATOR])
    match = index.match([4, 9, 5, 6, 7])
    assert match is not None
    assert (match.position, match.length) == (8, 3)
    assert index.continuation(match.position, 9) == [8]
    assert index.match([6, 7, 8]) is None  # nothing follows


@pytest.mark.parametrize("period", [1, 2, 3, 7, 40])
def test_a_period_is_found(period: int) -> None:
    tokens = (list(range(period)) * 200)[:200]
    match = index_of(tokens).match(tokens)
    assert match is not None
    assert (match.position, match.length) == (200 - period, MAX_MATCH)


def test_memory_of_a_ring_levels_off() -> None:
    index = TokenIndex(1024)
    rng = random.Random(0)
    sizes = []
    for _ in range(2000):
        index.extend([rng.randrange(50) for _ in range(40)] + [SEPARATOR])
        sizes.append(index.num_bytes)
    assert len(index) == 2000 * 41
    assert len(set(sizes[100:])) == 1
    assert sizes[-1] <= 1024 * 20 + 8 * 1024


class _Counting:
    """Counts the tokens a lookup reads."""

    def __init__(self, index: TokenIndex) -> None:
        self.num_reads = 0
        self._at = index._at
        index._at = self.read  # type: ignore[method-assign]

    def read(self, position: int) -> int:
        self.num_reads += 1
        return self._at(position)


@pytest.mark.parametrize(
    "text",
    [lambda i: 1, lambda i: i % 2, lambda i: i % 37, lambda i: i, lambda i: i * i % 11],
    ids=["constant", "alternating", "periodic", "all different", "squares"],
)
def test_work_does_not_grow_with_the_text(text: Callable[[int], int]) -> None:
    def reads(length: int) -> int:
        tokens = [text(i) for i in range(length)]
        index = index_of(tokens)
        counting = _Counting(index)
        index.match(tokens[-MAX_MATCH:])
        for token in range(8):
            index.extend([token])
        return counting.num_reads

    assert reads(32_000) <= reads(2_000) * 1.1 + 8
    assert reads(32_000) <= (MAX_CANDIDATES + 1) * (MAX_MATCH + 3) + 8 * 4

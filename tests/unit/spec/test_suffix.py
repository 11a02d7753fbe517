"""Looking the newest tokens up in a request's own text, in earlier answers and in the user's files."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from paceline.request import Request, SamplingParams, Speculation
from paceline.spec.index import TokenIndex
from paceline.spec.suffix import CorpusLookup, SuffixLookup


def request_of(token_ids: Sequence[int], name: str = "r", output: Sequence[int] = ()) -> Request:
    request = Request(name, list(token_ids), SamplingParams(), Speculation(), max_total_tokens=10**6)
    request.token_ids += output
    return request


def test_silent_for_long_and_then_right() -> None:
    request, lookup = request_of([5, 6, 7]), SuffixLookup()
    for token_id in range(100, 200):
        assert lookup.look_up(request, 4) is None
        request.token_ids.append(token_id)
    request.token_ids += [100, 101, 102]
    guess = lookup.look_up(request, 4)
    assert guess is not None
    assert (list(guess.token_ids), guess.source, guess.kind, guess.length) == (
        [103, 104, 105, 106],
        "suffix",
        "single",
        3,
    )


def test_places_that_disagree_are_told_apart_from_places_that_agree() -> None:
    lookup = SuffixLookup()
    split = lookup.look_up(request_of([1, 2, 3, 7, 0, 1, 2, 3, 8, 0, 1, 2, 3]), 2)
    agreed = lookup.look_up(request_of([1, 2, 3, 7, 0, 1, 2, 3, 7, 0, 1, 2, 3], "s"), 2)
    assert split is not None
    assert agreed is not None
    assert (split.kind, list(split.token_ids)) == ("split", [8, 0])
    assert (agreed.kind, list(agreed.token_ids)) == ("agreed", [7, 0])


@pytest.mark.parametrize("period", [1, 2, 3, 5])
def test_a_period_is_continued_beyond_the_known_text(period: int) -> None:
    tokens = (list(range(period)) * 30)[:30]
    guess = SuffixLookup().look_up(request_of(tokens), 16)
    assert guess is not None
    assert list(guess.token_ids) == [(30 + i) % period for i in range(16)]


def test_tokens_that_were_rejected_are_not_remembered() -> None:
    request, lookup = request_of([1, 2, 3, 4, 1, 2, 3]), SuffixLookup()
    first = lookup.look_up(request, 1)
    assert first is not None
    assert list(first.token_ids) == [4]
    request.token_ids += [8, 1, 2, 3]
    second = lookup.look_up(request, 1)
    assert second is not None
    assert list(second.token_ids) == [8]


def test_requests_are_apart_and_a_released_one_starts_over() -> None:
    lookup = SuffixLookup()
    lookup.look_up(request_of([1, 2, 3, 4]), 4)
    assert lookup.look_up(request_of([1, 2, 3], "s"), 4) is None
    lookup.release(request_of([1, 2, 3, 4]))
    lookup.release(request_of([1], "never seen"))
    guess = lookup.look_up(request_of([1, 2, 3, 9, 1, 2, 3]), 1)
    assert guess is not None
    assert list(guess.token_ids) == [9]


def test_an_answer_is_known_to_later_requests_and_a_prompt_is_not() -> None:
    lookup = CorpusLookup(1024)
    lookup.release(request_of([1, 2, 3, 4, 5], output=[11, 12, 13, 14, 15]))
    guess = lookup.look_up(request_of([9, 11, 12, 13], "s"), 8)
    assert guess is not None
    assert (list(guess.token_ids), guess.source) == ([14, 15], "corpus")
    assert lookup.look_up(request_of([1, 2, 3], "s"), 8) is None
    lookup.forget_answers()
    assert lookup.look_up(request_of([9, 11, 12, 13], "s"), 8) is None


def test_the_longer_match_wins_over_where_it_stands() -> None:
    repository = TokenIndex(1024)
    repository.extend([7, 1, 2, 3, 20, 21])
    lookup = CorpusLookup(1024, repository)
    lookup.release(request_of([0], output=[1, 2, 3, 30, 31]))
    for recent, expected in (([7, 1, 2, 3], [20, 21]), ([8, 1, 2, 3], [30, 31])):
        guess = lookup.look_up(request_of(recent, "s"), 8)
        assert guess is not None
        assert list(guess.token_ids) == expected
    lookup.forget_answers()
    guess = lookup.look_up(request_of([8, 1, 2, 3], "s"), 8)
    assert guess is not None
    assert list(guess.token_ids) == [20, 21]


def test_two_thousand_sessions_share_a_bounded_index() -> None:
    lookup, rng, sizes = CorpusLookup(4096), random.Random(1), []
    for number in range(2000):
        answer = [rng.randrange(1000) for _ in range(50)]
        lookup.release(request_of([1, 2, 3], f"r{number}", answer))
        sizes.append(lookup.num_bytes)
        guess = lookup.look_up(request_of(answer[:10], "probe"), 4)  # the newest answer is always there
        assert guess is not None
        assert list(guess.token_ids) == answer[10:14]
    assert len(set(sizes[200:])) == 1

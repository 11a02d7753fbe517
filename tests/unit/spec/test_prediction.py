"""Drafting from a prediction: from its start, then from wherever the output stands in it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from paceline.request import Request, SamplingParams, Speculation
from paceline.spec.prediction import PredictionProposer
from paceline.spec.proposer import NO_DRAFT

PREDICTION = list(range(10, 30))


def draft(prediction: Sequence[int], output: Sequence[int], horizon: int = 4, prompt: Sequence[int] = (1, 2)) -> list:
    request = Request("r", prompt, SamplingParams(), Speculation(), 1000, prediction_token_ids=prediction)
    request.token_ids += output
    result = PredictionProposer().propose([request], [horizon])[0]
    assert result.draft_probs is None
    assert not result.token_ids or result.source == "prediction"
    return list(result.token_ids)


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ([], [10, 11, 12, 13]),  # nothing yet: from the start
        ([10], [11, 12, 13, 14]),
        ([11], []),  # begins differently; one token is too few to look up
        ([10, 11], [12, 13, 14, 15]),
        ([10, 11, 12, 99], []),  # diverged
        ([10, 11, 12, 99, 15, 16], [17, 18, 19, 20]),  # and back again
        ([99, 98, 13, 14], [15, 16, 17, 18]),
        ([27, 28], [29]),  # the end of the prediction
        ([28, 29], []),
    ],
)
def test_where_the_output_stands(output: list[int], expected: list[int]) -> None:
    assert draft(PREDICTION, output) == expected


@pytest.mark.parametrize("horizon", [1, 3, 64])
def test_horizon_bounds_the_draft(horizon: int) -> None:
    assert draft(PREDICTION, [10, 11], horizon) == PREDICTION[2 : 2 + horizon]


@pytest.mark.parametrize(("prediction", "output"), [([], []), ([], [10, 11]), ([10], [10]), ([10], [10, 11])])
def test_tiny_predictions(prediction: list[int], output: list[int]) -> None:
    assert draft(prediction, output) == []


def test_the_prompt_is_not_looked_up() -> None:
    assert draft(PREDICTION, [13], prompt=[11, 12]) == []
    assert draft(PREDICTION, [14, 15], prompt=[20, 21]) == [16, 17, 18, 19]


def test_the_longest_match_wins() -> None:
    assert draft([1, 5, 6, 70, 2, 5, 6, 80, 3, 5, 6, 90], [9, 2, 5, 6], horizon=1) == [80]


def test_requests_have_predictions_of_their_own() -> None:
    proposer = PredictionProposer()
    requests = [
        Request(name, [1], SamplingParams(), Speculation(), 1000, prediction_token_ids=prediction)
        for name, prediction in (("a", [5, 6]), ("b", [7, 8]), ("c", []))
    ]
    drafts = proposer.propose(requests, [1, 2, 2])
    assert [list(d.token_ids) for d in drafts] == [[5], [7, 8], []]
    assert drafts[2] is NO_DRAFT
    proposer.release("a")
    proposer.release("c")
    renewed = Request("a", [1], SamplingParams(), Speculation(), 1000, prediction_token_ids=[9])
    assert list(proposer.propose([renewed], [1])[0].token_ids) == [9]

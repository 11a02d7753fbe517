"""Who is asked for a draft, about whom, and who learns of its fate."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from paceline.records import Verdict
from paceline.request import Request, SamplingParams, Speculation
from paceline.spec.chain import ProposerChain
from paceline.spec.proposer import NO_DRAFT, Draft


class Scripted:
    """Says its piece for the requests it knows, and notes what it was told."""

    def __init__(self, name: str, says: dict[str, list[int]]) -> None:
        self.name = name
        self.says = says
        self.asked: list[tuple[str, int]] = []
        self.observed: list[str] = []
        self.released: list[str] = []

    def propose(self, requests: Sequence[Request], horizons: Sequence[int]) -> list[Draft]:
        self.asked += zip((request.request_id for request in requests), horizons, strict=True)
        return [
            Draft(tokens[:horizon], self.name) if (tokens := self.says.get(request.request_id)) else NO_DRAFT
            for request, horizon in zip(requests, horizons, strict=True)
        ]

    def observe(self, request: Request, verdict: Verdict) -> None:
        self.observed.append(request.request_id)

    def release(self, request_id: str) -> None:
        self.released.append(request_id)


def request(name: str, drafters: Sequence[str] = ("prediction", "suffix", "model")) -> Request:
    return Request(name, [1], SamplingParams(), Speculation("static", 8, drafters), 100)


@pytest.fixture
def prediction() -> Scripted:
    return Scripted("prediction", {"a": [1, 2, 3]})


@pytest.fixture
def suffix() -> Scripted:
    return Scripted("suffix", {"a": [4], "b": [5, 6]})


@pytest.fixture
def model() -> Scripted:
    return Scripted("model", {"a": [7], "b": [8], "c": [9, 9, 9]})


@pytest.fixture
def chain(prediction: Scripted, suffix: Scripted, model: Scripted) -> ProposerChain:
    return ProposerChain([prediction, suffix, model])


def told(drafts: Sequence[Draft]) -> list[tuple[str, list[int]]]:
    return [(draft.source, list(draft.token_ids)) for draft in drafts]


def test_the_first_with_something_to_say_drafts(
    chain: ProposerChain, prediction: Scripted, suffix: Scripted, model: Scripted
) -> None:
    drafts = chain.propose([request("a"), request("b"), request("c"), request("d")], [2, 2, 2, 2])
    assert told(drafts) == [("prediction", [1, 2]), ("suffix", [5, 6]), ("model", [9, 9]), ("none", [])]
    assert [name for name, _ in prediction.asked] == ["a", "b", "c", "d"]
    assert [name for name, _ in suffix.asked] == ["b", "c", "d"]
    assert [name for name, _ in model.asked] == ["c", "d"]


@pytest.mark.parametrize(
    ("drafters", "expected"),
    [
        (("model",), ("model", [7])),
        (("suffix", "model"), ("suffix", [4])),
        (("model", "suffix"), ("model", [7])),
        (("suffix", "prediction"), ("suffix", [4])),
        ((), ("none", [])),
    ],
)
def test_each_request_names_its_drafters_in_its_own_order(
    chain: ProposerChain, drafters: Sequence[str], expected: tuple[str, list[int]]
) -> None:
    drafts = chain.propose([request("a", drafters), request("a2", ("prediction",)), request("a")], [3, 3, 3])
    assert told(drafts) == [expected, ("none", []), ("prediction", [1, 2, 3])]


def test_a_horizon_of_zero_is_not_asked_about(chain: ProposerChain, model: Scripted, suffix: Scripted) -> None:
    drafts = chain.propose([request("a"), request("b"), request("c")], [0, 1, 0])
    assert told(drafts) == [("none", []), ("suffix", [5]), ("none", [])]
    assert suffix.asked == [("b", 1)]
    assert model.asked == []


def test_drafters_that_are_not_there_are_skipped(suffix: Scripted) -> None:
    chain = ProposerChain([suffix])
    assert chain.sources == ["suffix"]
    assert told(chain.propose([request("a"), request("b", ("model",))], [3, 3])) == [("suffix", [4]), ("none", [])]
    assert chain.propose([], []) == []


def test_an_empty_draft_has_no_source(chain: ProposerChain, prediction: Scripted) -> None:
    prediction.propose = lambda requests, horizons: [Draft([], "prediction")] * len(requests)  # type: ignore[method-assign]
    assert told(chain.propose([request("d")], [3])) == [("none", [])]


def test_only_the_source_of_the_newest_draft_observes(
    chain: ProposerChain, prediction: Scripted, suffix: Scripted, model: Scripted
) -> None:
    a, b, d = request("a"), request("b"), request("d")
    chain.propose([a, b, d], [2, 2, 2])
    for item in (a, b, d, request("unheard of")):
        chain.observe(item, Verdict([1], 0, 0))
    assert (prediction.observed, suffix.observed, model.observed) == (["a"], ["b"], [])
    chain.propose([request("a", ("suffix",))], [2])
    chain.observe(a, Verdict([1], 1, 0))
    assert (prediction.observed, suffix.observed) == (["a"], ["b", "a"])


def test_release_reaches_everyone(
    chain: ProposerChain, prediction: Scripted, suffix: Scripted, model: Scripted
) -> None:
    chain.propose([request("a")], [2])
    chain.release("a")
    assert prediction.released == suffix.released == model.released == ["a"]
    chain.observe(request("a"), Verdict([1], 0, 0))
    assert prediction.observed == []

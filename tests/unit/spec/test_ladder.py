"""Who drafts, how far, who learns, and that a poor source never costs much: on scripted sources and a clock by hand."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from paceline.records import Verdict
from paceline.request import Request, SamplingParams, Speculation, SpeculationMode
from paceline.spec.forced import GrammarLookup
from paceline.spec.ladder import Ladder
from paceline.spec.proposer import NO_DRAFT, Draft, Guess, StopRule
from tests.fakes import RuledConstraint


class Clock:
    """Seconds under the test's control."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@dataclass
class FakeLookup:
    """Guesses what it is told to, for the requests it knows."""

    name: str
    says: dict[str, Sequence[int]] = field(default_factory=dict)
    length: int = 16
    released: list[str] = field(default_factory=list)

    def look_up(self, request: Request, num_tokens: int) -> Guess | None:
        said = self.says.get(request.request_id)
        return Guess(list(said)[:num_tokens], self.name, "single", self.length) if said else None

    def release(self, request: Request) -> None:
        self.released.append(request.request_id)

    def forget_answers(self) -> None:
        self.says = {}


class FakeModel:
    """Drafts what it is told to and takes its time."""

    name = "model"
    ms_to_prepare = 0.0

    def __init__(self, clock: Clock, says: dict[str, Sequence[int]], ms_per_token: float = 1.0) -> None:
        self.clock, self.says, self.ms_per_token = clock, says, ms_per_token
        self.asked: list[tuple[str, int]] = []
        self.observed: list[str] = []
        self.released: list[str] = []
        self.prepared: list[str] = []

    def prepare(self, requests: Sequence[Request]) -> None:
        self.clock.now += self.ms_to_prepare / 1e3
        self.prepared += (request.request_id for request in requests)

    def propose(
        self, requests: Sequence[Request], horizons: Sequence[int], rules: Sequence[StopRule | None] = ()
    ) -> list[Draft]:
        self.asked += zip((request.request_id for request in requests), horizons, strict=True)
        self.clock.now += self.ms_per_token * max(horizons) / 1e3
        return [
            Draft(list(said)[:horizon], self.name) if (said := self.says.get(request.request_id)) else NO_DRAFT
            for request, horizon in zip(requests, horizons, strict=True)
        ]

    def observe(self, request: Request, verdict: Verdict) -> None:
        self.observed.append(request.request_id)

    def release(self, request_id: str) -> None:
        self.released.append(request_id)


def request(
    name: str = "a",
    drafters: Sequence[str] = ("prediction", "suffix", "corpus", "model"),
    mode: SpeculationMode = "dynamic",
    max_tokens: int = 8,
) -> Request:
    return Request(name, [1, 2, 3], SamplingParams(), Speculation(mode, max_tokens, drafters, 0.0), 10**6)


def draft(ladder: Ladder, requests: Sequence[Request]) -> list[tuple[str, list[int]]]:
    """A step up to the verdicts, as the engine does it."""
    ladder.plan(requests)
    drafts = ladder.propose(requests, [ladder.horizon(item) for item in requests])
    return [(each.source, list(each.token_ids)) for each in drafts]


def commit(ladder: Ladder, item: Request, num_drafted: int, num_accepted: int, token_ids: Sequence[int]) -> None:
    item.token_ids += token_ids
    ladder.observe(item, Verdict(token_ids, num_drafted, num_accepted))


def test_the_most_promising_source_drafts(clock: Clock) -> None:
    suffix, corpus = FakeLookup("suffix", {"a": [4] * 8}, length=3), FakeLookup("corpus", {"a": [5] * 8}, length=40)
    ladder = Ladder([suffix, corpus])
    assert draft(ladder, [request()])[0][0] == "corpus"
    corpus.length = 3
    assert draft(ladder, [request()])[0][0] == "suffix"


def test_of_equal_sources_the_one_named_first_drafts(clock: Clock) -> None:
    lookups = [FakeLookup("prediction", {"a": [4] * 8}), FakeLookup("corpus", {"a": [5] * 8})]
    ladder = Ladder(lookups)
    ladder.calibration._priors = {(name, "single"): [0.9] * 12 for name in ("prediction", "corpus")}
    assert draft(ladder, [request()])[0] == ("prediction", [4] * 8)
    assert draft(ladder, [request(drafters=("corpus", "prediction"))])[0] == ("corpus", [5] * 8)
    assert draft(ladder, [request(drafters=("corpus",))])[0] == ("corpus", [5] * 8)
    assert draft(ladder, [request(drafters=())])[0] == ("none", [])


def test_the_model_drafts_where_no_lookup_knows_anything(clock: Clock) -> None:
    model = FakeModel(clock, {"a": [7] * 8, "b": [8] * 8}, ms_per_token=0.01)
    ladder = Ladder([FakeLookup("suffix", {"a": [4] * 8}, length=40)], [model], clock=clock)
    drafts = draft(ladder, [request("a"), request("b")])
    assert drafts[0] == ("suffix", [4] * len(drafts[0][1]))
    assert drafts[1][0] == "model"
    assert [name for name, _ in model.asked] == ["b"]


def test_static_drafts_as_far_as_told_and_off_never(clock: Clock) -> None:
    ladder = Ladder([FakeLookup("suffix", {"a": range(20), "b": range(20)}, length=3)])
    assert draft(ladder, [request(mode="static", max_tokens=5)])[0] == ("suffix", [0, 1, 2, 3, 4])
    assert draft(ladder, [request("b", mode="off")])[0] == ("none", [])


def test_an_empty_draft_has_no_source(clock: Clock) -> None:
    model = FakeModel(clock, {})
    ladder = Ladder([], [model], clock=clock)
    item = request(mode="static")
    assert draft(ladder, [item]) == [("none", [])]
    commit(ladder, item, 0, 0, [5])
    assert model.observed == []


def test_a_horizon_that_the_scheduler_cut_is_respected(clock: Clock) -> None:
    ladder = Ladder([FakeLookup("suffix", {"a": range(20)}, length=40)])
    item = request(mode="static")
    ladder.plan([item])
    assert ladder.horizon(item) == 8
    [cut] = ladder.propose([item], [3])
    assert list(cut.token_ids) == [0, 1, 2]
    assert len(cut.acceptances) == 3


def test_a_request_outside_the_plan_is_planned_when_asked_for_and_a_prefill_drafts_nothing(clock: Clock) -> None:
    ladder = Ladder([FakeLookup("suffix", {"a": range(20)}, length=40)])
    item = request(mode="static")
    assert [each.source for each in ladder.propose([item], [0])] == ["none"]
    commit(ladder, item, 0, 0, [9])
    assert ladder.horizon(request(mode="static")) == 8


def test_a_plan_from_before_other_tokens_came_is_void(clock: Clock) -> None:
    """A planned request may be left out of a step, and be prefilled again later: its old guess must not be drafted."""
    ladder = Ladder([FakeLookup("suffix", {"a": range(20)}, length=40)])
    item = request(mode="static")
    ladder.plan([item])
    item.token_ids.append(4)
    assert [each.source for each in ladder.propose([item], [8])] == ["none"]


def test_guesses_that_were_not_drafted_are_judged_too(clock: Clock) -> None:
    suffix, corpus = FakeLookup("suffix", {"a": [4, 4, 4]}, length=40), FakeLookup("corpus", {"a": [9, 9, 9]}, length=3)
    ladder = Ladder([suffix, corpus])
    item = request()
    before = ladder.calibration.acceptances("a", "corpus", "single", 3, 1)[0]
    assert draft(ladder, [item])[0][0] == "suffix"
    commit(ladder, item, 3, 0, [9])
    assert ladder.calibration.acceptances("a", "corpus", "single", 3, 1)[0] > before


def test_a_lookup_that_becomes_right_comes_back_without_a_probe(clock: Clock) -> None:
    suffix = FakeLookup("suffix", {"a": [4] * 8}, length=3)
    ladder = Ladder([suffix])
    item = request()
    for _ in range(60):
        [(_, tokens)] = draft(ladder, [item])
        commit(ladder, item, len(tokens), 0, [5])
    assert draft(ladder, [item])[0] == ("none", [])
    commit(ladder, item, 0, 0, [5])
    for _ in range(40):  # the guesses come true, one at a time, though none is drafted
        [(_, tokens)] = draft(ladder, [item])
        commit(ladder, item, len(tokens), len(tokens), [4] * (len(tokens) + 1))
    assert draft(ladder, [item])[0][0] == "suffix"


def test_only_the_source_of_the_draft_observes_and_release_reaches_everyone(clock: Clock) -> None:
    model, suffix = FakeModel(clock, {"b": [8] * 8}, 0.01), FakeLookup("suffix", {"a": [4] * 8}, length=40)
    ladder = Ladder([suffix], [model], clock=clock)
    a, b = request("a"), request("b")
    draft(ladder, [a, b])
    for item in (a, b, request("unheard of")):
        commit(ladder, item, 1, 0, [9])
    assert model.observed == ["b"]
    ladder.release(a)
    assert (suffix.released, model.released) == (["a"], ["a"])


# ---- never slower --------------------------------------------------------------------------------------------------

PLAIN_MS = 7.0


def rate_against_plain(
    ladder: Ladder, clock: Clock, target: Sequence[int], lookup: FakeLookup | None, rng: random.Random, after: int
) -> float:
    """Tokens per time of a run against plain decoding, behind the first ``after`` tokens."""
    item = request()
    spent, at, counted = 0.0, 0, 0
    while at < len(target) - 1:
        if lookup is not None:
            lookup.says = {"a": [rng.randrange(100, 200) for _ in range(8)]}
        started = clock.now
        ladder.plan([item])
        [drafted] = ladder.propose([item], [ladder.horizon(item)])
        num_accepted = 0
        while num_accepted < len(drafted.token_ids) and at + num_accepted < len(target) - 1:
            if drafted.token_ids[num_accepted] != target[at + num_accepted]:
                break
            num_accepted += 1
        verdict = Verdict(target[at : at + num_accepted + 1], len(drafted.token_ids), num_accepted)
        draft_ms = (clock.now - started) * 1e3
        rows = 1 + len(drafted.token_ids)
        pass_ms = PLAIN_MS * (1 + 0.06 * (rows - 1)) * rng.uniform(0.97, 1.03)
        clock.now += pass_ms / 1e3
        item.token_ids += verdict.token_ids
        ladder.observe(item, verdict)
        ladder.record_step(
            [item], num_accepted + 1, len(drafted.token_ids), draft_ms=draft_ms, step_ms=draft_ms + pass_ms
        )
        if at >= after:
            spent += draft_ms + pass_ms
            counted += num_accepted + 1
        at += num_accepted + 1
    return counted * PLAIN_MS / spent


@pytest.mark.parametrize("num_tokens", [200, 1000])
def test_a_lookup_that_is_always_wrong(clock: Clock, num_tokens: int) -> None:
    lookup = FakeLookup("suffix", length=20)
    rate = rate_against_plain(Ladder([lookup]), clock, [9] * num_tokens, lookup, random.Random(0), after=64)
    assert rate >= 0.95


@pytest.mark.parametrize("ms_per_token", [0.5, 50.0])
@pytest.mark.parametrize("num_tokens", [300, 3000])
def test_a_model_that_is_always_wrong(clock: Clock, ms_per_token: float, num_tokens: int) -> None:
    model = FakeModel(clock, {"a": [5] * 8}, ms_per_token)
    rate = rate_against_plain(
        Ladder([], [model], clock=clock), clock, [9] * num_tokens, None, random.Random(0), after=64
    )
    assert rate >= 0.95


@pytest.mark.parametrize("num_tokens", [300, 3000])
def test_a_model_that_is_always_right_and_slow(clock: Clock, num_tokens: int) -> None:
    """50 ms a call for one token of 7 ms: never worth it, however right."""
    model = FakeModel(clock, {"a": [9] * 8}, 50.0)
    rate = rate_against_plain(
        Ladder([], [model], clock=clock), clock, [9] * num_tokens, None, random.Random(0), after=64
    )
    assert rate >= 0.95


def test_a_model_that_is_right_and_quick_pays(clock: Clock) -> None:
    model = FakeModel(clock, {"a": [9] * 8}, 0.3)
    assert (
        rate_against_plain(Ladder([], [model], clock=clock), clock, [9] * 1000, None, random.Random(0), after=64) > 3.0
    )


def test_reading_is_no_price_of_a_token(clock: Clock) -> None:
    model = FakeModel(clock, {"a": [9] * 8}, 0.3)
    model.ms_to_prepare = 20.0
    ladder, item = Ladder([], [model], clock=clock), request()
    assert draft(ladder, [item])[0][0] == "model"
    assert model.prepared == ["a"]
    assert ladder.costs.draft_ms("model") == pytest.approx(0.3, rel=0.01)


def test_a_model_that_becomes_quick_is_found_again(clock: Clock) -> None:
    """Probes: what was too slow on a busy machine is tried again now and then."""
    model = FakeModel(clock, {"a": [9] * 8}, 50.0)
    ladder = Ladder([], [model], clock=clock)
    rate_against_plain(ladder, clock, [9] * 300, None, random.Random(0), after=0)
    model.ms_per_token = 0.3
    assert rate_against_plain(ladder, clock, [9] * 20_000, None, random.Random(0), after=12_000) > 2.0


def test_the_clock_does_not_decide_what_is_drafted_by_a_static_horizon(clock: Clock) -> None:
    model = FakeModel(clock, {"a": [9] * 8}, 500.0)
    ladder = Ladder([], [model], clock=clock)
    item = request(mode="static")
    for _ in range(5):
        assert draft(ladder, [item]) == [("model", [9] * 8)]
        commit(ladder, item, 8, 8, [9] * 9)


def test_a_guess_ends_where_the_structure_forbids_it(clock: Clock) -> None:
    suffix, corpus = FakeLookup("suffix", {"a": [4, 5, 6, 7]}), FakeLookup("corpus", {"a": [9, 4, 5, 6]})
    ladder = Ladder([suffix, corpus])
    item = request()
    item.constraint = RuledConstraint(lambda output: range(4, 7))
    assert draft(ladder, [item]) == [("suffix", [4, 5, 6])]
    item.constraint = RuledConstraint(lambda output: (9,))
    assert draft(ladder, [item]) == [("corpus", [9])]
    item.constraint = RuledConstraint(lambda output: (1,))
    assert draft(ladder, [item]) == [("none", [])]


def test_what_is_forced_is_drafted_first(clock: Clock) -> None:
    suffix = FakeLookup("suffix", {"a": [4, 5, 8, 7]})
    ladder = Ladder([GrammarLookup(), suffix])
    item = request(drafters=("grammar", "suffix"), mode="static")
    assert draft(ladder, [item]) == [("suffix", [4, 5, 8, 7])]
    item.constraint = RuledConstraint(lambda output: (4 + len(output),) if len(output) < 3 else range(9))
    assert draft(ladder, [item]) == [("grammar", [4, 5, 6])]
    item = request(drafters=("suffix",), mode="static")
    item.constraint = RuledConstraint(lambda output: (4 + len(output),))
    assert draft(ladder, [item]) == [("suffix", [4, 5])]  # only those that are named draft


class UnsureModel(FakeModel):
    """Asks its rule before each token, with the confidences it is given."""

    confidences: Sequence[float] = ()

    def propose(
        self, requests: Sequence[Request], horizons: Sequence[int], rules: Sequence[StopRule | None] = ()
    ) -> list[Draft]:
        drafts = []
        for whole, rule in zip(super().propose(requests, horizons), rules, strict=True):
            kept: list[int] = []
            for token_id, confidence in zip(whole.token_ids, self.confidences, strict=False):
                if rule is not None and ((kept and not rule.wants_more()) or not rule.keeps(confidence)):
                    break
                kept.append(token_id)
            drafts.append(Draft(kept, self.name) if kept else NO_DRAFT)
        return drafts


def test_a_model_stops_where_it_is_unsure_and_expects_what_its_confidence_was_worth(clock: Clock) -> None:
    model = UnsureModel(clock, {"a": [7] * 8}, ms_per_token=0.01)
    model.confidences = [0.99, 0.99, 0.01, 0.99]
    ladder, item = Ladder([], [model], clock=clock), request()
    assert draft(ladder, [item]) == [("model", [7, 7])]
    before = ladder.calibration.acceptances("a", "model", "blind", 0, 8)
    commit(ladder, item, 2, 2, [7, 7, 5])
    after = ladder.calibration.acceptances("a", "model", "blind", 0, 8)
    assert after[0] > before[0]
    assert after[1] > before[1]
    assert after[2] < before[2]  # it was asked for, and did not come
    assert after[3:] == before[3:]


def test_a_place_that_was_not_asked_for_is_no_miss(clock: Clock) -> None:
    model = UnsureModel(clock, {"a": [7] * 8}, ms_per_token=0.01)
    model.confidences = [0.99, 0.99]
    ladder, item = Ladder([], [model], clock=clock), request()
    for _ in range(8):  # until a second token is not worth its time
        ladder.calibration.observe("a", "model", "blind", 1, 0, ended_in_miss=True)
    ladder.costs.observe_draft("model", 1, 0.3)
    assert draft(ladder, [item]) == [("model", [7])]
    before = ladder.calibration.acceptances("a", "model", "blind", 0, 2)
    commit(ladder, item, 1, 1, [7, 5])
    after = ladder.calibration.acceptances("a", "model", "blind", 0, 2)
    assert after[0] > before[0]
    assert after[1] == before[1]


def test_a_static_draft_is_not_stopped(clock: Clock) -> None:
    model = UnsureModel(clock, {"a": [7] * 8})
    model.confidences = [0.01] * 8
    assert draft(Ladder([], [model], clock=clock), [request(mode="static", max_tokens=5)]) == [("model", [7] * 5)]


def test_lookups_that_know_nothing_lead_to_no_pause(clock: Clock) -> None:
    ladder, item = Ladder([FakeLookup("suffix", {}, length=3)]), request()
    for _ in range(300):
        draft(ladder, [item])
        commit(ladder, item, 0, 0, [5])
        ladder.record_step([item], 1, 0, draft_ms=0.3, step_ms=10.3)
        assert not ladder.controller.is_paused


def test_a_model_that_is_never_sure_is_asked_less_and_less(clock: Clock) -> None:
    model = UnsureModel(clock, {"a": [7] * 8})
    model.confidences = [0.01] * 8
    ladder, item = Ladder([], [model], clock=clock), request()
    for _ in range(300):
        asked = len(model.asked)
        clock.now += 10e-3
        draft(ladder, [item])
        commit(ladder, item, 0, 0, [5])
        ladder.record_step([item], 1, 0, draft_ms=1.0 * (len(model.asked) - asked), step_ms=10.0)
    assert len(model.asked) < 100

"""A draft ends where its confidence, by what such confidence was worth before, no longer pays for the next token."""

from __future__ import annotations

import pytest

from paceline.spec.calibration import Calibration, length_of
from paceline.spec.costs import StepCosts
from paceline.spec.horizon import HorizonController, Prospect
from paceline.spec.stopping import ConfidenceRule

PLACES = [0.6] * 8


def make_rule(
    calibration: Calibration,
    draft_ms: float = 0.05,
    min_acceptance: float = 0.0,
    controller: HorizonController | None = None,
) -> ConfidenceRule:
    return ConfidenceRule(
        calibration,
        controller if controller is not None else HorizonController(StepCosts()),
        session="s",
        source="model",
        prospect=Prospect([0.6, 0.36], draft_ms, min_acceptance),
        places=PLACES,
        num_requests=1,
        context=0.0,
    )  # fmt: skip


def draft(rule: ConfidenceRule, confidences: list[float]) -> int:
    """How many tokens of such confidences are drafted, as a proposer asks."""
    for kept, confidence in enumerate(confidences):
        if (kept and not rule.wants_more()) or not rule.keeps(confidence):
            return kept
    return len(confidences)


def test_a_sure_draft_goes_on_and_an_unsure_one_ends() -> None:
    assert draft(make_rule(Calibration()), [0.99] * 8) == 8
    assert draft(make_rule(Calibration()), [0.02] * 8) == 0
    assert 0 < draft(make_rule(Calibration()), [0.99, 0.99, 0.02, 0.99]) < 3


def test_what_a_confidence_is_worth_is_learnt() -> None:
    calibration = Calibration()
    for _ in range(200):
        calibration.observe("s", "model", "confidence", length_of(0.99), 0, ended_in_miss=True)
    rule = make_rule(calibration)
    assert draft(rule, [0.99] * 8) == 0
    [acceptance] = rule.acceptances
    assert acceptance < 0.05
    assert draft(make_rule(calibration), [0.75] * 8) > 0  # another bin


def test_tokens_that_cost_more_than_they_bring_are_not_drafted() -> None:
    assert draft(make_rule(Calibration(), draft_ms=50.0), [0.99] * 8) == 1  # the first was paid for by the plan


def test_an_acceptance_asked_for_ends_drafts_sooner() -> None:
    controller = HorizonController(StepCosts())
    for _ in range(300):
        controller.observe_round(4, 0, 0.9)
    confidences = [0.85] * 8
    strict = draft(make_rule(Calibration(), min_acceptance=0.9, controller=controller), confidences)
    assert strict < draft(make_rule(Calibration()), confidences)


def test_expected_acceptances_rise_with_confidence() -> None:
    rule = make_rule(Calibration())
    for confidence in (0.0, 0.15, 0.5, 0.9, 1.0):
        rule.keeps(confidence)
    assert rule.acceptances == sorted(rule.acceptances)
    assert rule.confidences == [0.0, 0.15, 0.5, 0.9, 1.0]
    assert rule.acceptances[-1] == pytest.approx(0.98)

"""How many tokens to draft: the formula, the constraint, the guard, the probe, the batch."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline import theory
from paceline.spec.costs import StepCosts
from paceline.spec.horizon import HorizonController, Prospect

CONTEXT = 500.0


def survivals(alpha: float, count: int = 16) -> list[float]:
    return [alpha ** (i + 1) for i in range(count)]


def flat_costs(per_row: float = 0.0, plain_ms: float = 10.0) -> StepCosts:
    """A machine whose rows cost ``per_row`` of a plain step each, learnt from passes."""
    costs = StepCosts()
    for _ in range(400):
        for rows in (1, 1, 1, 2, 4, 8, 9, 12, 16, 17, 24, 32, 48, 64):
            costs.observe_pass(rows, CONTEXT, plain_ms * (1 + per_row * (rows - 1)))
    return costs


def settled(controller: HorizonController, prospect: Prospect, num_steps: int = 300) -> int:
    """The horizon after many steps in which exactly the expected number of drafts came true."""
    horizon = 0
    for _ in range(num_steps):
        [horizon] = controller.choose([prospect], CONTEXT)
        tokens = 1 + sum(prospect.survivals[:horizon])
        costs = controller._costs
        milliseconds = costs.verify_ms(1 + horizon, CONTEXT) + horizon * prospect.draft_ms
        controller.observe_step(1, tokens, horizon, milliseconds, CONTEXT)  # type: ignore[arg-type]
    return horizon


@pytest.mark.parametrize("alpha", [0.3, 0.6, 0.8, 0.9])
@pytest.mark.parametrize("draft_share", [0.02, 0.08, 0.3])
@pytest.mark.parametrize("per_row", [0.0, 0.05])
def test_settles_on_the_horizon_of_the_closed_form(alpha: float, draft_share: float, per_row: float) -> None:
    """Choosing by theta maximises the long-run rate, which for independent rounds is theory.best_horizon."""
    controller = HorizonController(flat_costs(per_row))
    prospect = Prospect(survivals(alpha), draft_ms=10.0 * draft_share)
    verify = [1 + per_row * gamma for gamma in range(17)]
    best = theory.best_horizon(alpha, draft_share, 16, verify)
    horizon = settled(controller, prospect)

    def eta(gamma: int) -> float:
        return theory.speedup_constant(alpha, gamma, draft_share, verify[gamma])

    assert eta(horizon) >= 0.98 * eta(best)


def test_nothing_promising_is_not_drafted() -> None:
    controller = HorizonController(StepCosts())
    assert controller.choose([], CONTEXT) == []
    assert controller.choose([Prospect([])], CONTEXT) == [0]
    assert controller.choose([Prospect(survivals(0.02))], CONTEXT) == [0]
    assert controller.choose([Prospect(survivals(0.99), draft_ms=50.0)], CONTEXT) == [0]


def test_a_staircase_is_climbed_in_whole_steps() -> None:
    """Rows 2 to 8 are free here and the ninth costs a whole plain step: drafts stop at a step's end."""
    costs = StepCosts()
    costs._shape = [1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 4.0, 5.0, 9.0]
    controller = HorizonController(costs)
    assert controller.choose([Prospect(survivals(0.8))], CONTEXT) == [7]
    assert controller.choose([Prospect(survivals(0.99))], CONTEXT)[0] in (15, 16)


def test_boilerplate_gets_more_than_prose() -> None:
    controller = HorizonController(StepCosts())
    [copying] = controller.choose([Prospect(survivals(0.98))], CONTEXT)
    [prose] = controller.choose([Prospect(survivals(0.5))], CONTEXT)
    assert copying >= 2 * prose


def test_one_budget_over_the_batch() -> None:
    controller = HorizonController(StepCosts())
    prospects = [Prospect(survivals(0.98)), Prospect(survivals(0.7)), Prospect(survivals(0.05)), Prospect([])]
    horizons = controller.choose(prospects, CONTEXT)
    assert horizons[0] > horizons[1] > horizons[2] == horizons[3] == 0
    alone = controller.choose(prospects[:1], CONTEXT)[0]
    crowded = controller.choose(prospects[:1] * 8, CONTEXT)
    assert sum(crowded) > alone
    assert max(crowded) <= alone, "rows that others use leave less for each"


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.lists(st.floats(0.0, 1.0), max_size=16), min_size=1, max_size=6),
    min_acceptance=st.sampled_from([0.0, 0.5, 0.9]),
    outcomes=st.lists(st.tuples(st.integers(0, 16), st.floats(0.0, 1.0)), max_size=20),
)
def test_horizons_stay_within_what_is_offered(
    rows: list[list[float]], min_acceptance: float, outcomes: list[tuple[int, float]]
) -> None:
    controller = HorizonController(StepCosts())
    for drafted, share in outcomes:
        controller.observe_round(drafted, int(share * drafted), min_acceptance)
        controller.observe_step(1, 1 + int(share * drafted), drafted, 1.0 + drafted / 10, CONTEXT)
    prospects = [Prospect(list(itertools.accumulate(row, lambda a, b: a * b)), 0.0, min_acceptance) for row in rows]
    horizons = controller.choose(prospects, CONTEXT)
    assert all(0 <= horizon <= len(row) for horizon, row in zip(horizons, rows, strict=True))


@pytest.mark.parametrize("asked", [0.7, 0.8, 0.9])
def test_the_acceptance_asked_for_is_reached(asked: float) -> None:
    """Rounds of mixed promise: the multiplier rises until accepted / drafted is what was asked for."""
    controller, rng = HorizonController(flat_costs(0.02)), random.Random(0)
    drafted = accepted = free_drafted = free_accepted = 0
    free = HorizonController(flat_costs(0.02))
    for number in range(6000):
        alpha = rng.choice([0.5, 0.8, 0.95, 0.99])
        depth = 0
        while depth < 16 and rng.random() < alpha:
            depth += 1
        for each, knob in ((controller, asked), (free, 0.0)):
            [horizon] = each.choose([Prospect(survivals(alpha), 0.0, knob)], CONTEXT)
            hits = min(depth, horizon)
            each.observe_round(horizon, hits, knob)
            each.observe_step(1, 1 + hits, horizon, each._costs.verify_ms(1 + horizon, CONTEXT), CONTEXT)
            if number > 1000 and each is controller:
                drafted, accepted = drafted + horizon, accepted + hits
            elif number > 1000:
                free_drafted, free_accepted = free_drafted + horizon, free_accepted + hits
    assert accepted / drafted == pytest.approx(asked, abs=0.03) or accepted / drafted > asked
    assert accepted / drafted > free_accepted / free_drafted
    assert controller.pressure(asked) > 0.0
    assert controller.pressure(0.0) == free.pressure(0.0) == 0.0


def test_a_source_that_only_loses_is_paused_and_the_loss_is_bounded() -> None:
    """However sure its estimates stay: time that is lost is counted, and drafting pauses longer and longer."""
    controller = HorizonController(flat_costs(0.1))
    prospect = Prospect(survivals(0.9))
    spent = tokens = 0.0
    for _ in range(4000):
        [horizon] = controller.choose([prospect], CONTEXT)
        milliseconds = controller._costs.verify_ms(1 + horizon, CONTEXT)
        controller.observe_step(1, 1, horizon, milliseconds, CONTEXT)
        spent, tokens = spent + milliseconds, tokens + 1
    assert tokens * controller._costs.plain_ms(CONTEXT) / spent >= 0.97


def test_interruptions_of_the_machine_are_not_held_against_drafting() -> None:
    controller, rng = HorizonController(flat_costs(0.05)), random.Random(0)
    prospect = Prospect(survivals(0.95))
    for _ in range(2000):
        [horizon] = controller.choose([prospect], CONTEXT)
        assert horizon > 0
        milliseconds = controller._costs.verify_ms(1 + horizon, CONTEXT) * (20.0 if rng.random() < 0.1 else 1.0)
        controller.observe_step(1, 1 + int(horizon * 0.6), horizon, milliseconds, CONTEXT)


def test_a_pause_ends_and_success_makes_the_next_one_short() -> None:
    controller = HorizonController(flat_costs(0.1))
    prospect = Prospect(survivals(0.9))

    def lose_until_paused() -> int:
        for _ in range(200):
            [horizon] = controller.choose([prospect], CONTEXT)
            controller.observe_step(1, 1, horizon, controller._costs.verify_ms(1 + horizon, CONTEXT), CONTEXT)
            if controller.is_paused:
                break
        length = 0
        while controller.is_paused:
            assert controller.choose([prospect], CONTEXT) == [0]
            controller.observe_step(1, 1, 0, controller._costs.plain_ms(CONTEXT), CONTEXT)
            length += 1
        return length

    first, second = lose_until_paused(), lose_until_paused()
    assert second == 2 * first
    for _ in range(20):
        [horizon] = controller.choose([prospect], CONTEXT)
        milliseconds = controller._costs.verify_ms(1 + horizon, CONTEXT)
        controller.observe_step(1, 1 + horizon, horizon, milliseconds, CONTEXT)
    assert lose_until_paused() == first


def test_probes_take_a_small_share_of_the_time() -> None:
    controller = HorizonController(flat_costs(0.05))
    spent_on_probes = total = 0.0
    num_probes = 0
    for _ in range(20_000):
        plain = controller._costs.plain_ms(CONTEXT)
        length = controller.take_probe(50.0, CONTEXT)
        cost = length * 50.0 + controller._costs.verify_ms(1 + length, CONTEXT) - plain if length else 0.0
        controller.observe_step(1, 1, 0, plain + cost, CONTEXT)
        spent_on_probes, total, num_probes = spent_on_probes + cost, total + plain + cost, num_probes + (length > 0)
    assert num_probes > 5
    assert spent_on_probes / total <= 0.021

"""What the engine believes steps to cost, against machines that are known."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from paceline.spec.costs import StepCosts, prior_shape

ROWS = (1, 2, 4, 8, 9, 12, 16, 17, 24, 32)


def measured(machine: Callable[[int, float], float], num_passes: int = 1500, noise: float = 0.0) -> StepCosts:
    costs, rng = StepCosts(), random.Random(0)
    for number in range(num_passes):
        rows = ROWS[rng.randrange(len(ROWS))] if number > 20 else 1
        context = float(rng.choice([200, 1000, 3000]))
        costs.observe_pass(rows, context, machine(rows, context) * rng.uniform(1 - noise, 1 + noise))
    return costs


MACHINES: dict[str, Callable[[int, float], float]] = {
    "tiles of eight": lambda rows, context: (5.0 + 0.0015 * context) * (1.0 + 0.4 * ((rows + 7) // 8)),
    "an accelerator": lambda rows, context: 20.0 + 0.01 * rows,
    "a row at a time": lambda rows, context: 3.0 * rows * (1 + context / 5000),
}


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_learns_the_machine(name: str, noise: float) -> None:
    machine = MACHINES[name]
    costs = measured(machine, noise=noise)
    for rows in ROWS:
        assert costs.verify_ms(rows, 1000) == pytest.approx(machine(rows, 1000), rel=0.2)
    assert costs.plain_ms(3000) == pytest.approx(machine(1, 3000), rel=0.2)


def test_what_was_never_tried_keeps_its_prior_ratio_to_what_was() -> None:
    costs, prior = StepCosts(), prior_shape([8, 16, 32])
    for number in range(300):
        costs.observe_pass(1 if number % 2 else 8, 1000, 10.0)  # eight rows cost no more than one
    eight, sixteen, thirty_two = (costs.shape(rows) for rows in (8, 16, 32))
    assert eight == pytest.approx(1.0, abs=0.03)
    assert sixteen / eight == pytest.approx(prior[1] / prior[0], rel=0.03)
    assert thirty_two / eight == pytest.approx(prior[2] / prior[0], rel=0.03)


@example([(2, 1.0, 2.0)] * 9)
@given(st.lists(st.tuples(st.integers(1, 200), st.floats(1, 30_000), st.just(0.0) | st.floats(1e-3, 500)), max_size=80))
def test_more_rows_never_cost_less_whatever_was_observed(passes: list[tuple[int, float, float]]) -> None:
    costs = StepCosts()
    for rows, context, milliseconds in passes:
        costs.observe_pass(rows, context, milliseconds)
    shape = [costs.shape(rows) for rows in range(1, 140)]
    assert shape == sorted(shape)
    assert shape[0] == 1.0
    assert all(costs.verify_ms(rows, context) > 0.0 for rows in (1, 8, 64) for context in (1.0, 5000.0))


def test_an_interruption_is_not_a_cost() -> None:
    costs = measured(MACHINES["an accelerator"], 400)
    before = costs.verify_ms(8, 1000)
    costs.observe_pass(8, 1000, 5000.0)
    assert costs.verify_ms(8, 1000) < 1.25 * before


def test_a_machine_that_slows_down_is_followed() -> None:
    costs = measured(MACHINES["tiles of eight"], 400)
    for _ in range(200):
        costs.observe_pass(1, 1000, 2 * MACHINES["tiles of eight"](1, 1000))
    assert costs.plain_ms(1000) == pytest.approx(2 * MACHINES["tiles of eight"](1, 1000), rel=0.1)


def test_draft_costs_are_per_token_and_pessimistic() -> None:
    costs = StepCosts()
    assert costs.draft_ms("model") is None
    for milliseconds in (4.0, 4.0, 4.0, 4.0):
        costs.observe_draft("model", 4, milliseconds)
    assert costs.draft_ms("model") == pytest.approx(1.0)
    costs.observe_draft("model", 0, 100.0)  # nothing drafted says nothing
    assert costs.draft_ms("model") == pytest.approx(1.0)
    for milliseconds in (2.0, 6.0) * 20:
        costs.observe_draft("model", 4, milliseconds)
    assert costs.draft_ms("model") == pytest.approx(1.5, abs=0.15)  # mean 1, distance from it 0.5


def test_the_prior_is_in_plain_steps() -> None:
    assert StepCosts().plain_ms(0) == 1.0
    assert prior_shape([1, 8, 16]) == [1.0, 1.4, 2.0]

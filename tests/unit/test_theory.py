import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import InvalidParameterError
from paceline.theory import (
    best_horizon,
    expected_accepted,
    expected_accepted_constant,
    speedup,
    speedup_constant,
)

probabilities = st.floats(0.0, 1.0)


def test_expected_accepted_of_a_worked_example():
    # 0.9 + 0.9 * 0.5 + 0.9 * 0.5 * 0.2
    assert expected_accepted([0.9, 0.5, 0.2]) == pytest.approx(1.44)
    assert expected_accepted([]) == 0.0
    assert expected_accepted([0.0, 1.0, 1.0]) == 0.0


@given(probabilities, st.integers(0, 64))
def test_the_closed_form_is_the_sum(alpha, horizon):
    assert expected_accepted_constant(alpha, horizon) == pytest.approx(expected_accepted([alpha] * horizon), abs=1e-6)


def test_expected_accepted_matches_a_simulation():
    alphas = [0.8, 0.6, 0.9]
    coins = random.Random(7)
    num_rounds = 20_000
    num_accepted = 0
    for _ in range(num_rounds):
        for alpha in alphas:
            if coins.random() >= alpha:
                break
            num_accepted += 1
    assert num_accepted / num_rounds == pytest.approx(expected_accepted(alphas), abs=0.03)


@pytest.mark.parametrize("horizon", [4, 5])
def test_a_good_cheap_draft_gives_nearly_three_times_the_speed(horizon):
    assert speedup_constant(0.85, horizon, 0.08) >= 2.8
    assert speedup([0.85] * horizon, 0.08) == pytest.approx(speedup_constant(0.85, horizon, 0.08))


def test_no_drafting_is_neither_faster_nor_slower():
    assert speedup([], 0.3) == 1.0
    assert speedup_constant(0.7, 0, 0.3) == 1.0


def test_costly_verification_divides_the_gain():
    assert speedup([1.0], 0.0, verify_cost=2.0) == pytest.approx(1.0)


@given(probabilities, st.floats(0.0, 2.0), st.integers(0, 16))
def test_the_best_horizon_is_a_maximum_and_never_slower_than_plain(alpha, cost_ratio, max_horizon):
    horizon = best_horizon(alpha, cost_ratio, max_horizon)
    best = speedup_constant(alpha, horizon, cost_ratio)
    assert best >= 1.0
    assert all(best >= speedup_constant(alpha, other, cost_ratio) for other in range(max_horizon + 1))


def test_the_best_horizon_of_useless_and_of_perfect_drafts():
    assert best_horizon(0.0, 0.1, 8) == 0
    assert best_horizon(0.5, 0.6, 8) == 0  # a token costs more than it is expected to save
    assert best_horizon(1.0, 0.1, 8) == 8
    assert best_horizon(0.9, 0.0, 0) == 0


def test_the_shortest_of_equal_horizons_wins():
    assert best_horizon(0.0, 0.0, 8) == 0


def test_costly_rows_shorten_the_horizon():
    free = best_horizon(0.8, 0.05, 8)
    linear = best_horizon(0.8, 0.05, 8, verify_costs=[1.0 + 0.4 * rows for rows in range(9)])
    assert 0 < linear < free


@pytest.mark.parametrize(
    "call",
    [
        lambda: expected_accepted([0.5, 1.1]),
        lambda: expected_accepted([math.nan]),
        lambda: expected_accepted_constant(-0.1, 3),
        lambda: expected_accepted_constant(0.5, -1),
        lambda: speedup([0.5], -0.1),
        lambda: speedup([0.5], math.nan),
        lambda: speedup([0.5], math.inf),
        lambda: speedup([0.5], 0.1, verify_cost=0.0),
        lambda: best_horizon(0.5, 0.1, -1),
        lambda: best_horizon(0.5, 0.1, 3, verify_costs=[1.0, 1.0]),
    ],
)
def test_values_out_of_range_are_refused(call):
    with pytest.raises(InvalidParameterError):
        call()

import numpy as np
import pytest
from scipy import stats

from paceline.errors import InvalidParameterError
from paceline.sampling.goodness import chi_square_p_value


def test_agrees_with_scipy_where_nothing_needs_pooling():
    counts, probs = np.array([30, 14, 34, 45, 57, 20]), np.array([0.1, 0.1, 0.15, 0.2, 0.3, 0.15])
    expected = stats.chisquare(counts, probs * counts.sum()).pvalue
    assert chi_square_p_value(counts, probs) == pytest.approx(expected)


def test_rare_cells_are_pooled():
    counts, probs = [50, 40, 4, 3, 3], [0.5, 0.4, 0.04, 0.03, 0.03]
    assert chi_square_p_value(counts, probs) == pytest.approx(1.0)
    # The pool of 0.03, 0.03, 0.04 is one cell: what counts is its sum, not how it is spread.
    assert chi_square_p_value([50, 40, 10, 0, 0], probs) == pytest.approx(1.0)
    assert chi_square_p_value([60, 39, 1, 0, 0], probs) < 0.01


def test_a_pool_that_is_still_too_small_takes_the_next_cell():
    # 0.01 of 100 expects 1: it joins 0.29, leaving two cells.
    expected = stats.chisquare([60, 40], [70, 30]).pvalue
    assert chi_square_p_value([60, 39, 1], [0.7, 0.29, 0.01]) == pytest.approx(expected)


def test_an_impossible_outcome_is_decisive():
    assert chi_square_p_value([99, 1], [1.0, 0.0]) == 0.0


def test_a_single_cell_cannot_disagree():
    assert chi_square_p_value([10, 0], [1.0, 0.0]) == 1.0
    assert chi_square_p_value([2, 1], [0.5, 0.5]) == 1.0


def test_tables_are_compared_cell_by_cell():
    counts = np.array([[25, 25], [25, 25]])
    assert chi_square_p_value(counts, np.full((2, 2), 0.25)) == pytest.approx(1.0)


def test_p_values_are_uniform_when_the_distribution_is_right():
    generator = np.random.default_rng(0)
    probs = np.array([0.4, 0.3, 0.2, 0.1])
    p_values = [chi_square_p_value(generator.multinomial(2000, probs), probs) for _ in range(500)]
    assert stats.kstest(p_values, "uniform").pvalue > 1e-3


@pytest.mark.parametrize(
    ("counts", "probs"),
    [
        ([1, 2], [0.5, 0.3, 0.2]),
        ([0, 0], [0.5, 0.5]),
        ([-1, 2], [0.5, 0.5]),
        ([1, 2], [0.0, 0.0]),
        ([1, 2], [1.5, -0.5]),
        ([1, 2], [0.5, float("nan")]),
    ],
)
def test_what_is_no_distribution_is_refused(counts, probs):
    with pytest.raises(InvalidParameterError):
        chi_square_p_value(counts, probs)

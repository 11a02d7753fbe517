import numpy as np
import pytest
import torch

from paceline.sampling.goodness import chi_square_p_value
from paceline.sampling.sampler import draw_coins, invert, sample, sample_rows

LAST_COIN = 1.0 - 2.0**-53


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("coin", [0.0, 2.0**-53, 0.5, LAST_COIN])
@pytest.mark.parametrize("scale", [1.0, 1e-30, 0.999999, 1.000001, 1 / 3])
def test_a_token_of_probability_zero_is_never_drawn(coin, scale):
    weights = np.array([[0, 0, 0.5, 0, 0.5, 0, 0], [0, 0, 0, 1, 0, 0, 0], [0.1, 0.2, 0.3, 0.4, 0, 0, 0]]) * scale
    token_ids = invert(weights.astype(np.float32), np.full(3, coin))
    assert all(weights[row, token_id] > 0 for row, token_id in enumerate(token_ids))


def test_the_ends_of_the_coin_select_the_ends_of_the_row():
    weights = np.array([[0.25, 0.25, 0.5, 0.0]])
    for coin, expected in [(0.0, 0), (0.2499, 0), (0.25, 1), (0.5, 2), (LAST_COIN, 2)]:
        assert invert(weights, np.array([coin])).tolist() == [expected]


def test_rows_that_do_not_quite_sum_to_one_lose_nothing():
    weights = np.full((1, 10), 0.1, dtype=np.float32) * 0.9
    assert invert(weights, np.array([0.95])).tolist() == [9]


def test_a_row_without_mass_is_an_engine_error():
    for row in ([0.0, 0.0], [np.nan, 1.0], [np.inf, 1.0]):
        with pytest.raises(AssertionError):
            invert(np.array([row]), np.array([0.5]))


def test_draws_follow_the_row():
    probs = torch.tensor([0.5, 0.0, 0.2, 0.3])
    token_ids = sample_rows(probs.expand(10_000, -1), generator())
    counts = torch.bincount(token_ids, minlength=4)
    assert counts[1] == 0
    assert chi_square_p_value(counts, probs) > 1e-3


def test_one_row_and_many_take_the_same_coins():
    probs = torch.rand(5, 20, generator=generator(1))
    one, many = generator(2), generator(2)
    assert [sample(row, one) for row in probs] == sample_rows(probs, many).tolist()


def test_coins_are_below_one_and_repeatable():
    coins = draw_coins(100_000, generator(3))
    assert coins.min() >= 0.0
    assert coins.max() < 1.0
    assert coins.dtype == np.float64
    assert np.array_equal(coins, draw_coins(100_000, generator(3)))
    assert np.unique(coins).size > 99_990  # float32 coins would repeat hundreds of times


def test_no_rows_no_tokens():
    assert sample_rows(torch.empty(0, 5), generator()).tolist() == []

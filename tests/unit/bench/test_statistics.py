"""Quantiles and intervals against answers worked out by hand or by scipy."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from paceline.bench.compare import compare, decode_rate_interval
from paceline.bench.statistics import bootstrap, median, quantile, quantile_of, quotient, ratio_of_sums
from tests.unit.bench.factory import noisy_arm, step, turn


@pytest.mark.parametrize(
    ("fraction", "expected"), [(0.0, 1), (0.05, 1), (0.0501, 2), (0.5, 10), (0.95, 19), (0.951, 20), (1.0, 20)]
)
def test_a_quantile_is_the_smallest_value_that_the_fraction_does_not_exceed(fraction: float, expected: int) -> None:
    values = list(range(20, 0, -1))
    assert quantile(values, fraction) == expected


def test_a_quantile_is_not_one_rank_too_high_when_the_product_rounds_up() -> None:
    assert 0.07 * 100 > 7
    assert quantile(range(1, 101), 0.07) == 7


def test_a_weight_counts_a_value_several_times() -> None:
    assert quantile([5.0, 1.0, 9.0], 0.5, [1, 3, 1]) == quantile([5.0, 1.0, 1.0, 1.0, 9.0], 0.5) == 1.0
    assert quantile([5.0, 1.0, 9.0], 0.8, [1, 3, 1]) == 5.0


def test_the_median_is_one_of_the_values_and_nothing_has_none() -> None:
    assert median([4.0, 1.0, 3.0, 2.0]) == 2.0
    assert median([]) is None


def test_the_estimate_is_the_statistic_of_the_tasks_as_they_are() -> None:
    interval = bootstrap(ratio_of_sums([10, 20, 30], [1, 2, 1]), 3)
    assert interval.estimate == 15.0
    assert interval.num_tasks == 3


def test_an_interval_spans_what_resamples_can_give() -> None:
    interval = bootstrap(ratio_of_sums([1, 3], [1, 1]), 2)  # means 1, 2, 3 with 1/4, 1/2, 1/4
    assert (interval.estimate, interval.low, interval.high) == (2.0, 1.0, 3.0)


def test_tasks_that_agree_leave_no_doubt() -> None:
    interval = bootstrap(ratio_of_sums([2, 4, 6], [1, 2, 3]), 3)
    assert interval.low == interval.high == interval.estimate == 2.0


def test_one_task_has_no_interval() -> None:
    interval = bootstrap(ratio_of_sums([2], [1]), 1)
    assert interval.to_dict() == {"estimate": 2.0, "low": None, "high": None, "tasks": 1}


def test_the_same_seed_gives_the_same_interval_and_another_seed_another() -> None:
    statistic = ratio_of_sums(np.arange(1, 12), np.arange(2, 13) ** 1.5)
    assert bootstrap(statistic, 11, seed=1) == bootstrap(statistic, 11, seed=1)
    assert bootstrap(statistic, 11, seed=1) != bootstrap(statistic, 11, seed=2)


def test_the_interval_agrees_with_scipy() -> None:
    generator = np.random.default_rng(3)
    above, below = generator.lognormal(size=40), generator.lognormal(size=40)
    ours = bootstrap(ratio_of_sums(above, below), 40)

    def ratio(indices: np.ndarray) -> float:
        chosen = indices.astype(int)
        return float(above[chosen].sum() / below[chosen].sum())

    theirs = stats.bootstrap(
        (np.arange(40),), ratio, method="percentile", vectorized=False, n_resamples=2000, rng=np.random.default_rng(4)
    ).confidence_interval
    assert ours.low == pytest.approx(theirs.low, rel=0.05)
    assert ours.high == pytest.approx(theirs.high, rel=0.05)


def test_a_resampled_quantile_is_the_quantile_of_the_repeated_values() -> None:
    generator = np.random.default_rng(5)
    values = generator.integers(0, 30, 60).astype(float).tolist()
    weights = generator.integers(1, 5, 60).tolist()
    owners = generator.integers(0, 6, 60).tolist()
    counts = generator.multinomial(6, [1 / 6] * 6, size=50)
    resampled = quantile_of(values, weights, owners, 0.95)(counts)
    for row, found in zip(counts, resampled, strict=True):
        repeated = [v for v, w, o in zip(values, weights, owners, strict=True) for _ in range(w * row[o])]
        assert found == quantile(repeated, 0.95)


def test_a_quotient_sees_the_same_draw_on_both_sides() -> None:
    tasks = [3.0, 1.0, 4.0, 1.0, 5.0]
    same = ratio_of_sums(tasks, [1.0] * 5)
    interval = bootstrap(quotient(same, same), 5)
    assert interval.low == interval.high == 1.0


RATIOS = {"decode_speedup": 1.0, "turn_speedup": 1.0, "tokens_per_s": 1.0}
CHANGES = {"token_ms_p95_change": 0.0, "turn_tpot_ms_p95_change": 0.0}


@pytest.mark.parametrize(("name", "no_difference"), list({**RATIOS, **CHANGES}.items()))
def test_two_runs_of_the_same_arm_differ_by_an_interval_around_nothing(name: str, no_difference: float) -> None:
    interval = compare(noisy_arm("a", seed=1), noisy_arm("b", seed=2))[name]
    assert interval.low is not None
    assert interval.high is not None
    assert interval.low < no_difference < interval.high
    assert interval.high - interval.low < 0.15


def test_the_interval_contains_the_truth_about_as_often_as_it_says() -> None:
    contained = 0
    for seed in range(100):
        interval = compare(
            noisy_arm("a", seed=2 * seed, num_tokens=10), noisy_arm("b", seed=2 * seed + 1, num_tokens=10)
        )
        low, high = interval["decode_speedup"].low, interval["decode_speedup"].high
        assert low is not None
        assert high is not None
        contained += low <= 1.0 <= high
    assert 85 <= contained <= 99


def test_pairing_by_task_is_sharper_than_the_spread_between_tasks() -> None:
    one = decode_rate_interval(noisy_arm("a", seed=1))
    ratio = compare(noisy_arm("a", seed=1), noisy_arm("b", seed=2))["decode_speedup"]
    assert one is not None
    assert one.high is not None
    assert one.low is not None
    assert ratio.high is not None
    assert ratio.low is not None
    assert (one.high - one.low) / one.estimate > 3 * (ratio.high - ratio.low)


def test_an_arm_three_times_as_fast_is_found_so() -> None:
    ratios = compare(noisy_arm("fast", seed=1, token_ms=10.0), noisy_arm("slow", seed=2, token_ms=30.0))
    assert ratios["decode_speedup"].estimate == pytest.approx(3.0, rel=0.03)
    assert ratios["turn_speedup"].estimate == pytest.approx(3.0, rel=0.03)
    assert ratios["tokens_per_s"].estimate == pytest.approx(3.0, rel=0.03)
    assert ratios["token_ms_p95_change"].estimate == pytest.approx(-2 / 3, rel=0.05)
    assert ratios["turn_tpot_ms_p95_change"].estimate == pytest.approx(-2 / 3, rel=0.05)


def test_only_turns_that_both_arms_ran_are_compared() -> None:
    ours = [turn([step(), step(5.0)], task_id=task) for task in "abc"]
    theirs = [turn([step(), step(10.0)], task_id=task) for task in "bcd"] + [turn([step(), step(99.0)], turn=1)]
    ratios = compare(ours, theirs)
    assert ratios["decode_speedup"].estimate == 2.0
    assert ratios["decode_speedup"].num_tasks == 2


def test_arms_without_a_common_task_have_no_ratios() -> None:
    assert compare([turn([step(), step()], task_id="a")], [turn([step(), step()], task_id="b")]) == {}

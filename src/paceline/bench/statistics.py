"""Quantiles and bootstrap intervals. Knows nothing of arms or turns: numbers, and which task each belongs to."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

NUM_RESAMPLES = 2_000
CONFIDENCE = 0.95
SEED = 20_240_601

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]

# From how often each task was drawn, [num_resamples, num_tasks], to one value per resample, [num_resamples].
Statistic = Callable[[Counts], Floats]

_CHUNK_CELLS = 4_000_000  # cells of the largest temporary array of a quantile: 32 MB
_EPSILON = 1e-9  # 0.07 * 100 is above 7 in floating point


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with its 95 % interval; ``low`` and ``high`` are None when fewer than two tasks were measured."""

    estimate: float
    low: float | None
    high: float | None
    num_tasks: int

    def to_dict(self) -> dict[str, float | int | None]:
        """For JSON."""
        return {"estimate": self.estimate, "low": self.low, "high": self.high, "tasks": self.num_tasks}


def quantile(values: Sequence[float], fraction: float, weights: Sequence[int] | None = None) -> float | None:
    """The smallest of the values that at least ``fraction`` of the values do not exceed; None if there are none.

    ``weights[i]`` says how many times ``values[i]`` counts (once by default). Always one of the values, never between.
    """
    if not values:
        return None
    pairs = sorted(zip(values, weights or [1] * len(values), strict=True))
    needed = _rank(fraction, sum(weight for _, weight in pairs))
    for value, weight in pairs:
        needed -= weight
        if needed <= 0:
            return value
    return pairs[-1][0]


def median(values: Sequence[float]) -> float | None:
    """The lower median: :func:`quantile` at one half."""
    return quantile(values, 0.5)


def bootstrap(
    statistic: Statistic,
    num_tasks: int,
    *,
    num_resamples: int = NUM_RESAMPLES,
    seed: int = SEED,
    confidence: float = CONFIDENCE,
) -> Interval:
    """Percentile bootstrap by task.

    A resample draws ``num_tasks`` tasks with replacement; whatever was measured on a task (all its turns, in both arms
    of a comparison) comes along, which is what makes a comparison paired. The interval holds the middle
    ``confidence`` of the statistic over the resamples. It speaks of other tasks like these, not of other machines.
    """
    estimate = float(statistic(np.ones((1, num_tasks), dtype=np.int64))[0])
    if num_tasks < 2:
        return Interval(estimate, None, None, num_tasks)
    generator = np.random.default_rng(seed)
    counts = generator.multinomial(num_tasks, np.full(num_tasks, 1.0 / num_tasks), size=num_resamples)
    tail = (1.0 - confidence) / 2.0
    low, high = np.quantile(statistic(counts.astype(np.int64)), [tail, 1.0 - tail])
    return Interval(estimate, float(low), float(high), num_tasks)


def ratio_of_sums(numerators: ArrayLike, denominators: ArrayLike) -> Statistic:
    """The statistic sum(numerators) / sum(denominators), one entry of each per task; denominators are positive."""
    above = np.asarray(numerators, dtype=np.float64)
    below = np.asarray(denominators, dtype=np.float64)

    def statistic(counts: Counts) -> Floats:
        return np.asarray((counts @ above) / (counts @ below), dtype=np.float64)

    return statistic


def quantile_of(
    values: Sequence[float], weights: Sequence[int], task_indices: Sequence[int], fraction: float
) -> Statistic:
    """The statistic :func:`quantile` of values, each with a weight and the index of the task it belongs to."""
    order = np.argsort(np.asarray(values, dtype=np.float64), kind="stable")
    ordered = np.asarray(values, dtype=np.float64)[order]
    ordered_weights = np.asarray(weights, dtype=np.int64)[order]
    owners = np.asarray(task_indices, dtype=np.intp)[order]

    def statistic(counts: Counts) -> Floats:
        chunk = max(1, _CHUNK_CELLS // len(ordered))
        parts = [_weighted(counts[start : start + chunk]) for start in range(0, len(counts), chunk)]
        return np.concatenate(parts)

    def _weighted(counts: Counts) -> Floats:
        cumulative = np.cumsum(counts[:, owners] * ordered_weights, axis=1)
        needed = np.ceil(fraction * cumulative[:, -1] - _EPSILON).clip(min=1)
        found: Floats = ordered[np.argmax(cumulative >= needed[:, None], axis=1)]
        return found

    return statistic


def quotient(above: Statistic, below: Statistic) -> Statistic:
    """One statistic over another, both on the same draw of tasks."""

    def statistic(counts: Counts) -> Floats:
        return above(counts) / below(counts)

    return statistic


def _rank(fraction: float, total: int) -> int:
    return max(1, math.ceil(fraction * total - _EPSILON))

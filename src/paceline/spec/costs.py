"""What a step costs, as the engine measures it while it works: running estimates that need no tuning.

A verifying pass is modelled as ``V(rows, context) = plain(context) * shape(rows)``. ``plain`` is one row after so many
tokens, a line fitted by least squares with forgetting; ``shape`` is a staircase (kernels work in tiles), kept as a
piecewise linear curve through a few row counts and corrected by what each pass really took. The priors below are those
of the native CPU kernels; a few dozen steps of another machine outweigh them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

# Rows at which the curve is kept, and its prior there in units of one row. Kernels work in tiles of 8 and 16: the row
# after a tile is a knot of its own, or what it costs would be thought to be spread over the rows to come.
_KNOTS = (1, 2, 4, 8, 9, 12, 16, 17, 24, 32, 48, 64, 128)
_PRIOR_SHAPE = (1.0, 1.1, 1.2, 1.4, 1.5, 1.7, 2.0, 2.3, 3.0, 3.6, 5.3, 7.0, 13.0)
# Prior of the context's share: one row after 4,096 tokens takes about twice the time of one after none.
_PRIOR_SLOPE = 1.0 / 4096
# Weight of a new pass in the curve, and what is remembered of old passes in the line from one pass to the next.
_SHAPE_STEP = 0.1
_MEMORY = 0.98
# What a pass of several rows says about one row, against a pass of one row: it speaks through the curve, which may err.
_INDIRECT = 0.05
# A pass that took this many times what was expected was interrupted by something else and says little.
_OUTLIER = 2.5


class StepCosts:
    """Milliseconds of a verifying pass and of a draft token; everything in a step that is not drafting counts as pass.

    Before the first observation times are in units of one plain step.
    """

    def __init__(self) -> None:
        self._shape = list(_PRIOR_SHAPE)
        self._largest_seen = 1  # rows of a pass
        self._num_passes = 0
        # Sums of the weighted least squares of time / shape over context: weight, x, y, x x, x y.
        self._sums = [0.0, 0.0, 0.0, 0.0, 0.0]
        self._intercept, self._slope = 1.0, _PRIOR_SLOPE
        self._draft: dict[str, _RunningCost] = {}

    @property
    def num_passes(self) -> int:
        """Passes observed."""
        return self._num_passes

    def observe_pass(self, num_rows: int, context: float, milliseconds: float) -> None:
        """A pass of ``num_rows`` rows, each after about ``context`` tokens, took so long."""
        if milliseconds <= 0.0:
            return
        self._num_passes += 1
        shape = self.shape(num_rows)
        if self._num_passes > 8:
            milliseconds = min(milliseconds, _OUTLIER * self.verify_ms(num_rows, context))
            self._correct_shape(num_rows, milliseconds / self.plain_ms(context))
        self._correct_line(context, milliseconds / shape, 1.0 if num_rows == 1 else _INDIRECT)

    def observe_draft(self, source: str, num_tokens: int, milliseconds: float) -> None:
        """``source`` drafted ``num_tokens`` one after the other, in so many milliseconds."""
        if num_tokens > 0:
            self._draft.setdefault(source, _RunningCost()).observe(milliseconds / num_tokens)

    def plain_ms(self, context: float) -> float:
        """One row after ``context`` tokens."""
        return self._intercept + self._slope * context

    def verify_ms(self, num_rows: int, context: float) -> float:
        """A pass of ``num_rows`` rows."""
        return self.plain_ms(context) * self.shape(num_rows)

    def shape(self, num_rows: int) -> float:
        """A pass of ``num_rows`` rows in units of a pass of one."""
        last = len(_KNOTS) - 1
        if num_rows >= _KNOTS[last]:
            return self._shape[last] * num_rows / _KNOTS[last]
        lower, share = _segment(num_rows)
        before, after = self._shape[lower], self._shape[lower + 1]
        # In this order rounding keeps the curve from falling, by as little as it may be.
        return min(before + share * (after - before), after)

    def draft_ms(self, source: str) -> float | None:
        """One draft token of ``source``, pessimistically; None if it never drafted."""
        cost = self._draft.get(source)
        return cost.upper if cost is not None else None

    def _correct_shape(self, num_rows: int, ratio: float) -> None:
        if num_rows == 1 or num_rows >= _KNOTS[-1]:
            return  # the unit, and what is never chosen
        lower, share = _segment(num_rows)
        before = self.shape(num_rows)
        error = ratio - before
        for knot, weight in ((lower, 1.0 - share), (lower + 1, share)):
            if knot > 0:
                self._shape[knot] += _SHAPE_STEP * weight * error
        self._largest_seen = max(self._largest_seen, num_rows)
        # What was never tried keeps its prior ratio to what was: on an accelerator it would look dear for ever.
        for knot in range(lower + 1 + (share > 0.0), len(_KNOTS)):
            if _KNOTS[knot] > self._largest_seen:
                self._shape[knot] *= self.shape(num_rows) / before
        # More rows never cost less, and where that is at odds with what was just seen the other knots give way.
        for knot in range(lower, 0, -1):
            self._shape[knot] = min(self._shape[knot], self._shape[knot + 1])
        for knot in range(1, len(_KNOTS)):
            self._shape[knot] = max(self._shape[knot], self._shape[knot - 1])

    def _correct_line(self, context: float, milliseconds: float, weight_of_pass: float) -> None:
        sums = self._sums
        memory = _MEMORY**weight_of_pass
        for index, value in enumerate((1.0, context, milliseconds, context * context, context * milliseconds)):
            sums[index] = memory * sums[index] + weight_of_pass * value
        weight, x, y, xx, xy = sums
        mean = x / weight
        variance = xx / weight - mean * mean
        # The prior slope is worth contexts spread by about a thousand tokens; it decides while contexts are all alike.
        strength = 1e6
        level = y / weight / (1.0 + _PRIOR_SLOPE * mean)
        slope = (strength * level * _PRIOR_SLOPE + xy / weight - mean * y / weight) / (strength + variance)
        self._slope = max(0.0, min(slope, y / weight / max(mean, 1.0)))
        self._intercept = y / weight - self._slope * mean


class _RunningCost:
    """A mean that forgets, and the mean distance from it: a slow call now and then must show."""

    def __init__(self) -> None:
        self._mean = self._deviation = 0.0
        self._num_calls = 0

    def observe(self, value: float) -> None:
        self._num_calls += 1
        weight = max(0.1, 1.0 / self._num_calls)
        self._deviation += weight * (abs(value - self._mean) - self._deviation) if self._num_calls > 1 else 0.0
        self._mean += weight * (value - self._mean)

    @property
    def upper(self) -> float:
        return self._mean + self._deviation


def _segment(num_rows: int) -> tuple[int, float]:
    """The knot at or below ``num_rows``, and how far it lies on the way to the next."""
    lower = bisect_right(_KNOTS, num_rows) - 1
    return lower, (num_rows - _KNOTS[lower]) / (_KNOTS[lower + 1] - _KNOTS[lower])


def prior_shape(row_counts: Sequence[int]) -> list[float]:
    """The prior curve, for tables and for replays without a measurement."""
    costs = StepCosts()
    return [costs.shape(count) for count in row_counts]

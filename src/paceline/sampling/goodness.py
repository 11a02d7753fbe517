"""Pearson's chi-square test: are these counts what that distribution would give?

Product code, because ``paceline verify`` runs it on the user's machine with the user's model.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from scipy.special import gammaincc

from paceline.errors import InvalidParameterError

_MIN_EXPECTED = 5.0  # below this a cell's statistic is no longer near its limit distribution (Cochran's rule)


def chi_square_p_value(counts: npt.ArrayLike, probs: npt.ArrayLike) -> float:
    """The probability of counts at least as far from ``probs`` as these, if ``probs`` is the truth.

    Cells that expect fewer than 5 are pooled, the rarest first, until the pool expects 5 as well. A count where
    ``probs`` is 0 is impossible and gives 0; a single cell left cannot disagree and gives 1.

    Args:
        counts: how often each outcome occurred.
        probs: of the same shape; they are normalised to sum to 1.

    Raises:
        InvalidParameterError: shapes differ, nothing was counted, or the probabilities do not form a distribution.
    """
    observed = np.asarray(counts, dtype=np.float64).ravel()
    expected = np.asarray(probs, dtype=np.float64).ravel()
    if observed.shape != expected.shape:
        raise InvalidParameterError(f"{observed.size} counts cannot be compared with {expected.size} probabilities")
    if not (np.all(observed >= 0.0) and observed.sum() > 0.0):
        raise InvalidParameterError("a goodness-of-fit test needs at least one count, and none below 0")
    if not (np.all(expected >= 0.0) and 0.0 < expected.sum() < np.inf):
        raise InvalidParameterError("probabilities must be 0 or more and not all 0")
    if np.any(observed[expected == 0.0] > 0.0):
        return 0.0
    expected = expected * (observed.sum() / expected.sum())
    observed, expected = _pooled(observed, expected)
    if observed.size < 2:
        return 1.0
    statistic = float(((observed - expected) ** 2 / expected).sum())
    return float(gammaincc((observed.size - 1) / 2.0, statistic / 2.0))


def _pooled(
    observed: npt.NDArray[np.float64], expected: npt.NDArray[np.float64]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    order = np.argsort(expected, kind="stable")
    observed, expected = observed[order], expected[order]
    num_pooled = int(np.count_nonzero(expected < _MIN_EXPECTED))
    while 0 < num_pooled < expected.size and expected[:num_pooled].sum() < _MIN_EXPECTED:
        num_pooled += 1
    if num_pooled == 0:
        return observed, expected
    return (
        np.append(observed[num_pooled:], observed[:num_pooled].sum()),
        np.append(expected[num_pooled:], expected[:num_pooled].sum()),
    )

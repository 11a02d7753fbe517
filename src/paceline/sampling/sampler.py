"""Drawing tokens from probabilities by inverting the cumulative sum, one coin per row.

The sum runs in float64, in token order, on the CPU. Both ends need care: a coin in [0, 1) must never select a token of
probability zero (neither a coin of exactly 0 with a leading zero, nor one next to 1 with trailing zeros), and a row
that sums to slightly more or less than 1 must lose nothing to its last token.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.sampling.distribution import as_array


def draw_coins(num_coins: int, generator: torch.Generator) -> npt.NDArray[np.float64]:
    """Uniform numbers in [0, 1), never 1: 53 bits each, so that rounding cannot reach 1 as float32 coins can."""
    coins = torch.rand(num_coins, generator=generator, device=generator.device, dtype=torch.float64)
    array: npt.NDArray[np.float64] = coins.cpu().numpy()
    return array


def sample(probs: Tensor, generator: torch.Generator) -> int:
    """One token drawn from one row. ``probs``: [vocab_size]; otherwise as :func:`sample_rows`."""
    return int(sample_rows(probs.unsqueeze(0), generator)[0])


def sample_rows(probs: Tensor, generator: torch.Generator) -> Tensor:
    """One token per row, drawn from the row.

    Args:
        probs: [num_rows, vocab_size], not negative; each row need only be proportional to its distribution.
        generator: the source of coins; one is taken per row.

    Returns:
        [num_rows], int64, on the CPU.
    """
    return torch.from_numpy(invert(as_array(probs), draw_coins(probs.shape[0], generator)))


def invert(weights: npt.NDArray[np.floating[Any]], coins: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """The token whose stretch of the cumulative sum holds ``coin * total``, for each row.

    Args:
        weights: [num_rows, vocab_size], not negative, with a positive finite sum.
        coins: [num_rows] in [0, 1).

    Returns:
        [num_rows].
    """
    mass = np.cumsum(weights, axis=-1, dtype=np.float64)  # [num_rows, vocab_size]
    total = mass[:, -1]
    assert bool(np.all((total > 0.0) & (total < np.inf))), "a row to draw from needs a positive, finite sum"
    # The product may round up to the total; staying below it is what keeps trailing zeros unreachable.
    points = np.minimum(coins * total, np.nextafter(total, 0.0))
    # The first entry above the point is as many places in as there are entries at or below it (the sum never falls).
    num_below: npt.NDArray[np.int64] = np.count_nonzero(mass <= points[:, np.newaxis], axis=-1).astype(np.int64)
    return num_below

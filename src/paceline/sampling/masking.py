"""Masks of allowed tokens on rows of logits. A mask has one bit per token id, the lowest bit of byte 0 for id 0."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.sampling.distribution import as_array

# What each byte of a mask lets the logits of its eight tokens be at most, [256, 8]: infinity, or its negative. The
# smaller of logit and ceiling is then the masked logit, thirty times as fast as choosing by a condition.
_CEILINGS = np.where(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), np.inf, -np.inf)
_CEILINGS = _CEILINGS.astype(np.float32)


def ceilings(masks: Sequence[bytes], vocab_size: int) -> npt.NDArray[np.float32]:
    """Infinity for tokens that are allowed, its negative for all others: [num_masks, vocab_size].

    The masks are equally long; ids that they have no bit for are not allowed.
    """
    codes = np.frombuffer(b"".join(masks), dtype=np.uint8)
    values = _CEILINGS.take(codes, axis=0).reshape(len(masks), -1)[:, :vocab_size]  # eight times as fast as indexing
    num_missing = vocab_size - values.shape[1]
    return np.pad(values, ((0, 0), (0, num_missing)), constant_values=-np.inf) if num_missing else values


def apply_masks(adjusted: Tensor, masks: Sequence[bytes], logits: Tensor) -> Tensor:
    """The logits with -inf wherever a mask forbids.

    A row in which the adjustments forbid all that its mask allows falls back to the model's own logits under the mask.

    Args:
        adjusted: [num_rows, vocab_size], penalised or biased; never modified.
        masks: of the first rows; the others are left as they are.
        logits: [num_rows, vocab_size], before the adjustments.

    Returns:
        [num_rows, vocab_size]; float32 and new, or ``adjusted`` itself where there is no mask.
    """
    if not masks:
        return adjusted
    masked = _lowered(adjusted, masks)
    if adjusted is not logits:
        is_empty = masked.amax(dim=-1) == -torch.inf  # [num_rows]
        if bool(is_empty.any()):
            masked[is_empty] = _lowered(logits, masks)[is_empty]
    return masked


def is_forbidden(row: Tensor) -> bool:
    """True when a row [1, vocab_size] of logits allows no token."""
    return bool(row.amax() == -torch.inf)


def _lowered(logits: Tensor, masks: Sequence[bytes]) -> Tensor:
    """The logits, the first rows of them not above what their masks let them be."""
    limits, num_limited = ceilings(masks, logits.shape[-1]), len(masks)
    if logits.device.type == "cpu":  # on one thread: see distribution.py
        rows = as_array(logits)
        lowered = np.minimum(rows[:num_limited], limits, out=limits)
        return torch.from_numpy(lowered if num_limited == len(rows) else np.concatenate([lowered, rows[num_limited:]]))
    lowered_rows = torch.minimum(logits[:num_limited].float(), torch.from_numpy(limits).to(logits.device))
    return torch.cat([lowered_rows, logits[num_limited:].float()])

"""Masks of allowed tokens on rows of logits. A mask has one bit per token id, the lowest bit of byte 0 for id 0."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.sampling.distribution import as_array


def unpack_mask(mask: bytes, vocab_size: int) -> npt.NDArray[np.bool_]:
    """Whether each token is allowed, [vocab_size]; ids that the mask has no bit for are not."""
    bits = np.unpackbits(np.frombuffer(mask, dtype=np.uint8), count=vocab_size, bitorder="little")
    return bits.view(np.bool_)


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
    is_allowed = np.ones(adjusted.shape, dtype=np.bool_)
    for row, mask in zip(is_allowed, masks, strict=False):
        row[:] = unpack_mask(mask, row.size)
    masked = _where(is_allowed, adjusted)
    if adjusted is not logits:
        is_empty = masked.amax(dim=-1) == -torch.inf  # [num_rows]
        if bool(is_empty.any()):
            masked[is_empty] = _where(is_allowed, logits)[is_empty]
    return masked


def is_forbidden(row: Tensor) -> bool:
    """True when a row [1, vocab_size] of logits allows no token."""
    return bool(row.amax() == -torch.inf)


def _where(is_allowed: npt.NDArray[np.bool_], logits: Tensor) -> Tensor:
    if logits.device.type == "cpu":  # on one thread: see distribution.py
        return torch.from_numpy(np.where(is_allowed, as_array(logits), np.float32(-np.inf)))
    return logits.float().masked_fill(torch.from_numpy(~is_allowed).to(logits.device), -torch.inf)

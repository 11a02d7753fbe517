"""Weights kept as small integers: groups of 32 along the input dimension, each with its own scale and minimum.

GGUF's Q4_0, Q4_1, Q5_x, Q8_0, Q4_K and Q5_K are all of this form (see loader/blocks.py), and `quantize` brings float
weights into it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.errors import ModelFormatError

GROUP = 32
_SLAB_ELEMENTS = 1 << 18  # quantised at once: 1 MB of float32, so that the passes over it stay in the cache


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedTensor:
    """weight[n, k] = scales[n, k // 32] * codes[n, k] + mins[n, k // 32], for an [out_features, in_features] matrix.

    ``codes`` are uint8 [out_features, in_features], below 2 ** ``bits`` (4 or 8); ``scales`` and ``mins`` are float32
    [out_features, ceil(in_features / 32)].
    """

    codes: Tensor
    scales: Tensor
    mins: Tensor
    bits: int

    def __post_init__(self) -> None:
        num_rows, num_columns = self.codes.shape
        assert self.bits in (4, 8)
        assert self.codes.dtype == torch.uint8
        assert self.scales.shape == self.mins.shape == (num_rows, -(-num_columns // GROUP))
        assert self.scales.dtype == self.mins.dtype == torch.float32

    @property
    def shape(self) -> tuple[int, int]:
        """(out_features, in_features)."""
        num_rows, num_columns = self.codes.shape
        return num_rows, num_columns

    def dequantize(self) -> Tensor:
        """The weights as float32 [out_features, in_features]: the plain oracle of everything faster."""
        scales, mins = (
            values.repeat_interleave(GROUP, dim=1)[:, : self.codes.shape[1]] for values in (self.scales, self.mins)
        )
        return scales * self.codes + mins

    def rows(self, index: Tensor) -> QuantizedTensor:
        """A copy of the output rows that ``index`` (integers [num_selected]) names, in its order."""
        return QuantizedTensor(self.codes[index], self.scales[index], self.mins[index], self.bits)


Weight = Tensor | QuantizedTensor


def quantize(weight: Tensor, bits: int) -> QuantizedTensor:
    """Round a float [out_features, in_features] matrix to the nearest of 2 ** ``bits`` levels (4 or 8 bits).

    The levels of a group run from its smallest to its largest weight. Scale and minimum are first rounded to float16,
    in which a backend stores them, and the codes are chosen for the rounded ones: a weight comes back within half a
    scale, give or take that rounding. A group of equal weights has scale 0 and comes back as its rounded minimum, so
    exactly if float16 holds the value.

    Raises:
        ModelFormatError: a weight is not finite, or a group's minimum or scale lies beyond float16.
    """
    assert bits in (4, 8)
    num_rows, num_columns = weight.shape
    codes = torch.empty((num_rows, num_columns), dtype=torch.uint8, device=weight.device)
    groups = (num_rows, -(-num_columns // GROUP))
    scales = torch.empty(groups, dtype=torch.float32, device=weight.device)
    mins = torch.empty_like(scales)
    full = num_columns // GROUP  # groups; what remains of a row is one shorter group
    slab_rows = max(1, _SLAB_ELEMENTS // max(1, num_columns))
    for start in range(0, num_rows, slab_rows):
        slab = slice(start, start + slab_rows)
        for columns, group_columns in (
            (slice(0, full * GROUP), slice(0, full)),
            (slice(full * GROUP, num_columns), slice(full, groups[1])),
        ):
            if columns.start == columns.stop:
                continue
            part = weight[slab, columns]
            grouped = part.float().reshape(part.shape[0], group_columns.stop - group_columns.start, -1)
            levels, scale, least = _quantize_groups(grouped, bits)
            codes[slab, columns] = levels.view(part.shape)
            scales[slab, group_columns], mins[slab, group_columns] = scale, least
    return QuantizedTensor(codes, scales, mins, bits)


def _quantize_groups(weights: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes (whole float32 numbers [rows, groups, width]), scales and minima [rows, groups] of the last dimension."""
    highest = (1 << bits) - 1
    least, greatest = weights.aminmax(dim=-1)
    if not (least.isfinite().all() and greatest.isfinite().all()):
        raise ModelFormatError("the weights hold an infinity or a NaN; the file is damaged: fetch the model again")
    scale = ((greatest - least) / highest).half().float()
    least = least.half().float()
    if not (scale.isfinite().all() and least.isfinite().all()):
        raise ModelFormatError(
            "the weights lie beyond float16 (65,504), in which scales are stored; use --dtype bf16 or fp32"
        )
    divisor = scale.masked_fill(scale == 0, torch.inf)  # so that the codes of a group without a scale are 0
    codes = (weights - least.unsqueeze(-1)).div_(divisor.unsqueeze(-1)).round_().clamp_(0, highest)
    return codes, scale, least


def stack_rows(parts: Sequence[Weight]) -> Weight:
    """The matrices one below the other, along the output dimension; a single one is returned as it is.

    Parts of 4 and 8 bits give one of 8, whose codes are valid as they stand. Where some parts are float tensors the
    quantised ones are dequantised to the dtype of the first of those.
    """
    if len(parts) == 1:
        return parts[0]
    quantized = [part for part in parts if isinstance(part, QuantizedTensor)]
    if len(quantized) == len(parts):
        return QuantizedTensor(
            torch.cat([part.codes for part in quantized]),
            torch.cat([part.scales for part in quantized]),
            torch.cat([part.mins for part in quantized]),
            max(part.bits for part in quantized),
        )
    dtype = next(part.dtype for part in parts if isinstance(part, Tensor))
    return torch.cat([part if isinstance(part, Tensor) else part.dequantize().to(dtype) for part in parts])


def as_tensor(weight: Weight, dtype: torch.dtype) -> Tensor:
    """The weight as a float tensor, dequantised where it is not one."""
    return weight.dequantize().to(dtype) if isinstance(weight, QuantizedTensor) else weight

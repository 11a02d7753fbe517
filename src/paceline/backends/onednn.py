"""The reference backend with packed fp32 weights: several rows cost hardly more than one on a CPU.

torch's plain fp32 product of 8 rows takes twice the time of 1 row (MKL re-packs the weight on every call), which would
eat what speculation gains. oneDNN packs the weight once; its products are also bitwise independent of the number of
rows as long as the inner dimension is summed in one piece, so longer ones are cut at fixed places (law 6).
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.backends.base import Linear
from paceline.backends.quantized import Weight, as_tensor
from paceline.backends.torch_ref import TorchBackend

# The row count the packing is tuned for, and the longest inner dimension oneDNN sums in one piece.
_PACK_ROWS = 8
_MAX_INNER = 1024


def is_available() -> bool:
    """True when this build of torch carries oneDNN's packed linear."""
    ops = torch.ops.mkldnn
    return bool(torch._C._has_mkldnn) and hasattr(ops, "_linear_pointwise")


class PackedLinear:
    """x @ weight.T + bias with the weight in oneDNN's packed layout."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        num_parts = -(-weight.shape[1] // _MAX_INNER)
        parts = weight.chunk(num_parts, dim=1)
        self._width = parts[0].shape[1]
        self._parts = [torch.ops.mkldnn._reorder_linear_weight(part.contiguous(), _PACK_ROWS) for part in parts]
        self._bias = bias

    def __call__(self, x: Tensor, /) -> Tensor:
        """Map [num_rows, in_features] to [num_rows, out_features]."""
        out: Tensor | None = None
        for rows, part in zip(torch.split(x, self._width, dim=1), self._parts, strict=True):
            bias = self._bias if out is None else None
            product: Tensor = torch.ops.mkldnn._linear_pointwise(rows, part, bias, "none", [], "")
            out = product if out is None else out.add_(product)
        assert out is not None
        return out


class PackedTorchBackend(TorchBackend):
    """TorchBackend for fp32 on a CPU, with packed linears."""

    def prepare_linear(self, weight: Weight, bias: Tensor | None) -> Linear:
        """See :class:`Backend`; the packed copy replaces the weight."""
        return PackedLinear(as_tensor(weight, self.dtype), bias)

"""The K/V of a model. Which slot belongs to whom is the cache's business, not known here."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class KVShape:
    """How much K/V one model keeps: ``num_slots`` tokens in each of its layers.

    Slot = block id * block size + offset, so the target's and the draft's stores are addressed by the same tables.
    """

    num_slots: int
    num_layers: int
    num_kv_heads: int
    head_dim: int

    @property
    def numbers_per_token(self) -> int:
        """Numbers that one token's K and V take over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim


class KVStore:
    """K/V in the layout of the backend that made it; only that backend looks inside."""


class TorchKVStore(KVStore):
    """Per layer two tensors [num_slots, num_kv_heads, head_dim]."""

    def __init__(self, shape: KVShape, *, dtype: torch.dtype, device: torch.device) -> None:
        size = (shape.num_slots, shape.num_kv_heads, shape.head_dim)
        # Uninitialised, so that memory is taken only as blocks come into use. Backends must not read a slot beyond a
        # sequence's kv_len, not even to mask it: 0 * NaN would be NaN.
        self.keys: list[Tensor] = [torch.empty(size, dtype=dtype, device=device) for _ in range(shape.num_layers)]
        self.values: list[Tensor] = [torch.empty(size, dtype=dtype, device=device) for _ in range(shape.num_layers)]

"""The K/V tensors behind the block tables. Which slot belongs to whom is the cache's business, not known here."""

from __future__ import annotations

import torch
from torch import Tensor


class KVStore:
    """Keys and values of one model: per layer two tensors [num_slots, num_kv_heads, head_dim].

    Slot = block id * block size + offset, so the target's and the draft's stores are addressed by the same tables.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_blocks * block_size, num_kv_heads, head_dim)
        # Uninitialised, so that memory is taken only as blocks come into use. Backends must not read a slot beyond a
        # sequence's kv_len, not even to mask it: 0 * NaN would be NaN.
        self.keys: list[Tensor] = [torch.empty(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self.values: list[Tensor] = [torch.empty(shape, dtype=dtype, device=device) for _ in range(num_layers)]

    @staticmethod
    def bytes_per_token(num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Bytes that one token's K and V take over all layers."""
        return 2 * num_layers * num_kv_heads * head_dim * dtype.itemsize

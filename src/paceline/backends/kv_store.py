"""What a model keeps of each token, by slot. Which slot belongs to whom is the cache's business, not known here."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Positions that a backend may read together. Of a group without a visible key it reads nothing, so the K/V of tokens
# below every window need not exist, up to a multiple of this.
KV_GROUP = 256


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


class HiddenStore:
    """The target's last hidden state of each token, [hidden_size] after the final norm, for a draft head to read.

    A norm bounds its output, so float16 holds it. Slots are those of the K/V: whatever is written or rolled back there,
    prefix hits, preemption and forks, holds for the states by the same act.
    """

    def __init__(self, num_slots: int, hidden_size: int, *, device: torch.device) -> None:
        # Uninitialised, as K/V is. The row after the last is slot -1: what stands before a sequence's first token.
        self._rows = torch.empty(num_slots + 1, hidden_size, dtype=torch.float16, device=device)
        self._rows[-1] = 0

    @staticmethod
    def bytes_per_token(hidden_size: int) -> int:
        """Bytes that one token's state takes."""
        return hidden_size * torch.float16.itemsize

    @property
    def rows(self) -> Tensor:
        """The states by slot, [num_slots + 1, hidden_size] float16; the last row stands before a sequence's first."""
        return self._rows

    def write(self, slots: Tensor, states: Tensor) -> None:
        """Keep ``states`` [num_tokens, hidden_size] at ``slots`` [num_tokens]."""
        self._rows.index_copy_(0, slots, states.to(torch.float16))

    def read(self, slots: Tensor, dtype: torch.dtype) -> Tensor:
        """The states at ``slots`` [num_tokens], zeros for slot -1; [num_tokens, hidden_size]."""
        return self._rows[slots].to(dtype)

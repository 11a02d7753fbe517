"""Who attends to what in one forward pass: passed along explicitly, never a global."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class SequenceSlice:
    """One sequence's share of a ragged batch.

    Its query rows are [query_start, query_start + query_len) of the batch and stand at positions
    [kv_len - query_len, kv_len) of the sequence, whose K/V lie in the blocks of ``block_ids``.
    """

    query_start: int
    query_len: int
    kv_len: int
    block_ids: Sequence[int]


@dataclass(frozen=True)
class AttentionMetadata:
    """The sequences of a batch and where their K/V live. Derived tensors are made once and shared by all layers."""

    sequences: Sequence[SequenceSlice]
    block_size: int
    device: torch.device

    @cached_property
    def kv_slots(self) -> Sequence[slice | Tensor]:
        """Per sequence, the slots of positions 0 to kv_len: a slice where blocks are consecutive, else an index."""
        return [self._slots_of(sequence) for sequence in self.sequences]

    @cached_property
    def slot_mapping(self) -> Tensor:
        """Slots that this step's tokens are written to, [num_tokens] int64."""
        return self._slots(0)

    @cached_property
    def previous_slots(self) -> Tensor:
        """Slots of the tokens before this step's tokens, [num_tokens] int64; -1 before the first of a sequence."""
        return self._slots(-1)

    @cached_property
    def rows(self) -> Tensor:
        """Per sequence (query_start, query_len, kv_len): [num_sequences, 3] int32, as native code takes it."""
        rows = [(item.query_start, item.query_len, item.kv_len) for item in self.sequences]
        return torch.tensor(rows, dtype=torch.int32)

    @cached_property
    def block_tables(self) -> Tensor:
        """Per sequence its blocks in use, [num_sequences, most blocks] int32, short ones filled up with 0."""
        counts = [-(-item.kv_len // self.block_size) for item in self.sequences]
        longest = max(counts)
        tables = [
            [*item.block_ids[:count], *[0] * (longest - count)]
            for item, count in zip(self.sequences, counts, strict=True)
        ]
        return torch.tensor(tables, dtype=torch.int32)

    @cached_property
    def _masks(self) -> dict[tuple[int, int | None], Tensor | None]:
        return {}

    def mask(self, index: int, window: int | None) -> Tensor | None:
        """Which keys each query row of sequence ``index`` sees: bool [query_len, kv_len], or None for all of them."""
        key = (index, window)
        if key not in self._masks:
            self._masks[key] = self._make_mask(self.sequences[index], window)
        return self._masks[key]

    def _slots(self, offset: int) -> Tensor:
        """Slots ``offset`` positions from each of this step's tokens."""
        block_size = self.block_size
        slots = [
            sequence.block_ids[position // block_size] * block_size + position % block_size if position >= 0 else -1
            for sequence in self.sequences
            for position in range(sequence.kv_len - sequence.query_len + offset, sequence.kv_len + offset)
        ]
        return torch.tensor(slots, dtype=torch.int64, device=self.device)

    def _slots_of(self, sequence: SequenceSlice) -> slice | Tensor:
        block_size = self.block_size
        num_blocks = -(-sequence.kv_len // block_size)
        block_ids = sequence.block_ids[:num_blocks]
        first = block_ids[0]
        if all(block_id == first + i for i, block_id in enumerate(block_ids)):
            return slice(first * block_size, first * block_size + sequence.kv_len)
        blocks = torch.tensor(block_ids, dtype=torch.int64, device=self.device)
        offsets = torch.arange(block_size, device=self.device)
        return (blocks[:, None] * block_size + offsets).flatten()[: sequence.kv_len]

    def _make_mask(self, sequence: SequenceSlice, window: int | None) -> Tensor | None:
        if sequence.query_len == 1 and (window is None or window >= sequence.kv_len):
            return None
        keys = torch.arange(sequence.kv_len, device=self.device)
        queries = torch.arange(sequence.kv_len - sequence.query_len, sequence.kv_len, device=self.device)[:, None]
        visible = keys <= queries
        return visible if window is None else visible & (keys > queries - window)

"""Runs a decoder over ragged batches: flattens sequences, keeps the K/V store, returns only the logits asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.backends.kv_store import KVStore
from paceline.backends.metadata import AttentionMetadata, SequenceSlice
from paceline.model.decoder import Decoder


@dataclass(frozen=True, slots=True)
class SequenceInput:
    """Tokens of one sequence to run: ``token_ids`` stand at positions start, start + 1, ...

    ``block_ids`` is the sequence's block table; it must cover start + len(token_ids) slots. Logits are returned for
    the last ``num_logits`` of the tokens.
    """

    token_ids: Sequence[int]
    start: int
    block_ids: Sequence[int]
    num_logits: int


class ModelRunner:
    """One model with its K/V store; used for the target and for the draft alike."""

    def __init__(self, decoder: Decoder, store: KVStore, *, block_size: int, device: torch.device) -> None:
        self.decoder = decoder
        self._store = store
        self._block_size = block_size
        self._device = device

    @torch.inference_mode()
    def run(self, inputs: Sequence[SequenceInput]) -> Tensor:
        """One forward pass over all inputs; logits [sum of num_logits, vocab_size] in the order of the inputs."""
        token_ids: list[int] = []
        positions: list[int] = []
        logit_rows: list[int] = []
        sequences: list[SequenceSlice] = []
        for item in inputs:
            query_start, query_len = len(token_ids), len(item.token_ids)
            end = item.start + query_len
            token_ids += item.token_ids
            positions += range(item.start, end)
            logit_rows += range(query_start + query_len - item.num_logits, query_start + query_len)
            sequences.append(SequenceSlice(query_start, query_len, end, item.block_ids))
        metadata = AttentionMetadata(sequences, self._block_size, self._device)
        hidden = self.decoder.forward(self._tensor(token_ids), self._tensor(positions), self._store, metadata)
        if len(logit_rows) != len(token_ids):
            hidden = hidden[self._tensor(logit_rows)]
        return self.decoder.logits(hidden)

    def _tensor(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)

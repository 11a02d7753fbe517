"""Runs a decoder over ragged batches: flattens sequences, keeps the K/V store, returns only the logits asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from paceline.backends.kv_store import HiddenStore, KVStore
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


@dataclass(frozen=True, slots=True)
class _Batch:
    """Inputs flattened; ``logit_rows`` are the rows that logits are wanted for, None for all."""

    token_ids: Tensor
    positions: Tensor
    metadata: AttentionMetadata
    logit_rows: Tensor | None


class ModelRunner:
    """One model with its K/V store; used for the target and for a draft model alike.

    With ``states`` it keeps the last hidden state of every token that it runs, by slot, for a draft head.
    """

    def __init__(
        self,
        decoder: Decoder,
        store: KVStore,
        *,
        block_size: int,
        device: torch.device,
        states: HiddenStore | None = None,
    ) -> None:
        self.decoder = decoder
        self._store = store
        self._block_size = block_size
        self._device = device
        self._states = states

    @torch.inference_mode()
    def run(self, inputs: Sequence[SequenceInput]) -> Tensor:
        """One forward pass over all inputs; logits [sum of num_logits, vocab_size] in the order of the inputs."""
        batch = self._flatten(inputs)
        hidden = self._forward(batch)
        return self.decoder.logits(hidden if batch.logit_rows is None else hidden[batch.logit_rows])

    @torch.inference_mode()
    def hidden_states(self, inputs: Sequence[SequenceInput]) -> Tensor:
        """One forward pass over all inputs; the hidden state of every token, [num_tokens, hidden_size]."""
        return self._forward(self._flatten(inputs))

    @torch.inference_mode()
    def write_kv(self, inputs: Sequence[SequenceInput]) -> None:
        """Have the K/V of all inputs written, for passes to come; no logits, whatever the inputs ask for."""
        batch = self._flatten(inputs)
        self.decoder.write_kv(batch.token_ids, batch.positions, self._store, batch.metadata)

    def _forward(self, batch: _Batch) -> Tensor:
        hidden = self.decoder.forward(batch.token_ids, batch.positions, self._store, batch.metadata)
        if self._states is not None:
            self._states.write(batch.metadata.slot_mapping, hidden)
        return hidden

    def _flatten(self, inputs: Sequence[SequenceInput]) -> _Batch:
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
        return _Batch(
            self._tensor(token_ids),
            self._tensor(positions),
            AttentionMetadata(sequences, self._block_size, self._device),
            self._tensor(logit_rows) if len(logit_rows) != len(token_ids) else None,
        )

    def _tensor(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)


@runtime_checkable
class DraftsAtOnce(Protocol):
    """A decoder that drafts from a head in one call: in Python the way from one token to the next takes longer than a
    head's weights."""

    def draft(
        self,
        token_ids: Sequence[int],
        start: int,
        block_ids: Sequence[int],
        store: KVStore,
        states: HiddenStore,
        *,
        block_size: int,
        listed: Tensor,
        max_tokens: int,
        rule: object | None,
    ) -> list[int]:
        """The greedy draft behind ``token_ids``, which stand from ``start`` on.

        ``listed`` [num_tokens] are the target ids of the logits, ``rule`` is a
        :class:`~paceline.spec.proposer.StopRule`.
        """


class HeadRunner(ModelRunner):
    """A draft head with its K/V store: each token is read together with the hidden state of the one before it.

    The states are the target's, which its own runner keeps in ``states``. Beyond the last token that the target has
    run, the head's own states stand in for them: a row that logits are asked for leaves its state in its slot, where
    the target's will overwrite it when it verifies that position.
    """

    def __init__(
        self, decoder: Decoder, store: KVStore, *, block_size: int, device: torch.device, states: HiddenStore
    ) -> None:
        super().__init__(decoder, store, block_size=block_size, device=device)
        self._target_states = states
        self._drafting = decoder if isinstance(decoder, DraftsAtOnce) else None

    @torch.inference_mode()
    def run(self, inputs: Sequence[SequenceInput]) -> Tensor:
        """See :class:`ModelRunner`; logits are asked for only at positions that the target has not run."""
        batch = self._flatten(inputs)
        metadata = batch.metadata
        states = self._states_before(metadata)
        hidden = self.decoder.forward(batch.token_ids, batch.positions, self._store, metadata, states)
        slots = metadata.slot_mapping
        if batch.logit_rows is not None:
            hidden, slots = hidden[batch.logit_rows], slots[batch.logit_rows]
        self._target_states.write(slots, hidden)
        return self.decoder.logits(hidden)

    @torch.inference_mode()
    def write_kv(self, inputs: Sequence[SequenceInput]) -> None:
        """See :class:`ModelRunner`; the tokens before them must be ones that the target has run."""
        batch = self._flatten(inputs)
        states = self._states_before(batch.metadata)
        self.decoder.write_kv(batch.token_ids, batch.positions, self._store, batch.metadata, states)

    @property
    def drafts_at_once(self) -> bool:
        """Whether there is a :meth:`draft`."""
        return self._drafting is not None

    def draft(self, item: SequenceInput, listed: Tensor, max_tokens: int, rule: object | None) -> list[int]:
        """See :class:`DraftsAtOnce`; the K/V and states it leaves are those of :meth:`run`, token by token."""
        assert self._drafting is not None
        return self._drafting.draft(
            item.token_ids,
            item.start,
            item.block_ids,
            self._store,
            self._target_states,
            block_size=self._block_size,
            listed=listed,
            max_tokens=max_tokens,
            rule=rule,
        )

    def _states_before(self, metadata: AttentionMetadata) -> Tensor:
        """For each token the state of the one before it."""
        return self._target_states.read(metadata.previous_slots, self.decoder.dtype)

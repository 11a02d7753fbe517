"""The target's hidden states for given texts, as a draft head will find them when it drafts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from paceline.cache.manager import KVCacheManager
from paceline.cache.pool import OutOfBlocksError
from paceline.errors import CacheCapacityError
from paceline.model.runner import ModelRunner, SequenceInput

_BATCH_TOKENS = 2048  # in one pass: more would only take more memory


def hidden_states(runner: ModelRunner, cache: KVCacheManager, texts: Sequence[Sequence[int]]) -> list[Tensor]:
    """The state after the final norm of each token of each text: [num_tokens, hidden_size] each.

    Raises:
        CacheCapacityError: too few blocks are free; nothing was changed.
    """
    states: list[Tensor] = []
    room = min(_BATCH_TOKENS, cache.num_free_blocks * cache.block_size)
    for batch in _batches(texts, cache.block_size, room):
        owners = [f"hidden states:{number}" for number in range(len(batch))]
        for owner in owners:
            cache.begin(owner, ())
        try:
            for owner, text in zip(owners, batch, strict=True):
                cache.reserve(owner, len(text))
            inputs = [
                SequenceInput(text, 0, tuple(cache.block_ids(owner)), 0)
                for owner, text in zip(owners, batch, strict=True)
            ]
            states += torch.split(runner.hidden_states(inputs), [len(text) for text in batch])
        except OutOfBlocksError:
            raise CacheCapacityError(
                f"no room in the KV cache for {sum(map(len, batch))} tokens now; give the engine more memory"
            ) from None
        finally:
            for owner in owners:
                cache.release(owner)
    return states


def _batches(texts: Sequence[Sequence[int]], block_size: int, num_slots: int) -> Iterator[list[Sequence[int]]]:
    """As many texts at a time as ``num_slots`` hold, and at least one."""
    batch: list[Sequence[int]] = []
    left = num_slots
    for text in texts:
        needed = -(-len(text) // block_size) * block_size
        if batch and needed > left:
            yield batch
            batch, left = [], num_slots
        batch.append(text)
        left -= needed
    if batch:
        yield batch

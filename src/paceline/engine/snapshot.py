"""The block pool at one moment: plain numbers for a map of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.cache.manager import KVCacheManager

FREE, CACHED, FIRST_OWNER = 0, 1, 2


@dataclass(frozen=True, slots=True)
class OwnedBlocks:
    """One owner's part: ``num_blocks`` in its table, the last ``num_draft_blocks`` of them hold no committed token."""

    owner: str
    num_tokens: int
    num_blocks: int
    num_draft_blocks: int


@dataclass(frozen=True, slots=True)
class CacheSnapshot:
    """State of every block.

    ``states[block_id]`` is 0 for a free block, 1 for one without an owner that can still be found, and otherwise
    2 + 2 * i for a block of ``owners[i]``, or 3 + 2 * i where it is reserved for drafts and holds no committed token
    yet. A block of several owners is shown as the last one's.
    """

    block_size: int
    states: Sequence[int]
    owners: Sequence[OwnedBlocks]


def take_snapshot(cache: KVCacheManager) -> CacheSnapshot:
    """O(blocks + table entries)."""
    states = cache.idle_states()
    owners = []
    for index, owner in enumerate(cache.owners):
        block_ids, num_tokens = cache.block_ids(owner), cache.num_tokens(owner)
        num_filled = -(-num_tokens // cache.block_size)
        for position, block_id in enumerate(block_ids):
            states[block_id] = FIRST_OWNER + 2 * index + (position >= num_filled)
        owners.append(OwnedBlocks(owner, num_tokens, len(block_ids), max(0, len(block_ids) - num_filled)))
    return CacheSnapshot(cache.block_size, states, owners)

"""One block: a fixed run of K/V slots, in the target's store and, at the same index, in the draft model's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.cache.hash import BlockHash


@dataclass(slots=True, eq=False)
class Block:
    """Bookkeeping of one block; compared by identity, changed only by ``BlockPool`` and ``KVCacheManager``.

    Three states: *used* (``ref_count`` > 0), *cached* (0, but hashed: in the free list and still findable) and
    *free* (0 and not hashed).

    Attributes:
        ref_count: how many block tables hold this block.
        num_request_refs: how many of those tables belong to requests (the rest are sessions, which never write).
        hash: the chained content key, or None while the block is not findable.
        parent_hash: the key of the block before it, or the root; None exactly when ``hash`` is.
        token_ids: the tokens behind ``hash``, kept so that a lookup proves equality; empty when ``hash`` is None.
        has_draft_kv: the draft model's K/V of the whole block are valid too.
    """

    block_id: int
    ref_count: int = 0
    num_request_refs: int = 0
    hash: BlockHash | None = None
    parent_hash: BlockHash | None = None
    token_ids: Sequence[int] = ()
    has_draft_kv: bool = False
    # Links of the free list, intrusive so that a cache hit leaves its middle in O(1). None while not in the list.
    prev_free: Block | None = field(default=None, repr=False)
    next_free: Block | None = field(default=None, repr=False)

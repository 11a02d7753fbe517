"""All blocks, the order in which they are reused, and the map from content to block.

The free list is the eviction order:

    front | free blocks (nothing to lose) | cached blocks, least recently used first | back

A cached block keeps its content until it is taken, so memory that nobody needs is never forgotten early.

Two requests that compute the same content at the same time produce *copies*. Every copy is findable: were only the
first one hashed, a session holding the second would lose its prefix when the first is evicted. Copies are not merged
while referenced, because block tables are append-only (a device may hold a copy of a table). Once idle they are:
at most one idle copy of a content stays cached, the others are free at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from paceline.cache.block import Block
from paceline.cache.hash import BlockHash


class OutOfBlocksError(Exception):
    """The pool cannot serve right now; nothing was changed.

    Internal: the scheduler answers by waiting or preempting. A request that could never fit is a user error and is
    refused earlier, with ``KVCacheManager.fits``.
    """


class FreeList:
    """Doubly linked list through the blocks themselves; every operation is O(1) except iteration."""

    def __init__(self) -> None:
        self._head, self._tail = Block(-1), Block(-2)  # sentinels: no operation has an edge case
        self._head.next_free, self._tail.prev_free = self._tail, self._head
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Block]:
        """Blocks from the first to be reused to the last. Do not mutate meanwhile."""
        block = self._head.next_free
        while block is not None and block is not self._tail:
            yield block
            block = block.next_free

    def push_front(self, block: Block) -> None:
        """Make ``block`` the first to be reused."""
        self._insert_after(self._head, block)

    def push_back(self, block: Block) -> None:
        """Make ``block`` the last to be reused."""
        assert self._tail.prev_free is not None
        self._insert_after(self._tail.prev_free, block)

    def remove(self, block: Block) -> None:
        """Unlink ``block``, wherever it stands."""
        before, after = block.prev_free, block.next_free
        assert before is not None, f"block {block.block_id} is not in the free list"
        assert after is not None, f"block {block.block_id} is not in the free list"
        before.next_free, after.prev_free = after, before
        block.prev_free = block.next_free = None
        self._length -= 1

    def pop_front(self) -> Block:
        """Unlink and return the first block. The list must not be empty."""
        block = self._head.next_free
        assert block is not None
        assert block is not self._tail, "the free list is empty"
        self.remove(block)
        return block

    def _insert_after(self, before: Block, block: Block) -> None:
        after = before.next_free
        assert after is not None
        assert block.prev_free is None, f"block {block.block_id} is already in the free list"
        block.prev_free, block.next_free = before, after
        before.next_free = after.prev_free = block
        self._length += 1


class BlockPool:
    """Hands out blocks, takes them back, and finds them by content. Knows nothing of owners."""

    def __init__(self, num_blocks: int) -> None:
        self.blocks: Sequence[Block] = tuple(Block(block_id) for block_id in range(num_blocks))
        self._free = FreeList()
        self._copies: dict[BlockHash, list[Block]] = {}  # every hashed block, under its hash
        self._num_cached = 0
        for block in self.blocks:
            self._free.push_back(block)

    # ---- queries -------------------------------------------------------------------------------------------

    @property
    def free_list(self) -> FreeList:
        """Every block without a reference, in the order of reuse. Read only."""
        return self._free

    @property
    def copies(self) -> Mapping[BlockHash, Sequence[Block]]:
        """Every hashed block by its hash. Read only."""
        return self._copies

    @property
    def num_free(self) -> int:
        """Blocks without a reference, cached ones included: what ``take`` can serve."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks without a reference that can still be found by content."""
        return self._num_cached

    def find(self, block_hash: BlockHash, parent_hash: BlockHash, token_ids: Sequence[int]) -> Block | None:
        """The best block with exactly this content, or None.

        ``token_ids`` is compared with what the block holds, so equal digests alone are never a hit. Best: has the
        draft model's K/V; then: is referenced anyway, so that the hit costs no free block.
        """
        matches = [
            block
            for block in self._copies.get(block_hash, ())
            if block.parent_hash == parent_hash and block.token_ids == token_ids
        ]
        return max(matches, key=lambda block: (block.has_draft_kv, block.ref_count > 0), default=None)

    # ---- verbs ---------------------------------------------------------------------------------------------

    def take(self, num_blocks: int) -> list[Block]:
        """Remove ``num_blocks`` blocks from the front, forget their content and return each with one reference.

        Raises:
            OutOfBlocksError: fewer are free; nothing was changed.
        """
        if num_blocks > self.num_free:
            raise OutOfBlocksError(f"{num_blocks} blocks needed, {self.num_free} of {len(self.blocks)} free")
        taken = []
        for _ in range(num_blocks):
            block = self._free.pop_front()
            if block.hash is not None:
                self._num_cached -= 1
                self._forget(block)
            block.has_draft_kv = False
            block.ref_count = 1
            taken.append(block)
        return taken

    def acquire(self, block: Block) -> None:
        """Add a reference; a block without one leaves the free list, so nothing can evict it any more."""
        if block.ref_count == 0:
            self._free.remove(block)
            if block.hash is not None:
                self._num_cached -= 1
        block.ref_count += 1

    def drop(self, block: Block) -> None:
        """Take one reference away; the last one puts the block back into the free list."""
        assert block.ref_count > 0, f"block {block.block_id} has no reference to drop"
        block.ref_count -= 1
        if block.ref_count > 0:
            return
        if block.hash is None:
            self._put_free(block)
        else:
            self._settle(block)

    def cache(self, block: Block, block_hash: BlockHash, parent_hash: BlockHash, token_ids: Sequence[int]) -> None:
        """Make a referenced, full block findable by its content."""
        assert block.hash is None, f"block {block.block_id} is already hashed"
        assert block.ref_count > 0, f"block {block.block_id} belongs to nobody"
        block.hash, block.parent_hash, block.token_ids = block_hash, parent_hash, token_ids
        self._copies.setdefault(block_hash, []).append(block)

    def forget_all(self) -> None:
        """Make every block unfindable, referenced ones included. References and their K/V stay."""
        for block in self.blocks:
            self._forget(block)
            if block.ref_count == 0:
                block.has_draft_kv = False
        self._num_cached = 0

    def _settle(self, block: Block) -> None:
        """Put a hashed block that just lost its last reference back, keeping one idle copy of its content at most.

        The best copy stays; among equals the newest, so that repeats of one prompt do not crowd out other content.
        """
        assert block.hash is not None
        copies = [
            copy
            for copy in self._copies[block.hash]
            if copy.token_ids == block.token_ids and copy.parent_hash == block.parent_hash
        ]
        keep = max(copies, key=lambda copy: (copy.has_draft_kv, copy.ref_count > 0, copy is block))
        for copy in copies:
            if copy.ref_count > 0:
                continue
            if copy is not block:
                self._free.remove(copy)
                self._num_cached -= 1
            if copy is keep:
                self._free.push_back(copy)
                self._num_cached += 1
            else:
                self._forget(copy)
                self._put_free(copy)

    def _put_free(self, block: Block) -> None:
        """Return a block whose content nobody can find: it is reused before anything cached is evicted."""
        block.has_draft_kv = False
        self._free.push_front(block)

    def _forget(self, block: Block) -> None:
        """Remove the content key of ``block``, if it has one; the caller keeps the count of cached blocks."""
        if block.hash is None:
            return
        copies = self._copies[block.hash]
        copies.remove(block)
        if not copies:
            del self._copies[block.hash]
        block.hash = block.parent_hash = None
        block.token_ids = ()

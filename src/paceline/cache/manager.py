"""The KV cache as the scheduler sees it: owners, their slots, and what is already computed.

One manager serves both stores (law 3): the target's and the draft model's K/V tensors are indexed by the same block
ids, so a hit, a rollback, a preemption or a fork is one act for both.

Life of an owner: ``begin`` (take what the cache already holds), then per step ``reserve`` (room for what is written,
drafts included), the forward, and ``commit`` (what of it counts). Rejected drafts need no call: the next step writes
over them. ``release`` at the end, or to preempt. Only verified tokens are ever hashed (law 2), because ``commit`` is
the only place that hashes and it looks at nothing beyond ``num_verified``.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from paceline.cache.block import Block
from paceline.cache.hash import hash_block, root_hash
from paceline.cache.integrity import find_problems
from paceline.cache.pool import BlockPool
from paceline.cache.table import BlockTable
from paceline.errors import InvalidParameterError


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The leading part of a prompt whose K/V exist: whole blocks, never the entire prompt.

    ``num_draft_tokens`` (at most ``num_tokens``) counts the leading part that the draft model's store holds as well.
    A snapshot: it goes stale with the next verb of the manager.
    """

    num_tokens: int
    num_draft_tokens: int
    block_ids: Sequence[int]


class KVCacheManager:
    """Block bookkeeping for all owners; an owner is a string, the id of a request or of a session.

    Queries change nothing. Verbs name the owner they change; calling one for an unknown owner, or ``begin`` or
    ``fork`` into an existing one, is a bug of the caller and fails an assertion. All sizes are in tokens (= slots)
    unless the name says blocks.

    Raises:
        InvalidParameterError: ``num_blocks`` or ``block_size`` is below 1.
    """

    def __init__(self, num_blocks: int, block_size: int, *, enable_prefix_cache: bool = True) -> None:
        if num_blocks < 1 or block_size < 1:
            raise InvalidParameterError(
                f"the KV cache needs num_blocks and block_size of 1 or more, got {num_blocks} and {block_size}"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_cache = enable_prefix_cache
        self._pool = BlockPool(num_blocks)
        self._tables: dict[str, BlockTable] = {}
        self._num_request_blocks = 0  # blocks held by at least one request, shared ones counted once

    # ---- queries: the cache --------------------------------------------------------------------------------

    def match_prefix(self, token_ids: Sequence[int], *, salt: bytes = b"") -> PrefixMatch:
        """The longest prefix of ``token_ids`` that is cached, in whole blocks and at most ``len(token_ids) - 1``.

        The last token is always left to compute, because its logits are wanted. Costs one hash per block up to and
        including the first miss. Only content committed under the same ``salt`` is found.
        """
        if not self.enable_prefix_cache:
            return PrefixMatch(0, 0, ())
        size = self.block_size
        block_ids: list[int] = []
        num_draft_blocks = 0
        parent = root_hash(salt)
        for start in range(0, len(token_ids) - size, size):
            content = tuple(token_ids[start : start + size])
            block_hash = hash_block(parent, content)
            block = self._pool.find(block_hash, parent, content)
            if block is None:
                break
            if block.has_draft_kv and num_draft_blocks == len(block_ids):
                num_draft_blocks += 1
            block_ids.append(block.block_id)
            parent = block_hash
        return PrefixMatch(len(block_ids) * size, num_draft_blocks * size, tuple(block_ids))

    def fits(self, num_tokens: int) -> bool:
        """Whether ``num_tokens`` slots could be reserved for one owner if the cache were otherwise empty."""
        return self._num_blocks_for(num_tokens) <= self.num_blocks

    def can_begin(self, match: PrefixMatch, num_tokens: int) -> bool:
        """Whether ``begin`` with this fresh ``match`` and then ``reserve(owner, num_tokens)`` would succeed."""
        num_idle = sum(self._pool.blocks[block_id].ref_count == 0 for block_id in match.block_ids)
        num_new = self._num_blocks_for(num_tokens) - len(match.block_ids)
        return num_new <= self.num_free_blocks - num_idle

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be reserved: without a reference, cached ones (which would be evicted) included."""
        return self._pool.num_free

    @property
    def num_used_blocks(self) -> int:
        """Blocks held by at least one owner."""
        return self.num_blocks - self._pool.num_free

    @property
    def num_cached_blocks(self) -> int:
        """Blocks held by no owner that a lookup can still find."""
        return self._pool.num_cached

    @property
    def reserved_slots(self) -> int:
        """Slots of the blocks held by requests; a shared block counts once, sessions not at all."""
        return self._num_request_blocks * self.block_size

    @property
    def filled_slots(self) -> int:
        """The part of ``reserved_slots`` that holds committed tokens. O(owners)."""
        # Unfilled slots are in blocks nobody shares, so they add up over the tables.
        unfilled = sum(table.num_slots - table.num_tokens for table in self._tables.values() if table.is_request)
        return self.reserved_slots - unfilled

    def idle_states(self) -> list[int]:
        """For each block 1 if no owner holds it but a lookup can find it, else 0. O(blocks)."""
        return [int(block.ref_count == 0 and block.hash is not None) for block in self._pool.blocks]

    # ---- queries: one owner --------------------------------------------------------------------------------

    @property
    def owners(self) -> Collection[str]:
        """Everyone who holds a table, in order of creation. A live view: ``owner in manager.owners`` is O(1)."""
        return self._tables.keys()

    def block_ids(self, owner: str) -> Sequence[int]:
        """The owner's blocks in order of position. A live view: copy what must outlive the next verb."""
        return self._table(owner).block_ids

    def num_slots(self, owner: str) -> int:
        """Positions the owner may write: the reserved room, look-ahead included."""
        return self._table(owner).num_slots

    def num_tokens(self, owner: str) -> int:
        """The owner's committed tokens, as of its last ``begin``, ``fork`` or ``commit``."""
        return self._table(owner).num_tokens

    def num_draft_tokens(self, owner: str) -> int:
        """The leading part of ``num_tokens`` for which the draft model's K/V are known to exist."""
        return self._table(owner).num_draft_tokens

    def can_reserve(self, owner: str, num_tokens: int) -> bool:
        """Whether ``reserve`` with the same arguments would succeed now."""
        return self._num_missing_blocks(self._table(owner), num_tokens) <= self.num_free_blocks

    # ---- verbs ---------------------------------------------------------------------------------------------

    def begin(self, owner: str, token_ids: Sequence[int], *, salt: bytes = b"") -> PrefixMatch:
        """Create the owner's table and put the cached prefix of ``token_ids`` into it.

        The matched blocks leave the free list here, so no later ``reserve`` can evict them. Takes no other block.
        """
        assert owner not in self._tables, f"owner {owner!r} already has a block table"
        match = self.match_prefix(token_ids, salt=salt)
        table = BlockTable(
            block_size=self.block_size,
            root=root_hash(salt),
            is_cacheable=self.enable_prefix_cache,
            is_request=True,
            num_tokens=match.num_tokens,
            num_draft_tokens=match.num_draft_tokens,
        )
        self._tables[owner] = table
        self._share(table, match.block_ids)
        return match

    def reserve(self, owner: str, num_tokens: int) -> None:
        """Give the owner room for positions 0 to ``num_tokens`` - 1; never takes room away.

        Raises:
            OutOfBlocksError: the pool cannot serve; nothing was changed.
        """
        table = self._table(owner)
        num_missing = self._num_missing_blocks(table, num_tokens)
        if num_missing <= 0:
            return
        taken = self._pool.take(num_missing)  # all or nothing
        if not table.is_request:
            self._become_request(table)
        for block in taken:
            self._append(table, block)

    def commit(self, owner: str, token_ids: Sequence[int], num_verified: int, num_draft_verified: int = 0) -> None:
        """Declare ``token_ids[:num_verified]`` final and their target K/V written; hash the blocks that are now full.

        ``token_ids`` is the owner's whole list of committed tokens. ``num_verified`` never falls and never exceeds
        it, nor the reserved slots. ``num_draft_verified`` says the same of the draft model's K/V; what exceeds
        ``num_verified`` is ignored, and a number below an earlier one (0 when nothing was drafted) takes nothing
        back. O(new blocks), whatever the context length.
        """
        table = self._table(owner)
        assert num_verified <= len(token_ids), f"{num_verified} tokens verified of {len(token_ids)} committed"
        assert num_verified <= table.num_slots, f"{num_verified} tokens verified in {table.num_slots} slots"
        assert num_verified >= table.num_tokens, f"{table.num_tokens} tokens were committed, now {num_verified}"
        first_new = table.num_full_blocks
        table.num_tokens = num_verified
        if table.is_cacheable:
            for index in range(first_new, table.num_full_blocks):
                self._hash(table, index, token_ids)
        first_new_draft = table.num_draft_tokens // self.block_size
        table.num_draft_tokens = max(table.num_draft_tokens, min(num_draft_verified, num_verified))
        for index in range(first_new_draft, table.num_draft_tokens // self.block_size):
            self._pool.blocks[table.block_ids[index]].has_draft_kv = True

    def trim(self, owner: str, num_tokens: int) -> None:
        """Give back whole blocks beyond ``num_tokens`` positions, never one that holds a committed token."""
        table = self._table(owner)
        self._shrink(table, self._num_blocks_for(max(num_tokens, table.num_tokens)))

    def fork(self, parent: str, child: str) -> int:
        """Create ``child`` on the full committed blocks of ``parent`` and return how many tokens that covers.

        A multiple of the block size; the child computes the partial tail itself, so nothing is ever copied. The
        child counts as a session (it only keeps blocks alive) until its first ``reserve`` that needs a block.
        """
        assert child not in self._tables, f"owner {child!r} already has a block table"
        source = self._table(parent)
        num_shared = source.num_full_blocks * self.block_size
        table = BlockTable(
            block_size=self.block_size,
            root=source.root,
            is_cacheable=source.is_cacheable,
            is_request=False,
            num_tokens=num_shared,
            num_draft_tokens=min(source.num_draft_tokens, num_shared),
        )
        self._tables[child] = table
        self._share(table, source.block_ids[: source.num_full_blocks])
        return num_shared

    def release(self, owner: str) -> None:
        """Forget the owner and drop its references; its hashed blocks stay findable until they are reused."""
        table = self._table(owner)
        self._shrink(table, 0)
        del self._tables[owner]

    def reset_prefix_cache(self) -> None:
        """Make everything computed so far unfindable (after a change of weights, or to measure a cold start).

        Current owners keep their blocks and go on, but nothing of theirs is hashed any more: its prefix is old.
        """
        self._pool.forget_all()
        for table in self._tables.values():
            table.is_cacheable = False

    def check_integrity(self) -> None:
        """Prove that the books balance. O(blocks + table entries): for tests and idle moments.

        Raises:
            AssertionError: an invariant is broken; the message says which and where.
        """
        for problem in find_problems(self._pool, self._tables, self.block_size, self._num_request_blocks):
            raise AssertionError(f"KV cache: {problem}")

    # ---- helpers -------------------------------------------------------------------------------------------

    def _table(self, owner: str) -> BlockTable:
        assert owner in self._tables, f"owner {owner!r} has no block table"
        return self._tables[owner]

    def _num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _num_missing_blocks(self, table: BlockTable, num_tokens: int) -> int:
        return self._num_blocks_for(num_tokens) - len(table.block_ids)

    def _hash(self, table: BlockTable, index: int, token_ids: Sequence[int]) -> None:
        parent = self._pool.blocks[table.block_ids[index - 1]].hash if index else table.root
        assert parent is not None, "a full block of a cacheable table is not hashed"
        content = tuple(token_ids[index * self.block_size : (index + 1) * self.block_size])
        self._pool.cache(self._pool.blocks[table.block_ids[index]], hash_block(parent, content), parent, content)

    def _share(self, table: BlockTable, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            block = self._pool.blocks[block_id]
            self._pool.acquire(block)
            self._append(table, block)

    def _append(self, table: BlockTable, block: Block) -> None:
        table.block_ids.append(block.block_id)
        if table.is_request:
            self._add_request_ref(block)

    def _become_request(self, table: BlockTable) -> None:
        table.is_request = True
        for block_id in table.block_ids:
            self._add_request_ref(self._pool.blocks[block_id])

    def _add_request_ref(self, block: Block) -> None:
        block.num_request_refs += 1
        self._num_request_blocks += block.num_request_refs == 1

    def _shrink(self, table: BlockTable, num_blocks: int) -> None:
        # Tail first: the free list then evicts a chain from its tail, and what is left stays reachable.
        while len(table.block_ids) > num_blocks:
            block = self._pool.blocks[table.block_ids.pop()]
            if table.is_request:
                block.num_request_refs -= 1
                self._num_request_blocks -= block.num_request_refs == 0
            self._pool.drop(block)

"""The invariants of the block books, each as a sentence about what is wrong. Product code (law 10)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from paceline.cache.block import Block
from paceline.cache.hash import hash_block
from paceline.cache.pool import BlockPool
from paceline.cache.table import BlockTable


def find_problems(
    pool: BlockPool, tables: Mapping[str, BlockTable], block_size: int, num_request_blocks: int
) -> Iterator[str]:
    """Yield one sentence per broken invariant; nothing when the books balance. Changes nothing."""
    # Ordered from the structure to what relies on it: later checks may fail oddly once an earlier one has.
    yield from _free_list_problems(pool)
    yield from _entry_problems(pool, tables)
    yield from _count_problems(pool, tables, num_request_blocks)
    yield from _hash_problems(pool, block_size)
    for owner, table in tables.items():
        yield from _table_problems(owner, table, pool)


def _free_list_problems(pool: BlockPool) -> Iterator[str]:
    listed: set[int] = set()
    previous: Block | None = None
    for block in pool.free_list:
        where = f"free list at block {block.block_id}"
        if block.block_id in listed:
            yield f"{where}: a cycle"
            return
        listed.add(block.block_id)
        if not 0 <= block.block_id < len(pool.blocks) or pool.blocks[block.block_id] is not block:
            yield f"{where}: not a block of this pool"
        if previous is not None and block.prev_free is not previous:
            yield f"{where}: the backward link does not lead to block {previous.block_id}"
        if block.ref_count:
            yield f"{where}: it is referenced {block.ref_count} times"
        if block.hash is None and previous is not None and previous.hash is not None:
            yield f"{where}: a free block behind cached block {previous.block_id} would be reused too late"
        if block.hash is None and block.has_draft_kv:
            yield f"{where}: a free block claims draft K/V"
        previous = block
    if len(listed) != len(pool.free_list):
        yield f"the free list holds {len(listed)} blocks and counts {len(pool.free_list)}"
    for block in pool.blocks:
        if block.ref_count < 0:
            yield f"block {block.block_id} has {block.ref_count} references"
        if block.ref_count == 0 and block.block_id not in listed:
            yield f"block {block.block_id} leaked: no references and not in the free list"
        if block.ref_count and (block.prev_free is not None or block.next_free is not None):
            yield f"block {block.block_id} is referenced but linked into the free list"


def _entry_problems(pool: BlockPool, tables: Mapping[str, BlockTable]) -> Iterator[str]:
    num_refs: Counter[int] = Counter()
    num_request_refs: Counter[int] = Counter()
    index_of: dict[int, int] = {}
    for owner, table in tables.items():
        if len(set(table.block_ids)) != len(table.block_ids):
            yield f"{owner!r} lists a block twice"
        for index, block_id in enumerate(table.block_ids):
            num_refs[block_id] += 1
            num_request_refs[block_id] += table.is_request
            # K/V depend on the position, so sharing is only possible at the same index.
            if index_of.setdefault(block_id, index) != index:
                yield f"block {block_id} is shared at index {index_of[block_id]} and, by {owner!r}, at {index}"
    for block in pool.blocks:
        if block.ref_count != num_refs[block.block_id]:
            yield f"block {block.block_id} counts {block.ref_count} references, tables hold {num_refs[block.block_id]}"
        if block.num_request_refs != num_request_refs[block.block_id]:
            yield (
                f"block {block.block_id} counts {block.num_request_refs} references by requests, "
                f"their tables hold {num_request_refs[block.block_id]}"
            )


def _count_problems(pool: BlockPool, tables: Mapping[str, BlockTable], num_request_blocks: int) -> Iterator[str]:
    num_used = sum(block.ref_count > 0 for block in pool.blocks)
    num_cached = sum(block.ref_count == 0 and block.hash is not None for block in pool.blocks)
    num_free = len(pool.free_list) - num_cached
    if pool.num_cached != num_cached:
        yield f"{num_cached} blocks are cached, {pool.num_cached} are counted"
    if num_free + num_used + num_cached != len(pool.blocks):
        yield f"free {num_free} + used {num_used} + cached {num_cached} is not the total {len(pool.blocks)}"
    num_refs = sum(block.ref_count for block in pool.blocks)
    num_entries = sum(len(table.block_ids) for table in tables.values())
    if num_refs != num_entries:
        yield f"{num_refs} references but {num_entries} table entries"
    held = sum(block.num_request_refs > 0 for block in pool.blocks)
    if num_request_blocks != held:
        yield f"requests hold {held} blocks, {num_request_blocks} are counted"


def _hash_problems(pool: BlockPool, block_size: int) -> Iterator[str]:
    for block_hash, copies in pool.copies.items():
        if not copies:
            yield f"hash {block_hash.hex()} is in the map without a block"
        for block in copies:
            if block.hash != block_hash:
                yield f"block {block.block_id} is in the map under a hash it does not have"
        contents = Counter((copy.parent_hash, tuple(copy.token_ids)) for copy in copies if copy.ref_count == 0)
        if any(count > 1 for count in contents.values()):
            yield f"hash {block_hash.hex()} has more than one idle copy of the same content"
    for block in pool.blocks:
        if block.hash is None:
            if block.parent_hash is not None or block.token_ids:
                yield f"block {block.block_id} is not hashed but keeps content"
            continue
        if sum(copy is block for copy in pool.copies.get(block.hash, ())) != 1:
            yield f"block {block.block_id} is hashed but not in the map exactly once"
        if len(block.token_ids) != block_size:
            yield f"block {block.block_id} is hashed with {len(block.token_ids)} of {block_size} tokens"
        if block.parent_hash is None or hash_block(block.parent_hash, block.token_ids) != block.hash:
            yield f"block {block.block_id} has a hash that is not the hash of its content"


def _table_problems(owner: str, table: BlockTable, pool: BlockPool) -> Iterator[str]:
    if not 0 <= table.num_draft_tokens <= table.num_tokens <= table.num_slots:
        yield (
            f"{owner!r}: draft {table.num_draft_tokens} <= committed {table.num_tokens} "
            f"<= slots {table.num_slots} does not hold"
        )
        return
    blocks = [pool.blocks[block_id] for block_id in table.block_ids]
    parent = table.root
    for block in blocks[: table.num_full_blocks]:
        where = f"{owner!r}, block {block.block_id}"
        if (block.hash is not None) != table.is_cacheable:
            yield f"{where}: full and committed, hashed {block.hash is not None}, cacheable {table.is_cacheable}"
        elif block.hash is not None:
            if block.parent_hash != parent:
                yield f"{where}: its parent hash is not the hash of the block before it"
            parent = block.hash
    for block in blocks[: table.num_draft_tokens // table.block_size]:
        if not block.has_draft_kv:
            yield f"{owner!r}, block {block.block_id}: wholly below the draft counter without has_draft_kv"
    for block in blocks[table.num_full_blocks :]:
        where = f"{owner!r}, block {block.block_id}: not wholly committed"
        if block.hash is not None:
            yield f"{where}, but hashed"
        if block.has_draft_kv:
            yield f"{where}, but marked has_draft_kv"
        if block.ref_count != 1:
            yield f"{where}, but shared by {block.ref_count}"

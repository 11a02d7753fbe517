from __future__ import annotations

import pytest

from paceline.cache.block import Block
from paceline.cache.hash import hash_block, root_hash
from paceline.cache.pool import BlockPool, FreeList, OutOfBlocksError

ROOT = root_hash()


def order(pool: BlockPool) -> list[int]:
    return [block.block_id for block in pool.free_list]


def cached(pool: BlockPool, *tokens: int) -> Block:
    """A referenced block holding ``tokens`` as a first block."""
    block = pool.take(1)[0]
    pool.cache(block, hash_block(ROOT, tokens), ROOT, tokens)
    return block


def find(pool: BlockPool, *tokens: int) -> Block | None:
    return pool.find(hash_block(ROOT, tokens), ROOT, tokens)


class TestFreeList:
    def test_both_ends_and_the_middle(self):
        blocks = [Block(i) for i in range(4)]
        free = FreeList()
        for block in blocks[:3]:
            free.push_back(block)
        free.push_front(blocks[3])
        assert [b.block_id for b in free] == [3, 0, 1, 2]
        free.remove(blocks[1])
        assert [b.block_id for b in free] == [3, 0, 2]
        assert free.pop_front() is blocks[3]
        free.push_back(blocks[1])
        assert [b.block_id for b in free] == [0, 2, 1]
        assert len(free) == 3

    def test_a_block_cannot_be_in_it_twice_or_leave_twice(self):
        free, block = FreeList(), Block(0)
        free.push_back(block)
        with pytest.raises(AssertionError, match="already in the free list"):
            free.push_front(block)
        free.remove(block)
        with pytest.raises(AssertionError, match="not in the free list"):
            free.remove(block)

    def test_popping_an_empty_list_fails(self):
        with pytest.raises(AssertionError, match="empty"):
            FreeList().pop_front()


class TestTake:
    def test_takes_from_the_front_with_one_reference(self):
        pool = BlockPool(4)
        assert [(b.block_id, b.ref_count) for b in pool.take(3)] == [(0, 1), (1, 1), (2, 1)]
        assert order(pool) == [3]

    def test_too_much_changes_nothing(self):
        pool = BlockPool(3)
        pool.take(1)
        with pytest.raises(OutOfBlocksError, match="3 blocks needed, 2 of 3 free"):
            pool.take(3)
        assert order(pool) == [1, 2]

    def test_evicts_the_content(self):
        pool = BlockPool(1)
        block = cached(pool, 1, 2)
        block.has_draft_kv = True
        pool.drop(block)
        assert (pool.num_free, pool.num_cached) == (1, 1)
        assert pool.take(1) == [block]
        assert (block.hash, block.parent_hash, block.token_ids, block.has_draft_kv) == (None, None, (), False)
        assert find(pool, 1, 2) is None
        assert (pool.num_cached, dict(pool.copies)) == (0, {})


class TestOrder:
    def test_least_recently_used_goes_first(self):
        pool = BlockPool(3)
        a, b, c = cached(pool, 1), cached(pool, 2), cached(pool, 3)
        for block in (a, b, c):
            pool.drop(block)
        pool.acquire(a)  # used again ...
        pool.drop(a)
        assert order(pool) == [b.block_id, c.block_id, a.block_id]
        pool.take(1)
        assert find(pool, 2) is None
        assert find(pool, 1) is a

    def test_blocks_with_nothing_to_lose_go_before_cached_ones(self):
        pool = BlockPool(3)
        a = cached(pool, 1)
        (plain,) = pool.take(1)
        pool.drop(a)
        pool.drop(plain)
        assert order(pool) == [plain.block_id, 2, a.block_id]

    def test_a_shared_block_is_not_free_until_the_last_drop(self):
        pool = BlockPool(2)
        a = cached(pool, 1)
        pool.acquire(a)
        pool.drop(a)
        assert order(pool) == [1]
        pool.drop(a)
        assert order(pool) == [1, a.block_id]
        with pytest.raises(AssertionError, match="no reference to drop"):
            pool.drop(a)


class TestCopies:
    def test_the_second_copy_takes_over_when_the_first_is_evicted(self):
        """A session that holds the copy of an evicted block must still be found."""
        pool = BlockPool(4)
        first, second = cached(pool, 1), cached(pool, 1)
        pool.drop(first)
        assert first.hash is None, "an idle copy of a referenced block is no use"
        assert find(pool, 1) is second
        pool.take(3)
        assert find(pool, 1) is second

    def test_one_idle_copy_stays_the_newest(self):
        pool = BlockPool(4)
        first = cached(pool, 1)
        pool.drop(first)
        other = pool.take(1)[0]
        pool.drop(other)
        second = cached(pool, 1)
        pool.drop(second)
        assert find(pool, 1) is second
        assert pool.num_cached == 1
        assert order(pool)[0] == first.block_id
        assert order(pool)[-1] == second.block_id

    def test_the_idle_copy_with_draft_kv_stays(self):
        pool = BlockPool(5)
        older, between = cached(pool, 1), cached(pool, 2)
        older.has_draft_kv = True
        pool.drop(older)
        pool.drop(between)
        newer = cached(pool, 1)
        pool.drop(newer)
        assert find(pool, 1) is older
        assert newer.hash is None
        assert order(pool)[-1] == older.block_id, "it was as good as used"

    def test_an_idle_copy_with_draft_kv_survives_beside_a_referenced_one_without(self):
        pool = BlockPool(3)
        plain, drafted = cached(pool, 1), cached(pool, 1)
        drafted.has_draft_kv = True
        pool.drop(drafted)
        assert pool.num_cached == 1
        assert find(pool, 1) is drafted
        pool.drop(plain)
        assert find(pool, 1) is drafted
        assert pool.num_cached == 1

    def test_find_prefers_draft_kv_then_a_block_in_use(self):
        pool = BlockPool(4)
        idle = cached(pool, 1)
        pool.drop(idle)
        used = cached(pool, 1)
        assert find(pool, 1) is used, "a hit on it costs no free block"
        drafted = cached(pool, 1)
        drafted.has_draft_kv = True
        assert find(pool, 1) is drafted


class TestVerification:
    def test_equal_digests_are_not_a_hit(self):
        """A collision: the block is under the digest that is looked up, with other tokens or another parent."""
        pool = BlockPool(3)
        digest, other_parent = hash_block(ROOT, (1, 2)), hash_block(ROOT, (9,))
        wrong_tokens, wrong_parent, right = pool.take(3)
        pool.cache(wrong_tokens, digest, ROOT, (3, 4))
        pool.cache(wrong_parent, digest, other_parent, (1, 2))
        assert pool.find(digest, ROOT, (1, 2)) is None
        pool.cache(right, digest, ROOT, (1, 2))
        assert pool.find(digest, ROOT, (1, 2)) is right
        for block in (right, wrong_parent, wrong_tokens):
            pool.drop(block)
        assert pool.num_cached == 3, "colliding contents are not copies of each other"

    def test_a_block_is_hashed_once_and_only_while_owned(self):
        pool = BlockPool(2)
        block = cached(pool, 1)
        with pytest.raises(AssertionError, match="already hashed"):
            pool.cache(block, hash_block(ROOT, (2,)), ROOT, (2,))
        with pytest.raises(AssertionError, match="belongs to nobody"):
            pool.cache(pool.blocks[1], hash_block(ROOT, (2,)), ROOT, (2,))


def test_forget_all_keeps_references():
    pool = BlockPool(3)
    used, idle = cached(pool, 1), cached(pool, 2)
    used.has_draft_kv = idle.has_draft_kv = True
    pool.drop(idle)
    pool.forget_all()
    assert (find(pool, 1), find(pool, 2), pool.num_cached, pool.num_free) == (None, None, 0, 2)
    assert used.ref_count == 1
    assert used.has_draft_kv, "its K/V are still there"
    assert not idle.has_draft_kv

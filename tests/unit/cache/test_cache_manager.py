from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from paceline.cache import KVCacheManager, OutOfBlocksError, PrefixMatch, manager
from paceline.cache.hash import root_hash
from paceline.errors import InvalidParameterError


def run(kv: KVCacheManager, owner: str, token_ids: list[int], *, num_draft: int = 0) -> PrefixMatch:
    """One request through to the end of its prompt, as the engine would."""
    match = kv.begin(owner, token_ids)
    kv.reserve(owner, len(token_ids))
    kv.commit(owner, token_ids, len(token_ids), num_draft)
    return match


def run_and_release(kv: KVCacheManager, token_ids: list[int], **kwargs: int) -> PrefixMatch:
    match = run(kv, "once", token_ids, **kwargs)
    kv.release("once")
    return match


def state(kv: KVCacheManager) -> object:
    pool = kv._pool
    return (
        [(b.ref_count, b.num_request_refs, b.hash, b.parent_hash, b.token_ids, b.has_draft_kv) for b in pool.blocks],
        [b.block_id for b in pool.free_list],
        {block_hash: [b.block_id for b in copies] for block_hash, copies in pool.copies.items()},
        {owner: (list(t.block_ids), t.num_tokens, t.num_draft_tokens) for owner, t in kv._tables.items()},
    )


def tokens(n: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(50_000), k=n)


class TestSizes:
    @pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 4), (4, 0), (-1, 4)])
    def test_nonsense_is_a_user_error(self, num_blocks: int, block_size: int):
        with pytest.raises(InvalidParameterError, match="1 or more"):
            KVCacheManager(num_blocks, block_size)

    def test_fits_asks_the_whole_pool(self):
        kv = KVCacheManager(3, 4)
        run(kv, "a", tokens(12))
        assert kv.fits(12)
        assert not kv.fits(13)


class TestPrefixMatch:
    @pytest.mark.parametrize("block_size", [1, 2, 4])
    def test_one_token_is_always_left_to_compute(self, block_size: int):
        kv = KVCacheManager(32, block_size)
        prompt = tokens(8)
        run_and_release(kv, prompt)
        for length in range(9):
            match = kv.match_prefix(prompt[:length])
            assert match.num_tokens == max(0, length - 1) // block_size * block_size
        assert kv.match_prefix([*prompt, 1]).num_tokens == 8

    def test_a_change_in_the_middle_ends_the_match(self):
        kv = KVCacheManager(32, 4)
        prompt = tokens(20)
        run_and_release(kv, prompt)
        changed = [*prompt[:9], 1, *prompt[10:]]
        assert kv.match_prefix(changed).num_tokens == 8

    def test_begin_returns_and_holds_what_match_found(self):
        kv = KVCacheManager(8, 4)
        prompt = tokens(12)
        run_and_release(kv, prompt)
        match = kv.match_prefix(prompt)
        assert kv.begin("b", prompt) == match
        assert list(kv.block_ids("b")) == list(match.block_ids)
        assert (kv.num_tokens("b"), kv.num_slots("b"), kv.num_used_blocks) == (8, 8, 2)

    def test_matched_blocks_cannot_be_evicted_by_the_reserve_that_follows(self):
        kv = KVCacheManager(4, 4)
        prompt = tokens(16)
        run_and_release(kv, prompt)
        assert kv.num_cached_blocks == 4
        match = kv.begin("b", prompt)
        kv.reserve("b", 16)
        assert list(kv.block_ids("b"))[:3] == list(match.block_ids)
        kv.check_integrity()
        kv.commit("b", prompt, 16)
        kv.check_integrity()

    def test_can_begin_counts_idle_hits_as_taken(self):
        kv = KVCacheManager(4, 4)
        run_and_release(kv, tokens(12))
        kv.begin("other", [1])
        kv.reserve("other", 4)
        match = kv.match_prefix(tokens(12))
        assert (match.num_tokens, kv.num_free_blocks) == (8, 3)
        assert kv.can_begin(match, 12)
        assert not kv.can_begin(match, 13), "two of the three free blocks are the hit itself"

    def test_off_means_off(self):
        kv = KVCacheManager(8, 4, enable_prefix_cache=False)
        run_and_release(kv, tokens(12))
        assert kv.match_prefix(tokens(12)) == PrefixMatch(0, 0, ())
        assert (kv.num_cached_blocks, kv.num_free_blocks) == (0, 8)
        run(kv, "a", tokens(12))
        assert kv.fork("a", "b") == 12, "sharing between live owners needs no hash"
        kv.check_integrity()

    def test_salts_do_not_see_each_other(self):
        kv = KVCacheManager(16, 4)
        prompt = tokens(12)
        kv.begin("a", prompt, salt=b"tenant a")
        kv.reserve("a", 12)
        kv.commit("a", prompt, 12)
        kv.fork("a", "session")
        kv.reserve("session", 16)
        kv.commit("session", [*prompt, 1, 2, 3, 4], 16)
        assert kv.match_prefix(prompt).num_tokens == 0
        assert kv.match_prefix([*prompt, 1, 2, 3, 4, 5], salt=b"tenant a").num_tokens == 16
        kv.check_integrity()

    def test_a_digest_collision_is_a_miss(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(manager, "hash_block", lambda parent, token_ids: root_hash(b"always the same"))
        kv = KVCacheManager(8, 4)
        run_and_release(kv, [1, 2, 3, 4, 5])
        assert kv.match_prefix([1, 2, 3, 4, 5]).num_tokens == 4
        assert kv.match_prefix([1, 2, 3, 9, 5]).num_tokens == 0


class TestOnlyVerifiedTokensAreHashed:
    def test_reserved_and_drafted_positions_are_not_found(self):
        kv = KVCacheManager(16, 4)
        prompt, drafts = tokens(6), [7, 7, 7, 7, 7, 7]
        run(kv, "a", prompt)
        kv.reserve("a", 12)  # the forward writes six drafts here
        kv.commit("a", [*prompt, 7, 9], 7)  # one accepted, one recovered
        assert kv.match_prefix([*prompt, *drafts]).num_tokens == 4
        kv.check_integrity()
        kv.commit("a", [*prompt, 7, 9, 5], 8)
        assert kv.match_prefix([*prompt, *drafts]).num_tokens == 4, "the block was filled by 9, not by the draft"
        assert kv.match_prefix([*prompt, 7, 9, 5]).num_tokens == 8

    def test_committed_tokens_without_kv_are_not_hashed(self):
        """The newest token of a decoding request fills the block, but its K/V come with the next step."""
        kv = KVCacheManager(4, 4)
        prompt = tokens(3)
        run(kv, "a", prompt)
        kv.reserve("a", 4)
        kv.commit("a", [*prompt, 5], 3)
        assert kv.match_prefix([*prompt, 5, 6]).num_tokens == 0

    def test_the_counter_only_rises_and_stays_within_its_bounds(self):
        kv = KVCacheManager(4, 4)
        run(kv, "a", tokens(6))
        with pytest.raises(AssertionError, match="were committed"):
            kv.commit("a", tokens(6), 5)
        with pytest.raises(AssertionError, match="of 6 committed"):
            kv.commit("a", tokens(6), 7)
        with pytest.raises(AssertionError, match="slots"):
            kv.commit("a", tokens(9), 9)


class TestDraftStore:
    def test_only_whole_blocks_below_the_counter_are_marked(self):
        kv = KVCacheManager(8, 4)
        prompt = tokens(12)
        run(kv, "a", prompt, num_draft=7)
        match = kv.match_prefix([*prompt, 1])
        assert (match.num_tokens, match.num_draft_tokens) == (12, 4)

    def test_marks_blocks_that_were_hashed_earlier_and_shared_ones(self):
        kv = KVCacheManager(8, 4)
        prompt = tokens(13)
        run(kv, "a", prompt)
        run(kv, "b", prompt)  # shares three blocks; the draft model reads along this time
        assert kv.match_prefix(prompt).num_draft_tokens == 0
        kv.commit("b", prompt, 13, 9)
        assert kv.match_prefix(prompt).num_draft_tokens == 8
        kv.check_integrity()

    def test_the_leading_part_counts(self):
        kv = KVCacheManager(16, 4)
        prompt = tokens(13)
        run(kv, "a", prompt, num_draft=13)
        kv._pool.blocks[kv.block_ids("a")[1]].has_draft_kv = False
        match = kv.match_prefix(prompt)
        assert (match.num_tokens, match.num_draft_tokens) == (12, 4)

    def test_a_lower_or_excessive_number_takes_nothing_back_and_promises_nothing(self):
        kv = KVCacheManager(8, 4)
        run(kv, "a", tokens(8), num_draft=8)
        kv.reserve("a", 16)
        kv.commit("a", tokens(16), 9)
        assert kv.num_draft_tokens("a") == 8
        kv.commit("a", tokens(16), 10, 16)
        assert kv.num_draft_tokens("a") == 10
        kv.check_integrity()

    def test_begin_and_fork_carry_the_counter(self):
        kv = KVCacheManager(16, 4)
        run(kv, "a", tokens(13), num_draft=6)
        kv.begin("b", tokens(13))
        assert (kv.num_tokens("b"), kv.num_draft_tokens("b")) == (12, 4)
        kv.fork("a", "c")
        assert (kv.num_tokens("c"), kv.num_draft_tokens("c")) == (12, 6)
        kv.commit("a", tokens(13), 13, 13)
        kv.fork("a", "d")
        assert kv.num_draft_tokens("d") == 12


class TestReserve:
    def test_covers_the_slots_and_never_shrinks(self):
        kv = KVCacheManager(8, 4)
        kv.begin("a", tokens(5))
        kv.reserve("a", 5)
        ids = list(kv.block_ids("a"))
        assert kv.num_slots("a") == 8
        kv.reserve("a", 8)
        kv.reserve("a", 1)
        assert list(kv.block_ids("a")) == ids
        kv.reserve("a", 9)
        assert list(kv.block_ids("a"))[:2] == ids
        assert kv.num_slots("a") == 12

    def test_a_failed_reserve_changes_nothing(self):
        kv = KVCacheManager(6, 4)
        run_and_release(kv, tokens(8), num_draft=8)
        run(kv, "a", tokens(9, seed=1))
        kv.fork("a", "session")
        before = state(kv)
        for owner, size in (("a", 25), ("session", 21), ("a", 10_000)):
            assert not kv.can_reserve(owner, size)
            with pytest.raises(OutOfBlocksError):
                kv.reserve(owner, size)
            assert state(kv) == before
        assert kv.match_prefix(tokens(8)).num_tokens == 4
        kv.check_integrity()

    def test_a_fragmented_pool_serves_from_anywhere(self):
        kv = KVCacheManager(16, 4)
        for i in range(8):
            run(kv, f"r{i}", tokens(8, seed=i))
        for i in range(0, 8, 2):
            kv.release(f"r{i}")
        prompt = tokens(32, seed=99)
        run(kv, "long", prompt)
        ids = list(kv.block_ids("long"))
        assert len(set(ids)) == 8
        assert ids != sorted(ids) or ids[-1] - ids[0] > 7
        kv.check_integrity()
        kv.release("long")
        assert kv.match_prefix([*prompt, 1]).num_tokens == 32

    def test_trim_returns_look_ahead_but_no_committed_token(self):
        kv = KVCacheManager(8, 4)
        run(kv, "a", tokens(6))
        kv.reserve("a", 30)
        assert kv.num_free_blocks == 0
        kv.trim("a", 10)
        assert (kv.num_slots("a"), kv.num_free_blocks) == (12, 5)
        kv.trim("a", 100)
        assert kv.num_slots("a") == 12
        kv.trim("a", 0)
        assert (kv.num_slots("a"), kv.num_tokens("a")) == (8, 6)
        kv.check_integrity()


class TestEviction:
    def test_the_tail_of_a_chain_goes_first(self):
        kv = KVCacheManager(5, 4)
        prompt = tokens(16)
        run_and_release(kv, [*prompt, 1])
        for num_evicted in range(1, 5):
            kv.begin("x", [1])
            kv.reserve("x", 4 * (num_evicted + 1))  # one block was free anyway
            assert kv.match_prefix([*prompt, 1]).num_tokens == 16 - 4 * num_evicted
            kv.release("x")
            kv.check_integrity()

    def test_the_least_recently_used_prompt_goes_first(self):
        kv = KVCacheManager(6, 4)
        first, second = tokens(8, seed=1), tokens(8, seed=2)
        run_and_release(kv, first)
        run_and_release(kv, second)
        kv.begin("touch", [*first, 1])
        kv.release("touch")
        kv.begin("x", [1])
        kv.reserve("x", 16)
        assert kv.match_prefix([*first, 1]).num_tokens == 8
        assert kv.match_prefix([*second, 1]).num_tokens == 0

    def test_a_gap_ends_lookups_and_closes_when_the_head_is_recomputed(self):
        kv = KVCacheManager(4, 4)
        prompt = tokens(13)
        run(kv, "a", prompt)
        head, middle, _, _ = (kv._pool.blocks[i] for i in kv.block_ids("a"))
        kv.release("a")
        for block in (head, middle):  # to the front: evicted out of order
            kv._pool.free_list.remove(block)
        kv._pool.free_list.push_front(middle)
        kv._pool.free_list.push_front(head)
        taken = kv._pool.take(2)
        assert kv.match_prefix(prompt).num_tokens == 0
        assert kv.num_cached_blocks == 1
        for block in taken:
            kv._pool.drop(block)
        run(kv, "b", prompt[:8])
        assert kv.match_prefix(prompt).num_tokens == 12, "the third block is reachable again"
        kv.check_integrity()
        kv.release("b")
        kv.begin("x", [1])
        kv.reserve("x", 16)
        assert kv.num_cached_blocks == 0, "nothing is stuck in the cache"

    def test_repeating_a_prompt_does_not_crowd_out_others(self):
        """Every repeat recomputes the last block; its copies must not push other content out."""
        kv = KVCacheManager(8, 4)
        other, prompt = tokens(16, seed=1), tokens(8, seed=2)
        run_and_release(kv, other)
        for _ in range(20):
            run_and_release(kv, prompt)
            kv.check_integrity()
        assert kv.match_prefix([*other, 1]).num_tokens == 16
        assert kv.match_prefix([*prompt, 1]).num_tokens == 8
        assert kv.num_cached_blocks == 6

    def test_prompts_computed_side_by_side_both_stay_findable(self):
        kv = KVCacheManager(8, 4)
        prompt = tokens(9)
        for owner in ("a", "b"):  # neither sees the other: both begin before either commits
            kv.begin(owner, prompt)
            kv.reserve(owner, 9)
        for owner in ("a", "b"):
            kv.commit(owner, prompt, 9)
        kv.check_integrity()
        kv.fork("b", "session")
        kv.release("a")
        kv.release("b")
        kv.begin("x", [1])
        kv.reserve("x", kv.num_free_blocks * 4)
        assert kv.match_prefix(prompt).num_tokens == 8, "what a session holds is always found"


class TestSharing:
    def test_a_fork_shares_the_full_blocks_and_costs_none(self):
        kv = KVCacheManager(8, 4)
        prompt = tokens(10)
        run(kv, "a", prompt)
        kv.reserve("a", 16)
        num_free = kv.num_free_blocks
        assert kv.fork("a", "b") == 8
        assert list(kv.block_ids("b")) == list(kv.block_ids("a"))[:2]
        assert kv.num_free_blocks == num_free
        kv.reserve("b", 12)
        assert kv.block_ids("b")[2] != kv.block_ids("a")[2]
        kv.commit("b", [*prompt[:8], 1, 2, 3, 4], 12)
        kv.check_integrity()

    def test_a_fork_of_a_fork_and_of_nothing(self):
        kv = KVCacheManager(8, 4)
        kv.begin("empty", tokens(3))
        assert kv.fork("empty", "child") == 0
        run(kv, "a", tokens(10))
        assert kv.fork("a", "b") == kv.fork("b", "c") == 8
        kv.check_integrity()

    def test_releasing_one_of_two_keeps_the_blocks(self):
        kv = KVCacheManager(4, 4)
        prompt = tokens(9)
        run(kv, "a", prompt)
        run(kv, "b", prompt)
        shared = set(kv.block_ids("a")) & set(kv.block_ids("b"))
        kv.release("a")
        kv.begin("x", [1])
        kv.reserve("x", 4)
        assert not kv.can_reserve("x", 8)
        assert not shared & set(kv.block_ids("x"))
        assert set(kv.block_ids("b")) >= shared
        kv.check_integrity()

    def test_a_session_keeps_its_prefix_under_pressure(self):
        kv = KVCacheManager(6, 4)
        turn = tokens(9)
        run(kv, "request", turn)
        kv.fork("request", "session")
        kv.release("request")
        kv.begin("x", [1])
        kv.reserve("x", 16)
        with pytest.raises(OutOfBlocksError):
            kv.reserve("x", 17)
        kv.release("x")
        assert run(kv, "next turn", [*turn, *tokens(5, seed=1)]).num_tokens == 8

    def test_preemption_is_release_and_begin(self):
        kv = KVCacheManager(4, 4)
        prompt = tokens(9)
        run(kv, "a", prompt, num_draft=9)
        kv.release("a")
        match = kv.begin("a", prompt)
        assert (match.num_tokens, match.num_draft_tokens) == (8, 8)
        kv.check_integrity()

    def test_owners_are_unique_and_must_exist(self):
        kv = KVCacheManager(4, 4)
        kv.begin("a", [1])
        for verb in (lambda: kv.begin("a", [1]), lambda: kv.fork("a", "a")):
            with pytest.raises(AssertionError, match="already has a block table"):
                verb()
        for verb in (
            lambda: kv.release("b"),
            lambda: kv.reserve("b", 1),
            lambda: kv.fork("b", "c"),
            lambda: kv.block_ids("b"),
        ):
            with pytest.raises(AssertionError, match="has no block table"):
                verb()
        assert list(kv.owners) == ["a"]


class TestReset:
    def test_nothing_old_is_ever_found_again(self):
        kv = KVCacheManager(16, 4)
        prompt = tokens(12)
        run_and_release(kv, tokens(8, seed=1))
        run(kv, "a", prompt)
        kv.reset_prefix_cache()
        kv.check_integrity()
        assert kv.num_cached_blocks == 0
        assert kv.match_prefix([*prompt, 1]).num_tokens == 0
        kv.reserve("a", 16)  # it goes on, on K/V from before the reset
        kv.commit("a", [*prompt, 1, 2, 3, 4], 16)
        kv.fork("a", "session")
        kv.check_integrity()
        run(kv, "b", prompt)  # recomputed: the same head is cached again, but not the tail of "a" behind it
        assert kv.match_prefix([*prompt, 1, 2, 3, 4, 5]).num_tokens == 12
        kv.check_integrity()


class TestCounts:
    def test_free_used_and_cached(self):
        kv = KVCacheManager(8, 4)
        run_and_release(kv, tokens(8))
        run(kv, "a", tokens(5, seed=1))
        assert (kv.num_free_blocks, kv.num_used_blocks, kv.num_cached_blocks) == (6, 2, 2)

    def test_waste_counts_shared_blocks_once_and_sessions_not_at_all(self):
        kv = KVCacheManager(16, 4)
        prompt = tokens(10)
        run(kv, "a", prompt)
        assert (kv.reserved_slots, kv.filled_slots) == (12, 10)
        run(kv, "b", prompt)
        assert (kv.reserved_slots, kv.filled_slots) == (16, 12)
        kv.fork("a", "session")
        assert (kv.reserved_slots, kv.filled_slots) == (16, 12)
        kv.release("a")
        kv.release("b")
        assert (kv.reserved_slots, kv.filled_slots, kv.num_used_blocks) == (0, 0, 2)
        kv.reserve("session", 9)  # it becomes a request
        assert (kv.reserved_slots, kv.filled_slots) == (12, 8)
        kv.check_integrity()


class TestCost:
    def test_commit_does_not_grow_with_the_context(self, monkeypatch: pytest.MonkeyPatch):
        """Counted, not timed: hashes made and tokens read per call."""
        size, length = 4, 4000
        kv = KVCacheManager(length // size + 2, size)
        num_hashes = 0
        hash_block = manager.hash_block

        def counting(parent: object, token_ids: object) -> object:
            nonlocal num_hashes
            num_hashes += 1
            return hash_block(parent, token_ids)  # type: ignore[arg-type]

        class CountingList(list[int]):
            num_read = 0

            def __getitem__(self, key: object) -> object:  # type: ignore[override]
                got = super().__getitem__(key)  # type: ignore[index]
                CountingList.num_read += len(got) if isinstance(got, list) else 1
                return got

            def __iter__(self) -> object:  # type: ignore[override]
                raise AssertionError("commit walked over the whole context")

        monkeypatch.setattr(manager, "hash_block", counting)
        prompt = CountingList(tokens(length))
        kv.begin("a", prompt[: size - 1])
        costs = set()
        for num_verified in range(1, length + 1):
            kv.reserve("a", num_verified)
            num_hashes = CountingList.num_read = 0
            kv.commit("a", prompt, num_verified, num_verified)
            costs.add((num_hashes, CountingList.num_read))
        assert costs == {(0, 0), (1, size)}

    def test_a_lookup_stops_at_the_first_miss(self, monkeypatch: pytest.MonkeyPatch):
        kv = KVCacheManager(8, 4)
        run_and_release(kv, tokens(8))
        calls = []
        hash_block = manager.hash_block
        monkeypatch.setattr(manager, "hash_block", lambda *args: calls.append(1) or hash_block(*args))
        kv.match_prefix([*tokens(8), *tokens(400, seed=1)])
        assert len(calls) == 3


def test_five_hundred_random_aborts_leak_nothing():
    """Requests are cut off at any moment: queued, mid-prefill, drafting, verified, shared with a session."""
    rng = random.Random(7)
    kv = KVCacheManager(64, 4)
    live: dict[str, list[int]] = {}
    for number in range(500):
        owner = f"r{number}"
        prompt = rng.choices(range(3), k=rng.randint(1, 40))
        kv.begin(owner, prompt)
        live[owner] = prompt
        for _ in range(rng.randint(0, 4)):
            busy = rng.choice(list(live))
            prompt, done = live[busy], kv.num_tokens(busy)
            stop = rng.randint(done, len(prompt))
            try:
                kv.reserve(busy, stop + rng.randint(0, 8))
            except OutOfBlocksError:
                victim = rng.choice(list(live))
                kv.release(victim)
                del live[victim]
                continue
            if rng.random() < 0.7:
                kv.commit(busy, prompt, stop, rng.randint(0, stop))
            if rng.random() < 0.2:
                kv.fork(busy, f"s{number}")
                kv.release(f"s{number}")
        while len(live) > 6 or (live and rng.random() < 0.4):
            victim = rng.choice(list(live))
            kv.release(victim)
            del live[victim]
        kv.check_integrity()
    for owner in live:
        kv.release(owner)
    kv.check_integrity()
    assert kv.num_free_blocks == 64
    assert (kv.num_used_blocks, kv.reserved_slots, kv.filled_slots, list(kv.owners)) == (0, 0, 0, [])
    kv.begin("full pool", [1])
    kv.reserve("full pool", 256)
    assert kv.num_cached_blocks == 0
    kv.check_integrity()


def _leak(kv: KVCacheManager) -> None:
    kv._pool.free_list.pop_front()


def _stale_reference(kv: KVCacheManager) -> None:
    kv._pool.blocks[kv.block_ids("a")[0]].ref_count += 1


def _lost_reference(kv: KVCacheManager) -> None:
    kv._pool.blocks[kv.block_ids("a")[0]].ref_count -= 1


def _lost_request_reference(kv: KVCacheManager) -> None:
    kv._pool.blocks[kv.block_ids("a")[0]].num_request_refs -= 1


def _request_blocks(kv: KVCacheManager) -> None:
    kv._num_request_blocks += 1


def _free_but_referenced(kv: KVCacheManager) -> None:
    kv._pool.free_list.push_front(kv._pool.blocks[kv.block_ids("a")[0]])


def _broken_link(kv: KVCacheManager) -> None:
    first, second = list(kv._pool.free_list)[:2]
    second.prev_free = second
    assert first is not second


def _cycle(kv: KVCacheManager) -> None:
    first, second = list(kv._pool.free_list)[:2]
    second.next_free = first


def _free_length(kv: KVCacheManager) -> None:
    kv._pool.free_list._length += 1


def _cached_before_free(kv: KVCacheManager) -> None:
    block = kv._pool.free_list.pop_front()
    kv._pool.free_list.push_back(block)


def _cached_count(kv: KVCacheManager) -> None:
    kv._pool._num_cached += 1


def _wrong_tokens(kv: KVCacheManager) -> None:
    kv._pool.blocks[kv.block_ids("a")[0]].token_ids = (1, 1, 1, 1)


def _wrong_hash(kv: KVCacheManager) -> None:
    kv._pool.blocks[kv.block_ids("a")[0]].hash = root_hash(b"wrong")


def _broken_chain(kv: KVCacheManager) -> None:
    kv._tables["a"].root = root_hash(b"another salt")


def _missing_map_entry(kv: KVCacheManager) -> None:
    block = kv._pool.blocks[kv.block_ids("a")[0]]
    del kv._pool._copies[block.hash]  # type: ignore[arg-type]


def _empty_map_entry(kv: KVCacheManager) -> None:
    kv._pool._copies[root_hash(b"nobody")] = []


def _hashed_draft(kv: KVCacheManager) -> None:
    block = kv._pool.blocks[kv.block_ids("a")[2]]
    kv._pool.cache(block, manager.hash_block(root_hash(), (1, 2, 3, 4)), root_hash(), (1, 2, 3, 4))


def _counter_below_hash(kv: KVCacheManager) -> None:
    kv._tables["a"].num_tokens = 7
    kv._tables["a"].num_draft_tokens = 0


def _counter_beyond_slots(kv: KVCacheManager) -> None:
    kv._tables["a"].num_tokens = 100


def _unhashed_full_block(kv: KVCacheManager) -> None:
    kv._pool._forget(kv._pool.blocks[kv.block_ids("a")[1]])


def _draft_flag_too_far(kv: KVCacheManager) -> None:
    kv._pool.blocks[kv.block_ids("a")[2]].has_draft_kv = True


def _draft_flag_lost(kv: KVCacheManager) -> None:
    kv._pool.blocks[kv.block_ids("a")[0]].has_draft_kv = False


def _draft_counter(kv: KVCacheManager) -> None:
    kv._tables["a"].num_draft_tokens = 11


def _shared_partial(kv: KVCacheManager) -> None:
    kv.begin("thief", [1])
    kv._share(kv._tables["thief"], kv.block_ids("a"))


def _shared_at_another_index(kv: KVCacheManager) -> None:
    kv.begin("thief", [1])
    kv._share(kv._tables["thief"], kv.block_ids("a")[1:2])


def _listed_twice(kv: KVCacheManager) -> None:
    kv._share(kv._tables["a"], kv.block_ids("a")[:1])


def _second_idle_copy(kv: KVCacheManager) -> None:
    idle = next(b for b in kv._pool.free_list if b.hash is not None)
    (block,) = kv._pool.take(1)
    kv._pool.cache(block, idle.hash, idle.parent_hash, idle.token_ids)  # type: ignore[arg-type]
    block.ref_count = 0
    kv._pool.free_list.push_back(block)
    kv._pool._num_cached += 1


def _content_without_hash(kv: KVCacheManager) -> None:
    next(iter(kv._pool.free_list)).token_ids = (1, 2, 3, 4)


def _draft_kv_of_a_free_block(kv: KVCacheManager) -> None:
    next(iter(kv._pool.free_list)).has_draft_kv = True


@pytest.mark.parametrize(
    ("plant", "message"),
    [
        (_leak, "leaked"),
        (_stale_reference, "counts 2 references, tables hold 1"),
        (_lost_reference, "leaked"),
        (_lost_request_reference, "references by requests"),
        (_request_blocks, "requests hold 3 blocks, 4 are counted"),
        (_free_but_referenced, "it is referenced 1 times"),
        (_broken_link, "backward link"),
        (_cycle, "a cycle"),
        (_free_length, "and counts"),
        (_cached_before_free, "reused too late"),
        (_cached_count, "cached, 3 are counted"),
        (_wrong_tokens, "not the hash of its content"),
        (_wrong_hash, "under a hash it does not have"),
        (_broken_chain, "not the hash of the block before it"),
        (_missing_map_entry, "not in the map exactly once"),
        (_empty_map_entry, "in the map without a block"),
        (_hashed_draft, "not wholly committed, but hashed"),
        (_counter_below_hash, "not wholly committed, but hashed"),
        (_counter_beyond_slots, "does not hold"),
        (_unhashed_full_block, "full and committed, hashed False"),
        (_draft_flag_too_far, "but marked has_draft_kv"),
        (_draft_flag_lost, "without has_draft_kv"),
        (_draft_counter, "does not hold"),
        (_shared_partial, "not wholly committed, but shared by 2"),
        (_shared_at_another_index, "is shared at index 1"),
        (_listed_twice, "lists a block twice"),
        (_second_idle_copy, "more than one idle copy"),
        (_content_without_hash, "not hashed but keeps content"),
        (_draft_kv_of_a_free_block, "claims draft K/V"),
    ],
)
def test_planted_corruption_is_caught(plant: Callable[[KVCacheManager], None], message: str):
    kv = KVCacheManager(10, 4)
    run_and_release(kv, tokens(8, seed=1))
    run(kv, "a", tokens(10), num_draft=8)
    kv.check_integrity()
    plant(kv)
    with pytest.raises(AssertionError, match=message):
        kv.check_integrity()

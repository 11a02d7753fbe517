"""The KV cache against a naive model: no sharing, eviction or rollback may ever put a wrong K/V under an owner.

The model plays the engine. It keeps two physical stores, slot -> what was last written there, and "writes K/V" as the
whole token prefix up to the position, because that is what K/V depend on. After every step each committed position of
each owner must hold exactly its own prefix. Two token ids only, so that prefixes collide all the time.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paceline.cache import KVCacheManager, OutOfBlocksError, PrefixMatch

MAX_OWNERS = 6
MAX_TOKENS = 28

Prefix = tuple[int, ...]
Store = dict[tuple[int, int], Prefix]  # (block id, offset) -> the tokens up to and including the one written there

TOKEN = st.integers(0, 1)
TOKENS = st.lists(TOKEN, max_size=10)
DRAFTS = st.lists(TOKEN, max_size=6)
PICK = st.integers(0, MAX_OWNERS - 1)


@dataclass
class Owner:
    tokens: list[int]
    num_computed: int
    num_draft_computed: int
    is_cacheable: bool
    is_request: bool
    drafts: list[int] | None = None  # in flight: proposed, their K/V written, not yet verified
    has_drafts_in_store: bool = False  # the draft model proposed them

    @property
    def is_decoding(self) -> bool:
        return len(self.tokens) - self.num_computed == 1


@dataclass
class Model:
    kv: KVCacheManager
    owners: dict[str, Owner] = field(default_factory=dict)
    target_store: Store = field(default_factory=dict)
    draft_store: Store = field(default_factory=dict)
    # Whole-block prefixes that were committed (for each store) and may therefore be found.
    committed: set[Prefix] = field(default_factory=set)
    draft_committed: set[Prefix] = field(default_factory=set)
    history: list[list[int]] = field(default_factory=list)  # token runs seen, rejected drafts included
    preempted: list[list[int]] = field(default_factory=list)


def snapshot(kv: KVCacheManager) -> object:
    """Everything the manager knows, for "nothing changed"."""
    pool = kv._pool
    return (
        [(b.ref_count, b.num_request_refs, b.hash, b.parent_hash, b.token_ids, b.has_draft_kv) for b in pool.blocks],
        [b.block_id for b in pool.free_list],
        {block_hash: [b.block_id for b in copies] for block_hash, copies in pool.copies.items()},
        (pool.num_cached, kv._num_request_blocks),
        {
            owner: (list(t.block_ids), t.num_tokens, t.num_draft_tokens, t.is_cacheable, t.is_request)
            for owner, t in kv._tables.items()
        },
    )


def common_length(left: list[int], right: list[int]) -> int:
    length = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        length += 1
    return length


class CacheMachine(RuleBasedStateMachine):
    m: Model

    @initialize(
        num_slots=st.integers(12, 96),  # room for half a request to a handful
        block_size=st.sampled_from([1, 2, 4]),
        enable_prefix_cache=st.sampled_from([True, True, True, False]),
    )
    def start(self, num_slots: int, block_size: int, enable_prefix_cache: bool) -> None:
        num_blocks = num_slots // block_size
        self.m = Model(KVCacheManager(num_blocks, block_size, enable_prefix_cache=enable_prefix_cache))
        self.count = 0

    # ---- what the engine does --------------------------------------------------------------------------

    def pick(self, index: int) -> str:
        return list(self.m.owners)[index % len(self.m.owners)]

    def new_name(self) -> str:
        self.count += 1
        return f"owner-{self.count}"

    def num_blocks_for(self, num_tokens: int) -> int:
        return (num_tokens + self.m.kv.block_size - 1) // self.m.kv.block_size

    def whole(self, num_tokens: int) -> int:
        return num_tokens // self.m.kv.block_size * self.m.kv.block_size

    def num_unreferenced(self) -> int:
        used = {block_id for owner in self.m.owners for block_id in self.m.kv.block_ids(owner)}
        return self.m.kv.num_blocks - len(used)

    def write(self, store: Store, owner: str, tokens: list[int], start: int, stop: int) -> None:
        block_ids, size = self.m.kv.block_ids(owner), self.m.kv.block_size
        for position in range(start, stop):
            store[block_ids[position // size], position % size] = tuple(tokens[: position + 1])

    def reserve(self, owner: str, num_tokens: int) -> bool:
        """Reserve as the scheduler would; whether it worked must be what the naive count says."""
        kv = self.m.kv
        num_missing = self.num_blocks_for(num_tokens) - len(kv.block_ids(owner))
        expected = num_missing <= self.num_unreferenced()
        before_ids, before = list(kv.block_ids(owner)), snapshot(kv)
        assert kv.can_reserve(owner, num_tokens) == expected
        if not expected:
            with pytest.raises(OutOfBlocksError):
                kv.reserve(owner, num_tokens)
            assert snapshot(kv) == before
            return False
        kv.reserve(owner, num_tokens)
        assert list(kv.block_ids(owner))[: len(before_ids)] == before_ids, "a table only grows at its end"
        assert kv.num_slots(owner) >= num_tokens
        self.m.owners[owner].is_request |= num_missing > 0
        return True

    def commit(self, owner: str, num_draft_verified: int) -> None:
        model = self.m.owners[owner]
        self.m.kv.commit(owner, model.tokens, model.num_computed, num_draft_verified)
        model.num_draft_computed = max(model.num_draft_computed, min(num_draft_verified, model.num_computed))
        if model.is_cacheable:
            size = self.m.kv.block_size
            for stop in range(size, model.num_computed + 1, size):
                self.m.committed.add(tuple(model.tokens[:stop]))
            for stop in range(size, model.num_draft_computed + 1, size):
                self.m.draft_committed.add(tuple(model.tokens[:stop]))

    def check_match(self, tokens: list[int], match: PrefixMatch) -> None:
        size = self.m.kv.block_size
        assert match.num_tokens % size == 0
        assert match.num_draft_tokens % size == 0
        assert match.num_tokens == len(match.block_ids) * size
        assert match.num_draft_tokens <= match.num_tokens <= max(0, len(tokens) - 1)
        # Sound: only what was committed, and the slots really hold it.
        if match.num_tokens:
            assert tuple(tokens[: match.num_tokens]) in self.m.committed
        if match.num_draft_tokens:
            assert tuple(tokens[: match.num_draft_tokens]) in self.m.draft_committed
        for position in range(match.num_tokens):
            slot = match.block_ids[position // size], position % size
            prefix = tuple(tokens[: position + 1])
            assert self.m.target_store[slot] == prefix
            if position < match.num_draft_tokens:
                assert self.m.draft_store[slot] == prefix
        # Complete: whatever a live owner holds is found.
        longest = self.whole(max(0, len(tokens) - 1))
        for model in self.m.owners.values():
            if model.is_cacheable:
                held = common_length(tokens, model.tokens[: model.num_computed])
                assert match.num_tokens >= min(self.whole(held), longest)
                draft_held = common_length(tokens, model.tokens[: model.num_draft_computed])
                assert match.num_draft_tokens >= min(self.whole(draft_held), longest)

    def begin(self, tokens: list[int]) -> str:
        kv, owner = self.m.kv, self.new_name()
        before = snapshot(kv)
        expected = kv.match_prefix(tokens)
        can_begin = kv.can_begin(expected, len(tokens))
        assert snapshot(kv) == before
        self.check_match(tokens, expected)
        match = kv.begin(owner, tokens)
        assert match == expected
        assert list(kv.block_ids(owner)) == list(match.block_ids)
        assert kv.can_reserve(owner, len(tokens)) == can_begin
        self.m.owners[owner] = Owner(
            list(tokens), match.num_tokens, match.num_draft_tokens, kv.enable_prefix_cache, is_request=True
        )
        return owner

    def release(self, owner: str) -> None:
        model = self.m.owners.pop(owner)
        self.m.history.append(model.tokens + (model.drafts or []))
        self.m.kv.release(owner)
        assert owner not in self.m.kv.owners
        if model.is_cacheable:  # nothing is evicted by letting go
            match = self.m.kv.match_prefix([*model.tokens[: model.num_computed], 0])
            assert match.num_tokens == self.whole(model.num_computed)
            assert match.num_draft_tokens >= self.whole(model.num_draft_computed)

    def preempt_owner(self, owner: str) -> None:
        if self.m.owners[owner].tokens:
            self.m.preempted.append(self.m.owners[owner].tokens)
        self.release(owner)

    def reserve_or_preempt(self, owner: str, num_tokens: int) -> bool:
        """As the scheduler: when there is no room the newest other owner makes some, for the next try."""
        if self.reserve(owner, num_tokens):
            return True
        others = [other for other in self.m.owners if other != owner]
        if others:
            self.preempt_owner(others[-1])
        return False

    def compute_chunk(self, owner: str, num_tokens: int, with_draft: bool, sampled: int) -> bool:
        """A prefill chunk or a plain decode step; the draft model may read along or fall behind."""
        model = self.m.owners[owner]
        stop = min(model.num_computed + num_tokens, len(model.tokens))
        if model.drafts is not None or stop == model.num_computed:
            return False
        if not self.reserve_or_preempt(owner, stop):
            return False
        self.write(self.m.target_store, owner, model.tokens, model.num_computed, stop)
        if with_draft:
            self.write(self.m.draft_store, owner, model.tokens, model.num_draft_computed, stop)
        model.num_computed = stop
        if stop == len(model.tokens) and len(model.tokens) < MAX_TOKENS:
            model.tokens.append(sampled)
        self.commit(owner, stop if with_draft else 0)
        return True

    def draft(self, owner: str, drafts: list[int], by_model: bool) -> bool:
        """Reserve the look-ahead, draft, and run the target over the current token and every draft."""
        model = self.m.owners[owner]
        run = model.tokens + drafts
        if not model.is_decoding or model.drafts is not None or not self.reserve_or_preempt(owner, len(run)):
            return False
        self.write(self.m.target_store, owner, run, model.num_computed, len(run))
        if by_model and drafts:  # the K/V of the last draft token are never computed (law 3)
            self.write(self.m.draft_store, owner, run, model.num_draft_computed, len(run) - 1)
        model.drafts, model.has_drafts_in_store = drafts, by_model
        self.m.history.append(run)
        return True

    def judge(self, owner: str, num_accepted: int, final: int) -> None:
        """Accept some drafts (0: roll everything back) and add the recovered or bonus token."""
        model = self.m.owners[owner]
        assert model.drafts is not None
        num_drafted, before = len(model.drafts), len(model.tokens)
        num_accepted = min(num_accepted, num_drafted, max(0, MAX_TOKENS - before - 1))
        model.tokens += [*model.drafts[:num_accepted], final]
        model.num_computed = before + num_accepted
        has_drafted = model.has_drafts_in_store and num_drafted
        num_draft = before + min(num_accepted, num_drafted - 1) if has_drafted else 0
        model.drafts = None
        self.commit(owner, num_draft)

    def waiting(self) -> list[str]:
        return [owner for owner, model in self.m.owners.items() if model.drafts is not None]

    # ---- rules: whole turns, so that the cache is full of overlapping content -----------------------------

    @precondition(lambda self: len(self.m.owners) < MAX_OWNERS)
    @rule(
        source=st.one_of(st.none(), st.integers(0, 50)),
        cut=st.integers(1, MAX_TOKENS),
        extension=TOKENS,
        with_draft=st.booleans(),
        chunk=st.integers(1, MAX_TOKENS),
    )
    def prefill(self, source: int | None, cut: int, extension: list[int], with_draft: bool, chunk: int) -> None:
        """A fresh prompt, a repeated one, a next turn, or one that happens to contain rejected drafts."""
        past = self.m.history[source % len(self.m.history)] if self.m.history and source is not None else []
        owner = self.begin((past[:cut] + extension)[:MAX_TOKENS])
        while self.m.owners[owner].num_computed < len(self.m.owners[owner].tokens) - 1:
            if not self.compute_chunk(owner, chunk, with_draft, 0):
                break

    @precondition(lambda self: self.m.owners)
    @rule(index=PICK, rounds=st.lists(st.tuples(DRAFTS, st.booleans(), st.integers(0, 6), TOKEN), max_size=5))
    def decode(self, index: int, rounds: list[tuple[list[int], bool, int, int]]) -> None:
        owner = self.pick(index)
        for drafts, by_model, num_accepted, final in rounds:
            if len(self.m.owners[owner].tokens) < MAX_TOKENS and self.draft(owner, drafts, by_model):
                self.judge(owner, num_accepted, final)

    # ---- rules: single acts, so that everything meets everything ------------------------------------------

    @precondition(lambda self: len(self.m.owners) < MAX_OWNERS)
    @rule(source=st.integers(0, 50), cut=st.integers(1, MAX_TOKENS), extension=TOKENS)
    def begin_only(self, source: int, cut: int, extension: list[int]) -> None:
        past = self.m.history[source % len(self.m.history)] if self.m.history else []
        self.begin((past[:cut] + extension)[:MAX_TOKENS])

    @precondition(lambda self: any(o.num_computed < len(o.tokens) for o in self.m.owners.values()))
    @rule(index=PICK, num_tokens=st.integers(1, 9), with_draft=st.booleans(), sampled=TOKEN)
    def compute(self, index: int, num_tokens: int, with_draft: bool, sampled: int) -> None:
        ready = [name for name, o in self.m.owners.items() if o.num_computed < len(o.tokens)]
        self.compute_chunk(ready[index % len(ready)], num_tokens, with_draft, sampled)

    @precondition(lambda self: any(o.is_decoding and o.drafts is None for o in self.m.owners.values()))
    @rule(index=PICK, drafts=DRAFTS, by_model=st.booleans())
    def speculate(self, index: int, drafts: list[int], by_model: bool) -> None:
        ready = [name for name, o in self.m.owners.items() if o.is_decoding and o.drafts is None]
        self.draft(ready[index % len(ready)], drafts, by_model)

    @precondition(lambda self: self.waiting())
    @rule(index=PICK, num_accepted=st.integers(0, 6), final=TOKEN)
    def verify(self, index: int, num_accepted: int, final: int) -> None:
        self.judge(self.waiting()[index % len(self.waiting())], num_accepted, final)

    @precondition(lambda self: self.waiting())
    @rule(index=PICK)
    def abandon_drafts(self, index: int) -> None:
        """The round is thrown away: its K/V stay as junk beyond the counters."""
        self.m.owners[self.waiting()[index % len(self.waiting())]].drafts = None

    @precondition(lambda self: self.m.owners)
    @rule(index=PICK, num_tokens=st.integers(0, MAX_TOKENS + 8))
    def trim(self, index: int, num_tokens: int) -> None:
        owner = self.pick(index)
        model = self.m.owners[owner]
        model.drafts = None
        before = list(self.m.kv.block_ids(owner))
        self.m.kv.trim(owner, num_tokens)
        keep = min(len(before), self.num_blocks_for(max(num_tokens, model.num_computed)))
        assert list(self.m.kv.block_ids(owner)) == before[:keep]

    @precondition(lambda self: self.m.owners)
    @rule(index=PICK, num_tokens=st.integers(0, MAX_TOKENS + 20))
    def look_ahead(self, index: int, num_tokens: int) -> None:
        """Reserve without using it, often more than there is."""
        self.reserve(self.pick(index), num_tokens)

    @precondition(lambda self: 0 < len(self.m.owners) < MAX_OWNERS)
    @rule(index=PICK, extension=st.lists(TOKEN, max_size=4), finish_parent=st.booleans())
    def fork(self, index: int, extension: list[int], finish_parent: bool) -> None:
        """Without extension and with a finished parent: a session keeping a turn."""
        parent, child = self.pick(index), self.new_name()
        source = self.m.owners[parent]
        num_free = self.m.kv.num_free_blocks
        num_shared = self.m.kv.fork(parent, child)
        assert num_shared == self.whole(source.num_computed)
        assert list(self.m.kv.block_ids(child)) == list(
            self.m.kv.block_ids(parent)[: num_shared // self.m.kv.block_size]
        )
        assert self.m.kv.num_free_blocks == num_free, "a fork costs no block"
        self.m.owners[child] = Owner(
            source.tokens[:num_shared] + extension,
            num_shared,
            min(num_shared, source.num_draft_computed),
            source.is_cacheable,
            is_request=False,
        )
        if finish_parent:
            self.release(parent)

    @precondition(lambda self: self.m.owners)
    @rule(index=PICK)
    def finish(self, index: int) -> None:
        self.release(self.pick(index))

    @precondition(lambda self: self.m.owners)
    @rule(index=PICK)
    def preempt(self, index: int) -> None:
        self.preempt_owner(self.pick(index))

    @precondition(lambda self: self.m.preempted and len(self.m.owners) < MAX_OWNERS)
    @rule()
    def resume(self) -> None:
        self.begin(self.m.preempted.pop(0))

    @precondition(lambda self: self.m.kv.num_cached_blocks)
    @rule(num_blocks=st.integers(1, 20))
    def evict(self, num_blocks: int) -> None:
        """A stranger takes some or all free blocks, scribbles over them and leaves."""
        kv = self.m.kv
        num_blocks = min(num_blocks, kv.num_free_blocks)
        num_free_uncached = kv.num_free_blocks - kv.num_cached_blocks
        num_kept = min(kv.num_cached_blocks, kv.num_free_blocks - num_blocks)
        kv.begin("stranger", [7])
        kv.reserve("stranger", num_blocks * kv.block_size)
        assert kv.num_cached_blocks == num_kept, f"{num_free_uncached} blocks could be had without eviction"
        for block_id in kv.block_ids("stranger"):
            for offset in range(kv.block_size):
                self.m.target_store[block_id, offset] = self.m.draft_store[block_id, offset] = (7,)
        kv.release("stranger")

    @precondition(lambda self: self.m.kv.num_cached_blocks)
    @rule(go=st.integers(0, 4))
    def reset(self, go: int) -> None:
        if go:  # rare, or nothing would ever be cached for long
            return
        self.m.kv.reset_prefix_cache()
        self.m.committed.clear()
        self.m.draft_committed.clear()
        for model in self.m.owners.values():
            model.is_cacheable = False
        assert self.m.kv.num_cached_blocks == 0

    # ---- invariants ------------------------------------------------------------------------------------

    @invariant()
    def books_balance(self) -> None:
        self.m.kv.check_integrity()
        assert set(self.m.kv.owners) == set(self.m.owners)
        assert self.m.kv.num_free_blocks == self.num_unreferenced()

    @invariant()
    def every_committed_position_holds_its_own_prefix(self) -> None:
        kv, size = self.m.kv, self.m.kv.block_size
        for owner, model in self.m.owners.items():
            assert kv.num_tokens(owner) == model.num_computed
            assert kv.num_draft_tokens(owner) == model.num_draft_computed
            block_ids = kv.block_ids(owner)
            for position in range(model.num_computed):
                slot = block_ids[position // size], position % size
                prefix = tuple(model.tokens[: position + 1])
                assert self.m.target_store[slot] == prefix
                if position < model.num_draft_computed:
                    assert self.m.draft_store[slot] == prefix

    @invariant()
    def hashed_blocks_hold_what_they_claim(self) -> None:
        size = self.m.kv.block_size
        for block in self.m.kv._pool.blocks:
            if block.hash is None:
                continue
            last = self.m.target_store[block.block_id, size - 1]
            assert last in self.m.committed
            assert last[-size:] == block.token_ids
            if block.has_draft_kv:
                assert self.m.draft_store[block.block_id, size - 1] == last
                assert last in self.m.draft_committed

    @invariant()
    def waste_is_what_a_slot_by_slot_count_says(self) -> None:
        kv, size = self.m.kv, self.m.kv.block_size
        requests = [owner for owner, model in self.m.owners.items() if model.is_request]
        blocks = {block_id for owner in requests for block_id in kv.block_ids(owner)}
        filled = {
            (kv.block_ids(owner)[position // size], position % size)
            for owner in requests
            for position in range(self.m.owners[owner].num_computed)
        }
        assert kv.reserved_slots == len(blocks) * size
        assert kv.filled_slots == len(filled)


class LongCacheMachine(CacheMachine):
    """The same machine, many more examples."""


def _settings(max_examples: int) -> settings:
    return settings(
        max_examples=max_examples,
        stateful_step_count=60,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = _settings(150)

TestCacheMachineLong = pytest.mark.long(LongCacheMachine.TestCase)
TestCacheMachineLong.settings = _settings(2000)

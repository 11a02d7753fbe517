"""Who runs in a step, with how many tokens, on which blocks.

There is no prefill and no decode phase: a request's ``num_computed_tokens`` catches up with its tokens plus drafts, as
far as the token budget reaches (law 1).

Prompts are read in the order in which they are *due*. Time is counted in tokens of work done; a prompt is due when as
many have been done since its arrival as it has to compute. So a short prompt passes a long one, yet only if it came
before the long one was due: nobody starves (a deadline as in self-clocked fair queueing; Golestani, INFOCOM 1994).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paceline.cache.manager import KVCacheManager
from paceline.cache.pool import OutOfBlocksError
from paceline.config import SchedulerConfig
from paceline.engine.plan import Plan, ScheduledRequest
from paceline.errors import CacheCapacityError
from paceline.records import Verdict
from paceline.request import FinishReason, Request, RequestStatus


class Scheduler:
    """Admits, advances, preempts and finishes requests. Owns no tensor and no text."""

    def __init__(self, config: SchedulerConfig, cache: KVCacheManager) -> None:
        self._config = config
        self._cache = cache
        self._waiting: list[Request] = []
        self._running: list[Request] = []
        self._num_done_tokens = 0  # the clock of due times
        self._is_full = False  # someone had to wait in the last step
        self._sessions: dict[str, None] = {}  # sessions that keep a prefix referenced, least recently used first

    @property
    def has_work(self) -> bool:
        """True while any request is waiting or running."""
        return bool(self._waiting or self._running)

    @property
    def decoding(self) -> list[Request]:
        """Admitted requests of which only the newest token lacks its K/V: those that may draft in the next step."""
        return [request for request in self._running if request.is_decoding]

    @property
    def num_running(self) -> int:
        """Requests admitted and unfinished."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests not yet admitted, or preempted."""
        return len(self._waiting)

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            CacheCapacityError: it would not fit even if the whole cache were its own.
        """
        # The newest token never needs a slot: its K/V are computed only when one more follows.
        if not self._cache.fits(request.max_total_tokens - 1):
            raise CacheCapacityError(
                f"the request may grow to {request.max_total_tokens} tokens, more than the KV cache holds; "
                "lower max_tokens, shorten the prompt, or give the engine more kv_memory_bytes"
            )
        num_cached = self._cache.match_prefix(request.token_ids).num_tokens
        request.due = self._num_done_tokens + request.num_tokens - num_cached
        self._waiting.append(request)

    def schedule(self, choose_horizon: Callable[[Request], int]) -> Plan:
        """Plan one step: first those that decode, then prompts as they are due; reserves every slot it hands out."""
        plan = Plan()
        budget = self._config.max_num_batched_tokens
        decoding = self.decoding
        choose = _no_drafts if self._is_reading else choose_horizon
        for request in decoding:
            budget -= self._serve(request, budget, plan, choose)
        if decoding:
            budget = min(budget, self._config.max_num_prompt_tokens)
        self._is_full = False
        for request in self._prompts():
            if budget == 0:
                break
            if request.status is RequestStatus.WAITING:
                # Behind one that does not fit nobody else is admitted, or it would wait for ever.
                self._is_full = self._is_full or bool(plan.preempted) or not self._admit(request)
                if self._is_full:
                    continue
            budget -= self._serve(request, budget, plan, choose_horizon)
        return plan

    def update(
        self,
        plan: Plan,
        verdicts: Sequence[Verdict],
        emit: Callable[[Request, Verdict], FinishReason | None],
    ) -> None:
        """Commit a step: advance counters, append what ``emit`` accepts, roll back the rest, hash, finish.

        ``verdicts`` stand in the order of ``plan.sampled``. ``emit`` appends the verdict's tokens to the request up to
        a stop and returns the finish reason, if any.
        """
        outcome = iter(verdicts)
        for item in plan.scheduled:
            request = item.request
            self._num_done_tokens += item.num_new_tokens + item.horizon
            request.num_computed_tokens += item.num_new_tokens
            reason: FinishReason | None = None
            if item.is_sampled:
                verdict = next(outcome)
                # Rejected drafts are simply not counted; the next step overwrites their slots. A stop inside the
                # accepted run drops tokens whose K/V exist, hence the minimum.
                request.num_computed_tokens += verdict.num_accepted
                reason = emit(request, verdict)
                request.num_computed_tokens = min(request.num_computed_tokens, request.num_tokens)
            request.num_draft_computed_tokens = min(request.num_draft_computed_tokens, request.num_computed_tokens)
            # Others may share the draft's K/V only where none are missing before.
            num_draft_verified = request.num_draft_computed_tokens if request.draft_start == 0 else 0
            self._cache.commit(request.request_id, request.token_ids, request.num_computed_tokens, num_draft_verified)
            if reason is not None:
                self.finish(request, reason)

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request in whatever state it is and give back its blocks; a session keeps what was verified."""
        if request.status is RequestStatus.RUNNING:
            self._running.remove(request)
            if request.session_id is not None:
                self._retain(request, request.session_id)
            self._cache.release(request.request_id)
        elif request.status is RequestStatus.WAITING:
            self._waiting.remove(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason

    def fork_session(self, session_id: str, new_session_id: str) -> None:
        """Let another session reference the same prefix."""
        if session_id in self._sessions:
            self._cache.fork(_owner(session_id), _owner(new_session_id))
            self._sessions[new_session_id] = None

    def release_session(self, session_id: str) -> None:
        """Stop keeping a session's prefix referenced; the blocks stay findable until they are needed."""
        self._drop_session(session_id)
        for request in (*self._running, *self._waiting):
            if request.session_id == session_id:
                request.session_id = None  # a turn still in flight keeps nothing either

    def _drop_session(self, session_id: str) -> None:
        if session_id in self._sessions:
            del self._sessions[session_id]
            self._cache.release(_owner(session_id))

    @property
    def _is_reading(self) -> bool:
        """Whether the next step reads a prompt; drafts beside it would keep a first token waiting."""
        has_newcomers = bool(self._waiting) and not self._is_full
        return has_newcomers or any(not request.is_decoding for request in self._running)

    def _prompts(self) -> list[Request]:
        """All that are not decoding, admitted or not, in the order in which they are due."""
        reading = [request for request in self._running if not request.is_decoding]
        return sorted(reading + self._waiting, key=lambda request: (request.due, request.arrival))

    def _serve(self, request: Request, budget: int, plan: Plan, choose_horizon: Callable[[Request], int]) -> int:
        """Schedule one admitted request, preempting others if need be; how many tokens of the budget that takes."""
        if budget == 0 or request.status is not RequestStatus.RUNNING:
            return 0  # preempted a moment ago by one that came before it
        horizon = self._horizon(request, budget, choose_horizon)
        item = self._advance(request, budget, horizon)
        while item is None and self._make_room(request, plan):
            item = self._advance(request, budget, horizon)
        if item is None:
            return 0
        plan.scheduled.append(item)
        return item.num_new_tokens + item.horizon

    def _horizon(self, request: Request, budget: int, choose_horizon: Callable[[Request], int]) -> int:
        """How many drafts may join one request's next token, as far as budget and length allow."""
        if not request.is_decoding:
            return 0
        # One token is always sampled besides the drafts, so the last one is never worth drafting.
        room = request.max_total_tokens - request.num_tokens - 1
        return max(0, min(choose_horizon(request), room, budget - 1))

    def _advance(self, request: Request, budget: int, horizon: int) -> ScheduledRequest | None:
        """Reserve slots for one request's next tokens; None when blocks are lacking even without drafts."""
        missing = request.num_tokens - request.num_computed_tokens
        num_new_tokens = min(missing, budget)
        is_sampled = num_new_tokens == missing
        num_slots = request.num_computed_tokens + num_new_tokens
        for num_drafts in (horizon, 0):
            try:
                self._cache.reserve(request.request_id, num_slots + num_drafts)
            except OutOfBlocksError:
                continue
            block_ids = tuple(self._cache.block_ids(request.request_id))
            return ScheduledRequest(request, num_new_tokens, num_drafts, is_sampled, block_ids)
        return None

    def _make_room(self, request: Request, plan: Plan) -> bool:
        """Free some blocks for ``request``: idle sessions first, then the youngest request that has not run yet."""
        if self._sessions:
            self._drop_session(next(iter(self._sessions)))
            return True
        already = {item.request.request_id for item in plan.scheduled}
        victims = [other for other in self._running if other.request_id not in already]
        victim = max(victims, key=lambda other: other.arrival)
        if victim is request:
            # The others hold the blocks: they have moved on, or older ones will come to take this one's.
            assert plan.scheduled or len(victims) > 1, "a request that fits an empty cache found no block in it"
            return False
        self._preempt(victim)
        plan.preempted.append(victim)
        return True

    def _preempt(self, request: Request) -> None:
        """Take a request's blocks; it starts over from the longest prefix still cached (recompute)."""
        self._cache.release(request.request_id)
        self._running.remove(request)
        request.status = RequestStatus.WAITING
        request.num_computed_tokens = request.num_draft_computed_tokens = request.draft_start = 0
        request.num_preemptions += 1
        self._waiting.append(request)

    def _admit(self, request: Request) -> bool:
        """Start a waiting request if its whole prompt fits now; attaches the longest cached prefix."""
        if len(self._running) >= self._config.max_num_seqs:
            return False
        match = self._cache.begin(request.request_id, request.token_ids)
        while not self._cache.can_reserve(request.request_id, request.num_tokens):
            if self._running or not self._sessions:
                self._cache.release(request.request_id)
                return False
            self._drop_session(next(iter(self._sessions)))
        self._waiting.remove(request)
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = match.num_tokens
        request.num_draft_computed_tokens = match.num_draft_tokens
        if request.num_preemptions == 0:
            request.num_cached_tokens = match.num_tokens
        self._running.append(request)
        return True

    def _retain(self, request: Request, session_id: str) -> None:
        self._drop_session(session_id)
        self._cache.fork(request.request_id, _owner(session_id))
        self._sessions[session_id] = None


def _no_drafts(_: Request) -> int:
    return 0


def _owner(session_id: str) -> str:
    """The name under which a session owns blocks; apart from every request id."""
    return f"session:{session_id}"

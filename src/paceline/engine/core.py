"""The step: schedule, propose, run, verify, update. Everything else in the package serves these five verbs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.cache.manager import KVCacheManager
from paceline.engine.events import Listener, StepEvent
from paceline.engine.hidden import hidden_states
from paceline.engine.output import Delta, Output
from paceline.engine.plan import Plan
from paceline.engine.scheduler import Scheduler
from paceline.engine.score import score_tokens
from paceline.engine.text import TextStream
from paceline.engine.tracker import RequestTracker
from paceline.model.runner import ModelRunner, SequenceInput
from paceline.records import TokenLogprob, Verdict
from paceline.request import FinishReason, Request
from paceline.sampling.penalties import TokenHistory
from paceline.spec.ladder import Ladder
from paceline.spec.proposer import NO_DRAFT, Draft
from paceline.spec.verifier import Verifier, VerifyItem


@dataclass(slots=True)
class RequestState:
    """What the engine keeps beside a request: text, history for penalties, coins, measurements."""

    request: Request
    text: TextStream
    history: TokenHistory
    generator: torch.Generator
    tracker: RequestTracker
    end_token_ids: frozenset[int]
    draft: Draft = NO_DRAFT  # of the step in progress
    logprobs: list[TokenLogprob] = field(default_factory=list)
    new_token_ids: list[int] = field(default_factory=list)

    @property
    def stop_reason(self) -> str | int | None:
        """The stop string, or the stop token asked for, that ended the request; None otherwise."""
        if self.text.stopped_by is not None or self.request.finish_reason != "stop":
            return self.text.stopped_by
        last = self.request.token_ids[-1]
        return last if last in self.request.params.stop_token_ids else None


class EngineCore:
    """Advances all requests one step at a time. Not thread-safe: its owner serialises calls."""

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        cache: KVCacheManager,
        runner: ModelRunner,
        ladder: Ladder,
        verifier: Verifier,
        block_size: int,
        num_blocks: int,
    ) -> None:
        self.scheduler = scheduler
        self.cache = cache
        self.listeners: list[Listener] = []
        self._runner = runner
        self.ladder = ladder
        self._verifier = verifier
        self._block_size = block_size
        self._num_blocks = num_blocks
        self._states: dict[str, RequestState] = {}
        self._num_steps = 0

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._states

    def add(self, state: RequestState) -> None:
        """Queue a request; see :meth:`Scheduler.add` for what it raises."""
        self.scheduler.add(state.request)
        self._states[state.request.request_id] = state

    def step(self) -> dict[str, Delta]:
        """Run one step; the new text of each request that got any, by request id."""
        clock = _StepClock()
        self.ladder.plan(self.scheduler.decoding)
        plan = self.scheduler.schedule(self.ladder.horizon)
        drafts = self._propose(plan)
        clock.drafted()
        logits = self._run(plan, drafts)
        clock.ran()
        verdicts = self._verify(plan, drafts, logits)
        self.scheduler.update(plan, verdicts, self._emit)
        return self._report(plan, verdicts, clock)

    def cancel(self, request_id: str) -> Delta | None:
        """End a request wherever it is; its last delta, or None for one that is unknown or finished."""
        state = self._states.get(request_id)
        if state is None:
            return None
        self.scheduler.finish(state.request, "cancelled")
        state.text.close(state.draft.source)
        return self._delta(state)

    def score(self, token_ids: Sequence[int], num_top: int) -> list[TokenLogprob]:
        """The log-probability of each token but the first; see :func:`paceline.engine.score.score_tokens`."""
        limit = self._verifier.vocab_limit
        return score_tokens(self._runner, self.cache, token_ids, num_top=num_top, vocab_limit=limit)

    def hidden_states(self, texts: Sequence[Sequence[int]]) -> list[Tensor]:
        """The target's hidden states; see :func:`paceline.engine.hidden.hidden_states`."""
        return hidden_states(self._runner, self.cache, texts)

    def _propose(self, plan: Plan) -> list[Draft]:
        """One draft per sampled request, empty where the horizon is 0."""
        sampled = plan.sampled
        drafts = self.ladder.propose([item.request for item in sampled], [item.horizon for item in sampled])
        for item, draft in zip(sampled, drafts, strict=True):
            self._states[item.request.request_id].draft = draft
        return drafts

    def _run(self, plan: Plan, drafts: Sequence[Draft]) -> Tensor:
        """One ragged forward pass: prefill chunks and drafts side by side. Logits [rows that are verified, vocab]."""
        pending = iter(drafts)
        inputs = []
        for item in plan.scheduled:
            request = item.request
            start = request.num_computed_tokens
            token_ids: Sequence[int] = request.token_ids[start : start + item.num_new_tokens]
            num_logits = 0
            if item.is_sampled:
                draft = next(pending)
                token_ids = [*token_ids, *draft.token_ids]
                num_logits = 1 + len(draft.token_ids)
            inputs.append(SequenceInput(token_ids, start, item.block_ids, num_logits))
        return self._runner.run(inputs)

    def _verify(self, plan: Plan, drafts: Sequence[Draft], logits: Tensor) -> list[Verdict]:
        items = []
        row = 0
        for item, draft in zip(plan.sampled, drafts, strict=True):
            state = self._states[item.request.request_id]
            end = row + 1 + len(draft.token_ids)
            items.append(
                VerifyItem(
                    params=item.request.params,
                    history=state.history,
                    draft=draft,
                    generator=state.generator,
                    first_position=item.request.num_tokens,
                    end_token_ids=state.end_token_ids,
                    constraint=item.request.constraint,
                    rows=slice(row, end),
                )
            )
            row = end
        return self._verifier.verify(items, logits)

    def _emit(self, request: Request, verdict: Verdict) -> FinishReason | None:
        """Append a verdict's tokens one by one until one of them ends the request; the rest is dropped."""
        state, params, constraint = self._states[request.request_id], request.params, request.constraint
        reason: FinishReason | None = None
        for index, token_id in enumerate(verdict.token_ids):
            request.token_ids.append(token_id)
            state.new_token_ids.append(token_id)
            if verdict.logprobs is not None:
                state.logprobs.append(verdict.logprobs[index])
            origin = state.draft.source if index < verdict.num_accepted else verdict.final_token
            may_stop = request.num_output_tokens >= params.min_tokens
            is_end = may_stop and token_id in state.end_token_ids
            is_silent = is_end and not params.include_stop_str_in_output
            if is_end or state.text.push(token_id, origin, may_stop=may_stop):
                reason = "stop" if constraint is None or constraint.failure is None else "length"
            elif constraint is not None and (ending := constraint.advance(token_id)) is not None:
                reason = ending
            elif request.num_tokens >= request.max_total_tokens:
                reason = "length"
            if reason is not None:
                if is_end and not is_silent:
                    state.text.push(token_id, origin, may_stop=False)
                state.text.close(origin)
                break
        state.history.append(state.new_token_ids)
        self.ladder.observe(request, verdict)
        return reason

    def _report(self, plan: Plan, verdicts: Sequence[Verdict], clock: _StepClock) -> dict[str, Delta]:
        """Record the step and hand out what is new; a finished request is forgotten."""
        self._num_steps += 1
        self._record_costs(plan, verdicts, clock)
        num_rows = sum(item.num_new_tokens for item in plan.scheduled) + sum(v.num_drafted for v in verdicts)
        outcome = iter(verdicts)
        deltas: dict[str, Delta] = {}
        for item in plan.scheduled:
            state = self._states[item.request.request_id]
            num_blocks = len(item.block_ids)
            state.tracker.record_scheduled(clock.started)
            state.tracker.record_cache(num_blocks=num_blocks, block_size=self._block_size)
            if not item.is_sampled:
                continue
            verdict = next(outcome)
            event = StepEvent(
                request_id=item.request.request_id,
                step=self._num_steps,
                horizon=item.horizon,
                num_drafted=verdict.num_drafted,
                num_accepted=verdict.num_accepted,
                final_token=verdict.final_token,
                source=state.draft.source,
                num_rows=num_rows,
                num_blocks=num_blocks,
                num_computed_tokens=item.request.num_computed_tokens,
                draft_ms=clock.draft_ms,
                forward_ms=clock.forward_ms,
                step_ms=clock.step_ms,
                expected_acceptances=state.draft.acceptances,
            )
            state.tracker.record_tokens(len(state.new_token_ids), event)
            for listener in self.listeners:
                listener(event)
            deltas[item.request.request_id] = self._delta(state)
        return deltas

    def _record_costs(self, plan: Plan, verdicts: Sequence[Verdict], clock: _StepClock) -> None:
        """Tell the ladder what a decoding step took; with a prompt beside it a step says nothing about drafting."""
        requests = [item.request for item in plan.scheduled]
        if requests and all(item.is_sampled and item.num_new_tokens == 1 for item in plan.scheduled):
            self.ladder.record_step(
                requests,
                num_tokens=sum(verdict.num_accepted + 1 for verdict in verdicts),
                num_drafted=sum(verdict.num_drafted for verdict in verdicts),
                draft_ms=clock.draft_ms,
                step_ms=clock.step_ms,
            )

    def _delta(self, state: RequestState) -> Delta:
        pieces = state.text.drain()
        token_ids, state.new_token_ids = state.new_token_ids, []
        logprobs = state.logprobs[len(state.logprobs) - len(token_ids) :] if state.logprobs else ()
        output = None
        if state.request.is_finished:
            output = self._output(state)
            self._forget(state)
        return Delta("".join(piece.text for piece in pieces), pieces, token_ids, output, logprobs)

    def _output(self, state: RequestState) -> Output:
        request, tracker = state.request, state.tracker
        assert request.finish_reason is not None
        return Output(
            text=state.text.text,
            token_ids=request.output_token_ids,
            finish_reason=request.finish_reason,
            usage=tracker.usage(),
            timing=tracker.timing(),
            speculation=tracker.speculation(),
            kv=tracker.kv(block_size=self._block_size, num_blocks=self._num_blocks),
            logprobs=state.logprobs if request.params.logprobs is not None else None,
            stop_reason=state.stop_reason,
        )

    def _forget(self, state: RequestState) -> None:
        del self._states[state.request.request_id]
        self.ladder.release(state.request)


class _StepClock:
    """Where a step's time goes; ``started`` on ``time.perf_counter``'s clock."""

    def __init__(self) -> None:
        self.started = self._drafted = self._ran = time.perf_counter()

    def drafted(self) -> None:
        """Proposing is done."""
        self._drafted = self._ran = time.perf_counter()

    def ran(self) -> None:
        """The target's forward pass is done."""
        self._ran = time.perf_counter()

    @property
    def draft_ms(self) -> float:
        """Scheduling and proposing."""
        return (self._drafted - self.started) * 1e3

    @property
    def forward_ms(self) -> float:
        """The target's forward pass."""
        return (self._ran - self._drafted) * 1e3

    @property
    def step_ms(self) -> float:
        """From the start to now."""
        return (time.perf_counter() - self.started) * 1e3

"""A scheduler at work on fake models: what a step of the engine does, without tensors and with every check."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.cache.manager import KVCacheManager
from paceline.config import SchedulerConfig
from paceline.engine.plan import Plan, ScheduledRequest
from paceline.engine.scheduler import Scheduler
from paceline.records import Verdict
from paceline.request import FinishReason, Request, RequestStatus, SamplingParams, Speculation
from tests.fakes import FakeModel, next_token

VOCAB_SIZE = 64


def continuation(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """What must come out."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens, VOCAB_SIZE))
    return tokens[len(prompt) :]


class Workshop:
    """Runs requests to the end and checks in every step what must hold in every step."""

    def __init__(self, num_blocks: int, *, block_size: int = 4, **config: Any) -> None:
        self.cache = KVCacheManager(num_blocks, block_size)
        self.config = SchedulerConfig(**config)
        self.scheduler = Scheduler(self.config, self.cache)
        self.target = FakeModel(block_size=block_size, vocab_size=VOCAB_SIZE)
        self.drafter = FakeModel(block_size=block_size, vocab_size=VOCAB_SIZE)
        self.requests: list[Request] = []
        self.plans: list[Plan] = []
        self.misses_every = 4  # how often a draft token is wrong

    def add(
        self, prompt: Sequence[int], max_tokens: int, *, horizon: int = 0, session_id: str | None = None
    ) -> Request:
        number = len(self.requests)
        request = Request(
            request_id=f"r{number}",
            prompt_token_ids=list(prompt),
            params=SamplingParams(max_tokens=max_tokens),
            speculation=Speculation("static", horizon) if horizon else Speculation("off"),
            max_total_tokens=len(prompt) + max_tokens,
            session_id=session_id,
            arrival=number,
        )
        self.scheduler.add(request)
        self.requests.append(request)
        return request

    def step(self) -> Plan:
        asked: list[str] = []

        def choose(request: Request) -> int:
            asked.append(request.request_id)
            return request.speculation.max_tokens if request.speculation.mode != "off" else 0

        plan = self.scheduler.schedule(choose)
        assert len(asked) == len(set(asked)), "a horizon is chosen once per round"
        self._check(plan)
        verdicts = [self._run(item) for item in plan.scheduled]
        self.scheduler.update(plan, [verdict for verdict in verdicts if verdict is not None], self._emit)
        self.cache.check_integrity()
        self.plans.append(plan)
        return plan

    def run(self, max_steps: int = 5000) -> None:
        """Until nothing is left to do; every output must be right."""
        for _ in range(max_steps):
            if not self.scheduler.has_work:
                break
            assert self.step().scheduled, "a step in which nothing moves"
        assert not self.scheduler.has_work, "starved"
        for request in self.requests:
            if request.finish_reason != "cancelled":
                expected = continuation(request.prompt_token_ids, request.max_total_tokens - request.num_prompt_tokens)
                assert request.output_token_ids == expected, request.request_id
                assert request.finish_reason == "length"

    def _check(self, plan: Plan) -> None:
        budget = sum(item.num_new_tokens + item.horizon for item in plan.scheduled)
        assert budget <= self.config.max_num_batched_tokens
        assert self.scheduler.num_running <= self.config.max_num_seqs
        assert len({item.request.request_id for item in plan.scheduled}) == len(plan.scheduled)
        for item in plan.scheduled:
            request = item.request
            assert request.status is RequestStatus.RUNNING
            end = request.num_computed_tokens + item.num_new_tokens
            assert item.num_new_tokens > 0
            assert item.is_sampled == (end == request.num_tokens)
            assert item.horizon == 0 or item.is_sampled
            assert request.num_tokens + item.horizon < request.max_total_tokens
            assert len(item.block_ids) * self.cache.block_size >= end + item.horizon
            assert request not in plan.preempted

    def _run(self, item: ScheduledRequest) -> Verdict | None:
        request, start = item.request, item.request.num_computed_tokens
        tokens = request.token_ids[start : start + item.num_new_tokens]
        draft = self._draft(item)
        answers = self.target.feed([*tokens, *draft], start, item.block_ids)
        if not item.is_sampled:
            return None
        answers = answers[len(tokens) - 1 :]
        num_accepted = 0
        while num_accepted < len(draft) and draft[num_accepted] == answers[num_accepted]:
            num_accepted += 1
        return Verdict(answers[: num_accepted + 1], len(draft), num_accepted)

    def _draft(self, item: ScheduledRequest) -> list[int]:
        """A draft model of the same mind as the target, except for every so many tokens."""
        request, draft = item.request, list[int]()
        for _ in range(item.horizon):
            known = [*request.token_ids, *draft]
            start = request.num_draft_computed_tokens
            answer = self.drafter.feed(known[start:], start, item.block_ids)[-1]
            assert answer == next_token(known, VOCAB_SIZE), "the draft's K/V are not those of the tokens before it"
            request.num_draft_computed_tokens = len(known)
            draft.append(answer if len(known) % self.misses_every else answer ^ 1)
        return draft

    def _emit(self, request: Request, verdict: Verdict) -> FinishReason | None:
        for token_id in verdict.token_ids:
            request.token_ids.append(token_id)
            if request.num_tokens >= request.max_total_tokens:
                return "length"
        return None

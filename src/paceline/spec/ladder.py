"""The ladder of drafters: in each step every request drafts with the source that promises most, and as far as it pays.

All choices are made from committed tokens, before anything is drawn: lookups are deterministic and stand before the
draft model begins, and which source drafts never depends on what a model drew (law 4's trap).

Lookups are free, so all of them are asked in every step and judged by what was then committed, whether or not they
drafted. Their acceptance stays known while others draft, or nobody: nothing has to be tried out to come back to them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from paceline.records import Verdict
from paceline.request import Constraint, Request
from paceline.spec.calibration import Calibration
from paceline.spec.costs import StepCosts
from paceline.spec.horizon import HorizonController, Prospect
from paceline.spec.proposer import NO_DRAFT, Draft, Guess, Lookup, Proposer
from paceline.spec.stopping import ConfidenceRule

# Kind of evidence of a source that is not asked before it drafts: the place in the draft is all there is to go by.
_BLIND = "blind"
# A proposer that pays at all may draft so many tokens: it is stopped by its own confidence, place by place.
_LONGEST_DRAFT = 8
# Cost of a draft token of a source that never drafted, in plain steps.
_UNKNOWN_COST = 0.08
# A source named earlier drafts if it promises this share of the best: differences below it are noise.
_AS_GOOD = 0.95


@dataclass(slots=True)
class _Option:
    """One source's offer to one request; ``guess`` is None for a proposer, which has not drafted yet."""

    source: str
    acceptances: Sequence[float]
    prospect: Prospect
    guess: Guess | None = None


@dataclass(slots=True)
class _State:
    """A request between its plan, made when it had ``num_tokens`` tokens, and its verdict."""

    request: Request
    num_tokens: int = 0
    guesses: list[Guess] = field(default_factory=list)
    option: _Option | None = None
    horizon: int = 0
    draft: Draft = NO_DRAFT
    asked: str | None = None  # the proposer that drafted, or would not
    rule: ConfidenceRule | None = None


class Ladder:
    """Plans horizons, drafts, and learns.

    Args:
        lookups: sources that answer at once, in order of preference where two promise the same.
        proposers: sources that take time.
        costs: what passes and drafts take; fed by :meth:`record_step`.
        clock: in seconds, for the price of what proposers draft; a replay brings its own.
    """

    name = "ladder"

    def __init__(
        self,
        lookups: Sequence[Lookup],
        proposers: Sequence[Proposer] = (),
        *,
        costs: StepCosts | None = None,
        calibration: Calibration | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.costs = costs if costs is not None else StepCosts()
        self.calibration = calibration if calibration is not None else Calibration()
        self.controller = HorizonController(self.costs)
        self._lookups = {lookup.name: lookup for lookup in lookups}
        self._proposers = {proposer.name: proposer for proposer in proposers}
        self._clock = clock
        self._states: dict[str, _State] = {}
        self._has_asked = False  # a proposer, in this step

    @property
    def sources(self) -> list[str]:
        """The names of all sources."""
        return [*self._lookups, *self._proposers]

    @property
    def proposers(self) -> Mapping[str, Proposer]:
        """The sources that take time, by name."""
        return self._proposers

    def plan(self, requests: Sequence[Request]) -> None:
        """Choose source and horizon for each of the requests that decode in this step: one budget over the batch."""
        self._has_asked = False
        states = [self._look_around(request) for request in requests]
        context = _mean_context(requests)
        dynamic = []
        for state in states:
            if state.option is not None and state.request.speculation.mode == "dynamic":
                dynamic.append(state)
            elif state.option is not None:
                state.horizon = len(state.option.acceptances)
        if not dynamic:
            return
        prospects = [state.option.prospect for state in dynamic if state.option is not None]
        for state, horizon in zip(dynamic, self.controller.choose(prospects, context), strict=True):
            state.horizon = horizon or self._probe(state, context)
            if horizon and state.option is not None and state.option.guess is None:
                state.horizon = min(_LONGEST_DRAFT, len(state.option.acceptances))

    def horizon(self, request: Request) -> int:
        """How many tokens the request should draft in this step; planned now if it was not in the plan."""
        state = self._states.get(request.request_id)
        if state is None:
            self.plan([request])
            state = self._states[request.request_id]
        return state.horizon

    def propose(self, requests: Sequence[Request], horizons: Sequence[int]) -> list[Draft]:
        """One draft per request, of at most ``horizons[i]`` tokens, from the source that was planned."""
        drafts = [NO_DRAFT] * len(requests)
        asked: dict[str, list[int]] = {}
        for index, (request, horizon) in enumerate(zip(requests, horizons, strict=True)):
            state = self._states.get(request.request_id)
            option = state.option if state is not None and state.num_tokens == request.num_tokens else None
            if option is None or horizon == 0:
                continue
            if option.guess is not None:
                token_ids = option.guess.token_ids[:horizon]
                drafts[index] = Draft(token_ids, option.source, acceptances=option.acceptances[:horizon])
            else:
                asked.setdefault(option.source, []).append(index)
        for source, indices in asked.items():
            proposed = self._ask(source, [requests[i] for i in indices], [horizons[i] for i in indices])
            for index, draft in zip(indices, proposed, strict=True):
                drafts[index] = draft
        for request, draft in zip(requests, drafts, strict=True):
            if draft.token_ids:
                self._states[request.request_id].draft = draft
        return drafts

    def observe(self, request: Request, verdict: Verdict) -> None:
        """What became of a request's draft; called after its tokens and counters are updated."""
        state = self._states.get(request.request_id)
        if state is None:
            return
        session = _session(request)
        for guess in state.guesses:
            num_true, is_missed = _agreement(guess.token_ids, verdict.token_ids)
            self.calibration.observe(session, guess.source, guess.kind, guess.length, num_true, ended_in_miss=is_missed)
        if state.asked is not None:
            self._observe_proposer(state, session, verdict)
        if verdict.num_drafted and request.speculation.mode == "dynamic":
            self.controller.observe_round(verdict.num_drafted, verdict.num_accepted, request.speculation.min_acceptance)
        self._clear(state)

    def record_step(
        self, requests: Sequence[Request], num_tokens: int, num_drafted: int, *, draft_ms: float, step_ms: float
    ) -> None:
        """A step in which all of ``requests`` decoded: what it yielded and what it took, drafting included."""
        context = _mean_context(requests)
        self.controller.observe_step(
            len(requests), num_tokens, num_drafted, step_ms, context, draft_ms, has_tried=self._has_asked
        )
        self.costs.observe_pass(len(requests) + num_drafted, context, step_ms - draft_ms)

    def release(self, request: Request) -> None:
        """Forget a request that ended."""
        self._states.pop(request.request_id, None)
        for lookup in self._lookups.values():
            lookup.release(request)
        for proposer in self._proposers.values():
            proposer.release(request.request_id)
        if request.session_id is None:
            self.calibration.forget(_session(request))

    def forget_answers(self) -> None:
        """Drop what earlier requests were answered, wherever it is looked up; for a cold start."""
        for lookup in self._lookups.values():
            lookup.forget_answers()

    def _look_around(self, request: Request) -> _State:
        """Ask every lookup, and choose the source that promises most."""
        state = self._states.get(request.request_id)
        if state is None:
            state = self._states[request.request_id] = _State(request)
        speculation = request.speculation
        self._clear(state)
        state.num_tokens = request.num_tokens
        if speculation.mode == "off":
            return state
        options = []
        for name in speculation.drafters:
            if name in self._lookups:
                guess = self._lookups[name].look_up(request, speculation.max_tokens)
                if guess is not None and request.constraint is not None:
                    guess = _lawful(guess, request.constraint)
                if guess is not None:
                    state.guesses.append(guess)
                    options.append(self._option(request, name, guess))
            elif name in self._proposers:
                options.append(self._option(request, name, None))
        if len(options) == 1:
            state.option = options[0]
        elif options:
            context = float(request.num_tokens)
            promises = [self._promise(option, request, context) for option in options]
            enough = _AS_GOOD * max(promises)
            state.option = next(option for option, promise in zip(options, promises, strict=True) if promise >= enough)
        return state

    def _option(self, request: Request, source: str, guess: Guess | None) -> _Option:
        kind, length, count = _BLIND, 0, request.speculation.max_tokens
        if guess is not None:
            kind, length, count = guess.kind, guess.length, len(guess.token_ids)
        acceptances = self.calibration.acceptances(_session(request), source, kind, length, count)
        survivals, survival = [], 1.0
        for acceptance in acceptances:
            survival *= acceptance
            survivals.append(survival)
        cost = 0.0 if guess is not None else self._draft_ms(source, float(request.num_tokens))
        return _Option(source, acceptances, Prospect(survivals, cost, request.speculation.min_acceptance), guess)

    def _promise(self, option: _Option, request: Request, context: float) -> float:
        if request.speculation.mode == "static":
            return self.controller.value_of_all(option.prospect, context)
        return self.controller.value(option.prospect, context)

    def _probe(self, state: _State, context: float) -> int:
        """A short draft of a proposer that seemed not worth its cost, now and then."""
        names = [name for name in state.request.speculation.drafters if name in self._proposers]
        if not names:
            return 0
        length = self.controller.take_probe(self._draft_ms(names[0], context), context)
        if length:
            state.option = self._option(state.request, names[0], None)
        return min(length, state.request.speculation.max_tokens)

    def _draft_ms(self, source: str, context: float) -> float:
        known = self.costs.draft_ms(source)
        return known if known is not None else _UNKNOWN_COST * self.costs.plain_ms(context)

    def _ask(self, source: str, requests: Sequence[Request], horizons: Sequence[int]) -> list[Draft]:
        states = [self._states[request.request_id] for request in requests]
        for state, horizon in zip(states, horizons, strict=True):
            state.asked, state.horizon = source, horizon
            state.rule = self._stop_rule(state, len(requests), _mean_context(requests))
        self._has_asked = True
        proposer = self._proposers[source]
        proposer.prepare(requests)
        started = self._clock()
        proposed = proposer.propose(requests, horizons, [state.rule for state in states])
        milliseconds = (self._clock() - started) * 1e3
        # The last pass of a draft that was stopped gave no token.
        passes = [len(draft.token_ids) for draft in proposed]
        passes += [len(state.rule.confidences) for state in states if state.rule is not None]
        self.costs.observe_draft(source, max(passes), milliseconds)
        drafts = []
        for state, draft in zip(states, proposed, strict=True):
            by_place: Sequence[float] = state.option.acceptances if state.option is not None else ()
            expected = (state.rule.acceptances if state.rule is not None else ()) or by_place
            if draft.token_ids:
                drafts.append(Draft(draft.token_ids, source, draft.draft_probs, expected[: len(draft.token_ids)]))
            else:
                drafts.append(NO_DRAFT)
        return drafts

    def _stop_rule(self, state: _State, num_requests: int, context: float) -> ConfidenceRule | None:
        """Ends a dynamic draft where its confidence says so; a static one has the length that was asked for."""
        if state.request.speculation.mode != "dynamic" or state.option is None:
            return None
        return ConfidenceRule(
            self.calibration,
            self.controller,
            session=_session(state.request),
            source=state.option.source,
            prospect=state.option.prospect,
            places=state.option.acceptances,
            num_requests=num_requests,
            context=context,
        )

    def _observe_proposer(self, state: _State, session: str, verdict: Verdict) -> None:
        """By place, where a token that was not worth keeping is a miss; and by the drafter's confidence."""
        assert state.asked is not None
        num_accepted, is_missed = verdict.num_accepted, verdict.num_accepted < verdict.num_drafted
        # Places the drafter was not asked about say nothing; else one that is once thought poor would stay so for ever.
        num_asked = len(state.rule.confidences) if state.rule is not None else state.horizon
        is_short = verdict.num_drafted < num_asked
        self.calibration.observe(session, state.asked, _BLIND, 0, num_accepted, ended_in_miss=is_missed or is_short)
        if state.rule is not None:
            state.rule.observe(num_accepted, ended_in_miss=is_missed)
        if verdict.num_drafted:
            self._proposers[state.asked].observe(state.request, verdict)

    @staticmethod
    def _clear(state: _State) -> None:
        state.guesses, state.option, state.horizon, state.draft = [], None, 0, NO_DRAFT
        state.asked = state.rule = None


def _lawful(guess: Guess, constraint: Constraint) -> Guess | None:
    """A guess up to the first token that the constraint forbids; exact, because nothing in a lookup is drawn."""
    num_allowed = constraint.count_allowed(guess.token_ids)
    return replace(guess, token_ids=guess.token_ids[:num_allowed]) if num_allowed else None


def _session(request: Request) -> str:
    return request.session_id if request.session_id is not None else request.request_id


def _mean_context(requests: Sequence[Request]) -> float:
    return sum(request.num_tokens for request in requests) / max(1, len(requests))


def _agreement(guessed: Sequence[int], committed: Sequence[int]) -> tuple[int, bool]:
    """How many guessed tokens came true, and whether the next one is known not to have."""
    for position, (guess, token_id) in enumerate(zip(guessed, committed, strict=False)):
        if guess != token_id:
            return position, True
    return min(len(guessed), len(committed)), False

"""How many tokens to draft next: as many as pay for themselves, by what steps cost and how likely drafts are accepted.

A step that verifies g drafts takes T(g) = g d + V(g + 1) and yields 1 + s_1 + ... + s_g tokens, where s_i is the
probability that draft i survives. With theta the tokens a millisecond yields at present, the g to choose maximises

    sum of (s_i (1 + m) - m A)  -  theta T(g)

For m = 0 this maximises tokens per time in the long run (a renewal-reward argument: a millisecond spent here is one not
spent at the usual rate). A is the acceptance asked for, and the multiplier m rises while accepted / drafted is below it
(dual ascent), so that drafts of little promise are given up first. One budget over a batch: a row costs the same
whichever request uses it, so the drafts of all requests compete in one list.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.spec.costs import StepCosts

# What is left of an old step in theta after one more step.
_RATE_MEMORY = 0.95
# How far a round moves the multiplier per draft token missing to the acceptance asked for; and its largest value.
_PRESSURE_STEP, _MAX_PRESSURE = 0.02, 20.0
# Drafting pauses when it has lost this many plain steps in all; the pause, in tokens, doubles while it keeps losing.
_AFFORDABLE_LOSS = 4.0
_FIRST_PAUSE, _LONGEST_PAUSE = 32, 512
# A pass of this many times its usual time was interrupted.
_INTERRUPTED = 1.5
# Share of the time that probes of a drafter that costs something may take.
_PROBE_SHARE = 0.02
_PROBE_LENGTH = 2


@dataclass(frozen=True, slots=True)
class Prospect:
    """What one request might draft.

    Attributes:
        survivals: per draft token, the probability that it and all before it are accepted; never rising.
        draft_ms: cost of each token.
        min_acceptance: the acceptance asked for; 0 asks for speed alone.
    """

    survivals: Sequence[float]
    draft_ms: float = 0.0
    min_acceptance: float = 0.0


class HorizonController:
    """Chooses the horizons of a step and learns from what it took and brought."""

    def __init__(self, costs: StepCosts) -> None:
        self._costs = costs
        self._tokens = self._ms = 0.0
        self._pressures: dict[float, float] = {}
        self._loss = 0.0
        self._pause = _FIRST_PAUSE
        self._tokens_to_skip = 0
        self._probe_budget = 0.0

    @property
    def is_paused(self) -> bool:
        """True while drafting has cost more than it brought, and none is made."""
        return self._tokens_to_skip > 0

    def pressure(self, min_acceptance: float) -> float:
        """The multiplier of that constraint."""
        return self._pressures.get(min_acceptance, 0.0)

    def choose(self, prospects: Sequence[Prospect], context: float) -> list[int]:
        """The horizon of each request, 0 included. ``context`` is their mean number of tokens."""
        lengths = [0] * len(prospects)
        if not prospects or self.is_paused:
            return lengths
        rate = self._rate(len(prospects), context)
        gains = [self._gains(prospect, rate) for prospect in prospects]
        drafts = sorted(
            ((gain, index, at) for index, row in enumerate(gains) for at, gain in enumerate(row)),
            key=lambda entry: -entry[0],
        )
        plain_ms = self._costs.verify_ms(len(prospects), context)
        best = total = 0.0
        num_best = 0
        for number, (gain, _, _) in enumerate(drafts, 1):
            total += gain
            value = total - rate * (self._costs.verify_ms(len(prospects) + number, context) - plain_ms)
            if value > best:
                best, num_best = value, number
        for _, index, at in drafts[:num_best]:
            lengths[index] = max(lengths[index], at + 1)
        return lengths

    def value(self, prospect: Prospect, context: float) -> float:
        """Tokens that the best horizon gains over drafting nothing, were the request alone: for comparing sources."""
        rate = self._rate(1, context)
        plain_ms = self._costs.plain_ms(context)
        best = total = 0.0
        for number, gain in enumerate(self._gains(prospect, rate), 1):
            total += gain
            best = max(best, total - rate * (self._costs.verify_ms(1 + number, context) - plain_ms))
        return best

    def value_of_all(self, prospect: Prospect, context: float) -> float:
        """Tokens that drafting everything gains, less the time for drafting it: for horizons that are given."""
        return sum(prospect.survivals) - self._rate(1, context) * prospect.draft_ms * len(prospect.survivals)

    def pays(self, survival: float, place: int, prospect: Prospect, num_requests: int, context: float) -> bool:
        """Whether draft token ``place`` (from 0) of a request is worth a row, and ``prospect.draft_ms``, if it survives
        with this probability. All of ``num_requests`` are taken to draft as far."""
        pressure, rate = self.pressure(prospect.min_acceptance), self._rate(num_requests, context)
        before, after = (self._costs.verify_ms(num_requests * (1 + place + more), context) for more in (0, 1))
        toll = pressure * prospect.min_acceptance + rate * (prospect.draft_ms + (after - before) / num_requests)
        return survival * (1.0 + pressure) > toll

    def take_probe(self, draft_ms: float, context: float) -> int:
        """How many tokens to try with a drafter that seems not worth its cost: it may have become better. Mostly 0."""
        if self.is_paused:
            return 0
        costs = self._costs
        cost = _PROBE_LENGTH * draft_ms + costs.verify_ms(1 + _PROBE_LENGTH, context) - costs.plain_ms(context)
        if self._probe_budget < cost:
            return 0
        self._probe_budget = 0.0
        return _PROBE_LENGTH

    def observe_step(
        self,
        num_requests: int,
        num_tokens: int,
        num_drafted: int,
        milliseconds: float,
        context: float,
        draft_ms: float = 0.0,
        *,
        has_tried: bool = False,
    ) -> None:
        """A step of ``num_requests`` decoding requests took so long and yielded ``num_tokens``.

        ``draft_ms`` of the time went into drafting. With ``has_tried`` a model was asked, even if it drafted nothing.
        """
        self._tokens = _RATE_MEMORY * self._tokens + num_tokens
        self._ms = _RATE_MEMORY * self._ms + milliseconds
        self._probe_budget += _PROBE_SHARE * milliseconds
        if self._tokens_to_skip > 0:
            self._tokens_to_skip -= num_tokens
            return
        if num_drafted == 0 and not has_tried:
            return
        plain_step_ms = self._costs.verify_ms(num_requests, context)
        # A pass that something else interrupted is no loss of drafting's; a slow drafter's time is.
        usual_ms = self._costs.verify_ms(num_requests + num_drafted, context)
        pass_ms = min(milliseconds - draft_ms, _INTERRUPTED * usual_ms)
        self._loss += draft_ms + pass_ms - plain_step_ms * num_tokens / num_requests
        if self._loss <= 0.0:
            self._loss, self._pause = 0.0, _FIRST_PAUSE
        elif self._loss > _AFFORDABLE_LOSS * plain_step_ms:
            self._loss, self._tokens_to_skip = 0.0, self._pause
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)

    def observe_round(self, num_drafted: int, num_accepted: int, min_acceptance: float) -> None:
        """One request's drafts were judged."""
        if min_acceptance > 0.0:
            missing = min_acceptance * num_drafted - num_accepted
            pressure = self.pressure(min_acceptance) + _PRESSURE_STEP * missing
            self._pressures[min_acceptance] = min(max(0.0, pressure), _MAX_PRESSURE)

    def _rate(self, num_requests: int, context: float) -> float:
        """Tokens per millisecond at present, never below plain decoding."""
        plain = num_requests / self._costs.verify_ms(num_requests, context)
        return max(plain, self._tokens / self._ms) if self._ms > 0.0 else plain

    def _gains(self, prospect: Prospect, rate: float) -> list[float]:
        pressure = self.pressure(prospect.min_acceptance)
        toll = pressure * prospect.min_acceptance + rate * prospect.draft_ms
        return [survival * (1.0 + pressure) - toll for survival in prospect.survivals]

"""The measures: pure functions from the turns of one arm to numbers. ``docs/benchmarks.md`` has every formula.

Words used throughout. The *first step* of a turn brought its first token; the steps after it are *decoding* steps. A
*round* is a step in which something was drafted. A *session* is one task: all its turns, one conversation.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from paceline import theory
from paceline.bench.records import StepRecord, TurnRecord
from paceline.bench.statistics import quantile
from paceline.spec.calibration import CalibrationError

Turns = Sequence[TurnRecord]
_Key = TypeVar("_Key")


@dataclass(frozen=True, slots=True)
class TokenLatency:
    """``num_tokens`` tokens of one decoding step that took ``ms`` each."""

    ms: float
    num_tokens: int


@dataclass(frozen=True, slots=True)
class PositionAcceptance:
    """What became of the drafts at one position of a round (the first draft stands at position 1).

    Attributes:
        num_drafted: rounds that drafted this position.
        num_reached: of those, rounds that accepted every draft before it.
        num_accepted: of those, rounds that accepted it too.
    """

    position: int
    num_drafted: int
    num_reached: int
    num_accepted: int

    @property
    def conditional(self) -> float | None:
        """num_accepted / num_reached: acceptance given that all drafts before it were accepted (alpha_i)."""
        return self.num_accepted / self.num_reached if self.num_reached else None

    @property
    def survival(self) -> float:
        """num_accepted / num_drafted: the share of drafts at this position that became output."""
        return self.num_accepted / self.num_drafted


@dataclass(frozen=True, slots=True)
class KVLayout:
    """How an arm takes KV memory: whole runs of ``slots_per_block`` slots of ``bytes_per_slot`` (target and draft).

    The paged cache has a small block; one contiguous buffer per session is a block of max_model_len slots.
    """

    slots_per_block: int
    bytes_per_slot: int


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the closed form expects of an arm, from its measured acceptance and costs.

    Attributes:
        speedup: eta, in tokens per time against plain decoding.
        cost_ratio: r, draft time per drafted token in units of one plain forward pass.
        verify_cost: v, the mean forward pass of the arm's decoding steps in the same unit.
        one_row_ms: that unit.
    """

    speedup: float
    cost_ratio: float
    verify_cost: float
    one_row_ms: float


# Latency and throughput


def token_latencies(turns: Turns) -> list[TokenLatency]:
    """Per decoding step: each of its tokens is charged step ms / tokens. Tokens of first steps have no latency."""
    return [
        TokenLatency(step.ms / step.num_tokens, step.num_tokens)
        for turn in turns
        for step in turn.steps[1:]
        if step.num_tokens
    ]


def token_ms_quantile(turns: Turns, fraction: float) -> float:
    """The quantile of :func:`token_latencies` over tokens; 0 without decoded tokens."""
    latencies = token_latencies(turns)
    return quantile([each.ms for each in latencies], fraction, [each.num_tokens for each in latencies]) or 0.0


def turn_tpots(turns: Turns) -> list[float]:
    """Per turn with decoded tokens: decode ms / decoded tokens, the turn's mean time per output token."""
    return [turn.decode_ms / turn.num_decoded for turn in turns if turn.num_decoded]


def decode_tokens_per_s(turns: Turns) -> float:
    """sum(decoded tokens) / sum(decode seconds), over all turns; 0 without decoded tokens."""
    seconds = sum(turn.decode_ms for turn in turns) / 1e3
    return sum(turn.num_decoded for turn in turns) / seconds if seconds else 0.0


def ttfts(turns: Turns, *, is_cold: bool | None = None) -> list[float]:
    """Time to first token of each turn that generated something; of cold or warm turns only, if asked."""
    return [turn.ttft_ms for turn in turns if turn.steps and is_cold in (None, turn.is_cold)]


# Acceptance and horizon


def steps_of(turns: Turns) -> list[StepRecord]:
    """All steps that yielded tokens, in order."""
    return [step for turn in turns for step in turn.steps]


def rounds_of(turns: Turns) -> list[StepRecord]:
    """All steps that drafted something."""
    return [step for step in steps_of(turns) if step.num_drafted]


def acceptance_rate(steps: Iterable[StepRecord]) -> float:
    """sum(accepted) / sum(drafted); 0 if nothing was drafted."""
    drafted = accepted = 0
    for step in steps:
        drafted += step.num_drafted
        accepted += step.num_accepted
    return accepted / drafted if drafted else 0.0


def mean_acceptance_length(turns: Turns) -> float:
    """1 + accepted / rounds; 1 if nothing was drafted."""
    rounds = rounds_of(turns)
    return 1.0 + (sum(step.num_accepted for step in rounds) / len(rounds) if rounds else 0.0)


def mean_horizon(turns: Turns) -> float:
    """Drafted tokens / decoding steps, as ``paceline run --json`` has it: 0 if there were none.

    A first step that drafted (its prompt was cached up to the last token) counts as a decoding step.
    """
    steps = [step for turn in turns for index, step in enumerate(turn.steps) if index or step.num_drafted]
    return sum(step.num_drafted for step in steps) / len(steps) if steps else 0.0


def horizon_histogram(turns: Turns) -> list[int]:
    """Entry n counts the decoding steps that drafted n tokens."""
    lengths = Counter(step.num_drafted for turn in turns for index, step in enumerate(turn.steps) if index)
    return [lengths[length] for length in range(max(lengths, default=-1) + 1)]


def calibration_error(turns: Turns) -> float | None:
    """Expected calibration error of the acceptances that were predicted of drafts; None if none were."""
    error = CalibrationError()
    for step in rounds_of(turns):
        error.add(step.expected_acceptances, step.num_accepted)
    return error.value


def acceptance_by_position(turns: Turns) -> list[PositionAcceptance]:
    """One entry per position that was ever drafted, from the first."""
    rounds = Counter((step.num_drafted, step.num_accepted) for step in rounds_of(turns))
    longest = max((drafted for drafted, _ in rounds), default=0)
    return [
        PositionAcceptance(
            position=i + 1,
            num_drafted=sum(n for (drafted, _), n in rounds.items() if drafted > i),
            num_reached=sum(n for (drafted, accepted), n in rounds.items() if drafted > i and accepted >= i),
            num_accepted=sum(n for (_, accepted), n in rounds.items() if accepted > i),
        )
        for i in range(longest)
    ]


def group(turns: Turns, key: Callable[[TurnRecord], _Key]) -> dict[_Key, list[TurnRecord]]:
    """Turns by a key, keys in order of appearance."""
    groups: dict[_Key, list[TurnRecord]] = defaultdict(list)
    for turn in turns:
        groups[key(turn)].append(turn)
    return dict(groups)


def rounds_by_source(turns: Turns) -> dict[str, list[StepRecord]]:
    """The rounds of each drafter that drafted."""
    sources: dict[str, list[StepRecord]] = defaultdict(list)
    for step in rounds_of(turns):
        sources[step.source].append(step)
    return dict(sources)


# Memory


def kv_waste(turns: Turns) -> float | None:
    """Mean over steps of 1 - filled slots / reserved slots; None if no step knew its slots."""
    wastes = [1.0 - step.filled_slots / step.reserved_slots for step in steps_of(turns) if step.reserved_slots]
    return sum(wastes) / len(wastes) if wastes else None


def final_contexts(turns: Turns) -> list[int]:
    """Per session, the longest context of any of its turns: prompt plus generated tokens."""
    sessions = group(turns, lambda turn: turn.task_id)
    return [max(turn.num_prompt_tokens + len(turn.token_ids) for turn in session) for session in sessions.values()]


def peak_sessions(contexts: Sequence[int], layout: KVLayout, budget_bytes: int, fraction: float | None = None) -> int:
    """How many sessions of these final contexts fit a KV budget at the same time.

    floor(B / b), with B = floor(budget bytes / bytes per block) blocks, and b the blocks of a session, ceil(context /
    slots per block): its mean over sessions, or its quantile at ``fraction``. Nothing is shared between sessions.
    """
    if not contexts:
        return 0
    num_blocks = budget_bytes // (layout.slots_per_block * layout.bytes_per_slot)
    needs = [math.ceil(context / layout.slots_per_block) for context in contexts]
    if fraction is None:
        return num_blocks * len(needs) // max(1, sum(needs))
    return num_blocks // max(1, int(quantile(needs, fraction) or 0))


def peak_rss_mib(turns: Turns) -> float:
    """The largest resident set any turn saw."""
    return max((turn.peak_rss_mib for turn in turns), default=0.0)


# Against another arm


def pair_turns(turns: Turns, others: Turns) -> list[tuple[TurnRecord, TurnRecord]]:
    """The same (task, turn) in both, in the order of the first."""
    partners = {(turn.task_id, turn.turn): turn for turn in others}
    return [(turn, partners[key]) for turn in turns if (key := (turn.task_id, turn.turn)) in partners]


def identical_turns(turns: Turns, reference: Turns) -> tuple[int, int]:
    """How many turns have the reference's token ids, all of them and no more, and how many were compared."""
    pairs = pair_turns(turns, reference)
    return sum(list(ours.token_ids) == list(theirs.token_ids) for ours, theirs in pairs), len(pairs)


def predict(turns: Turns, plain: Turns) -> Prediction | None:
    """The closed form with measured parameters, for an arm against plain decoding on the same cache.

    eta = sum over decoding steps of (E[K_d] + 1) / sum of (d r + v_d), where d is what the step drafted, E[K_d] the
    expected accepted of d drafts with the measured acceptance by position, r = draft ms / drafted tokens, v_d the
    forward ms of steps with d drafts, both over the mean forward ms of plain decoding. With one d throughout this is
    :func:`paceline.theory.speedup`. Work outside drafting and forward passes is not in it. None if the arm drafted
    nothing or times are unknown.
    """
    plain_ms = [step.forward_ms for turn in plain for step in turn.steps[1:] if not step.num_drafted]
    decoding = [step for turn in turns for step in turn.steps[1:]]
    num_drafted = sum(step.num_drafted for step in decoding)
    forward_ms = sum(step.forward_ms for step in decoding)
    if not sum(plain_ms) or not num_drafted or not forward_ms:
        return None
    one_row_ms = sum(plain_ms) / len(plain_ms)
    draft_ms = sum(step.draft_ms for step in decoding)
    alphas = [each.conditional or 0.0 for each in acceptance_by_position(turns)]
    lengths = Counter(step.num_drafted for step in decoding)
    tokens = sum(n * (theory.expected_accepted(alphas[:length]) + 1.0) for length, n in lengths.items())
    return Prediction(
        speedup=tokens * one_row_ms / (draft_ms + forward_ms),
        cost_ratio=draft_ms / num_drafted / one_row_ms,
        verify_cost=forward_ms / len(decoding) / one_row_ms,
        one_row_ms=one_row_ms,
    )

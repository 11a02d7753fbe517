"""One arm against another on the same tasks: ratios with bootstrap intervals.

Only turns that both arms ran count, so a comparison never mixes different work. Tasks are what is drawn: both arms'
turns of a drawn task come along together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paceline.bench import measure
from paceline.bench.records import TurnRecord
from paceline.bench.statistics import Interval, Statistic, bootstrap, quantile_of, quotient, ratio_of_sums

Turns = Sequence[TurnRecord]
Sessions = Sequence[Turns]  # the turns of one arm, task by task

AUTOREGRESSIVE = "autoregressive"
CONTIGUOUS = "autoregressive-contiguous"
BASELINES = (AUTOREGRESSIVE, CONTIGUOUS)


def same_cache_baseline(arm: str) -> str:
    """The autoregressive arm on the same kind of cache; arms on the contiguous cache end in ``-contiguous``."""
    return CONTIGUOUS if arm.endswith("-contiguous") else AUTOREGRESSIVE


def compare(turns: Turns, baseline: Turns) -> dict[str, Interval]:
    """Every ratio of an arm to a baseline; empty if no task has tokens decoded by both.

    decode_speedup: decode tokens/s over the baseline's. turn_speedup: the baseline's turn time over the arm's.
    tokens_per_s: tokens of whole turns / turn time, over the baseline's. token_ms_p95_change and
    turn_tpot_ms_p95_change: P95 / the baseline's P95 - 1, so that -0.75 is three quarters less.
    """
    ours, theirs = _paired_sessions(turns, baseline)
    if not ours:
        return {}
    num_tasks = len(ours)
    intervals = {
        "decode_speedup": _rate(ours, theirs, lambda turn: turn.num_decoded, lambda turn: turn.decode_ms),
        "turn_speedup": _rate(ours, theirs, lambda turn: 1, lambda turn: turn.turn_ms),
        "tokens_per_s": _rate(ours, theirs, lambda turn: len(turn.token_ids), lambda turn: turn.turn_ms),
        "token_ms_p95_change": quotient(_token_p95(ours), _token_p95(theirs)),
        "turn_tpot_ms_p95_change": quotient(_tpot_p95(ours), _tpot_p95(theirs)),
    }
    results = {name: bootstrap(statistic, num_tasks) for name, statistic in intervals.items()}
    return {name: _less_one(each) if name.endswith("_change") else each for name, each in results.items()}


def decode_rate_interval(turns: Turns) -> Interval | None:
    """Decode tokens/s of one arm with its interval; None without decoded tokens."""
    sessions = [each for each in _sessions(turns) if measure.decode_tokens_per_s(each)]
    if not sessions:
        return None
    return bootstrap(
        ratio_of_sums(
            [sum(turn.num_decoded for turn in session) for session in sessions],
            [sum(turn.decode_ms for turn in session) / 1e3 for session in sessions],
        ),
        len(sessions),
    )


def _paired_sessions(turns: Turns, baseline: Turns) -> tuple[list[Turns], list[Turns]]:
    pairs = measure.pair_turns(turns, baseline)
    tasks: dict[str, tuple[list[TurnRecord], list[TurnRecord]]] = {}
    for our_turn, their_turn in pairs:
        ours, theirs = tasks.setdefault(our_turn.task_id, ([], []))
        ours.append(our_turn)
        theirs.append(their_turn)
    both = [each for each in tasks.values() if all(measure.decode_tokens_per_s(side) for side in each)]
    return [ours for ours, _ in both], [theirs for _, theirs in both]


def _sessions(turns: Turns) -> list[list[TurnRecord]]:
    return list(measure.group(turns, lambda turn: turn.task_id).values())


def _rate(
    ours: Sessions, theirs: Sessions, amount: Callable[[TurnRecord], float], time: Callable[[TurnRecord], float]
) -> Statistic:
    def of(sessions: Sessions) -> Statistic:
        return ratio_of_sums([sum(map(amount, each)) for each in sessions], [sum(map(time, each)) for each in sessions])

    return quotient(of(ours), of(theirs))


def _token_p95(sessions: Sessions) -> Statistic:
    latencies = [(each, task) for task, turns in enumerate(sessions) for each in measure.token_latencies(turns)]
    return quantile_of(
        [each.ms for each, _ in latencies],
        [each.num_tokens for each, _ in latencies],
        [task for _, task in latencies],
        0.95,
    )


def _tpot_p95(sessions: Sessions) -> Statistic:
    tpots = [(each, task) for task, turns in enumerate(sessions) for each in measure.turn_tpots(turns)]
    return quantile_of([each for each, _ in tpots], [1] * len(tpots), [task for _, task in tpots], 0.95)


def _less_one(interval: Interval) -> Interval:
    low = None if interval.low is None else interval.low - 1.0
    high = None if interval.high is None else interval.high - 1.0
    return Interval(interval.estimate - 1.0, low, high, interval.num_tasks)

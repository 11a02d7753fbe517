"""Results on disk: the log of turns (JSONL, append-only, so that a run can be resumed) and the summary made of it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from paceline.bench import measure
from paceline.bench.arms import ARMS
from paceline.bench.compare import (
    AUTOREGRESSIVE,
    BASELINES,
    CONTIGUOUS,
    compare,
    decode_rate_interval,
    same_cache_baseline,
)
from paceline.bench.machine import Machine
from paceline.bench.measure import KVLayout
from paceline.bench.peers.catalog import PEER_ARMS, plain_arm
from paceline.bench.records import StepRecord, TurnRecord
from paceline.bench.statistics import quantile
from paceline.errors import BenchmarkError

_STEP_FIELDS = tuple(each.name for each in fields(StepRecord))


@dataclass(frozen=True, slots=True)
class RunInfo:
    """What a summary needs to know beside the turns.

    Attributes:
        kv_budget_bytes: the K/V memory for which ``peak_sessions`` is reckoned, the same for all arms.
        layouts: how each arm takes K/V memory; arms without one (other engines) have no ``peak_sessions``.
        not_run: what was asked for and could not run, or not to the end: a peer or one arm of it, and why.
    """

    machine: Machine
    model: str
    draft: str | None
    suite: str
    kv_budget_bytes: int = 0
    layouts: Mapping[str, KVLayout] = field(default_factory=dict)
    not_run: Mapping[str, str] = field(default_factory=dict)


# The log


def append_records(path: Path, records: Iterable[TurnRecord]) -> None:
    """Add a line for each, in one write. What a kill left of an unfinished line is removed first."""
    lines = "".join(encode(record) + "\n" for record in records)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        _cut_unfinished_line(file.fileno())
        file.write(lines.encode())


def read_records(path: Path) -> list[TurnRecord]:
    """All turns in the log, in order; none if there is no file. A last line without its newline is left out.

    Raises:
        BenchmarkError: another line is no turn.
    """
    if not path.exists():
        return []
    *lines, _unfinished = path.read_bytes().split(b"\n")
    records = []
    for number, line in enumerate(lines, 1):
        try:
            records.append(decode(line.decode()))
        except (ValueError, KeyError, TypeError) as error:
            raise BenchmarkError(f"{path}, line {number} is not a benchmark turn: {error!r}; remove it") from error
    return records


def encode(record: TurnRecord) -> str:
    """One line of JSON. Steps are stored column by column, which is a third of the size."""
    data = {each.name: getattr(record, each.name) for each in fields(TurnRecord)}
    data["token_ids"] = list(record.token_ids)
    data["steps"] = {name: [getattr(step, name) for step in record.steps] for name in _STEP_FIELDS}
    data["extra"] = dict(record.extra)
    return json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def decode(line: str) -> TurnRecord:
    """The inverse of :func:`encode`. Columns a past version did not write take their defaults."""
    data = json.loads(line)
    columns = data.pop("steps")
    if "expected_acceptances" in columns:
        columns["expected_acceptances"] = map(tuple, columns["expected_acceptances"])
    rows = zip(*columns.values(), strict=True)
    steps = tuple(StepRecord(**dict(zip(columns, row, strict=True))) for row in rows)
    data["token_ids"] = tuple(data["token_ids"])
    return TurnRecord(**data, steps=steps)


def _cut_unfinished_line(descriptor: int) -> None:
    end = size = os.fstat(descriptor).st_size
    while end and os.pread(descriptor, 1, end - 1) != b"\n":
        end -= 1
    if end != size:
        os.ftruncate(descriptor, end)


# The summary


def summarise(records: Iterable[TurnRecord], info: RunInfo) -> dict[str, Any]:
    """The public result: {"machine", "model", "draft", "suite", "not_run", "peers", "arms", "ratios"}, ready for JSON.

    A later record of the same (arm, task, turn) replaces an earlier one. ``ratios`` is {ARM: {BASELINE: {RATIO:
    {"estimate", "low", "high", "tasks"}}}} for the baselines that were run.
    """
    arms = by_arm(records)
    return {
        "machine": info.machine.to_dict(),
        "model": info.model,
        "draft": info.draft,
        "suite": info.suite,
        "not_run": dict(info.not_run),
        "peers": {arm: _summarise_peer(arm, arms) for arm in arms if arm in PEER_ARMS},
        "arms": {arm: _summarise_arm(arm, arms, info) for arm in arms},
        "ratios": {arm: _ratios(arm, arms) for arm in arms},
    }


def by_arm(records: Iterable[TurnRecord]) -> dict[str, list[TurnRecord]]:
    """The latest record of each turn by arm: the baselines first, then in the order of ``ARMS``, then all others."""
    latest = {(record.arm, record.task_id, record.turn): record for record in records}
    arms = measure.group(list(latest.values()), lambda record: record.arm)
    order = dict.fromkeys([CONTIGUOUS, AUTOREGRESSIVE, *ARMS, *arms])
    return {arm: arms[arm] for arm in order if arm in arms}


def _summarise_arm(arm: str, arms: Mapping[str, Sequence[TurnRecord]], info: RunInfo) -> dict[str, Any]:
    turns = arms[arm]
    identical, compared = measure.identical_turns(turns, arms.get(AUTOREGRESSIVE, ()))
    prediction = measure.predict(turns, arms.get(same_cache_baseline(arm), ()))
    rate = decode_rate_interval(turns)
    return {
        "tasks": len({turn.task_id for turn in turns}),
        "turns": len(turns),
        "tokens": sum(len(turn.token_ids) for turn in turns),
        "decode_tokens_per_s": measure.decode_tokens_per_s(turns),
        "decode_tokens_per_s_interval": [rate.low, rate.high] if rate else None,
        "token_ms_p50": measure.token_ms_quantile(turns, 0.50),
        "token_ms_p95": measure.token_ms_quantile(turns, 0.95),
        "turn_tpot_ms_p95": quantile(measure.turn_tpots(turns), 0.95) or 0.0,
        "turn_ms_mean": sum(turn.turn_ms for turn in turns) / len(turns),
        "ttft_ms_p50": quantile(measure.ttfts(turns), 0.50) or 0.0,
        "ttft_cold_ms_p50": quantile(measure.ttfts(turns, is_cold=True), 0.50),
        "ttft_warm_ms_p50": quantile(measure.ttfts(turns, is_cold=False), 0.50),
        **_speculation(turns),
        "predicted_speedup": prediction.speedup if prediction else None,
        "cost_ratio": prediction.cost_ratio if prediction else None,
        "verify_cost": prediction.verify_cost if prediction else None,
        **_memory(turns, info.layouts.get(arm), info.kv_budget_bytes),
        "identical_to_autoregressive": {"count": identical, "total": compared},
    }


def _summarise_peer(arm: str, arms: Mapping[str, Sequence[TurnRecord]]) -> dict[str, Any]:
    """What an arm of another engine ran on, and whether drafting changed that engine's own tokens."""
    extra, plain = arms[arm][-1].extra, plain_arm(arm)
    identical, compared = measure.identical_turns(arms[arm], arms.get(plain, ()))
    return {
        "version": extra.get("peer_version"),
        "weights": extra.get("weights"),
        "identical_to_plain": {"count": identical, "total": compared} if plain != arm else None,
    }


def _speculation(turns: Sequence[TurnRecord]) -> dict[str, Any]:
    kinds = measure.group(turns, lambda turn: turn.kind)
    return {
        "drafted": sum(step.num_drafted for step in measure.rounds_of(turns)),
        "acceptance_rate": measure.acceptance_rate(measure.rounds_of(turns)),
        "mean_acceptance_length": measure.mean_acceptance_length(turns),
        "mean_horizon": measure.mean_horizon(turns),
        "acceptance_by_position": [
            {**asdict(each), "conditional": each.conditional, "survival": each.survival}
            for each in measure.acceptance_by_position(turns)
        ],
        "acceptance_by_source": {
            source: {
                "drafted": sum(step.num_drafted for step in rounds),
                "accepted": sum(step.num_accepted for step in rounds),
                "rate": measure.acceptance_rate(rounds),
            }
            for source, rounds in measure.rounds_by_source(turns).items()
        },
        "acceptance_by_kind": {
            kind: measure.acceptance_rate(rounds) for kind, each in kinds.items() if (rounds := measure.rounds_of(each))
        },
        "calibration_error": measure.calibration_error(turns),
        "horizon_histogram": measure.horizon_histogram(turns),
        "mean_horizon_by_kind": {kind: measure.mean_horizon(each) for kind, each in kinds.items()},
    }


def _memory(turns: Sequence[TurnRecord], layout: KVLayout | None, budget_bytes: int) -> dict[str, Any]:
    contexts = measure.final_contexts(turns)
    return {
        "kv_waste": measure.kv_waste(turns),
        "peak_sessions": measure.peak_sessions(contexts, layout, budget_bytes) if layout else None,
        "peak_sessions_p95": measure.peak_sessions(contexts, layout, budget_bytes, 0.95) if layout else None,
        "final_context_mean": sum(contexts) / len(contexts),
        "kv_layout": {**asdict(layout), "budget_bytes": budget_bytes} if layout else None,
        "peak_rss_mib": measure.peak_rss_mib(turns),
    }


def _ratios(arm: str, arms: Mapping[str, Sequence[TurnRecord]]) -> dict[str, Any]:
    return {
        baseline: {name: interval.to_dict() for name, interval in compare(arms[arm], arms[baseline]).items()}
        for baseline in BASELINES
        if baseline in arms and baseline != arm
    }

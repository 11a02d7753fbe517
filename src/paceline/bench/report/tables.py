"""The tables below the headline, as rows of text for both formats."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.bench.compare import BASELINES
from paceline.bench.report.numbers import (
    UNKNOWN,
    change,
    count,
    interval,
    mebibytes,
    milliseconds,
    percent,
    plain,
    rate,
    times,
)


@dataclass(frozen=True, slots=True)
class Table:
    """A title, the header of the columns, and rows whose first cell is their header."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


_MEASURES: Sequence[tuple[str, str, Callable[[Any], str]]] = (
    ("Tasks", "tasks", count),
    ("Turns", "turns", count),
    ("Tokens generated", "tokens", count),
    ("Decode tokens/s", "decode_tokens_per_s", rate),
    ("Token latency, P50", "token_ms_p50", milliseconds),
    ("Token latency, P95", "token_ms_p95", milliseconds),
    ("Mean token latency of a turn, P95", "turn_tpot_ms_p95", milliseconds),
    ("Turn time, mean", "turn_ms_mean", milliseconds),
    ("Time to first token, P50", "ttft_ms_p50", milliseconds),
    ("… of cold turns", "ttft_cold_ms_p50", milliseconds),
    ("… of warm turns", "ttft_warm_ms_p50", milliseconds),
    ("Acceptance rate", "acceptance_rate", percent),
    ("Mean acceptance length", "mean_acceptance_length", plain),
    ("Mean horizon", "mean_horizon", plain),
    ("Draft cost per token (r)", "cost_ratio", plain),
    ("Verify cost (v)", "verify_cost", plain),
    ("Decode speedup predicted from these", "predicted_speedup", times),
    ("KV waste", "kv_waste", percent),
    ("Sessions in the KV budget, mean context", "peak_sessions", count),
    ("Sessions in the KV budget, P95 context", "peak_sessions_p95", count),
    ("Peak resident memory", "peak_rss_mib", mebibytes),
)
_DRAFTING = {"acceptance_rate", "mean_acceptance_length", "mean_horizon"}

_RATIOS: Sequence[tuple[str, str, Callable[[float], str]]] = (
    ("decode tokens/s", "decode_speedup", times),
    ("turn time", "turn_speedup", times),
    ("tokens/s of whole turns", "tokens_per_s", times),
    ("P95 token latency", "token_ms_p95_change", change),
    ("P95 of turn means", "turn_tpot_ms_p95_change", change),
)


def arms_table(summary: Mapping[str, Any]) -> Table:
    """Every measure of every arm, an arm per column."""
    arms = summary["arms"]
    rows = [[label, *(_cell(arm, name, show) for arm in arms.values())] for label, name, show in _MEASURES]
    rows.append(["Turns identical to autoregressive", *(_identity(arm) for arm in arms.values())])
    return Table("Arms", ["", *arms], rows)


def ratio_tables(summary: Mapping[str, Any]) -> list[Table]:
    """Each arm over each baseline that was run, with intervals: a table per baseline."""
    header = ["", *(label for label, _, _ in _RATIOS)]
    tables = []
    for baseline in BASELINES:
        rows = [
            [arm, *(_ratio(baselines[baseline].get(name), show) for _, name, show in _RATIOS)]
            for arm, baselines in summary["ratios"].items()
            if baseline in baselines
        ]
        tables.append(Table(f"Gains over {baseline}", header, rows))
    return tables


def position_table(summary: Mapping[str, Any]) -> Table:
    """Acceptance given that all drafts before were accepted, position by position, of arms that drafted."""
    arms = {arm: each["acceptance_by_position"] for arm, each in summary["arms"].items() if each["drafted"]}
    longest = max((len(positions) for positions in arms.values()), default=0)
    rows = [
        [arm, *(_position(each) for each in positions), *[UNKNOWN] * (longest - len(positions))]
        for arm, positions in arms.items()
    ]
    return Table("Acceptance by position", ["", *(str(position) for position in range(1, longest + 1))], rows)


def source_table(summary: Mapping[str, Any]) -> Table:
    """What each drafter of each arm drafted."""
    rows = [
        [f"{arm}: {source}", count(each["drafted"]), count(each["accepted"]), percent(each["rate"])]
        for arm, found in summary["arms"].items()
        for source, each in found["acceptance_by_source"].items()
    ]
    return Table("Acceptance by drafter", ["", "drafted", "accepted", "rate"], rows)


def peer_table(summary: Mapping[str, Any]) -> Table:
    """The other engines, and where their prompt lookup gave other tokens than their own plain decoding."""
    rows = [
        [arm, each["version"] or UNKNOWN, each["weights"] or UNKNOWN, _share(each["identical_to_plain"])]
        for arm, each in summary["peers"].items()
    ]
    return Table("Other engines", ["", "version", "weights", "turns identical to its own plain arm"], rows)


def not_run_table(summary: Mapping[str, Any]) -> Table:
    """What was asked for and is missing, or stopped on the way."""
    return Table("Not run", ["", "reason"], [[who, reason] for who, reason in summary["not_run"].items()])


def machine_table(summary: Mapping[str, Any]) -> Table:
    """The machine, the versions and what was run."""
    machine = summary["machine"]
    threads = machine["num_threads"]
    rows = [
        ["Model", summary["model"]],
        ["Draft", summary["draft"] or "none"],
        ["Suite", summary["suite"]],
        ["Measured at", machine["measured_at"]],
        ["Processor", machine["processor"]],
        ["Cores", f"{machine['num_usable_cores']} usable of {machine['num_cores']}"],
        ["Threads", "default" if threads is None else str(threads)],
        ["Instructions", " ".join(machine["instructions"]) or UNKNOWN],
        ["Accelerator", machine["accelerator"] or "none"],
        ["Memory", f"{machine['memory_gib']:.1f} GiB"],
        ["Load at the start", f"{machine['load']:.2f}"],
        ["System", machine["system"]],
        ["Python", machine["versions"]["python"]],
        *([name, version] for name, version in machine["versions"]["packages"].items()),
    ]
    return Table("Machine and versions", ["", ""], rows)


def _cell(arm: Mapping[str, Any], name: str, show: Callable[[Any], str]) -> str:
    if arm[name] is None or (name in _DRAFTING and not arm["drafted"]):
        return UNKNOWN
    return show(arm[name])


def _identity(arm: Mapping[str, Any]) -> str:
    return _share(arm["identical_to_autoregressive"])


def _share(found: Mapping[str, int] | None) -> str:
    return f"{found['count']} of {found['total']}" if found and found["total"] else UNKNOWN


def _ratio(entry: Mapping[str, Any] | None, show: Callable[[float], str]) -> str:
    return UNKNOWN if entry is None else show(entry["estimate"]) + interval(entry, show)


def _position(entry: Mapping[str, Any]) -> str:
    return UNKNOWN if entry["conditional"] is None else f"{100 * entry['conditional']:.0f} %"

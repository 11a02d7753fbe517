"""The seven headline rows: what was measured, beside the mark the project set itself, met or missed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.bench.compare import CONTIGUOUS, same_cache_baseline
from paceline.bench.report.numbers import NOT_RUN, UNKNOWN, change, interval, milliseconds, percent, rate, times

Summary = Mapping[str, Any]
Entry = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class HeadlineArms:
    """The arms in the three columns. ``static`` None stands for the fastest ``static-*`` arm on the paged cache."""

    contiguous: str = CONTIGUOUS
    static: str | None = None
    dynamic: str = "dynamic"


@dataclass(frozen=True, slots=True)
class Gain:
    """One measured gain beside its mark; ``is_met`` is None where it was not measured."""

    label: str
    measured: str
    mark: str
    is_met: bool | None

    @property
    def verdict(self) -> str:
        """In a word or two."""
        return {True: "met", False: "missed", None: "not measured"}[self.is_met]


@dataclass(frozen=True, slots=True)
class Row:
    """One row: a cell for each of the three arms, and the gains."""

    label: str
    note: str
    cells: Sequence[str]
    gains: Sequence[Gain]


@dataclass(frozen=True, slots=True)
class Headline:
    """The table, and how many turns had the same tokens as autoregressive decoding."""

    columns: Sequence[str]
    rows: Sequence[Row]
    identity: str


def headline(summary: Summary, arms: HeadlineArms | None = None) -> Headline:
    """The rows in their order. An arm that was not run leaves ``not run`` in its cells and no gain that needs it."""
    arms = arms or HeadlineArms()
    return _Maker(summary, arms.contiguous, arms.static or _fastest_static(summary), arms.dynamic).headline()


def _fastest_static(summary: Summary) -> str:
    speeds = {
        name: arm["decode_tokens_per_s"]
        for name, arm in summary["arms"].items()
        if name.startswith("static") and not name.endswith("-contiguous")
    }
    return max(speeds, key=speeds.__getitem__, default="static")


class _Maker:
    def __init__(self, summary: Summary, contiguous: str, static: str, dynamic: str) -> None:
        self._arms: Mapping[str, Entry] = summary["arms"]
        self._ratios: Mapping[str, Mapping[str, Entry]] = summary["ratios"]
        self._contiguous, self._static, self._dynamic = contiguous, static, dynamic

    def headline(self) -> Headline:
        static = f"static speculation ({self._static})" if self._static in self._arms else "static speculation"
        columns = ("autoregressive (contiguous)", static, "dynamic paged", "gain")
        return Headline(columns, [*self._speed_rows(), *self._memory_rows(), self._acceptance_row()], self._identity())

    def _speed_rows(self) -> list[Row]:
        return [
            self._row(
                "P95 per-token latency",
                "each token is charged its share of its step; turn means: the mean of each turn",
                self._measure("token_ms_p95", milliseconds),
                self._over_contiguous("token_ms_p95_change", change, "−76.9 %", lambda value: value <= -0.769),
                self._over_contiguous(
                    "turn_tpot_ms_p95_change", change, "−76.9 %", lambda value: value <= -0.769, "turn means"
                ),
            ),
            self._row(
                "End-to-end turn time",
                "mean, from submission to the last token",
                self._measure("turn_ms_mean", milliseconds),
                self._over_contiguous("turn_speedup", times, "4.8 ×", lambda value: value >= 4.8),
            ),
            self._row(
                "Tokens/s",
                "decoding: after the first token of each turn",
                self._measure("decode_tokens_per_s", rate),
                self._over_contiguous("decode_speedup", times, "4.35 ×", lambda value: value >= 4.35),
            ),
            self._row(
                "Decode speedup over autoregressive on the same cache",
                "the share of speculation alone",
                self._same_cache_speedup,
                _ratio_gain(self._same_cache_ratio(self._dynamic), times, "3.2 ×", lambda value: value >= 3.2),
            ),
        ]

    def _memory_rows(self) -> list[Row]:
        waste, sessions = self._before_and_after("kv_waste"), self._before_and_after("peak_sessions")
        return [
            self._row(
                "KV memory waste",
                "slots held without a verified token, mean over steps",
                self._measure("kv_waste", percent),
                Gain("", f"{percent(waste[0])} → {percent(waste[1])}", "42.1 % → 1.2 %", waste[1] <= 0.012)
                if waste
                else Gain("", "", "42.1 % → 1.2 %", None),
            ),
            self._row(
                "Sessions in the same KV memory",
                "of this workload's final contexts, nothing shared",
                self._measure("peak_sessions", str),
                Gain("", times(sessions[1] / sessions[0]), "2 ×", sessions[1] >= 2 * sessions[0])
                if sessions and sessions[0]
                else Gain("", "", "2 ×", None),
            ),
        ]

    def _acceptance_row(self) -> Row:
        return self._row(
            "Draft token acceptance",
            "accepted / drafted",
            lambda arm: percent(self._arms[arm]["acceptance_rate"]) if self._arms[arm]["drafted"] else "no drafts",
            self._acceptance_gain(self._dynamic, "", "86.8 %", 0.868),
            self._acceptance_gain(self._static, "static", "71.4 %", 0.714),
        )

    def _row(self, label: str, note: str, cell: Callable[[str], str], *gains: Gain) -> Row:
        arms = (self._contiguous, self._static, self._dynamic)
        return Row(label, note, [cell(arm) if arm in self._arms else NOT_RUN for arm in arms], gains)

    def _measure(self, name: str, show: Callable[[Any], str]) -> Callable[[str], str]:
        def cell(arm: str) -> str:
            value = self._arms[arm][name]
            return UNKNOWN if value is None else show(value)

        return cell

    def _over_contiguous(
        self, name: str, show: Callable[[float], str], mark: str, is_met: Callable[[float], bool], label: str = ""
    ) -> Gain:
        entry = self._ratios.get(self._dynamic, {}).get(self._contiguous, {}).get(name)
        return _ratio_gain(entry, show, mark, is_met, label)

    def _same_cache_ratio(self, arm: str) -> Entry | None:
        return self._ratios.get(arm, {}).get(same_cache_baseline(arm), {}).get("decode_speedup")

    def _same_cache_speedup(self, arm: str) -> str:
        if arm == same_cache_baseline(arm):
            return times(1.0)
        entry = self._same_cache_ratio(arm)
        return times(entry["estimate"]) if entry else UNKNOWN

    def _before_and_after(self, name: str) -> tuple[float, float] | None:
        """A measure of the contiguous and the dynamic arm, if both have it."""
        before, after = (self._arms.get(arm, {}).get(name) for arm in (self._contiguous, self._dynamic))
        return None if before is None or after is None else (before, after)

    def _acceptance_gain(self, arm: str, label: str, mark: str, least: float) -> Gain:
        found = self._arms.get(arm)
        if found is None or not found["drafted"]:
            return Gain(label, "", mark, None)
        return Gain(label, percent(found["acceptance_rate"]), mark, found["acceptance_rate"] >= least)

    def _identity(self) -> str:
        counts = {
            arm: self._arms[arm]["identical_to_autoregressive"]
            for arm in (self._contiguous, self._static, self._dynamic)
            if arm in self._arms
        }
        parts = [f"{arm} {each['count']} of {each['total']}" for arm, each in counts.items() if each["total"]]
        return f"Turns with the same tokens as autoregressive: {', '.join(parts)}." if parts else ""


def _ratio_gain(
    entry: Entry | None, show: Callable[[float], str], mark: str, is_met: Callable[[float], bool], label: str = ""
) -> Gain:
    if entry is None:
        return Gain(label, "", mark, None)
    return Gain(label, show(entry["estimate"]) + interval(entry, show), mark, is_met(entry["estimate"]))

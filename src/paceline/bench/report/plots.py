"""The plots. Each takes numbers and returns an SVG element, or None where there is nothing to show."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from paceline.bench import measure
from paceline.bench.compare import AUTOREGRESSIVE, same_cache_baseline
from paceline.bench.records import TurnRecord
from paceline.bench.report.svg import GRID, INK, MUTED, SERIES, figure, house_style, to_svg

Arms = Mapping[str, Sequence[TurnRecord]]
Summary = Mapping[str, Any]

_KINDS = ("prose", "new code", "edit")
# An arm keeps its colour on every page: by how it decodes. The contiguous cache is the same colour, dashed or pale.
_KNOWN = {"dynamic": 0, "static-2": 1, "static-4": 2, "static-8": 3, "suffix": 4, "draft": 5, AUTOREGRESSIVE: 6}
_OTHERS = (7, 8)
_WINDOW = 16
_LEAST_WASTE = 0.001  # what the logarithmic axis shows of none
_DASHED = (0, (4, 2))


def all_plots(summary: Summary, arms: Arms, dynamic: str) -> list[tuple[str, str]]:
    """Captions and SVG elements, in the order of the page; ``dynamic`` is the arm whose session is shown."""
    with house_style():
        plots = [
            ("Decode tokens/s, with 95 % intervals over tasks", tokens_per_s(summary)),
            ("Per-token latency: share of tokens at most this late", latency_distribution(arms)),
            (f"Horizon and accepted drafts over one session ({dynamic})", horizon_over_session(arms, dynamic)),
            ("Acceptance by kind of text", acceptance_by_kind(summary)),
            (f"KV waste over one session, moving mean of {_WINDOW} steps", waste_over_session(arms)),
        ]
    return [(caption, svg) for caption, svg in plots if svg]


def tokens_per_s(summary: Summary) -> str | None:
    """A bar per arm with its interval."""
    arms = summary["arms"]
    if not arms:
        return None
    drawn = figure(1.0 + 0.42 * len(arms))
    axes = drawn.add_subplot()
    largest = max(_upper(arm) for arm in arms.values())
    for row, (name, arm) in enumerate(arms.items()):
        rate = arm["decode_tokens_per_s"]
        axes.barh(row, rate, height=0.6, **_bar(name, arms))
        low, high = arm["decode_tokens_per_s_interval"] or (None, None)
        if low is not None and high is not None:
            axes.plot([low, high], [row, row], color=INK, linewidth=1.4, marker="|", markersize=7)
        axes.text(_upper(arm) + 0.02 * largest, row, f"{rate:.1f}", va="center", color=INK)
    axes.set_yticks(range(len(arms)), list(arms), color=INK)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.14 * largest or 1)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("tokens per second")
    return to_svg(drawn, "tokens", "Decode tokens per second of each arm")


def latency_distribution(arms: Arms) -> str | None:
    """The cumulative distribution over tokens, with the 95 % line."""
    drawn = figure(3.3, legend_entries=len(arms))
    axes = drawn.add_subplot()
    any_tokens = False
    for name, turns in arms.items():
        latencies = sorted((each.ms, each.num_tokens) for each in measure.token_latencies(turns))
        if not latencies:
            continue
        any_tokens = True
        times, weights = np.array(latencies).T
        share = np.cumsum(weights) / weights.sum()
        keep = np.unique(np.searchsorted(share, np.linspace(0, 1, 200)).clip(max=len(share) - 1))
        axes.step(times[keep], share[keep], where="post", **_line(name, arms))
    if not any_tokens:
        return None
    axes.axhline(0.95, color=MUTED, linewidth=0.9, linestyle=(0, (4, 3)))
    axes.text(0.01, 0.94, "P95", transform=axes.transAxes, ha="left", va="top", color=MUTED)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(FuncFormatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "25" else ""))
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, symbol=" %"))
    axes.set_xlabel("ms per token")
    _legend(axes)
    return to_svg(drawn, "latency", "Cumulative distribution of per-token latency of each arm")


def horizon_over_session(arms: Arms, arm: str) -> str | None:
    """Of each round of the longest session: how many tokens might be drafted, and how many were accepted."""
    session = _longest_session(arms.get(arm, ()))
    if not measure.rounds_of(session):
        return None
    steps = measure.steps_of(session)
    position = np.cumsum([0] + [step.num_tokens for step in steps[:-1]])
    drawn = figure(3.1, legend_entries=2)
    axes = drawn.add_subplot()
    axes.fill_between(
        position,
        [step.num_accepted for step in steps],
        step="post",
        color=SERIES[0],
        alpha=0.45,
        linewidth=0,
        label="accepted",
    )
    axes.step(position, [step.horizon for step in steps], where="post", color=INK, linewidth=1.2, label="horizon")
    axes.set_ylim(0, 1.18 * max(1, max(max(step.horizon, step.num_accepted) for step in steps)))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    axes.set_ylabel("draft tokens")
    _mark_turns(axes, session)
    _legend(axes)
    return to_svg(drawn, "session", f"Horizon and accepted drafts of {arm} over its longest session")


def acceptance_by_kind(summary: Summary) -> str | None:
    """Bars by kind of text, of the arms that drafted."""
    drafting = {name: arm["acceptance_by_kind"] for name, arm in summary["arms"].items() if arm["drafted"]}
    if not drafting:
        return None
    drawn = figure(3.0, legend_entries=len(drafting))
    axes = drawn.add_subplot()
    width = 0.8 / len(drafting)
    for index, (name, kinds) in enumerate(drafting.items()):
        offsets = [place + (index - (len(drafting) - 1) / 2) * width for place in range(len(_KINDS))]
        rates = [kinds.get(kind, 0.0) for kind in _KINDS]
        axes.bar(offsets, rates, 0.9 * width, **_bar(name, summary["arms"]))
        if len(drafting) <= 3:
            for offset, kind in zip(offsets, _KINDS, strict=True):
                label = f"{100 * kinds[kind]:.0f} %" if kind in kinds else "–"
                axes.text(
                    offset, kinds.get(kind, 0.0) + 0.015, label, ha="center", va="bottom", color=INK, fontsize=9.5
                )
    axes.set_xticks(range(len(_KINDS)), _KINDS, color=INK)
    axes.set_ylim(0, 1.08)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1.0])
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, symbol=" %", decimals=0))
    axes.grid(visible=False, axis="x")
    _legend(axes)
    return to_svg(drawn, "kinds", "Acceptance rate of each drafting arm by kind of text")


def waste_over_session(arms: Arms) -> str | None:
    """Waste after each step of the same session in every arm that reports slots."""
    longest = max(arms.values(), key=len, default=[])
    session = _longest_session(longest)
    if not session:
        return None
    drawn = figure(3.1, legend_entries=len(arms))
    axes = drawn.add_subplot()
    drew = False
    for name, turns in arms.items():
        steps = measure.steps_of([turn for turn in turns if turn.task_id == session[0].task_id])
        position = np.cumsum([step.num_tokens for step in steps])
        known = [
            (place, 1.0 - step.filled_slots / step.reserved_slots)
            for place, step in zip(position, steps, strict=True)
            if step.reserved_slots
        ]
        if len(known) >= _WINDOW:
            drew = True
            places, wastes = np.array(known).T
            smooth = np.convolve(wastes, np.full(_WINDOW, 1 / _WINDOW), mode="valid").clip(min=_LEAST_WASTE)
            axes.plot(places[_WINDOW - 1 :], smooth, **_line(name, arms))
    if not drew:
        return None
    axes.set_yscale("log")
    axes.set_ylim(_LEAST_WASTE, 1)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g} %"))
    axes.set_xlim(left=0)
    axes.set_xlabel("tokens generated in the session")
    _legend(axes)
    return to_svg(drawn, "waste", "Share of reserved KV slots without a verified token over one session, by arm")


def _upper(arm: Mapping[str, Any]) -> float:
    _, high = arm["decode_tokens_per_s_interval"] or (None, None)
    return float(arm["decode_tokens_per_s"] if high is None else max(high, arm["decode_tokens_per_s"]))


def _is_contiguous(arm: str) -> bool:
    return same_cache_baseline(arm) != AUTOREGRESSIVE


def _colour(arm: str, arms: Iterable[str]) -> str:
    """``arms`` are all of the page; those the project does not know take the colours left, in order."""
    decoding = arm.removesuffix("-contiguous")
    if decoding in _KNOWN:
        return SERIES[_KNOWN[decoding]]
    others = dict.fromkeys(each.removesuffix("-contiguous") for each in arms)
    index = [each for each in others if each not in _KNOWN].index(decoding)
    return SERIES[_OTHERS[index % len(_OTHERS)]]


def _line(arm: str, arms: Iterable[str]) -> dict[str, Any]:
    style = _DASHED if _is_contiguous(arm) else "solid"
    return {"color": _colour(arm, arms), "linestyle": style, "linewidth": 1.8, "label": arm}


def _bar(arm: str, arms: Iterable[str]) -> dict[str, Any]:
    return {"color": _colour(arm, arms), "alpha": 0.5 if _is_contiguous(arm) else 1.0, "label": arm}


def _longest_session(turns: Sequence[TurnRecord]) -> list[TurnRecord]:
    """The task with most generated tokens; the first of them on a tie."""
    sessions = measure.group(turns, lambda turn: turn.task_id)
    return max(sessions.values(), key=lambda session: sum(len(turn.token_ids) for turn in session), default=[])


def _mark_turns(axes: Axes, session: Sequence[TurnRecord]) -> None:
    """A line where a turn begins, and what kind of text it is if there is room."""
    lengths = [sum(step.num_tokens for step in turn.steps) for turn in session]
    starts = np.cumsum([0, *lengths[:-1]])
    for start, length, turn in zip(starts, lengths, session, strict=True):
        axes.axvline(start, color=GRID, linewidth=1.2)
        if length > 0.12 * sum(lengths):
            axes.text(
                start + length / 2,
                0.985,
                turn.kind,
                transform=axes.get_xaxis_transform(),
                ha="center",
                va="top",
                color=MUTED,
            )
    axes.grid(visible=False, axis="x")
    axes.set_xlim(0, sum(lengths))
    axes.set_xlabel("tokens generated in the session")


def _legend(axes: Axes) -> None:
    num_columns = 2 if len(axes.get_legend_handles_labels()[1]) > 1 else 1
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(0, 1.0),
        ncols=num_columns,
        borderaxespad=0.2,
        handlelength=1.4,
        columnspacing=1.4,
    )

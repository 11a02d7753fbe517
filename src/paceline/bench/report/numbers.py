"""How numbers are written in a report."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

NOT_RUN = "not run"
UNKNOWN = "–"


def milliseconds(value: float) -> str:
    """Three significant digits; seconds from one second on."""
    if value >= 1000.0:
        return f"{_significant(value / 1e3)} s"
    return f"{_significant(value)} ms"


def percent(value: float) -> str:
    """A share of one."""
    return f"{100.0 * value:.1f} %"


def change(value: float) -> str:
    """A relative change, always with its sign."""
    return f"{'−' if value < 0 else '+'}{abs(100.0 * value):.1f} %"


def times(value: float) -> str:
    """A factor."""
    return f"{value:.2f} ×"


def rate(value: float) -> str:
    """Tokens per second."""
    return f"{value:.1f}"


def count(value: float) -> str:
    """A whole number with thousands apart."""
    return f"{value:,.0f}".replace(",", " ")


def plain(value: float) -> str:
    """Two decimals."""
    return f"{value:.2f}"


def mebibytes(value: float) -> str:
    """A memory size."""
    return f"{value:.0f} MiB" if value else UNKNOWN


def interval(entry: Mapping[str, Any], show: Callable[[float], str]) -> str:
    """`` (low to high)`` without the unit, or nothing where there is no interval."""
    if entry["low"] is None:
        return ""
    low, high = (show(entry[bound]).rpartition(" ")[0] for bound in ("low", "high"))
    return f" ({low} to {high})"


def _significant(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"

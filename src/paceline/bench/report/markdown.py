"""The report as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.bench.report.headline import Gain, Headline
from paceline.bench.report.tables import Table, arms_table, machine_table, not_run_table, peer_table, ratio_tables


def markdown_report(summary: Mapping[str, Any], top: Headline) -> str:
    """Headline, what was not run, arms, ratios, other engines and machine."""
    tables = [
        not_run_table(summary),
        arms_table(summary),
        *ratio_tables(summary),
        peer_table(summary),
        machine_table(summary),
    ]
    parts = [
        f"# Paceline benchmark: {_text(summary['suite'])} with {_text(summary['model'])}\n",
        headline_table(top),
        f"{top.identity}\n",
        *(_titled(table) for table in tables if table.rows),
    ]
    return "\n".join(parts)


def headline_table(top: Headline) -> str:
    """The seven rows, for a README."""
    body = [[row.label, *row.cells, "; ".join(_gain(gain) for gain in row.gains)] for row in top.rows]
    return _table(["", *top.columns], body)


def _gain(gain: Gain) -> str:
    label = f"{gain.label} " if gain.label else ""
    if gain.is_met is None:
        return f"{label}not measured (mark {gain.mark})"
    return f"{label}**{gain.measured}** (mark {gain.mark}: {gain.verdict if gain.is_met else gain.verdict.upper()})"


def _titled(table: Table) -> str:
    return f"## {table.title}\n\n{_table(table.header, table.rows)}"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *([_text(cell) for cell in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _text(cell: str) -> str:
    return cell.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")

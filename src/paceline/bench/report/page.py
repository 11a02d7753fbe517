"""The report as one HTML page that needs nothing beside itself: no script, no font, no image from elsewhere."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from paceline.bench.report.headline import Gain, Headline, Row
from paceline.bench.report.numbers import NOT_RUN, UNKNOWN
from paceline.bench.report.tables import (
    Table,
    arms_table,
    machine_table,
    not_run_table,
    peer_table,
    position_table,
    ratio_tables,
    source_table,
)

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
<main>
<header>
<h1>{title}</h1>
<p class="lead">{lead}</p>
</header>
{sections}
</main>
</body>
</html>
"""
_RATIO_NOTE = (
    "On the turns both arms ran, with 95 % intervals by paired bootstrap over tasks (2,000 resamples). "
    "They speak of other tasks like these, not of other machines."
)
_PEER_NOTE = (
    "Each engine on the same token ids, with the same number of threads and the same limit of tokens. The last column "
    "compares an arm that drafts with the same engine's arm that does not: a difference is that engine's own rounding."
)


def html_page(summary: Mapping[str, Any], top: Headline, plots: Sequence[tuple[str, str]] | None) -> str:
    """The page; ``plots`` are captions with SVG elements, or None where matplotlib is not installed."""
    draft = f", draft {summary['draft']}" if summary["draft"] else ""
    return _PAGE.format(
        title=escape(f"Paceline benchmark: {summary['suite']}"),
        style=files(__package__).joinpath("style.css").read_text(encoding="utf-8"),
        lead=escape(
            f"{summary['model']}{draft} on {summary['machine']['processor']}, {summary['machine']['measured_at']}"
        ),
        sections="\n".join(
            [
                _headline(top),
                _table(not_run_table(summary)),
                _table(arms_table(summary)),
                *(_table(table, _RATIO_NOTE) for table in ratio_tables(summary)),
                _plots(plots),
                _table(position_table(summary), "Of rounds that accepted every draft before this position."),
                _table(source_table(summary)),
                _table(peer_table(summary), _PEER_NOTE),
                _table(machine_table(summary), kind="facts"),
                _raw(summary),
            ]
        ),
    )


def _headline(top: Headline) -> str:
    header = "".join(f'<th scope="col">{escape(column)}</th>' for column in ("", *top.columns))
    body = "\n".join(_headline_row(row, top.columns) for row in top.rows)
    table = f'<table class="headline">\n<thead><tr>{header}</tr></thead>\n<tbody>\n{body}\n</tbody></table>'
    return _section("Headline", f'{table}\n<p class="note">{escape(top.identity)}</p>' if top.identity else table)


def _headline_row(row: Row, columns: Sequence[str]) -> str:
    head = f'<th scope="row">{escape(row.label)}<small>{escape(row.note)}</small></th>'
    cells = "".join(_cell(value, label) for value, label in zip(row.cells, columns, strict=False))
    gains = "".join(_gain(gain) for gain in row.gains)
    return f'<tr>{head}{cells}<td class="gains" data-label="{escape(columns[-1])}"><div>{gains}</div></td></tr>'


def _gain(gain: Gain) -> str:
    kind = {True: "met", False: "missed", None: "unmeasured"}[gain.is_met]
    symbol = {True: "✓ ", False: "✗ ", None: ""}[gain.is_met]
    label = f"{escape(gain.label)} " if gain.label else ""
    value = f"{label}<b>{escape(gain.measured)}</b> " if gain.measured else label
    verdict = f'<span class="verdict {kind}">{symbol}{gain.verdict}</span>'
    return f'<p>{value}<span class="mark">mark {escape(gain.mark)}</span> {verdict}</p>'


def _table(table: Table, note: str = "", kind: str = "") -> str:
    if not table.rows:
        return ""
    header = "".join(f'<th scope="col">{escape(column)}</th>' for column in table.header)
    body = "\n".join(
        f'<tr><th scope="row">{escape(row[0])}</th>{"".join(_cell(cell) for cell in row[1:])}</tr>'
        for row in table.rows
    )
    head = f"<thead><tr>{header}</tr></thead>\n" if any(table.header) else ""
    paragraph = f"<p>{escape(note)}</p>\n" if note else ""
    return _section(
        table.title,
        f'{paragraph}<div class="scroll"><table class="{kind}">\n{head}<tbody>\n{body}\n</tbody></table></div>',
    )


def _cell(value: str, label: str = "") -> str:
    kind = ' class="absent"' if value in (NOT_RUN, UNKNOWN) else ""
    data = f' data-label="{escape(label)}"' if label else ""
    return f"<td{kind}{data}>{escape(value)}</td>"


def _plots(plots: Sequence[tuple[str, str]] | None) -> str:
    if plots is None:
        return _section("Plots", "<p>Plots need matplotlib: <code>pip install 'paceline[bench]'</code></p>")
    figures = "\n".join(f"<figure><figcaption>{escape(caption)}</figcaption>{svg}</figure>" for caption, svg in plots)
    return _section("Plots", f'<div class="plots">\n{figures}\n</div>') if plots else ""


def _raw(summary: Mapping[str, Any]) -> str:
    text = escape(json.dumps(summary, indent=1, ensure_ascii=False, allow_nan=False), quote=False)
    return _section("Raw result", f'<details><summary>JSON</summary><pre id="summary-json">{text}</pre></details>')


def _section(title: str, content: str) -> str:
    return f"<section>\n<h2>{escape(title)}</h2>\n{content}\n</section>"

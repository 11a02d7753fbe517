"""Writing a report into a folder."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from paceline.bench.records import TurnRecord
from paceline.bench.report.headline import HeadlineArms, headline
from paceline.bench.report.markdown import markdown_report
from paceline.bench.report.page import html_page
from paceline.bench.results import by_arm


def write_report(
    summary: Mapping[str, Any], records: Iterable[TurnRecord], folder: Path, arms: HeadlineArms | None = None
) -> list[Path]:
    """Write ``report.html``, ``report.md`` and ``summary.json`` into the folder; returns their paths.

    The page needs nothing beside itself. Without matplotlib (extra ``bench``) it is written without plots and says so.

    Args:
        summary: what :func:`paceline.bench.results.summarise` returned.
        records: the turns, for the plots.
        folder: created if it does not exist.
        arms: the arms of the headline table.
    """
    arms = arms or HeadlineArms()
    top = headline(summary, arms)
    contents = {
        "report.html": html_page(summary, top, _plots(summary, records, arms)),
        "report.md": markdown_report(summary, top),
        "summary.json": json.dumps(summary, indent=2, ensure_ascii=False, allow_nan=False) + "\n",
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        (folder / name).write_text(content, encoding="utf-8")
    return [folder / name for name in contents]


def _plots(
    summary: Mapping[str, Any], records: Iterable[TurnRecord], arms: HeadlineArms
) -> list[tuple[str, str]] | None:
    try:
        from paceline.bench.report.plots import all_plots
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        return None
    return all_plots(summary, by_arm(records), arms.dynamic)

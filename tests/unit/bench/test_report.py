"""The report: what it says about marks, and that the page stands alone."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from paceline.bench.report import write_report
from paceline.bench.report.headline import HeadlineArms, Row, headline
from paceline.bench.report.markdown import headline_table, markdown_report
from paceline.bench.report.page import html_page
from paceline.bench.results import summarise
from tests.unit.bench.factory import agent_run, drafted, run_info, step, turn

VOID = {"meta", "br", "img", "link", "hr", "input"}


class Page(HTMLParser):
    """Collects what a test asks about, and fails on a tag that is closed in the wrong place."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.ids: list[str] = []
        self.text: dict[str, str] = {}
        self._open: list[str] = []
        self._raw = ""
        self.feed(text)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        self._raw = dict(attrs).get("id") or self._raw
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text[self._raw] = self.text.get(self._raw, "") + data


def known_run(dynamic_ms: float, accepted: int) -> dict[str, Any]:
    """Turns of 1 and 40 tokens: contiguous 10 ms a token, dynamic rounds of 10 drafts, static rounds of 4."""
    records = []
    for task in ("a", "b", "c"):
        plain = {"filled_slots": 50, "reserved_slots": 100, "forward_ms": 9.0}
        records += [
            turn([step(100.0, **plain), *[step(10.0, **plain)] * 40], arm="autoregressive-contiguous", task_id=task),
            turn([step(100.0), *[step(10.0)] * 40], arm="autoregressive", task_id=task),
            turn([step(20.0), *[drafted(4, 3, ms=16.0)] * 10], arm="static-4", task_id=task),
            turn(
                [step(20.0), *[drafted(10, accepted, ms=dynamic_ms, filled_slots=99, reserved_slots=100)] * 4],
                arm="dynamic",
                task_id=task,
            ),
        ]
    return summarise(records, run_info())


def rows_of(summary: Mapping[str, Any]) -> dict[str, Row]:
    return {row.label: row for row in headline(summary).rows}


ROWS = [
    "P95 per-token latency",
    "End-to-end turn time",
    "Tokens/s",
    "Decode speedup over autoregressive on the same cache",
    "KV memory waste",
    "Sessions in the same KV memory",
    "Draft token acceptance",
]


def test_the_headline_has_the_seven_rows_in_order() -> None:
    top = headline(known_run(20.0, 9))
    assert [row.label for row in top.rows] == ROWS
    assert top.columns == ("autoregressive (contiguous)", "static speculation (static-4)", "dynamic paged", "gain")


def test_every_mark_can_be_met() -> None:
    rows = rows_of(known_run(20.0, 9))  # 10 tokens in 20 ms: 2 ms each
    measured = {label: [gain.measured for gain in row.gains] for label, row in rows.items()}
    assert measured["P95 per-token latency"] == ["−80.0 % (−80.0 to −80.0)"] * 2
    assert measured["End-to-end turn time"] == ["5.00 × (5.00 to 5.00)"]  # 500 ms against 100
    assert measured["Tokens/s"] == measured["Decode speedup over autoregressive on the same cache"]
    assert measured["Tokens/s"] == ["5.00 × (5.00 to 5.00)"]
    assert measured["KV memory waste"] == ["50.0 % → 1.0 %"]
    assert measured["Sessions in the same KV memory"] == ["14.12 ×"]  # 113 (1,024 blocks, 9 for 140 tokens) to 8
    assert measured["Draft token acceptance"] == ["90.0 %", "75.0 %"]
    assert {gain.verdict for row in rows.values() for gain in row.gains} == {"met"}


def test_a_missed_mark_is_called_missed() -> None:
    rows = rows_of(known_run(80.0, 3))  # 4 tokens in 80 ms: slower than plain decoding
    verdicts = {label: [gain.verdict for gain in row.gains] for label, row in rows.items()}
    for label in ROWS[:4]:
        assert set(verdicts[label]) == {"missed"}
    assert verdicts["Draft token acceptance"] == ["missed", "met"]


def test_a_mark_is_met_at_the_mark_and_missed_just_below() -> None:
    summary = known_run(20.0, 9)
    entry = summary["ratios"]["dynamic"]["autoregressive-contiguous"]["turn_speedup"]
    for estimate, verdict in ((4.8, "met"), (4.7999, "missed")):
        entry["estimate"] = estimate
        assert rows_of(summary)["End-to-end turn time"].gains[0].verdict == verdict


def test_cells_of_arms_that_were_not_run_say_so() -> None:
    rows = rows_of(summarise(agent_run(["dynamic"], num_tasks=2), run_info()))
    for label in ROWS:
        assert list(rows[label].cells[:2]) == ["not run", "not run"]
        assert rows[label].cells[2] != "not run"
    gains = {label: [gain.verdict for gain in row.gains] for label, row in rows.items()}
    assert gains.pop("Draft token acceptance") == ["missed", "not measured"]
    assert {verdict for verdicts in gains.values() for verdict in verdicts} == {"not measured"}


def test_the_static_column_shows_the_fastest_static_arm_unless_told() -> None:
    summary = known_run(20.0, 9)
    summary["arms"]["static-8"] = {**summary["arms"]["static-4"], "decode_tokens_per_s": 1e6}
    assert "static-8" in headline(summary).columns[1]
    assert "static-4" in headline(summary, HeadlineArms(static="static-4")).columns[1]


def test_an_engine_without_memory_figures_has_a_dash_and_no_verdict() -> None:
    summary = known_run(20.0, 9)
    summary["arms"]["dynamic"] |= {"kv_waste": None, "peak_sessions": None}
    rows = rows_of(summary)
    for label in ("KV memory waste", "Sessions in the same KV memory"):
        assert rows[label].cells[2] == "–"
        assert rows[label].gains[0].verdict == "not measured"


def test_markdown_marks_what_was_missed_and_what_was_not_run() -> None:
    missed = headline_table(headline(known_run(80.0, 3)))
    assert "**0.50 × (0.50 to 0.50)** (mark 4.35 ×: MISSED)" in missed
    alone = headline_table(headline(summarise(agent_run(["dynamic"], num_tasks=2), run_info())))
    assert "| Tokens/s | not run | not run |" in alone
    assert "not measured (mark 4.35 ×)" in alone


def test_every_markdown_table_has_as_many_cells_as_columns() -> None:
    summary = summarise(agent_run(num_tasks=2), run_info(model="a|b"))
    text = markdown_report(summary, headline(summary))
    assert "a\\|b" in text
    for table in re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE):
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}) == 1


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    records = agent_run(num_tasks=3)
    summary = summarise(records, run_info())
    folder = tmp_path_factory.mktemp("report")
    paths = write_report(summary, records, folder / "new")
    assert [path.name for path in paths] == ["report.html", "report.md", "summary.json"]
    return folder / "new", summary


def test_the_page_uses_nothing_from_outside(written: tuple[Path, dict[str, Any]]) -> None:
    text = (written[0] / "report.html").read_text()
    page = Page(text)
    assert not {"link", "script", "img", "iframe", "object", "embed"} & set(page.tags)
    assert "http" not in text
    assert "@import" not in text
    assert all(reference.startswith("#") for reference in re.findall(r"url\(([^)]*)\)", text))
    assert all(value.startswith("#") for name, value in page.attributes if name in ("href", "xlink:href", "src"))


def test_the_page_follows_the_readers_colours(written: tuple[Path, dict[str, Any]]) -> None:
    text = (written[0] / "report.html").read_text()
    assert "prefers-color-scheme: dark" in text
    assert 'name="viewport"' in text
    figures = re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL)
    assert len(figures) == 5
    for svg in figures:
        assert "<text" in svg
        assert 'role="img" aria-label="' in svg
        assert not re.findall(r"(?:fill|stroke): ?#(?!000000|ffffff)", svg)
    used = set(re.findall(r"var\((--[\w-]+)\)", text))
    for declared in (text.split("@media")[0], text.split("@media")[1]):
        assert used <= set(re.findall(r"(--[\w-]+):", declared))


def test_the_raw_result_is_in_the_page_and_beside_it(written: tuple[Path, dict[str, Any]]) -> None:
    folder, summary = written
    assert json.loads(Page((folder / "report.html").read_text()).text["summary-json"].strip()) == summary
    assert json.loads((folder / "summary.json").read_text()) == summary


def test_figures_do_not_share_ids_with_different_content(written: tuple[Path, dict[str, Any]]) -> None:
    text = (written[0] / "report.html").read_text()
    ids = re.findall(r'id="([^"]+)"', text)
    assert len(ids) == len(set(ids))


def test_the_same_records_give_the_same_page(written: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    write_report(written[1], agent_run(num_tasks=3), tmp_path)
    assert (tmp_path / "report.html").read_bytes() == (written[0] / "report.html").read_bytes()


def test_names_cannot_break_out_of_the_page() -> None:
    hostile = "</pre></style><script>alert(1)</script>"
    records = [turn([step(), drafted(2, 1, source=hostile)], arm=hostile)]
    summary = summarise(records, run_info(model=hostile, draft=hostile, suite=hostile))
    text = html_page(summary, headline(summary), None)
    assert "<script" not in text
    assert json.loads(Page(text).text["summary-json"].strip())["model"] == hostile


def test_without_matplotlib_the_page_says_how_to_get_the_plots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("paceline.bench.report.plots", "paceline.bench.report.svg"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    records = agent_run(["dynamic"], num_tasks=1)
    write_report(summarise(records, run_info()), records, tmp_path)
    text = (tmp_path / "report.html").read_text()
    assert "paceline[bench]" in text
    assert "<svg" not in text


@pytest.mark.parametrize(
    "records",
    [
        [],
        [turn()],
        [turn([step()])],
        [turn([step(), step()], arm="llama.cpp")],
        [turn([drafted(3, 0)])],
        [turn([step(), drafted(3, 3)], arm=f"other-{number}") for number in range(12)],
    ],
    ids=["nothing", "no tokens", "one token", "no slots", "draft in the first step", "many arms"],
)
def test_a_report_can_be_written_of_little(tmp_path: Path, records: list[Any]) -> None:
    summary = summarise(records, run_info())
    write_report(summary, records, tmp_path)
    Page((tmp_path / "report.html").read_text())


def test_the_identity_line_counts_turns() -> None:
    identity = headline(known_run(20.0, 9)).identity
    assert identity.endswith("autoregressive: autoregressive-contiguous 3 of 3, static-4 3 of 3, dynamic 3 of 3.")

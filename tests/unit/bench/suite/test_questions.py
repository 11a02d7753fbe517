from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.bench.suite import load_questions
from paceline.errors import BenchmarkError


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_line_is_a_task_and_its_category_the_part(tmp_path: Path) -> None:
    rows = [
        {"question_id": 81, "category": "writing", "turns": ["Write.", "Shorter."], "reference": ["A long text."]},
        {"question_id": 82, "category": "math", "turns": ["2 + 2?"]},
    ]
    one, two = load_questions(write(tmp_path / "question.jsonl", *rows))
    assert (one.task_id, one.part) == ("81", "writing")
    assert [turn.messages[0]["content"] for turn in one.turns] == ["Write.", "Shorter."]
    assert [turn.gold for turn in one.turns] == ["A long text.", ""]
    assert len(two.turns) == 1


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"category": "x", "turns": ["a"]}, "line 1: not a question"),
        ({"question_id": 1, "category": "x", "turns": "a"}, "turns must be a list of texts"),
        ([1], "line 1: not a question"),
    ],
)
def test_another_line_is_an_error_that_names_it(row: object, message: str, tmp_path: Path) -> None:
    with pytest.raises(BenchmarkError, match=message):
        load_questions(write(tmp_path / "question.jsonl", row))


def test_an_absent_or_empty_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkError, match="cannot read"):
        load_questions(tmp_path / "none.jsonl")
    with pytest.raises(BenchmarkError, match="no questions"):
        load_questions(write(tmp_path / "empty.jsonl"))

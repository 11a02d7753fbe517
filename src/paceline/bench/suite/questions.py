"""MT-bench and Spec-Bench questions from a file of the user: one JSON object a line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paceline.bench.records import Task, Turn
from paceline.errors import BenchmarkError

MAX_TOKENS = 256


def load_questions(path: Path, *, max_tokens: int = MAX_TOKENS) -> list[Task]:
    """A task per line of ``{"question_id", "category", "turns": [...]}``; the part is the category.

    ``gold`` is the line's "reference" answer for that turn where it has one, else empty: such questions are for free
    runs, a scripted history needs recorded answers.

    Raises:
        BenchmarkError: the file cannot be read, or a line is not a question (the message names it).
    """
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BenchmarkError(f"cannot read questions from {path}: {error}") from error
    tasks = [_task(line, f"{path.name}, line {i}", max_tokens) for i, line in enumerate(lines, 1) if line.strip()]
    if not tasks:
        raise BenchmarkError(f"{path} holds no questions")
    if len({task.task_id for task in tasks}) != len(tasks):
        raise BenchmarkError(f"{path} uses a question_id twice")
    return tasks


def _task(line: str, where: str, max_tokens: int) -> Task:
    try:
        row: Any = json.loads(line)
        name, part, questions = row["question_id"], row["category"], row["turns"]
    except (ValueError, KeyError, TypeError) as error:
        raise BenchmarkError(f"{where}: not a question with question_id, category and turns ({error!r})") from error
    if not isinstance(questions, list) or not questions or not all(isinstance(q, str) and q for q in questions):
        raise BenchmarkError(f"{where}: turns must be a list of texts")
    reference = row.get("reference")
    golds = reference if isinstance(reference, list) else []
    turns = [
        Turn(
            messages=[{"role": "user", "content": question}],
            gold=golds[i] if i < len(golds) and isinstance(golds[i], str) else "",
            kind="prose",
            max_tokens=max_tokens,
        )
        for i, question in enumerate(questions)
    ]
    return Task(task_id=str(name), part=str(part), turns=turns)

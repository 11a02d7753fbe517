"""Tasks of editing real code (parts A and E): an issue, reading, an edit, a failing test, a second edit, a summary."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.bench.records import Task, Turn
from paceline.bench.suite.choice import pick, rank
from paceline.bench.suite.edit_results import pytest_output, said, summary
from paceline.bench.suite.edits import edit_text
from paceline.bench.suite.facts import facts
from paceline.bench.suite.functions import Change, Span
from paceline.bench.suite.prompt import git_diff, grep, numbered, repository_map, tool_call, tool_result, turn, window

WINDOW_CHARS = 2300


@dataclass(frozen=True, slots=True)
class Step:
    """A project before and after: what a release or a commit did.

    Attributes:
        project: what it is called.
        old, new: the texts of its files by path.
        title: the subject of the commit, or None for a release.
        log: earlier history as ``git log --oneline`` shows it, newest first; empty for a release pair.
        aim: what the result is for, such as "release 8.2.1".
    """

    project: str
    old: Mapping[str, str]
    new: Mapping[str, str]
    aim: str
    title: str | None = None
    log: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class EditSpec:
    """One task's selection: two changes of a step, and the shape of each edit ("blocks" or "function")."""

    task_id: str
    part: str
    changes: tuple[Change, Change]
    shapes: tuple[str, str]
    seed: int


def _edit_turn_gold(change: Change, old_lines: Sequence[str], new_lines: Sequence[str], shape: str, lead: str) -> str:
    arguments = {"path": change.path} | ({"function": change.name} if shape == "function" else {})
    return f"{lead}\n{tool_call('apply_edit', **arguments)}\n{edit_text(change, old_lines, new_lines, shape)}"


_ASKS = (
    "Please change `{name}` in `{path}` for {aim}:",
    "For {aim} of {project}, `{name}` (in `{path}`) has to change:",
    "Could you take care of `{name}` in `{path}`? What we want for {aim}:",
    "I am preparing {aim} and need this done in `{path}`, in `{name}`:",
    "`{name}` in `{path}` should behave differently in {aim}:",
)
_READS = (
    "I will look at `{name}` first.",
    "Let me read the code of `{name}` before changing it.",
    "First the current code.",
)
_EDITS = (
    "`{name}` is here. This is the change:",
    "I have what I need; the edit of `{name}`:",
    "Only `{name}` has to change for this point:",
)
_SECONDS = (
    "The first change works; `{name}` still has to follow.",
    "One test is left, and it is about `{name}`.",
    "The failure is in `{name}`, not in what I just changed.",
)


def build_edit_task(spec: EditSpec, step: Step) -> Task:
    """The conversation of one selection; every text comes from the step and the templates here."""
    first, second = spec.changes
    key = (spec.seed, spec.task_id)
    old = {path: text.split("\n") for path, text in step.old.items() if path in (first.path, second.path)}
    new = {path: step.new[path].split("\n") for path in old}
    facts_1, facts_2 = (
        facts(change.name, change.old.lines(old[change.path]), change.new.lines(new[change.path]))
        for change in spec.changes
    )
    words = {"name": first.name, "path": first.path, "aim": step.aim, "project": step.project}
    points = "\n".join(f"- {text}" for text in said(facts_1, 4))
    ask = pick(_ASKS, *key, "ask").format(**words)
    ask = f"{step.title}\n\n{ask}" if step.title else ask
    opening = (
        f"Repository {step.project}. Files:\n{repository_map(sorted(step.old.items()), first.path)}\n\n"
        f"{ask}\n{points}\n"
        f"`{second.name}`{_elsewhere(first, second)} is affected too; the tests will tell."
    )
    turns: list[Turn] = []

    def add(prompt: str, gold: str, prediction: str | None = None) -> None:
        kind = "edit" if prediction is not None else "prose"
        turns.append(turn(prompt, gold, kind, prediction=prediction, is_first=not turns))  # type: ignore[arg-type]

    lines = old[first.path]
    at = window(lines, first.old.first, first.old.last, WINDOW_CHARS)
    lead = pick(_READS, *key, "read").format(**words)
    read = tool_call("read_file", path=first.path, first_line=at[0], last_line=at[1])
    prompt = opening
    if step.log:
        add(
            prompt, "Let me see what happened here lately.\n" + tool_call("run_command", command="git log --oneline -8")
        )
        prompt = tool_result("run_command", "\n".join(step.log[:8]) + "\n\n$ git status --short\n(clean)")
    if rank(*key, "search") % 3 == 0:
        word = first.name.removesuffix(".__init__").rpartition(".")[2]
        add(prompt, f"Let me find where `{word}` is used.\n" + tool_call("search", pattern=rf"\b{word}\b", path="."))
        prompt = tool_result("search", grep(_nearby(step.old, first.path), word))
    add(prompt, f"{lead}\n{read}")
    add(
        tool_result(f"read_file {first.path}", numbered(lines, *at)),
        _edit_turn_gold(
            first, lines, new[first.path], spec.shapes[0], pick(_EDITS, *key, "edit").format(name=first.name)
        ),
        prediction="\n".join(first.old.lines(lines)),
    )
    # From here on the first edit is in the file, and a second function below it has moved.
    shift = 0
    after = dict(old)
    after[first.path] = [*lines[: first.old.first - 1], *first.new.lines(new[first.path]), *lines[first.old.last :]]
    if second.path == first.path and second.old.first > first.old.last:
        shift = (first.new.last - first.new.first) - (first.old.last - first.old.first)
    moved = Change(second.path, second.name, Span(second.old.first + shift, second.old.last + shift), second.new)
    current = after[second.path]
    failed = pytest_output(spec.task_id, first, second, facts_2, diff=None)
    lead = pick(_SECONDS, *key, "second").format(name=second.name)
    edit = _edit_turn_gold(moved, current, new[second.path], spec.shapes[1], lead)
    seen_1, seen_2 = moved.old.first, moved.old.last
    prediction = "\n".join(moved.old.lines(current))
    if second.path == first.path and at[0] <= seen_1 - shift and seen_2 - shift <= at[1]:
        add(failed, edit, prediction)  # it was in the first window
    else:
        window_2 = window(current, seen_1, seen_2, WINDOW_CHARS)
        call = tool_call("read_file", path=second.path, first_line=window_2[0], last_line=window_2[1])
        add(failed, f"{lead} Reading it now.\n{call}")
        edit = _edit_turn_gold(moved, current, new[second.path], spec.shapes[1], f"The edit of `{second.name}`:")
        add(tool_result(f"read_file {second.path}", numbered(current, *window_2)), edit, prediction)
    after[second.path] = [
        *current[: moved.old.first - 1],
        *second.new.lines(new[second.path]),
        *current[moved.old.last :],
    ]
    diff = "\n".join(git_diff(path, old[path], after[path], 1800 // len(old)) for path in sorted(old))
    passed = pytest_output(spec.task_id, first, second, facts_2, diff=diff)
    add(passed, summary(step.aim, [(first, facts_1), (second, facts_2)]))
    return Task(task_id=spec.task_id, part=spec.part, turns=turns)


def _elsewhere(first: Change, second: Change) -> str:
    return "" if first.path == second.path else f" in `{second.path}`"


def _nearby(files: Mapping[str, str], path: str) -> list[tuple[str, str]]:
    """The file itself, then its neighbours."""
    folder = posixpath.dirname(path)
    near = sorted(name for name in files if posixpath.dirname(name) == folder and name != path)
    return [(name, files[name]) for name in [path, *near]]

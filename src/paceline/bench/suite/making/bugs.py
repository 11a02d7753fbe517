"""Find, for each call of ``calls.py``, a bug that the call shows."""

from __future__ import annotations

import tempfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from paceline.bench.records import Task
from paceline.bench.suite.archives import Archive
from paceline.bench.suite.bug_task import BugSpec, build_bug_task
from paceline.bench.suite.choice import rank
from paceline.bench.suite.edits import MAX_GOLD_CHARS, edit_text
from paceline.bench.suite.functions import Change, Span, function_spans
from paceline.bench.suite.making.calls import CALLS
from paceline.bench.suite.making.mutate import mutations
from paceline.bench.suite.making.run_code import run_call
from paceline.bench.suite.mutation import KINDS, Mutation
from paceline.bench.suite.suite import texts

_MAX_TRIES = 14
_MAX_TEXT = 160


def select_bugs(
    wheels: Mapping[str, Path], num_tasks: int, seed: int, fits: Callable[[Task], bool]
) -> list[tuple[str, BugSpec]]:
    """(requirement, selection) for ``num_tasks`` functions, the kinds of bugs as even as the functions allow.

    Each candidate bug is run for real; it counts when the call then raises or gives another value, in every one of
    two runs alike.
    """
    used = dict.fromkeys(KINDS, 0)
    found: list[tuple[str, BugSpec]] = []
    order = sorted(CALLS, key=lambda row: rank(seed, row[1], row[2]))
    for requirement, module, name, call in order:
        if len(found) == num_tasks:
            break
        with tempfile.TemporaryDirectory() as folder:
            zipfile.ZipFile(wheels[requirement]).extractall(folder)
            spec = _find(Path(folder), module, name, call, used, seed, f"bug-fix-{len(found):02d}")
        if spec is not None and fits(build_bug_task(spec, texts(Archive(wheels[requirement])))):
            used[spec.mutation.kind] += 1
            found.append((requirement, spec))
    return found


def _find(
    folder: Path, module: str, name: str, call: str, used: Mapping[str, int], seed: int, task_id: str
) -> BugSpec | None:
    stem = module.replace(".", "/")
    member = f"{stem}.py" if (folder / f"{stem}.py").exists() else f"{stem}/__init__.py"
    path = folder / member
    source = path.read_text("utf-8")
    span = function_spans(source).get(name)
    right = run_call(folder, module, member, call)
    if span is None or right is None or "value" not in right or len(right["value"]) > _MAX_TEXT:
        return None
    tried = sorted(mutations(source, span, seed), key=lambda m: used[m.kind])  # the rarest kind first
    for mutation in tried[:_MAX_TRIES]:
        broken = mutation.apply(source)
        shape = _shape(member, name, source, broken, span, mutation, seed)
        if shape is None:
            continue
        path.write_text(broken, "utf-8")
        outcome = run_call(folder, module, member, call)
        again = run_call(folder, module, member, call)
        path.write_text(source, "utf-8")
        if outcome is None or outcome != again or not _shows(outcome, right):
            continue
        return BugSpec(task_id, member, module, name, span, mutation, call, right["value"], outcome, shape, seed)
    return None


def _shows(outcome: Mapping[str, Any], right: Mapping[str, Any]) -> bool:
    """True when the outcome differs, says something, and can be told in a few lines."""
    if "value" in outcome:
        return outcome["value"] != right["value"] and 0 < len(outcome["value"]) <= _MAX_TEXT
    kind, message = outcome["raises"]
    if kind in ("UnboundLocalError", "NameError") or message.startswith("unsupported operand"):
        return False  # nobody would have merged that
    plain = "0x" not in message and len(message) <= _MAX_TEXT and kind not in ("SystemExit", "RecursionError")
    return plain and 1 <= len(outcome["frames"]) <= 4


def _shape(member: str, name: str, source: str, broken: str, span: Span, mutation: Mutation, seed: int) -> str | None:
    """How the fix is written: the whole function when it is short and the seed says so, else blocks."""
    bad = Span(span.first, span.last - mutation.num_lines_lost)
    if name not in function_spans(broken):
        return None
    change = Change(member, name, bad, span)
    lines = (broken.split("\n"), source.split("\n"))
    shapes = [s for s in ("blocks", "function") if len(edit_text(change, *lines, s)) <= MAX_GOLD_CHARS]
    return shapes[rank(seed, name, "shape") % len(shapes)] if shapes else None

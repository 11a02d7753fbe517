"""Which changes of a step make a good task: telling, small enough to answer, and two that belong together."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.bench.suite.choice import pick, rank
from paceline.bench.suite.edit_task import EditSpec, Step
from paceline.bench.suite.edits import MAX_GOLD_CHARS, edit_text
from paceline.bench.suite.facts import facts
from paceline.bench.suite.functions import Change, changed_functions, num_changed_lines

MAX_FUNCTION_CHARS = 2000


@dataclass(frozen=True, slots=True)
class Candidate:
    """A change fit for a task.

    Attributes:
        score: how much can be said about it.
        new_words: what its new text brings.
        shapes: how the edit can be written.
        fails: does a test fail without it, by what is known.
    """

    change: Change
    score: int
    new_words: frozenset[str]
    shapes: tuple[str, ...]
    fails: bool


def candidates(step: Step) -> list[Candidate]:
    """The changes of a step with 3 to 60 changed lines that can be described and answered briefly."""
    found = []
    for path in sorted(step.old.keys() & step.new.keys()):
        old_text, new_text = step.old[path], step.new[path]
        if old_text == new_text:
            continue
        old_lines, new_lines = old_text.split("\n"), new_text.split("\n")
        for change in changed_functions(path, old_text, new_text):
            old, new = change.old.lines(old_lines), change.new.lines(new_lines)
            if len("\n".join(old)) > MAX_FUNCTION_CHARS or not 3 <= num_changed_lines(old, new) <= 60:
                continue
            told = facts(change.name, old, new)
            score = sum(fact.weight for fact in told[:4])
            if score < 4 or told[0].weight < 2:
                continue
            sizes = {shape: len(edit_text(change, old_lines, new_lines, shape)) for shape in ("blocks", "function")}
            shapes = tuple(shape for shape, size in sizes.items() if 150 <= size <= MAX_GOLD_CHARS)
            if shapes and all(applies(change, old_lines, new_lines, shape) for shape in shapes):
                words = frozenset(re.findall(r"\w{4,}", "\n".join(new))) - frozenset(re.findall(r"\w+", "\n".join(old)))
                found.append(Candidate(change, score, words, shapes, any(fact.failure for fact in told)))
    return found


def applies(change: Change, old_lines: Sequence[str], new_lines: Sequence[str], shape: str) -> bool:
    """True when the edit, applied the way the system prompt says, yields the new function."""
    if shape == "function":
        return True
    text = "\n".join(old_lines)
    for block in edit_text(change, old_lines, new_lines, shape).split(">>>>>>> REPLACE"):
        if not block.strip():
            continue
        search, _, replace = block.partition("<<<<<<< SEARCH\n")[2].partition("=======\n")
        if text.count(search) != 1:
            return False
        text = text.replace(search, replace)
    wanted = [*old_lines[: change.old.first - 1], *change.new.lines(new_lines), *old_lines[change.old.last :]]
    return text == "\n".join(wanted)


def select(step: Step, part: str, prefix: str, num_tasks: int, seed: int) -> list[EditSpec]:
    """At most ``num_tasks`` selections of a step, none sharing a change, best first.

    The second change of a task is the one that shares most new words with the first, then one of the same file.
    """
    pool = sorted(candidates(step), key=lambda c: (-c.score, rank(seed, c.change.path, c.change.name)))
    specs: list[EditSpec] = []
    while len(pool) >= 2 and len(specs) < num_tasks:
        first = pool.pop(0)
        second = max(
            pool,
            key=lambda c: (
                4 * c.fails + len(first.new_words & c.new_words) + 2 * (c.change.path == first.change.path),
                c.score,
                rank(seed, c.change.path, c.change.name),
            ),
        )
        pool.remove(second)
        task_id = f"{prefix}-{len(specs):02d}"
        shapes = (pick(first.shapes, seed, task_id, 1), pick(second.shapes, seed, task_id, 2))
        specs.append(EditSpec(task_id, part, (first.change, second.change), shapes, seed))
    return specs

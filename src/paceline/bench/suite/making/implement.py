"""Choose HumanEval problems, plant a bug in the first attempt where one shows, and run the wheel's own test on it."""

from __future__ import annotations

import ast
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from paceline.bench.records import Task
from paceline.bench.suite.archives import Archive
from paceline.bench.suite.choice import rank
from paceline.bench.suite.edits import MAX_GOLD_CHARS, edit_text
from paceline.bench.suite.functions import Change, Span, function_spans
from paceline.bench.suite.implement_task import (
    ImplementSpec,
    Problem,
    build_implement_task,
    parameter_names,
    problems,
    refactored,
    solution,
    tests_text,
)
from paceline.bench.suite.making.mutate import mutations
from paceline.bench.suite.making.run_code import run_call
from paceline.bench.suite.mutation import KINDS, Mutation

_NAMES = {
    "list[int]": "numbers",
    "list[float]": "values",
    "list[str]": "words",
    "str": "text",
    "int": "number",
    "float": "value",
}


def select_problems(archive: Archive, num_tasks: int, seed: int, fits: Callable[[Task], bool]) -> list[ImplementSpec]:
    """Problems whose answers fit a turn; two of three start with a wrong attempt."""
    found: list[ImplementSpec] = []
    used = dict.fromkeys(KINDS, 0)
    all_problems = problems(archive)
    for index in sorted(range(len(all_problems)), key=lambda i: rank(seed, "problem", i)):
        if len(found) == num_tasks:
            break
        spec = _try(all_problems[index], index, used, seed, f"implement-{len(found):02d}", len(found) % 3 != 2)
        if spec is not None and fits(build_implement_task(spec, all_problems[index])):
            if spec.mutation is not None:
                used[spec.mutation.kind] += 1
            found.append(spec)
    return found


def _try(
    problem: Problem, index: int, used: Mapping[str, int], seed: int, task_id: str, with_bug: bool
) -> ImplementSpec | None:
    name, text = problem["entry_point"], solution(problem)
    spans = function_spans(text)
    num_lines = problem["canonical_solution"].strip("\n").count("\n") + 1
    if list(spans) != [name] or len(text) > MAX_GOLD_CHARS - 40 or num_lines < 2:
        return None
    types = _types(problem)
    if types is None or not all(types):
        return None
    asserts = _asserts(problem)
    if len(asserts) < 4 or not _passes(problem, text):
        return None
    renames = _renames(problem, types)
    better = refactored(problem, types, renames)
    if len(better) > MAX_GOLD_CHARS - 40 or not _passes(problem, better):
        return None
    while len(tests_text(problem, asserts, f"exercises.{name}")) > MAX_GOLD_CHARS - 100:
        asserts = asserts[:-1]
    if len(asserts) < 3:
        return None
    if not with_bug:
        return ImplementSpec(task_id, index, None, 0, "", types, renames, asserts, seed)
    bugs = sorted(mutations(text, spans[name], seed), key=lambda m: used[m.kind])
    docstring_end = problem["prompt"].strip("\n").count("\n") + 1
    for mutation in [m for m in bugs if m.line > docstring_end][:12]:
        failure = _failure(problem, mutation, text)
        if failure is not None:
            return ImplementSpec(task_id, index, mutation, *failure, types, renames, asserts, seed)
    return None


def _asserts(problem: Problem) -> list[int]:
    """Lines of the test that hold one whole assertion about the candidate, at most eight, spread out."""
    lines = problem["test"].split("\n")
    numbers = [
        number
        for number, line in enumerate(lines, start=1)
        if re.match(r"\s+assert candidate\(", line) and len(line) < 100 and _parses(line) and line.startswith("    a")
    ]
    return numbers[:4] + numbers[4:][-4:]


def _parses(line: str) -> bool:
    try:
        ast.parse(line.strip())
    except SyntaxError:
        return False
    return True


def _types(problem: Problem) -> list[str] | None:
    """The types of the parameters and the result, from the literals in the assertions."""
    names = parameter_names(problem)
    seen: list[set[str]] = [set() for _ in range(len(names) + 1)]
    for number in _asserts(problem):
        node = ast.parse(problem["test"].split("\n")[number - 1].strip()).body[0]
        if not (isinstance(node, ast.Assert) and isinstance(node.test, ast.Compare)):
            continue
        call, value = node.test.left, node.test.comparators[0]
        if not isinstance(call, ast.Call) or len(call.args) != len(names) or not isinstance(node.test.ops[0], ast.Eq):
            return None
        for kinds, part in zip(seen, [*call.args, value], strict=True):
            try:
                kinds.add(_type(ast.literal_eval(part)))
            except ValueError:
                return None
    merged = [_merge(kinds) for kinds in seen]
    return merged if all(merged) else None


def _type(value: object) -> str:
    if isinstance(value, list):
        inner = _merge({_type(item) for item in value})
        return f"list[{inner}]" if inner else "list"
    return type(value).__name__


def _merge(kinds: set[str]) -> str:
    """One plain type, or an empty string where there is none."""
    if kinds == {"int", "float"}:
        return "float"
    if len(kinds) == 2 and "list" in kinds:  # an empty list says nothing
        kinds = kinds - {"list"}
    if kinds == {"list[int]", "list[float]"}:
        return "list[float]"
    return next(iter(kinds)) if len(kinds) == 1 and kinds <= {*_NAMES, "bool", "list[bool]", "list[list[int]]"} else ""


def _renames(problem: Problem, types: Sequence[str]) -> dict[str, str]:
    """One-letter parameters of plain types get a name, unless the name or a string in the body would be hit."""
    body = problem["canonical_solution"]
    strings = " ".join(re.findall(r"(?:\"[^\"\n]*\"|'[^'\n]*')", body))
    renames: dict[str, str] = {}
    for name, kind in zip(parameter_names(problem), types, strict=False):
        new = _NAMES.get(kind, "")
        is_free = new and new not in renames.values() and not re.search(rf"\b{new}\b", body)
        if len(name) <= 2 and is_free and not re.search(rf"\b{name}\b", strings):
            renames[name] = new
    return renames


def _run(problem: Problem, text: str) -> tuple[int, str] | None:
    """(0, "") when the wheel's test passes; else the failing line of the test and the error; None for a hang."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        entry = problem["entry_point"]
        (folder / "solution_file.py").write_text(text, "utf-8")
        (folder / "check_file.py").write_text(problem["test"] + f"\n\nfrom solution_file import {entry}\n", "utf-8")
        outcome = run_call(folder, "check_file", "/check_file.py", f"m.check(m.{entry})")
        if outcome is None:
            return None
        if "value" in outcome:
            return 0, ""
        kind, message = outcome["raises"]
        line = outcome["frames"][0][0] if outcome["frames"] else 0
        if kind != "AssertionError":
            return line, f"{kind}: {message}"[:160]
        source = problem["test"].split("\n")[line - 1].strip()
        call = re.match(r"assert (candidate\(.*\)) == (.+?)(, [\"'].*)?$", source)
        if call is None:
            return None
        left = run_call(folder, "check_file", "/check_file.py", "m." + call[1].replace("candidate(", f"{entry}(", 1))
        if left is None or "value" not in left:
            return None
        return line, f"AssertionError: assert {left['value'][:70]}"


def _passes(problem: Problem, text: str) -> bool:
    return _run(problem, text) == (0, "")


def _failure(problem: Problem, mutation: Mutation, text: str) -> tuple[int, str] | None:
    broken = mutation.apply(text)
    bad, good = broken.split("\n"), text.split("\n")
    if len(edit_text(Change("", "", Span(1, len(bad)), Span(1, len(good))), bad, good, "blocks")) > MAX_GOLD_CHARS:
        return None
    outcome = _run(problem, broken)
    if (
        outcome is None
        or outcome[0] == 0
        or outcome[1].startswith(("UnboundLocalError", "NameError", "TypeError: unsupported"))
    ):
        return None
    return outcome

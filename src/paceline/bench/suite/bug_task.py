"""Tasks of fixing a planted bug (part C): report, reading, reproducing, the fix, a regression test, a summary."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.bench.records import Task, Turn
from paceline.bench.suite.choice import pick, rank
from paceline.bench.suite.edit_task import WINDOW_CHARS
from paceline.bench.suite.edits import edit_text
from paceline.bench.suite.functions import Change, Span
from paceline.bench.suite.mutation import KINDS, Mutation
from paceline.bench.suite.prompt import git_diff, numbered, repository_map, tool_call, tool_result, turn, window

PART = "bug fix"


@dataclass(frozen=True, slots=True)
class BugSpec:
    """One selection: a function, the bug planted in it, a call that shows it and what really happened then.

    Attributes:
        span: the function in the original file.
        expected: the repr of the call's value without the bug.
        outcome: ``making.run_code.run_call`` with the bug.
    """

    task_id: str
    member: str
    module: str
    name: str
    span: Span
    mutation: Mutation
    call: str
    expected: str
    outcome: Mapping[str, Any]
    shape: str
    seed: int


_REPORTS = (
    "`{name}` in `{path}` is broken since the last merge. This call should give {expected}:",
    "A user reports that `{name}` (`{path}`) misbehaves. Expected from this call is {expected}:",
    "Something is wrong with `{name}` in `{path}`. I expect {expected} from:",
    "Please fix `{name}` in `{path}`; the result of this should be {expected}:",
)


def build_bug_task(spec: BugSpec, texts: Mapping[str, str]) -> Task:
    """The conversation of one selection; ``texts`` are the wheel's files, without the bug."""
    key = (spec.seed, spec.task_id)
    original = texts[spec.member]
    broken = spec.mutation.apply(original)
    good, bad = original.split("\n"), broken.split("\n")
    span = Span(spec.span.first, spec.span.last - spec.mutation.num_lines_lost)
    change = Change(spec.member, spec.name, span, spec.span)
    short = spec.name.rpartition(".")[2]
    alias = f"import {spec.module} as m"
    escaped = spec.call.replace("\\", "\\\\").replace('"', '\\"')
    command = f'python -c "{alias}; print({escaped})"'
    found = _outcome_text(spec, bad, command)
    turns: list[Turn] = []
    report = pick(_REPORTS, *key, "report").format(name=spec.name, path=spec.member, expected=spec.expected)
    shown = f"    {alias}\n    {spec.call}"
    got = spec.outcome.get("value")
    what = f"It gives {got} instead." if got is not None else f"It raises {spec.outcome['raises'][0]} instead."
    folder = posixpath.dirname(spec.member)
    near = [(path, text) for path, text in sorted(texts.items()) if posixpath.dirname(path) == folder]
    files = repository_map(near, spec.member)
    at = window(bad, span.first, span.last, WINDOW_CHARS)
    read = tool_call("read_file", path=spec.member, first_line=at[0], last_line=at[1])
    turns.append(
        turn(
            f"Repository files:\n{files}\n\n{report}\n{shown}\n{what}\nFind the cause, fix it and add a test for it.",
            f"I will start with the code of `{spec.name}`.\n{read}",
            "prose",
            is_first=True,
        )
    )
    turns.append(
        turn(
            tool_result(f"read_file {spec.member}", numbered(bad, *at)),
            f"Before I change anything I want to see it fail.\n{tool_call('run_command', command=command)}",
            "prose",
        )
    )
    lead = _diagnosis(spec, good, bad)
    call = tool_call(
        "apply_edit", **({"path": spec.member} | ({"function": spec.name} if spec.shape == "function" else {}))
    )
    turns.append(
        turn(
            tool_result("run_command", found),
            f"{lead}\n{call}\n{edit_text(change, bad, good, spec.shape)}",
            "edit",
            prediction="\n".join(span.lines(bad)),
        )
    )
    test_path = f"tests/test_{posixpath.basename(spec.module.replace('.', '/')).strip('_')}.py"
    test_name = f"test_{short.strip('_').lower()}_regression"
    test = f"```python\n{alias}\n\n\ndef {test_name}():\n    assert {spec.call} == {spec.expected}\n```"
    turns.append(
        turn(
            tool_result(
                "run_command",
                f"$ {command}\n{_printed(spec.expected)}\n\n$ git diff\n{git_diff(spec.member, bad, good)}",
            )
            + f"\n\nThat is right now. Put the case into `{test_path}` as a test.",
            f"The call is the test; it fails without the fix.\n{tool_call('apply_edit', path=test_path)}\n{test}",
            "new code",
        )
    )
    total = 8 + rank(spec.task_id, "tests") % 40
    turns.append(
        turn(
            tool_result(
                "run_tests", f"$ python -m pytest -q tests\n{'.' * total} [100%]\n{total} passed in 0.{total:02d}s"
            ),
            f"Fixed: in `{spec.name}` {KINDS[spec.mutation.kind]}; the original behaviour is restored. "
            f"`{test_path}` has `{test_name}` as a regression test, and all {total} tests pass.",
            "prose",
        )
    )
    return Task(task_id=spec.task_id, part=PART, turns=turns)


def _printed(value: str) -> str:
    """What ``print`` shows for a repr: strings lose their quotes."""
    is_string = value[:1] in "'\"" and value[:1] == value[-1:]
    return value[1:-1] if is_string and "\\" not in value else value


def _outcome_text(spec: BugSpec, bad: Sequence[str], command: str) -> str:
    """What the command prints with the bug: the wrong value, or a traceback of the frames in the file."""
    if "value" in spec.outcome:
        return f"$ {command}\n{_printed(spec.outcome['value'])}\n\n# expected: {_printed(spec.expected)}"
    kind, message = spec.outcome["raises"]
    rows = ["Traceback (most recent call last):", '  File "<string>", line 1, in <module>']
    for line, function in spec.outcome["frames"]:
        rows += [f'  File "{spec.member}", line {line}, in {function}', f"    {bad[line - 1].strip()}"]
    return "\n".join([f"$ {command}", *rows, f"{kind}: {message}" if message else kind])


def _diagnosis(spec: BugSpec, good: Sequence[str], bad: Sequence[str]) -> str:
    mutation = spec.mutation
    right = good[mutation.line - 1].strip()
    if mutation.kind == "guard":
        return f"The case `{right}` is not handled any more: {KINDS['guard']}. I put it back."
    return f"`{bad[mutation.line - 1].strip()}` is the cause: {KINDS[mutation.kind]}. It has to be `{right}`."

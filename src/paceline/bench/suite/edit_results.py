"""What the tools answer to an edit of part A or E, and the closing summary."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Sequence

from paceline.bench.suite.choice import rank
from paceline.bench.suite.facts import Fact
from paceline.bench.suite.functions import Change
from paceline.bench.suite.prompt import tool_result


def said(found: Sequence[Fact], limit: int, max_chars: int = 700) -> list[str]:
    """The first sentences, as many as fit."""
    told: list[str] = []
    for fact in found[:limit]:
        if told and sum(map(len, told)) + len(fact.text) > max_chars:
            break
        told.append(fact.text)
    return told


def _test_name(change: Change) -> tuple[str, str]:
    stem = posixpath.basename(change.path).rpartition(".")[0].strip("_") or "package"
    name = re.sub(r"\W+", "_", change.name).strip("_").lower()
    file = change.path if stem.startswith("test_") else f"tests/test_{stem}.py"
    return file, f"test_{re.sub('_+', '_', name)}"


def pytest_output(task_id: str, first: Change, second: Change, found: Sequence[Fact], *, diff: str | None) -> str:
    """What the tests print after the first edit or, with the ``diff`` of both, when all is done; in pytest's form.

    No test was run: the failure is the one the second change's facts imply.
    """
    file_1, file_2 = _test_name(first)[0], _test_name(second)[0]
    test = _test_name(second)[1]
    total = 24 + rank(task_id, "tests") % 30
    seconds = f"{0.4 + rank(task_id, diff is None) % 300 / 100:.2f}s"
    targets = " ".join(dict.fromkeys([file_1, file_2]))
    command = f"$ python -m pytest -q {targets}"
    if diff is not None:
        dots = "." * total
        return tool_result("run_tests", f"{command}\n{dots} [100%]\n{total} passed in {seconds}\n\n$ git diff\n{diff}")
    at = 1 + rank(task_id, "at") % (total - 2)
    dots = "." * at + "F" + "." * (total - at - 1)
    told = said(found, 3, 420)
    failure = next((fact.failure for fact in found if fact.failure), None)
    failure = failure or f"AssertionError: {second.name} does not do this yet"
    quoted = "\n".join(f"        # {text}" for text in told)
    return tool_result(
        "run_tests",
        f"{command}\n{dots} [100%]\n"
        f"================ FAILURES ================\n________________ {test} ________________\n"
        f"    def {test}():\n{quoted}\n"
        f"E   {failure}\n"
        f"======== short test summary info ========\nFAILED {file_2}::{test} - {failure.split(':')[0]}\n"
        f"1 failed, {total - 1} passed in {seconds}",
    )


def summary(aim: str, changes: Sequence[tuple[Change, Sequence[Fact]]]) -> str:
    """The closing answer."""
    told = [f"- `{change.path}`, `{change.name}`: {_as_done(found[0].text)}" for change, found in changes]
    return (
        f"Both parts of {aim} are in and the tests pass.\n" + "\n".join(told) + "\n"
        "Nothing else was touched; callers that do not use the new behaviour need no change."
    )


def _as_done(text: str) -> str:
    """A wish as a report."""
    for wish, report in _DONE:
        text = text.replace(wish, report)
    return text


_DONE = (
    (" should be `", " is now `"),
    (" should use ", " uses "),
    (" needs complete ", " has complete "),
    ("Its docstring gets this:", "the docstring says now:"),
    ("Keep in mind:", "taken care of:"),
    (" is no longer needed", " is gone"),
    (" is better called ", " is now called "),
    ("; use that name", ", and so it is here"),
    ("Add `", "added `"),
    ("Use `", "uses `"),
)

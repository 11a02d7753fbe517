"""Tasks of calling tools (part D, BFCL's multi-turn file system): a request, the calls, their results, an answer."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.bench.records import Task, Turn
from paceline.bench.suite.archives import Archive
from paceline.bench.suite.choice import pick, rank
from paceline.bench.suite.folder_tools import FolderTools, Result
from paceline.bench.suite.prompt import tool_call, tool_result, turn

PART = "tool calling"
REQUIREMENT = "bfcl-eval==2026.3.23"
MAX_REQUESTS = 4

_DATA = "bfcl_eval/data"
_NAME = "BFCL_v4_multi_turn_base.json"
_CLASS = "GorillaFileSystem"

Call = tuple[str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """One selection: a scenario by its id, of which the first ``num_requests`` requests are used."""

    task_id: str
    scenario: str
    num_requests: int
    seed: int


@dataclass(frozen=True, slots=True)
class Scenarios:
    """What the wheel holds: scenarios and right calls by id, and the tools' documentation."""

    questions: Mapping[str, Mapping[str, Any]]
    answers: Mapping[str, Sequence[Sequence[str]]]
    documentation: str

    @classmethod
    def read(cls, archive: Archive) -> Scenarios:
        """Read the wheel's data files; nothing of the wheel is imported."""
        questions = [json.loads(line) for line in archive.text(f"{_DATA}/{_NAME}").splitlines() if line.strip()]
        answers = [json.loads(x) for x in archive.text(f"{_DATA}/possible_answer/{_NAME}").splitlines() if x.strip()]
        functions = archive.text(f"{_DATA}/multi_turn_func_doc/gorilla_file_system.json").splitlines()
        return cls(
            {row["id"]: row for row in questions if _CLASS in row["involved_classes"]},
            {row["id"]: row["ground_truth"] for row in answers},
            "\n".join(_signature(json.loads(line)) for line in functions if line.strip()),
        )


def _signature(function: Mapping[str, Any]) -> str:
    """One line per tool: its parameters and the first sentence of its description."""
    parameters = function["parameters"]
    required = parameters.get("required", [])
    spelled = [
        f"{name}: {spec['type']}" + ("" if name in required else "?") for name, spec in parameters["properties"].items()
    ]
    told = function["description"].partition("Tool description:")[2].strip().partition(".")[0]
    return f"{function['name']}({', '.join(spelled)}): {told}."


def parse_call(text: str) -> Call:
    """``mv(source='a',destination='b')`` as name and arguments."""
    node = ast.parse(text.strip(), mode="eval").body
    assert isinstance(node, ast.Call)
    assert isinstance(node.func, ast.Name)
    names = FolderTools.parameters(node.func.id)
    positional = {name: ast.literal_eval(value) for name, value in zip(names, node.args, strict=False)}
    return node.func.id, positional | {word.arg or "": ast.literal_eval(word.value) for word in node.keywords}


_LEADS = ("I will do that with these calls:", "On it:", "Let me take care of that.", "That needs the following:")
_OPENINGS = (
    "Besides the repository tools there is a folder of documents with tools of its own, called the same way:",
    "For this conversation you also have the tools of a document folder; they work on the current directory only:",
)


def build_tool_task(spec: ToolSpec, scenarios: Scenarios) -> Task:
    """The conversation of one selection: for each request one turn of calls and one of the answer."""
    question = scenarios.questions[spec.scenario]
    folder = FolderTools(question["initial_config"][_CLASS])
    key = (spec.seed, spec.task_id)
    turns: list[Turn] = []
    opening = pick(_OPENINGS, *key) + f"\n{scenarios.documentation}\n\n"
    for number in range(spec.num_requests):
        request = question["question"][number][0]["content"]
        prompt = f"{opening if not turns else ''}{request}\n\n[environment]\n{folder.environment()}"
        calls = [parse_call(text) for text in scenarios.answers[spec.scenario][number]]
        lead = pick(_LEADS, *key, number)
        gold = "\n".join([lead, *(tool_call(name, **arguments) for name, arguments in calls)])
        turns.append(turn(prompt, gold, "prose", is_first=not turns))
        results = [(name, arguments, folder.call(name, arguments)) for name, arguments in calls]
        shown = "\n\n".join(
            tool_result(_spelled(name, arguments), json.dumps(result, ensure_ascii=False) if result else "(done)")
            for name, arguments, result in results
        )
        turns.append(turn(shown, _answer(results), "prose"))
    return Task(task_id=spec.task_id, part=PART, turns=turns)


def _spelled(name: str, arguments: Mapping[str, Any]) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


def _answer(results: Sequence[tuple[str, Mapping[str, Any], Result]]) -> str:
    told = [_sentence(name, arguments, result) for name, arguments, result in results]
    return re.sub(r"\n ", "\n", " ".join(told)).strip()


def _sentence(name: str, arguments: Mapping[str, Any], result: Result) -> str:
    """What a call brought, in words."""
    if "error" in result:
        return f"`{name}` did not work: {result['error']}."
    file = arguments.get("file_name") or arguments.get("dir_name") or ""
    value = next(iter(result.values()), "")
    listed = ", ".join(f"`{item}`" for item in value) if isinstance(value, list) else ""
    match name:
        case "cd":
            return f"We are now in `{arguments['folder']}`." if arguments["folder"] != ".." else "I went one folder up."
        case "ls":
            return f"The folder holds {listed}." if listed else "The folder is empty."
        case "find":
            return f"I found {listed}." if listed else "Nothing matches."
        case "grep":
            lines = "; ".join(f'"{line}"' for line in value)
            return (
                f"In `{file}` these lines contain '{arguments['pattern']}': {lines}." if value else "No line matches."
            )
        case "wc":
            kind = result["type"] if result["count"] != 1 else result["type"].removesuffix("s")
            return f"`{file}` has {result['count']} {kind}."
        case "cat":
            return f"`{file}` says: {value}"
        case "sort":
            return f"The lines of `{file}` in order:\n{value}\n"
        case "tail":
            return f"`{file}` ends like this:\n{value}\n"
        case "diff":
            return f"The files differ here:\n{value}\n" if value else "The files do not differ."
        case "du":
            return f"The folder takes {value}."
        case "touch" | "mkdir":
            return f"I created `{file}`."
        case "echo":
            return f"I wrote the text to `{file}`." if file else f"{value}"
        case "pwd":
            return f"The working directory is `{value}`."
    return f"Done: {value}."


def select_scenarios(scenarios: Scenarios, num_tasks: int, seed: int, fits: Callable[[Task], bool]) -> list[ToolSpec]:
    """Scenarios that begin with at least two requests for the file system alone, those with most requests first."""
    usable: list[tuple[int, int, str]] = []
    for name in sorted(scenarios.questions):
        num = 0
        for calls in scenarios.answers[name][:MAX_REQUESTS]:
            parsed = [parse_call(text) for text in calls]
            if not parsed or not all(FolderTools.has(tool) for tool, _ in parsed):
                break
            num += 1
        if num >= 2 and fits(build_tool_task(ToolSpec("", name, num, seed), scenarios)):
            usable.append((-num, rank(seed, name), name))
    chosen = sorted(usable)[:num_tasks]
    return [ToolSpec(f"tool-{i:02d}", name, -num, seed) for i, (num, _, name) in enumerate(chosen)]

"""Conversations of a coding agent up to where the target takes over: tools, a file that was read, an edit, test output.

A target asked in the middle of such work answers otherwise than one asked out of nothing, and a draft has to follow it
there. All texts are made from the source file and the templates here.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence

from paceline.train.corpus import SourceFile
from paceline.train.examples import rename, search_replace, whole
from paceline.train.syntax import Node, Tree

Message = dict[str, str]
_Tools = Mapping[str, tuple[str, str, Sequence[str]]]

MAX_UNIT_BYTES = 1600
_CONTEXT_BYTES = 700

# What agents call the same few things; a conversation keeps to one set.
_TOOLSETS: Sequence[_Tools] = (
    {
        "read": ("read_file", "Show part of a file.", ("path", "first_line", "last_line")),
        "edit": ("edit_file", "Change a file by SEARCH/REPLACE blocks or a whole function.", ("path",)),
        "search": ("grep", "Search the files for a pattern.", ("pattern", "path")),
        "test": ("run_tests", "Run the tests.", ("target",)),
        "shell": ("run_command", "Run a command in the repository.", ("command",)),
    },
    {
        "read": ("open", "Open a file at a line.", ("file", "line")),
        "edit": ("str_replace", "Replace text in a file.", ("file",)),
        "search": ("find", "List files or search in them.", ("query",)),
        "test": ("pytest", "Run tests by path.", ("path",)),
        "shell": ("bash", "Run a shell command.", ("command",)),
    },
    {
        "read": ("view_file", "View lines of a file.", ("file_path", "offset", "limit")),
        "edit": ("apply_patch", "Apply a change to a file.", ("file_path",)),
        "test": ("test", "Run the test suite.", ("args",)),
        "shell": ("terminal", "Use the terminal.", ("command",)),
    },
)
_CALLING = 'Call a tool as <tool_call>{"name": ..., "arguments": {...}}</tool_call>. '
_RULES = (
    "Results come back as messages. Read before you change, change only what was asked, then say what changed.",
    "Keep the style of the code. Run the tests after a change. When they pass, summarise it in a sentence and stop.",
)
_ASKS = (
    "`{old}` in `{name}` says too little. Call it `{new}`.",
    "Please rename `{old}` to `{new}` in `{name}` (`{path}`) and keep everything else.",
    "In `{path}`, `{name}` should use the name `{new}` instead of `{old}`.",
)
_OPEN_ASKS = (
    "`{name}` in `{path}` needs type hints.",
    "Make `{name}` in `{path}` raise ValueError for empty input.",
    "`{name}` is slow for large inputs. Can you improve it?",
    "Please add a docstring to `{name}` in `{path}`.",
    "A user says that `{name}` gives a wrong result in some cases. Find out why and fix it.",
)
_READS = ("I will read `{name}` first.", "Let me look at the code.", "First I look at `{path}`.", "")
_EDITS = ("Here is the change:", "Now I can edit `{name}`.", "The edit:", "")


def agent_conversation(file: SourceFile, data: bytes, unit: Node, tree: Tree, dice: random.Random) -> list[Message]:
    """Messages that end with one of the user's, after none to three turns of the agent."""
    tools = dice.choice(_TOOLSETS)
    names = {"name": str(unit.name), "path": file.path}
    edit = rename(data, unit, tree, dice) if unit.end - unit.start <= MAX_UNIT_BYTES else None
    ask = dice.choice(_OPEN_ASKS).format(**names)
    if edit is not None:
        ask = dice.choice(_ASKS).format(old=edit.old, new=edit.new, **names)
    num_lines = data.count(b"\n")
    messages = [
        {"role": "system", "content": _system_prompt(tools, dice)},
        {"role": "user", "content": f"Files:\n{file.path} ({num_lines} lines)\n\n{ask}"},
    ]
    num_turns = dice.choice((0, 1, 1, 1, 2, 3) if edit is not None else (0, 1, 1))
    if num_turns >= 1:
        messages += _reading(file, data, unit, tools, names, dice)
    if num_turns >= 2 and edit is not None:
        before, after = data[unit.start : unit.end].decode(errors="replace"), edit.after.decode(errors="replace")
        shape = dice.choice((search_replace, whole))
        lead = dice.choice(_EDITS).format(**names)
        text = f"{lead}\n{_call(tools, 'edit', file.path)}\n{shape(file, before, after)}".lstrip()
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "The file was changed."}]
    if num_turns >= 3:
        call = _call(tools, "test", "tests")
        messages += [
            {"role": "assistant", "content": f"Now the tests.\n{call}"},
            {"role": "user", "content": _test_output(names, dice)},
        ]
    return messages


def _reading(
    file: SourceFile, data: bytes, unit: Node, tools: _Tools, names: Mapping[str, str], dice: random.Random
) -> list[Message]:
    """The agent reads the definition, and sees it among its neighbours."""
    start = data.rfind(b"\n", 0, max(0, unit.start - dice.choice((0, _CONTEXT_BYTES)))) + 1
    end = data.find(b"\n", min(unit.end, unit.start + MAX_UNIT_BYTES) + dice.choice((0, _CONTEXT_BYTES)))
    end = len(data) if end < 0 else end
    shown = data[start:end].decode(errors="replace").rstrip()
    first = data.count(b"\n", 0, start) + 1
    lead = dice.choice(_READS).format(**names)
    return [
        {"role": "assistant", "content": f"{lead}\n{_call(tools, 'read', file.path)}".lstrip()},
        {"role": "user", "content": f"[{tools['read'][0]}] {file.path}, from line {first}:\n{shown}"},
    ]


def _system_prompt(tools: _Tools, dice: random.Random) -> str:
    lines = []
    for name, description, parameters in tools.values():
        properties = {parameter: {"type": "string"} for parameter in parameters}
        lines.append(json.dumps({"name": name, "description": description, "parameters": properties}))
    return "\n".join(
        ["You are a coding agent in the user's repository. Tools:", *lines, "", _CALLING + dice.choice(_RULES)]
    )


def _call(tools: _Tools, use: str, value: str) -> str:
    name, _, parameters = tools[use]
    return f"<tool_call>{json.dumps({'name': name, 'arguments': {parameters[0]: value}})}</tool_call>"


def _test_output(names: Mapping[str, str], dice: random.Random) -> str:
    passed = dice.randint(3, 60)
    if dice.random() < 0.6:
        return f"{'.' * passed}\n{passed} passed in {dice.random():.2f}s"
    test = f"test_{names['name'].strip('_').lower()}"
    return (
        f"{'.' * passed}F\n\n_____ {test} _____\n\n    def {test}():\n>       assert {names['name']}(x) == expected\n"
        f"E       AssertionError\n\n1 failed, {passed} passed in {dice.random():.2f}s"
    )

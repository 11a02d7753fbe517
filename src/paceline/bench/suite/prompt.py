"""What every task of the suite shares: the system prompt, tool calls and their results, windows, the repository map.

Only the roles system, user and assistant are used: every chat template knows them, while ``tool`` breaks many. A tool
result is a user message under a header of its own.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping, Sequence

from paceline.bench.records import TextKind, Turn

_TOOLS: Sequence[tuple[str, str, Mapping[str, str]]] = (
    ("read_file", "Show lines of a text file.", {"path": "string", "first_line": "integer", "last_line": "integer"}),
    ("apply_edit", "Change or create a file; the text follows the call.", {"path": "string", "function": "string"}),
    ("list_dir", "List a folder.", {"path": "string"}),
    ("search", "Find a regular expression in the files.", {"pattern": "string", "path": "string"}),
    ("run_tests", "Run the tests and show the outcome.", {"target": "string"}),
    ("run_command", "Run a shell command in the repository.", {"command": "string"}),
)


def _schema(name: str, description: str, parameters: Mapping[str, str]) -> str:
    properties = {key: {"type": kind} for key, kind in parameters.items()}
    return json.dumps({"name": name, "description": description, "parameters": properties}, separators=(", ", ": "))


SYSTEM_PROMPT = "\n".join(
    [
        "You are a coding agent. You work in the user's repository through these tools:",
        *(_schema(*tool) for tool in _TOOLS),
        "",
        "Rules:",
        '- Call a tool as <tool_call>{"name": ..., "arguments": {...}}</tool_call>, after at most two sentences.',
        '- Its result comes back in a message that begins with "[tool result]".',
        "- apply_edit is followed either by SEARCH/REPLACE blocks, whose search text occurs exactly once in the file,",
        "  or by one code block: with `function` it replaces that function, without it the whole file.",
        "- Read before you edit, change only what the task asks for, keep the style of the file.",
        "- Run the tests after an edit. When they pass, say in a few sentences what changed and stop.",
    ]
)

MIN_TOKENS, MAX_TOKENS = 64, 256


def tool_call(name: str, /, **arguments: object) -> str:
    """A call as the system prompt asks for it."""
    body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False, separators=(", ", ": "))
    return f"<tool_call>{body}</tool_call>"


def tool_result(name: str, body: str) -> str:
    """A result as the system prompt announces it."""
    return f"[tool result] {name}\n{body.rstrip()}"


def turn(prompt: str, gold: str, kind: TextKind, *, prediction: str | None = None, is_first: bool = False) -> Turn:
    """A turn with one user message; the first also brings the system prompt. ``max_tokens`` follows the gold's length.

    Two and a half characters a token is what dense code takes with small vocabularies; prose has room to spare.
    """
    messages = [{"role": "user", "content": prompt}]
    if is_first:
        messages.insert(0, {"role": "system", "content": SYSTEM_PROMPT})
    max_tokens = min(MAX_TOKENS, max(MIN_TOKENS, -(-len(gold) // 40) * 16))
    return Turn(messages=messages, gold=gold, kind=kind, max_tokens=max_tokens, prediction=prediction)


def numbered(lines: Sequence[str], first: int, last: int) -> str:
    """The header and text of ``read_file`` for lines ``first`` to ``last``, counted from 1, both included."""
    return f"lines {first}-{last} of {len(lines) - (not lines[-1])}:\n" + "\n".join(lines[first - 1 : last])


def window(lines: Sequence[str], first: int, last: int, max_chars: int, max_lines: int = 250) -> tuple[int, int]:
    """A range around ``first``..``last`` that grows on both sides, line by line, up to the limits."""
    size = sum(len(line) + 1 for line in lines[first - 1 : last])
    grows = True
    while grows and last - first + 1 < max_lines:
        grows = False
        for line in (first - 1, last + 1):
            if 1 <= line <= len(lines) and size + len(lines[line - 1]) + 1 <= max_chars:
                size += len(lines[line - 1]) + 1
                first, last = min(first, line), max(last, line)
                grows = True
    while last > first and not lines[last - 1].strip():
        last -= 1
    while first < last and not lines[first - 1].strip():
        first += 1
    return first, last


_DEFINITION = re.compile(r"^([ \t]*)(class|(?:async )?def) (\w+)", re.MULTILINE)


def repository_map(files: Iterable[tuple[str, str]], focus: str, max_chars: int = 560) -> str:
    """A few files with their sizes; the one in focus with the names it defines at top level."""
    files = list(files)
    rows = []
    for path, text in files:
        row = f"{path} ({text.count(chr(10))} lines)"
        if path == focus:
            names = [name for indent, _, name in _DEFINITION.findall(text) if not indent]
            row += ": " + ", ".join(dict.fromkeys(names)) if names else ""
            row = row if len(row) <= max_chars // 2 else row[: max_chars // 2].rpartition(",")[0] + ", ..."
        rows.append(row)
    at = next((i for i, (path, _) in enumerate(files) if path == focus), 0)
    keep, size = {at}, len(rows[at]) if rows else 0
    for i in sorted(range(len(rows)), key=lambda i: abs(i - at)):  # neighbours of the focus first
        if i not in keep and size + len(rows[i]) + 1 <= max_chars:
            keep.add(i)
            size += len(rows[i]) + 1
    shown = [rows[i] for i in sorted(keep)]
    if len(shown) < len(rows):
        shown.append(f"(and {len(rows) - len(shown)} more files)")
    return "\n".join(shown)


def git_diff(path: str, old: Sequence[str], new: Sequence[str], max_chars: int = 1500) -> str:
    """What ``git diff`` would show for one file, cut off after ``max_chars`` at a line."""
    rows = [f"diff --git a/{path} b/{path}"]
    rows += [row.rstrip("\n") for row in difflib.unified_diff(old, new, f"a/{path}", f"b/{path}", lineterm="")]
    size = 0
    shown: list[str] = []
    for row in rows:
        size += len(row) + 1
        if size > max_chars:
            return "\n".join([*shown, "..."])
        shown.append(row)
    return "\n".join(shown)


def grep(files: Iterable[tuple[str, str]], word: str, max_lines: int = 12) -> str:
    """What ``search`` would show for a whole word."""
    pattern = re.compile(rf"\b{re.escape(word)}\b")
    rows = [
        f"{path}:{number}: {line.strip()[:110]}"
        for path, text in files
        for number, line in enumerate(text.split("\n"), start=1)
        if pattern.search(line)
    ]
    if len(rows) > max_lines:
        rows = [*rows[:max_lines], f"({len(rows) - max_lines} more)"]
    return "\n".join(rows) or "no match"

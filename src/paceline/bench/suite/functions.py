"""Where the functions of a file are, and which of them changed between two versions of it."""

from __future__ import annotations

import ast
import difflib
import warnings
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """Lines ``first`` to ``last`` of a file, counted from 1, both included."""

    first: int
    last: int

    def lines(self, text_lines: Sequence[str]) -> list[str]:
        """The lines themselves."""
        return list(text_lines[self.first - 1 : self.last])


@dataclass(frozen=True, slots=True)
class Change:
    """One function of one file in two versions. ``name`` is qualified (``Parser.parse``)."""

    path: str
    name: str
    old: Span
    new: Span


def parse(text: str) -> ast.Module | None:
    """The syntax tree, or None for text this Python cannot parse."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return None


def function_spans(text: str) -> dict[str, Span]:
    """Functions at module level and in classes, decorators included; names defined twice are left out."""
    tree = parse(text)
    found: dict[str, list[Span]] = {}

    def visit(body: Sequence[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                found.setdefault(prefix + node.name, []).append(Span(first, node.end_lineno or node.lineno))
            elif isinstance(node, ast.ClassDef):
                visit(node.body, f"{prefix}{node.name}.")

    if tree is not None:
        visit(tree.body, "")
    return {name: spans[0] for name, spans in found.items() if len(spans) == 1}


def changed_functions(path: str, old_text: str, new_text: str) -> list[Change]:
    """The functions that both versions define, with different text, in the order of the old file."""
    old_lines, new_lines = old_text.split("\n"), new_text.split("\n")
    new_spans = function_spans(new_text)
    return [
        Change(path, name, old, new_spans[name])
        for name, old in function_spans(old_text).items()
        if name in new_spans and old.lines(old_lines) != new_spans[name].lines(new_lines)
    ]


Opcode = tuple[str, int, int, int, int]


def opcodes(old: Sequence[str], new: Sequence[str]) -> list[Opcode]:
    """difflib's opcodes between lists of lines, equal stretches included."""
    return list(difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes())


def num_changed_lines(old: Sequence[str], new: Sequence[str]) -> int:
    """Lines that go plus lines that come."""
    return sum((i2 - i1) + (j2 - j1) for tag, i1, i2, j1, j2 in opcodes(old, new) if tag != "equal")


def hunks(old: Sequence[str], new: Sequence[str], join: int = 3) -> list[tuple[Span, Span]]:
    """Changed stretches, counted from 1; those at most ``join`` equal lines apart are one. A span may be empty."""
    found: list[tuple[Span, Span]] = []
    for tag, i1, i2, j1, j2 in opcodes(old, new):
        if tag == "equal":
            continue
        if found and i1 - found[-1][0].last <= join:
            found[-1] = (Span(found[-1][0].first, i2), Span(found[-1][1].first, j2))
        else:
            found.append((Span(i1 + 1, i2), Span(j1 + 1, j2)))
    return found

"""Code as a tree of nodes, and what each byte of it is for. Offsets are bytes of the UTF-8 text.

Python is read by the standard library's ``ast`` and ``tokenize``, other languages by tree-sitter (optional).
"""

from __future__ import annotations

import ast
import enum
import io
import keyword
import re
import tokenize
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


class Role(enum.IntEnum):
    """What a piece of text is for. The order is stored in data sets: append only."""

    PROSE = 0
    INDENTATION = 1
    KEYWORD = 2
    OPERATOR = 3
    IDENTIFIER = 4
    CALL_ARGUMENT = 5
    IMPORT = 6
    LITERAL = 7
    DOCSTRING = 8
    COMMENT = 9


Roles = npt.NDArray[np.uint8]
NAMES = (Role.IDENTIFIER, Role.CALL_ARGUMENT, Role.IMPORT)


@dataclass(frozen=True, slots=True)
class Node:
    """A statement or definition: bytes [start, end), whole lines; ``depth`` counts the nodes around it.

    ``name`` is set for functions and classes.
    """

    start: int
    end: int
    depth: int
    kind: str
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Tree:
    """The nodes of a file in order of their start, outer before inner, and the role of each byte."""

    nodes: Sequence[Node]
    roles: Roles


def parse(text: str, language: str) -> Tree | None:
    """The tree of a file, or None where it does not parse or nothing here reads the language."""
    if language == "python":
        return _parse_python(text)
    from paceline.train import tree_sitter_syntax

    return tree_sitter_syntax.parse(text, language)


def roles_of(text: str, language: str) -> Roles:
    """The role of each byte of code that may be incomplete or wrong, as a model writes it."""
    if language == "python":
        return _python_roles(text, None)
    tree = parse(text, language)
    return np.full(len(text.encode()), Role.PROSE, dtype=np.uint8) if tree is None else tree.roles


_FENCE = re.compile(r"^```[ \t]*([\w+-]*)[^\n]*\n(.*?)(?:^```[ \t]*$|\Z)", re.MULTILINE | re.DOTALL)
_ALIASES = {"py": "python", "js": "javascript", "ts": "typescript", "rs": "rust", "c++": "cpp", "": "python"}


def roles_of_answer(text: str) -> Roles:
    """The role of each byte of an answer in Markdown: code within fences by its language, the rest prose."""
    roles = np.full(len(text.encode()), Role.PROSE, dtype=np.uint8)
    for match in _FENCE.finditer(text):
        language = match[1].lower()
        inside = roles_of(match[2], _ALIASES.get(language, language))
        start = len(text[: match.start(2)].encode())
        roles[start : start + len(inside)] = inside
    return roles


def _parse_python(text: str) -> Tree | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of odd escapes in other people's strings
            module = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    lines = _Lines(text)
    try:
        nodes = list(_python_nodes(module, lines, 0))
    except RecursionError:
        return None
    nodes.sort(key=lambda node: (node.start, -node.end))
    return Tree(nodes, _python_roles(text, module))


class _Lines:
    """Turns the line and column of ast (bytes) and of tokenize (characters) into a byte offset."""

    def __init__(self, text: str) -> None:
        self.lines = text.splitlines(keepends=True) if "\f" not in text else io.StringIO(text).readlines()
        sizes = [len(line.encode()) for line in self.lines]
        self.starts = np.concatenate(([0], np.cumsum(sizes))).tolist()

    def of_line(self, line: int) -> int:
        """Where line ``line`` (from 1) begins; one past the last is the end."""
        return int(self.starts[min(line - 1, len(self.lines))])

    def of_character(self, line: int, column: int) -> int:
        """The byte of character ``column`` in line ``line``."""
        if line > len(self.lines):
            return int(self.starts[-1])
        return self.of_line(line) + len(self.lines[line - 1][:column].encode())


def _python_nodes(parent: ast.AST, lines: _Lines, depth: int) -> Iterator[Node]:
    for child in ast.iter_child_nodes(parent):
        if isinstance(child, ast.stmt):
            first = min([child.lineno, *(item.lineno for item in getattr(child, "decorator_list", []))])
            start, end = lines.of_line(first), lines.of_line((child.end_lineno or child.lineno) + 1)
            name = child.name if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) else None
            yield Node(start, end, depth, type(child).__name__, name)
            yield from _python_nodes(child, lines, depth + 1)
        elif isinstance(child, ast.excepthandler | ast.match_case):
            yield from _python_nodes(child, lines, depth)


def _python_roles(text: str, module: ast.Module | None) -> Roles:
    """Roles from the token stream, as far as it can be read, refined by the tree where there is one."""
    lines = _Lines(text)
    roles = np.full(int(lines.starts[-1]), Role.OPERATOR, dtype=np.uint8)
    data = text.encode()
    for match in re.finditer(rb"^[ \t]+|[ \t]*\n", data, re.MULTILINE):
        roles[match.start() : match.end()] = Role.INDENTATION
    opened: list[str] = []  # brackets: those of a call, and others
    is_import, previous, is_statement_start = False, "", True
    for token in _python_tokens(text):
        start, end = lines.of_character(*token.start), lines.of_character(*token.end)
        if token.type in (tokenize.NEWLINE, tokenize.NL, tokenize.INDENT, tokenize.DEDENT):
            is_import = is_import and token.type == tokenize.NL
            is_statement_start = is_statement_start or token.type == tokenize.NEWLINE
            continue
        if token.type == tokenize.NAME:
            if is_statement_start and token.string in ("import", "from"):
                is_import = True
            if keyword.iskeyword(token.string):
                role = Role.KEYWORD
            elif is_import:
                role = Role.IMPORT
            else:
                role = Role.CALL_ARGUMENT if opened and opened[-1] == "call" else Role.IDENTIFIER
            roles[start:end] = role
        elif token.type == tokenize.COMMENT:
            roles[start:end] = Role.COMMENT
        elif token.type == tokenize.NUMBER:
            roles[start:end] = Role.LITERAL
        elif token.type == tokenize.STRING or "STRING" in tokenize.tok_name[token.type]:
            roles[start:end] = Role.DOCSTRING if is_statement_start else Role.LITERAL
        elif token.string in "([{" and token.string:
            # A definition's parameters are names of its own, not arguments.
            is_call = token.string == "(" and (previous.isidentifier() or previous in (")", "]"))
            opened.append("call" if is_call and not keyword.iskeyword(previous) else "other")
            if is_call and _is_definition(data, start):
                opened[-1] = "other"
        elif token.string in ")]}" and token.string and opened:
            opened.pop()
        is_statement_start = False
        previous = token.string
    if module is not None:
        for start, end in _docstrings(module, lines):
            roles[start:end] = Role.DOCSTRING
    return roles


def _is_definition(data: bytes, at: int) -> bool:
    line = data[data.rfind(b"\n", 0, at) + 1 : at].lstrip()
    return line.startswith((b"def ", b"async def ", b"class "))


def _python_tokens(text: str) -> Iterator[tokenize.TokenInfo]:
    """Tokens up to where the text stops being Python."""
    try:
        yield from tokenize.generate_tokens(io.StringIO(text).readline)
    except (tokenize.TokenError, SyntaxError, IndentationError):
        return


def _docstrings(module: ast.Module, lines: _Lines) -> Iterator[tuple[int, int]]:
    for node in ast.walk(module):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) or not node.body:
            continue
        first = node.body[0]
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            value = first.value
            start = lines.of_line(value.lineno) + value.col_offset
            yield start, lines.of_line(value.end_lineno or value.lineno) + (value.end_col_offset or 0)

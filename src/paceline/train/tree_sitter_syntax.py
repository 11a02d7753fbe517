"""Trees of other languages, by tree-sitter's single-grammar wheels (the extra ``train``)."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from paceline.train.syntax import Node, Role, Roles, Tree

# Language -> module and the function that gives its grammar.
_GRAMMARS = {
    "javascript": ("tree_sitter_javascript", "language"),
    "typescript": ("tree_sitter_typescript", "language_typescript"),
    "tsx": ("tree_sitter_typescript", "language_tsx"),
    "go": ("tree_sitter_go", "language"),
    "rust": ("tree_sitter_rust", "language"),
    "java": ("tree_sitter_java", "language"),
    "c": ("tree_sitter_c", "language"),
    "cpp": ("tree_sitter_cpp", "language"),
}
_DEFINITIONS = ("function", "method", "class", "struct", "interface", "trait", "impl", "enum", "constructor")
_IMPORTS = ("import", "use_declaration", "preproc_include", "package_clause", "package_declaration")
_MAX_DEPTH = 150


def parse(text: str, language: str) -> Tree | None:
    """See `paceline.train.syntax.parse`; None also where the grammar is not installed, or most of the file is wrong."""
    parser = _parser(language)
    if parser is None:
        return None
    data = text.encode()
    root = parser.parse(data).root_node
    if root.type == "ERROR":
        return None
    roles = np.full(len(data), Role.OPERATOR, dtype=np.uint8)
    _mark_spaces(data, roles)
    nodes: list[Node] = []
    _visit(root, data, roles, nodes, depth=0, level=0, around=Role.IDENTIFIER)
    nodes.sort(key=lambda node: (node.start, -node.end))
    return Tree(nodes, roles)


def is_available(language: str) -> bool:
    """Whether the grammar of a language is installed."""
    return _parser(language) is not None


@functools.cache
def _parser(language: str) -> Any:
    if language not in _GRAMMARS:
        return None
    module, function = _GRAMMARS[language]
    try:
        tree_sitter = importlib.import_module("tree_sitter")
        grammar = importlib.import_module(module)
    except ImportError:
        return None
    return tree_sitter.Parser(tree_sitter.Language(getattr(grammar, function)()))


def _visit(node: Any, data: bytes, roles: Roles, nodes: list[Node], *, depth: int, level: int, around: Role) -> None:
    """Mark the roles of the leaves below ``node`` and collect its statements; ``around`` is what a name in it is."""
    kind: str = node.type
    if any(kind.startswith(item) for item in _IMPORTS):
        around = Role.IMPORT
    elif kind in ("arguments", "argument_list"):
        around = Role.CALL_ARGUMENT
    if not node.child_count or "string" in kind or "comment" in kind:
        roles[node.start_byte : node.end_byte] = _leaf_role(node, data, around)
        return
    is_statement = node.is_named and (
        kind.endswith(("_statement", "_declaration", "_definition", "_item", "_specifier", "_directive"))
        or kind.startswith(_IMPORTS)
    )
    if is_statement and level > 0:
        start, end = _whole_lines(data, node.start_byte, node.end_byte)
        named = node.child_by_field_name("name") or node.child_by_field_name("declarator")
        is_definition = any(item in kind for item in _DEFINITIONS)
        name = _name(named, data) if named is not None and is_definition else None
        nodes.append(Node(start, end, depth, kind, name))
        depth += 1
    if level < _MAX_DEPTH:
        for child in node.children:
            _visit(child, data, roles, nodes, depth=depth, level=level + 1, around=around)


def _name(node: Any, data: bytes) -> str:
    """The identifier of a declarator, however deep C nests it."""
    for item in _walk(node):
        if item.type.endswith("identifier"):
            return data[item.start_byte : item.end_byte].decode(errors="replace")
    return data[node.start_byte : node.end_byte].decode(errors="replace")


def _walk(node: Any) -> Iterator[Any]:
    yield node
    for child in node.children:
        yield from _walk(child)


def _leaf_role(node: Any, data: bytes, around: Role) -> Role:
    kind: str = node.type
    if "comment" in kind:
        return Role.COMMENT
    if "string" in kind or "literal" in kind or kind in ("number", "char", "true", "false", "null"):
        return Role.IMPORT if around is Role.IMPORT else Role.LITERAL
    if kind.endswith("identifier"):
        return around
    if not node.is_named and data[node.start_byte : node.start_byte + 1].isalpha():
        return Role.KEYWORD
    return Role.IDENTIFIER if node.is_named and kind.endswith("type") else Role.OPERATOR


def _mark_spaces(data: bytes, roles: Roles) -> None:
    at = 0
    for line in data.splitlines(keepends=True):
        body = line.strip()
        indent = len(line) - len(line.lstrip()) if body else len(line)
        roles[at : at + indent] = Role.INDENTATION
        roles[at + len(line.rstrip()) : at + len(line)] = Role.INDENTATION
        at += len(line)


def _whole_lines(data: bytes, start: int, end: int) -> tuple[int, int]:
    """The lines a node stands on, if nothing else does; else the node itself."""
    first = data.rfind(b"\n", 0, start) + 1
    last = data.find(b"\n", end)
    last = len(data) if last < 0 else last + 1
    has_company = data[first:start].strip() or data[end:last].strip(b" \t\r\n;,")
    return (start, end) if has_company else (first, last)

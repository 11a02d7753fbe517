"""Every small bug that can be planted in a function, by its syntax tree."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from paceline.bench.suite.choice import rank
from paceline.bench.suite.functions import Span, parse
from paceline.bench.suite.mutation import Mutation

_COMPARE = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
}
_BINARY = {ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.FloorDiv: ("//", "%"), ast.Mod: ("%", "//")}


def mutations(source: str, span: Span, seed: int) -> list[Mutation]:
    """The bugs that fit the function at ``span``, in an order the seed decides; only plain ASCII lines are touched."""
    tree = parse(source)
    assert tree is not None
    lines = source.split("\n")
    function = next(
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and span.first <= node.lineno <= span.last
        and node.end_lineno == span.last
    )
    found = [m for m in _walk(function, lines) if all(line.isascii() for line in lines[m.line - 1 : m.end_line])]
    return sorted(set(found), key=lambda m: rank(seed, m.kind, m.line, m.column, m.text))


def _walk(function: ast.FunctionDef | ast.AsyncFunctionDef, lines: Sequence[str]) -> Iterator[Mutation]:
    names = _local_names(function)
    for statement in function.body:
        for node in ast.walk(statement):
            match node:
                case ast.Compare(left=left, ops=[operator], comparators=[right]) if type(operator) in _COMPARE:
                    kind = (
                        "condition" if isinstance(operator, ast.In | ast.NotIn | ast.Is | ast.IsNot) else "comparison"
                    )
                    yield from _between(kind, left, right, *_COMPARE[type(operator)], lines)
                case ast.BinOp(left=left, op=binary, right=right) if type(binary) in _BINARY:
                    yield from _between("operator", left, right, *_BINARY[type(binary)], lines)
                case ast.BoolOp(op=boolean, values=[first, second]):
                    words = ("and", "or") if isinstance(boolean, ast.And) else ("or", "and")
                    yield from _between("condition", first, second, *words, lines)
                case ast.Constant(value=int(value)) if not isinstance(value, bool) and 0 <= value <= 100:
                    yield _replace("off by one", node, str(value + 1))
                    if value > 0:
                        yield _replace("off by one", node, str(value - 1))
                case ast.UnaryOp(op=ast.Not(), operand=operand) if node.lineno == operand.lineno:
                    yield Mutation("condition", node.lineno, node.col_offset, node.lineno, operand.col_offset, "")
                case ast.Name(ctx=ast.Load(), id=name) if name in names:
                    yield from (_replace("name", node, other) for other in names if other != name)
                case ast.If(orelse=[]) if isinstance(node.body[-1], ast.Return | ast.Raise | ast.Continue):
                    if lines[node.lineno - 1].lstrip().startswith("if "):
                        end = node.end_lineno or node.lineno
                        if _follows(function, node):
                            yield Mutation("guard", node.lineno, 0, end + 1, 0, "")


def _follows(function: ast.AST, node: ast.stmt) -> bool:
    """True when another statement of the same block comes after the node: then it can be dropped."""
    for parent in ast.walk(function):
        for block in (getattr(parent, field, None) for field in ("body", "orelse", "finalbody")):
            if isinstance(block, list) and node in block:
                return block[-1] is not node
    return False


def _local_names(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    spec = function.args
    found = [arg.arg for arg in [*spec.posonlyargs, *spec.args, *spec.kwonlyargs]]
    found += [n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
    return [name for name in dict.fromkeys(found) if name not in ("self", "cls", "_")]


def _between(
    kind: str, left: ast.expr, right: ast.expr, operator: str, other: str, lines: Sequence[str]
) -> Iterator[Mutation]:
    if left.end_lineno != right.lineno or left.end_col_offset is None:
        return
    gap = lines[right.lineno - 1][left.end_col_offset : right.col_offset]
    if gap.count(operator) == 1:
        column = left.end_col_offset + gap.index(operator)
        yield Mutation(kind, right.lineno, column, right.lineno, column + len(operator), other)


def _replace(kind: str, node: ast.expr, text: str) -> Mutation:
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    return Mutation(kind, node.lineno, node.col_offset, node.end_lineno, node.end_col_offset, text)

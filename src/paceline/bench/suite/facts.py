"""What a change of a function does, in sentences a user would write: read off both versions, never invented."""

from __future__ import annotations

import ast
import copy
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from paceline.bench.suite.functions import opcodes, parse

_BUILTINS = re.compile(
    "(all|any|bool|dict|enumerate|filter|float|frozenset|getattr|hasattr|int|isinstance|iter|len|list|map|max|min|next"
    "|range|repr|reversed|set|sorted|str|sum|super|tuple|type|zip|dict.fromkeys)"
)

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Fact:
    """One sentence about a change.

    Attributes:
        weight: how much it tells: 3 for behaviour in words or names, 1 for a hint.
        text: the sentence.
        failure: how a test that expects it fails before the change, or None.
    """

    weight: int
    text: str
    failure: str | None = None


def facts(name: str, old_lines: Sequence[str], new_lines: Sequence[str]) -> list[Fact]:
    """The facts of one function's change, most telling first; empty when nothing worth saying was found."""
    old_text, new_text = (textwrap.dedent("\n".join(lines)) for lines in (old_lines, new_lines))
    old, new = _function(old_text), _function(new_text)
    found: list[Fact] = []
    if old is not None and new is not None:
        if _stripped(old, types=False) == _stripped(new, types=False):
            return []  # only reformatted, or documented differently
        if _stripped(old) == _stripped(new):
            text = f"`{name}` needs complete type annotations: `{_signature(new_lines)}`."
            if _num_annotated(new) <= _num_annotated(old):
                return [Fact(3, f"The annotations of `{name}` become `{_signature(new_lines)}`.")]
            return [Fact(4, text, f"mypy: {name}: incomplete or outdated type annotation  [no-untyped-def]")]
        found += _parameters(name, _arguments(old, old_text), _arguments(new, new_text))
        found += _raises(name, old, new, old_text, new_text)
        found += _docstring(old, new)
    found += _comments(old_lines, new_lines)
    found += _replacements(name, old_lines, new_lines, old, new)
    if old is not None and new is not None:
        found += _calls(name, old, new, old_text, new_text)
    return sorted(dict.fromkeys(found), key=lambda fact: -fact.weight)


def _function(text: str) -> Function | None:
    tree = parse(text)
    if tree is None or len(tree.body) != 1 or not isinstance(tree.body[0], ast.FunctionDef | ast.AsyncFunctionDef):
        return None
    return tree.body[0]


def _stripped(function: Function, types: bool = True) -> str:
    """A dump that ignores the docstring and, with ``types``, annotations."""
    tree = copy.deepcopy(function)
    if ast.get_docstring(tree) is not None:
        tree.body = tree.body[1:] or [ast.Pass()]
    if types:
        tree.returns = None
        for node in ast.walk(tree):
            if isinstance(node, ast.arg):
                node.annotation = None
    return ast.dump(tree)


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """Like ``ast.walk`` in reading order, without what stands in f-strings: Python 3.11 gives that wrong positions."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.JoinedStr):
            yield from _walk(child)


def _num_annotated(function: Function) -> int:
    arguments = [node for node in ast.walk(function.args) if isinstance(node, ast.arg)]
    return sum(argument.annotation is not None for argument in arguments) + (function.returns is not None)


def _signature(lines: Sequence[str]) -> str:
    """The ``def`` up to its colon on one line."""
    start = next(i for i, line in enumerate(lines) if re.match(r"\s*(async )?def ", line))
    text = ""
    for line in lines[start:]:
        text += " " + line.split("  #")[0].strip()
        if text.endswith(":"):
            break
    return re.sub(r",\s*\)", ")", re.sub(r"([(\[])\s+", r"\1", text.strip().rstrip(":")))


def _arguments(function: Function, text: str) -> dict[str, str | None]:
    """Parameters and the source of their defaults."""
    spec = function.args
    positional = [*spec.posonlyargs, *spec.args]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(spec.defaults))
    pairs = [*zip(positional, [*defaults, *spec.defaults], strict=True)]
    pairs += zip(spec.kwonlyargs, spec.kw_defaults, strict=True)
    return {arg.arg: None if default is None else ast.get_source_segment(text, default) for arg, default in pairs}


def _parameters(name: str, old_args: Mapping[str, str | None], new_args: Mapping[str, str | None]) -> list[Fact]:
    found: list[Fact] = []
    call = name if not name.endswith(".__init__") else name.removesuffix(".__init__")
    added, gone = ([arg for arg in a if arg not in b] for a, b in ((new_args, old_args), (old_args, new_args)))
    if len(added) == len(gone) == 1 and [*new_args].index(added[0]) == [*old_args].index(gone[0]):
        failure = f"TypeError: {call}() got an unexpected keyword argument '{added[0]}'"
        return [Fact(3, f"The parameter `{gone[0]}` of `{call}` is now called `{added[0]}`.", failure)]
    for arg, default in new_args.items():
        if arg in added:
            with_default = f", by default `{default}`" if default is not None else ""
            found.append(
                Fact(
                    3,
                    f"`{call}` accepts a new parameter `{arg}`{with_default}.",
                    f"TypeError: {call}() got an unexpected keyword argument '{arg}'",
                )
            )
    for arg in (arg for arg in new_args if arg in old_args):
        before, after = old_args[arg], new_args[arg]
        if before != after and after is not None:
            found.append(Fact(3, f"The default of `{arg}` in `{call}` becomes `{after}`."))
    if gone:
        found.append(Fact(2, f"`{call}` no longer takes {' and '.join(f'`{arg}`' for arg in gone)}."))
    return found


def _raises(name: str, old: Function, new: Function, old_text: str, new_text: str) -> list[Fact]:
    def collect(function: Function, text: str) -> dict[str, str]:
        raised = [node.exc for node in _walk(function) if isinstance(node, ast.Raise) and node.exc is not None]
        return {ast.dump(exc): re.sub(r"\s+", " ", ast.get_source_segment(text, exc) or "") for exc in raised}

    before = collect(old, old_text)
    found = []
    for dump, source in collect(new, new_text).items():
        if dump not in before and "(" in source and len(source) < 160 and not _is_like(source, before.values()):
            source = source.replace("( ", "(").replace(" )", ")")
            error = re.split(r"[^\w.]", source)[0].rpartition(".")[2]
            found.append(Fact(3, f"`{name}` raises `{source}` where it applies.", f"Failed: DID NOT RAISE {error}"))
    return found


def _is_like(source: str, others: Iterable[str]) -> bool:
    """True when one of the others raises the same error with mostly the same words: only its form is new."""
    words = re.findall(r"[A-Za-z]{2,}", source)
    for other in others:
        same = set(re.findall(r"[A-Za-z]{2,}", other))
        if other.partition("(")[0] == source.partition("(")[0] and sum(w in same for w in words) >= 0.6 * len(words):
            return True
    return False


def _docstring(old: Function, new: Function) -> list[Fact]:
    before, after = ((ast.get_docstring(function) or "").split("\n") for function in (old, new))
    found = []
    for tag, _, _, j1, j2 in opcodes(before, after):
        added = re.sub(r"(\s|-{3,})+", " ", " ".join(after[j1:j2])).strip() if tag in ("insert", "replace") else ""
        words = re.findall(r"[A-Za-z]{2,}", added)
        if len(words) >= 4 and ">>>" not in added:
            shown = added if len(added) <= 240 else added[:240].rpartition(" ")[0] + " ..."
            found.append(Fact(3, f"Its docstring gets this: {shown}"))
    return found[:2]


def _comments(old: Sequence[str], new: Sequence[str]) -> list[Fact]:
    found = []
    for tag, i1, i2, j1, j2 in opcodes(old, new):
        if tag not in ("insert", "replace"):
            continue
        before = {line.strip() for line in old[i1:i2]}
        words = [line.strip().lstrip("# ") for line in new[j1:j2] if line.strip().startswith("# ")]
        text = " ".join(words)
        if len(re.findall(r"[A-Za-z]{2,}", text)) >= 4 and f"# {text}" not in before and "type: " not in text:
            found.append(
                Fact(3, f"Keep in mind: {text if len(text) <= 240 else text[:240].rpartition(' ')[0] + ' ...'}")
            )
    return found[:2]


def _replacements(
    name: str, old: Sequence[str], new: Sequence[str], old_tree: Function | None, new_tree: Function | None
) -> list[Fact]:
    """Small replaced stretches of code, quoted; a rename is said once."""
    found: list[Fact] = []
    renames: dict[tuple[str, str], None] = {}
    prose = [_collapsed(ast.get_docstring(tree) or "") for tree in (old_tree, new_tree) if tree is not None]
    for tag, i1, i2, j1, j2 in opcodes(old, new):
        before, after = ([line.strip() for line in lines] for lines in (old[i1:i2], new[j1:j2]))
        text = _collapsed(" ".join(after or before))
        is_same = text == _collapsed(" ".join(before)) or not re.search(r"\w", " ".join(before or after))
        if tag == "equal" or is_same or any(text.strip('" ') in told for told in prose):
            continue
        rename = _rename("\n".join(before), "\n".join(after))
        if rename is not None:
            renames[rename] = None
        elif tag == "replace" and len(before) <= 2 and len(after) <= 2 and all(before) and all(after):
            found.append(Fact(2, f"`{' '.join(before)}` should be `{' '.join(after)}`."))
        elif tag == "delete" and len(before) <= 2 and all(before):
            found.append(Fact(2, f"`{' '.join(before)}` is no longer needed."))
        elif tag == "insert" and len(after) == 1 and after[0] and not after[0].startswith("#"):
            near = next((line.strip() for line in reversed(old[:i1]) if line.strip()), "")
            place = f" after `{near}`" if near and len(near) < 70 else ""
            found.append(Fact(2, f"Add `{after[0]}`{place}."))
    said = [_renamed(name, before, after, old_tree) for before, after in renames]
    return said + [fact for fact in found if len(fact.text) <= 230 and '"""' not in fact.text][:3]


def _collapsed(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()


def _renamed(name: str, before: str, after: str, tree: Function | None) -> Fact:
    """A rename, told by what the old name is in the function: its own variable, a global, or something else."""
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == before] if tree else []
    own = [arg.arg for arg in ast.walk(tree.args) if isinstance(arg, ast.arg)] if tree else []
    if before in own or any(isinstance(node.ctx, ast.Store) for node in names):
        return Fact(2, f"The variable `{before}` of `{name}` is better called `{after}`.")
    if names:
        return Fact(
            3, f"`{before}` is called `{after}` now; use that name.", f"NameError: name '{before}' is not defined"
        )
    return Fact(2, f"Use `{after}` where `{name}` has `{before}`.")


def _rename(before: str, after: str) -> tuple[str, str] | None:
    """(A, B) when the texts differ exactly by the word A having become B."""
    old_words, new_words = (re.findall(r"\w+|\W", text) for text in (before, after))
    if len(old_words) != len(new_words):
        return None
    differing = {(a, b) for a, b in zip(old_words, new_words, strict=True) if a != b}
    if len(differing) != 1:
        return None
    a, b = differing.pop()
    is_name = a.isidentifier() and b.isidentifier() and len(a) > 1 and len(b) > 1
    return (a, b) if is_name and not {"True", "False", "None", "and", "or", "is"} & {a, b} else None


def _calls(name: str, old: Function, new: Function, old_text: str, new_text: str) -> list[Fact]:
    def collect(function: Function, text: str) -> list[str]:
        called = [
            ast.get_source_segment(text, node.func) or "" for node in _walk(function) if isinstance(node, ast.Call)
        ]
        return [source for source in called if re.fullmatch(r"[\w.]{3,50}", source) and not _BUILTINS.fullmatch(source)]

    before, after = collect(old, old_text), collect(new, new_text)
    added = [source for source in dict.fromkeys(after) if source not in before]
    gone = [source for source in dict.fromkeys(before) if source not in after]
    if not added:
        return []
    use = " and ".join(f"`{source}()`" for source in added[:2])
    return [Fact(1, f"`{name}` should use {use}" + (f" instead of `{gone[0]}()`." if gone else "."))]

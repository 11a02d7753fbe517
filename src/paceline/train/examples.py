"""Training examples made from source files, by the shape of their syntax trees."""

from __future__ import annotations

import difflib
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from paceline.loader.chat import ChatTemplate
from paceline.loader.tokenizer import Tokenizer
from paceline.train.corpus import SourceFile
from paceline.train.encoding import EncodedText, Example, encode
from paceline.train.syntax import Node, Role, Tree, parse, roles_of, roles_of_answer

MAX_EDIT_BYTES = 2400
_MIN_NODE_TOKENS, _MAX_NODE_TOKENS = 8, 160


@dataclass(frozen=True, slots=True)
class ExampleMaker:
    """Turns files into examples of at most ``row_tokens`` tokens.

    ``syntax`` names the uses made of the tree (see `Recipe`). Whatever is named, the source itself is read once:
    the other examples come on top, and are left out where a file does not parse.
    """

    tokenizer: Tokenizer
    chat: ChatTemplate | None
    row_tokens: int
    syntax: Sequence[str]
    seed: int

    def examples(self, file: SourceFile) -> Iterator[Example]:
        """All examples of a file; the same for the same file and seed, whatever else is in the corpus."""
        dice = random.Random(f"{self.seed}/{file.package}/{file.path}")
        tree = parse(file.text, file.language)
        byte_roles = tree.roles if tree is not None else roles_of(file.text, file.language)
        source = encode(file.text, self.tokenizer, byte_roles)
        yield from self._windows(file, source, tree, dice)
        if tree is None or not tree.nodes:
            return
        if "completion" in self.syntax:
            yield from self._completions(file, source, tree, dice)
        if "continuation" in self.syntax or "edits" in self.syntax:
            yield from self._edited(file, tree, dice)

    def _windows(
        self, file: SourceFile, source: EncodedText, tree: Tree | None, dice: random.Random
    ) -> Iterator[Example]:
        """The whole file in windows. Of aligned ones every second is cut anywhere, as a running text is."""
        is_aligned = "windows" in self.syntax and tree is not None
        boundaries = _boundaries(source, tree) if is_aligned and tree is not None else {}
        start, total = 0, len(source.token_ids)
        while start < total:
            end = min(start + self.row_tokens, total)
            if end < total and boundaries and dice.random() < 0.5:
                end = _best_boundary(boundaries, start + self.row_tokens // 2, end)
            yield self._part(file, source, start, end, "window")
            start = end

    def _completions(self, file: SourceFile, source: EncodedText, tree: Tree, dice: random.Random) -> Iterator[Example]:
        """A node to be written from what stands before it; only its own tokens count."""
        spans = [(source.first_token_at(node.start), source.first_token_at(node.end)) for node in tree.nodes]
        fit = [(a, b) for a, b in spans if _MIN_NODE_TOKENS <= b - a <= min(_MAX_NODE_TOKENS, self.row_tokens // 2)]
        for first, last in dice.sample(fit, min(len(fit), 1 + len(source.token_ids) // (4 * self.row_tokens))):
            start = max(0, last - self.row_tokens)
            example = self._part(file, source, start, last, "completion")
            example.weights[: first - start] = 0
            yield example

    def _edited(self, file: SourceFile, tree: Tree, dice: random.Random) -> Iterator[Example]:
        """A name of one definition changed throughout: as the code goes on after it, and as agents write it down."""
        data = file.text.encode()
        units = [node for node in tree.nodes if node.name and node.end - node.start <= MAX_EDIT_BYTES]
        for unit in dice.sample(units, min(len(units), 1 + len(data) // 8000)):
            edit = rename(data, unit, tree, dice)
            if edit is None:
                continue
            if "continuation" in self.syntax:
                yield from self._continuation(file, data, unit, edit)
            if "edits" in self.syntax and self.chat is not None:
                yield self._answer(file, data, unit, edit, dice)

    def _continuation(self, file: SourceFile, data: bytes, unit: Node, edit: Rename) -> Iterator[Example]:
        """The file up to the end of the changed definition, learnt from the first changed name on."""
        text = (data[: unit.start] + edit.after).decode(errors="replace")
        source = encode(text, self.tokenizer, roles_of(text, file.language))
        first = source.first_token_at(unit.start + edit.first_change) + 1
        total = len(source.token_ids)
        start = max(0, total - self.row_tokens)
        if first < total:
            example = self._part(file, source, start, total, "continuation")
            example.weights[: max(0, first - start)] = 0
            yield example

    def _answer(self, file: SourceFile, data: bytes, unit: Node, edit: Rename, dice: random.Random) -> Example:
        assert self.chat is not None
        before, after = data[unit.start : unit.end].decode(errors="replace"), edit.after.decode(errors="replace")
        ask = dice.choice(_ASKS).format(old=edit.old, new=edit.new, name=unit.name, path=file.path)
        question = f"{file.path}:\n```{file.language}\n{before.rstrip()}\n```\n\n{ask}"
        answer = dice.choice(_SHAPES)(file, before, after)
        prompt = self.tokenizer.encode(self.chat.render([{"role": "user", "content": question}]))
        source = encode(answer, self.tokenizer, roles_of_answer(answer))
        token_ids = [*prompt, *source.token_ids, *self.tokenizer.encode(self.tokenizer.eos_token)]
        weights = np.zeros(len(token_ids), dtype=np.float32)
        own = source.role_weights() if "roles" in self.syntax else np.ones(len(source.token_ids), dtype=np.float32)
        weights[len(prompt) : len(prompt) + len(own)] = own
        weights[len(prompt) + len(own) :] = 1
        roles = np.full(len(token_ids), Role.PROSE, dtype=np.uint8)
        roles[len(prompt) : len(prompt) + len(own)] = source.roles
        keep = slice(max(0, len(token_ids) - self.row_tokens), None)
        return Example(token_ids[keep], weights[keep], roles[keep], file.package, "edit")

    def _part(self, file: SourceFile, source: EncodedText, start: int, end: int, kind: str) -> Example:
        weights = source.role_weights() if "roles" in self.syntax else np.ones(len(source.token_ids), np.float32)
        part = weights[start:end].copy()
        part[:1] = 0
        return Example(source.token_ids[start:end], part, source.roles[start:end], file.package, kind)


@dataclass(frozen=True, slots=True)
class Rename:
    """A definition after a name in it was changed; ``first_change`` is the byte where that first shows."""

    old: str
    new: str
    after: bytes
    first_change: int


def rename(data: bytes, unit: Node, tree: Tree, dice: random.Random) -> Rename | None:
    """Change a name that ``unit`` uses at least twice; None if there is none. Strings and comments stay as they are."""
    body = data[unit.start : unit.end]
    roles = tree.roles[unit.start : unit.end]
    places: dict[bytes, list[int]] = {}
    for match in re.finditer(rb"[A-Za-z_]\w{2,}", body):
        if roles[match.start()] in (Role.IDENTIFIER, Role.CALL_ARGUMENT):
            places.setdefault(match[0], []).append(match.start())
    candidates = sorted(name for name, found in places.items() if len(found) >= 2 and name not in (b"self", b"this"))
    if not candidates:
        return None
    old = dice.choice(candidates)
    new = _other_name(old.decode(), dice).encode()
    pieces, at = [], 0
    for start in places[old]:
        pieces += [body[at:start], new]
        at = start + len(old)
    return Rename(old.decode(), new.decode(), b"".join([*pieces, body[at:]]), places[old][0])


def _other_name(name: str, dice: random.Random) -> str:
    if dice.random() < 0.3 and "_" in name.strip("_"):
        return "_".join(reversed(name.strip("_").split("_")))
    prefix, suffix = dice.choice(
        [("new_", ""), ("current_", ""), ("", "_value"), ("", "_item"), ("", "_2"), ("raw_", "")]
    )
    return f"{prefix}{name.lstrip('_')}{suffix}"


def _boundaries(source: EncodedText, tree: Tree) -> dict[int, int]:
    """Token positions where a node ends, with the depth of the outermost node that does."""
    found: dict[int, int] = {}
    for node in tree.nodes:
        at = source.first_token_at(node.end)
        found[at] = min(found.get(at, node.depth), node.depth)
    return found


def _best_boundary(boundaries: dict[int, int], first: int, last: int) -> int:
    """The latest of the outermost boundaries in [first, last]; ``last`` where there is none."""
    inside = [(depth, -at) for at, depth in boundaries.items() if first <= at <= last]
    return -min(inside)[1] if inside else last


def whole(file: SourceFile, before: str, after: str) -> str:
    """The new text in a code block."""
    return f"```{file.language}\n{after.rstrip()}\n```"


def search_replace(file: SourceFile, before: str, after: str) -> str:
    """Blocks around the changed lines, as editing agents write them."""
    old, new = before.splitlines(), after.splitlines()
    blocks = []
    for tag, a, b, c, d in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if tag != "equal":
            replaced, replacement = "\n".join(old[a:b]), "\n".join(new[c:d])
            blocks.append(f"<<<<<<< SEARCH\n{replaced}\n=======\n{replacement}\n>>>>>>> REPLACE")
    return f"{file.path}\n" + "\n".join(blocks)


def _diff(file: SourceFile, before: str, after: str) -> str:
    rows = difflib.unified_diff(
        before.splitlines(), after.splitlines(), f"a/{file.path}", f"b/{file.path}", lineterm="", n=2
    )
    return "```diff\n" + "\n".join(rows) + "\n```"


_SHAPES = (whole, search_replace, _diff)
_ASKS = (
    "Rename `{old}` to `{new}` in `{name}`.",
    "In `{name}` the name `{old}` is unclear. Call it `{new}` and change nothing else.",
    "Please replace every use of `{old}` in {path} by `{new}`.",
)

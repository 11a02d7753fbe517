"""A planted bug: one region of a file replaced by a few characters. The manifest holds these, never the code."""

from __future__ import annotations

from dataclasses import dataclass

KINDS = {
    "comparison": "a comparison is the wrong one",
    "off by one": "a number is off by one",
    "operator": "an operator is the wrong one",
    "condition": "a condition is the wrong way round",
    "guard": "a case that has to be handled first is missing",
    "name": "a wrong variable is used",
}


@dataclass(frozen=True, slots=True)
class Mutation:
    """From (``line``, ``column``) to (``end_line``, ``end_column``) stands ``text``; lines from 1, columns from 0."""

    kind: str
    line: int
    column: int
    end_line: int
    end_column: int
    text: str

    def apply(self, source: str) -> str:
        """The source with the bug in it."""
        lines = source.split("\n")
        head, tail = lines[self.line - 1][: self.column], lines[self.end_line - 1][self.end_column :]
        return "\n".join([*lines[: self.line - 1], *f"{head}{self.text}{tail}".split("\n"), *lines[self.end_line :]])

    @property
    def num_lines_lost(self) -> int:
        """How many lines shorter the source becomes."""
        return self.end_line - self.line - self.text.count("\n")

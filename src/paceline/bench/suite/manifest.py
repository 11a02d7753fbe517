"""What a suite is made of: pinned wheels and selections, no content. Stored as JSON beside this file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from typing import Any

from paceline.bench.suite.archives import Source
from paceline.bench.suite.bug_task import BugSpec
from paceline.bench.suite.edit_task import EditSpec
from paceline.bench.suite.functions import Change, Span
from paceline.bench.suite.implement_task import ImplementSpec
from paceline.bench.suite.mutation import Mutation
from paceline.bench.suite.tool_task import ToolSpec


@dataclass(frozen=True, slots=True)
class StepSpec:
    """Two releases of a package, how the step is called, and the edit tasks selected from it."""

    project: str
    old: str
    new: str
    aim: str
    title: str | None
    log: tuple[str, ...]
    tasks: tuple[EditSpec, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """A suite.

    Attributes:
        sources: every wheel needed.
        releases, commits: parts A and E.
        problems: part B.
        bugs: part C, each with the requirement its function comes from.
        scenarios: part D.
        sha256: of the built tasks (``suite.suite_sha256``), so that a build can tell that it is right.
    """

    seed: int
    sources: tuple[Source, ...]
    releases: tuple[StepSpec, ...]
    problems: tuple[ImplementSpec, ...]
    bugs: tuple[tuple[str, BugSpec], ...]
    scenarios: tuple[ToolSpec, ...]
    commits: tuple[StepSpec, ...]
    sha256: str

    def to_json(self) -> str:
        """One selection a line, so that a change of the manifest can be read."""
        rows = asdict(self)
        body = ",\n".join(f" {json.dumps(key)}: {_rows(value)}" for key, value in rows.items())
        return f"{{\n{body}\n}}\n"

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Read what ``to_json`` wrote."""
        data = json.loads(text)
        return cls(
            seed=data["seed"],
            sources=tuple(Source(**row) for row in data["sources"]),
            releases=tuple(_step(row) for row in data["releases"]),
            problems=tuple(
                ImplementSpec(**(row | {"mutation": Mutation(**row["mutation"]) if row["mutation"] else None}))
                for row in data["problems"]
            ),
            bugs=tuple(
                (requirement, BugSpec(**(row | {"span": Span(**row["span"]), "mutation": Mutation(**row["mutation"])})))
                for requirement, row in data["bugs"]
            ),
            scenarios=tuple(ToolSpec(**row) for row in data["scenarios"]),
            commits=tuple(_step(row) for row in data["commits"]),
            sha256=data["sha256"],
        )

    @classmethod
    def shipped(cls) -> Manifest:
        """The manifest of the suite "agent"."""
        return cls.from_json(resources.files(__package__).joinpath("agent.json").read_text("utf-8"))


def _rows(value: Any) -> str:
    if isinstance(value, list | tuple) and value:
        return "[\n  " + ",\n  ".join(json.dumps(row) for row in value) + "\n ]"
    return json.dumps(value)


def _step(row: Mapping[str, Any]) -> StepSpec:
    tasks = tuple(_edit(task) for task in row["tasks"])
    return StepSpec(**(dict(row) | {"log": tuple(row["log"]), "tasks": tasks}))


def _edit(row: Mapping[str, Any]) -> EditSpec:
    one, two = (_change(change) for change in row["changes"])
    shapes: Sequence[str] = row["shapes"]
    return EditSpec(**(dict(row) | {"changes": (one, two), "shapes": (shapes[0], shapes[1])}))


def _change(row: Mapping[str, Any]) -> Change:
    return Change(row["path"], row["name"], Span(**row["old"]), Span(**row["new"]))

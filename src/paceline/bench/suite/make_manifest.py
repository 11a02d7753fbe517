"""Rebuild the manifest of the suite "agent" (maintainers): ``python -m paceline.bench.suite.make_manifest``.

It downloads the packages named here, selects, runs mutated functions of two part's packages in processes of their own,
drops tasks that are too long for a small model with the embedded model's tokenizer, and writes ``agent.json``. The same
packages and seed give the same manifest.
"""

from __future__ import annotations

import email
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from paceline.bench.records import Task
from paceline.bench.suite import implement_task, tool_task
from paceline.bench.suite.archives import Archive, Source
from paceline.bench.suite.edit_task import build_edit_task
from paceline.bench.suite.making.bugs import select_bugs
from paceline.bench.suite.making.calls import CALLS
from paceline.bench.suite.making.implement import select_problems
from paceline.bench.suite.manifest import Manifest, StepSpec
from paceline.bench.suite.prompt import MAX_TOKENS
from paceline.bench.suite.select_edits import select
from paceline.bench.suite.suite import build, release_step, suite_sha256
from paceline.bench.suite.tool_task import Scenarios, select_scenarios
from paceline.errors import BenchmarkError
from paceline.loader.catalog import paceline_home
from paceline.loader.gguf_file import GgufFile
from paceline.loader.integrity import file_sha256
from paceline.loader.pip_download import pip_download
from paceline.loader.resolve import resolve_source
from paceline.loader.tokenizer import Tokenizer

SEED = 1
PAIRS = (
    ("click", "8.1.8", "8.2.1", 9),
    ("rich", "13.0.1", "13.9.4", 5),
    ("httpx", "0.24.1", "0.27.2", 4),
    ("starlette", "0.31.1", "0.46.2", 6),
    ("attrs", "23.2.0", "25.3.0", 3),
    ("jinja2", "3.0.3", "3.1.6", 3),
    ("markdown-it-py", "2.2.0", "3.0.0", 6),
    ("more-itertools", "8.14.0", "10.5.0", 3),
    ("packaging", "23.2", "25.0", 3),
    ("tomlkit", "0.10.2", "0.13.2", 6),
    ("networkx", "3.1", "3.3", 10),
    ("pygments", "2.15.1", "2.18.0", 2),
)
CHAIN = ("marshmallow", ("3.15.0", "3.21.3", "3.24.2", "3.26.1"), (5, 2, 3))
NUM_PROBLEMS, NUM_BUGS, NUM_SCENARIOS = 30, 30, 20
MAX_TASK_TOKENS, MAX_PROMPT_TOKENS, MAX_FIRST_TOKENS = 5500, 900, 1400

Fits = Callable[[Task], bool]


def make(wheels: Path, fits: Fits) -> Manifest:
    """Select everything anew from the wheels in the folder, which are downloaded where absent."""
    project, versions, _ = CHAIN
    requirements = [f"{name}=={version}" for name, *pair, _ in PAIRS for version in pair]
    requirements += [f"{project}=={version}" for version in versions]
    requirements += [implement_task.REQUIREMENT, tool_task.REQUIREMENT, *dict.fromkeys(row[0] for row in CALLS)]
    paths = {requirement: _wheel(requirement, wheels) for requirement in requirements}
    archives = {requirement: Archive(path) for requirement, path in paths.items()}
    manifest = Manifest(
        seed=SEED,
        sources=tuple(Source(r, file_sha256(path), _licence(path)) for r, path in sorted(paths.items())),
        releases=tuple(_with_tasks(step, num, "release edit", archives, fits) for step, num in _releases()),
        problems=tuple(select_problems(archives[implement_task.REQUIREMENT], NUM_PROBLEMS, SEED, fits)),
        bugs=tuple(select_bugs(paths, NUM_BUGS, SEED, fits)),
        scenarios=tuple(select_scenarios(Scenarios.read(archives[tool_task.REQUIREMENT]), NUM_SCENARIOS, SEED, fits)),
        commits=tuple(_with_tasks(step, num, "commit", archives, fits) for step, num in _chain()),
        sha256="",
    )
    tasks = build(manifest, archives)
    for task in tasks:
        if not fits(task):
            raise BenchmarkError(f"{task.task_id} is too long; lower the limits of its part")
    return replace(manifest, sha256=suite_sha256(tasks))


def _releases() -> Iterable[tuple[StepSpec, int]]:
    for name, old, new, num in PAIRS:
        yield StepSpec(name, f"{name}=={old}", f"{name}=={new}", f"release {new}", None, (), ()), num


def _chain() -> Iterable[tuple[StepSpec, int]]:
    """Each release of the chain is a commit on the ones before it."""
    project, versions, nums = CHAIN
    for i, num in enumerate(nums):
        if num:
            old, new = versions[i : i + 2]
            log = tuple(f"v{version} Release {version}" for version in reversed(versions[: i + 1]))
            requirements = (f"{project}=={old}", f"{project}=={new}")
            yield StepSpec(project, *requirements, f"version {new}", f"Prepare version {new}", log, ()), num


def _with_tasks(step: StepSpec, num: int, part: str, archives: dict[str, Archive], fits: Fits) -> StepSpec:
    """The step with its ``num`` best tasks among those that fit.

    Raises:
        BenchmarkError: it does not have that many.
    """
    sources = release_step(step, archives)
    prefix = f"{part.replace(' ', '-')}-{step.new.replace('==', '-')}"
    found = [spec for spec in select(sources, part, prefix, 3 * num, SEED) if fits(build_edit_task(spec, sources))]
    if len(found) < num:
        raise BenchmarkError(f"{step.old} to {step.new} has {len(found)} fit tasks, {num} are wanted")
    return replace(step, tasks=tuple(found[:num]))


def _wheel(requirement: str, folder: Path) -> Path:
    path = folder / f"{requirement.replace('==', '-')}.whl"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=folder) as staging:
            pip_download(requirement, Path(staging), lambda done, total: None).replace(path)
    return path


def _licence(path: Path) -> str:
    """What the wheel's metadata say: the expression, the classifiers, or the licence field."""
    with zipfile.ZipFile(path) as archive:
        member = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        data = email.message_from_bytes(archive.read(member))
        files = [archive.read(name) for name in archive.namelist() if name.endswith(("LICENSE", "LICENSE.txt"))]
    classifiers = [
        c.rpartition(" :: ")[2] for c in data.get_all("Classifier", []) if c.startswith("License :: OSI App")
    ]
    named = data["License-Expression"] or " / ".join(c for c in classifiers if c != "OSI Approved") or data["License"]
    if not named and any(b"MIT License" in file or b"The MIT License" in file for file in files):
        named = "MIT (licence file)"
    return str(named or "").partition("\n")[0]


def fits_with(tokenizer: Tokenizer) -> Fits:
    """Is a task short enough for a small model with a context of 8k, counted with its tokenizer?"""

    def count(text: str) -> int:
        return len(tokenizer.encode(text))

    def fits(task: Task) -> bool:
        total = 0
        for i, turn in enumerate(task.turns):
            prompt = sum(count(message["content"]) for message in turn.messages)
            gold = count(turn.gold)
            total += prompt + gold
            if gold > MAX_TOKENS or prompt > (MAX_PROMPT_TOKENS if i else MAX_FIRST_TOKENS):
                return False
        return total <= MAX_TASK_TOKENS and 4 <= len(task.turns) <= 8

    return fits


def main(arguments: Sequence[str] = ()) -> None:
    """Write ``agent.json`` beside this file."""
    wheels = paceline_home() / "bench"
    wheels.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_gguf(GgufFile(resolve_source("smollm2-135m")).metadata)
    manifest = make(wheels, fits_with(tokenizer))
    (Path(__file__).parent / "agent.json").write_text(manifest.to_json(), "utf-8")


if __name__ == "__main__":
    main()

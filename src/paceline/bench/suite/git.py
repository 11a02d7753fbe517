"""Edit tasks from the history of any git repository: each commit that changed functions tellingly is a step."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from paceline.bench.records import Task
from paceline.bench.suite.choice import rank
from paceline.bench.suite.edit_task import Step, build_edit_task
from paceline.bench.suite.select_edits import select
from paceline.errors import BenchmarkError

MAX_COMMITS = 400
MAX_FILES_PER_COMMIT = 12
MAX_FILE_BYTES = 400_000
MAX_TREE_FILES = 60
SUFFIXES = (".py", ".pyi")


def build_from_git(path: Path, num_tasks: int, seed: int) -> list[Task]:
    """Tasks of part "commit" from the latest commits of the repository at ``path``, at most two per commit.

    Only Python files are read (functions are told apart by syntax), only from commits with one parent, and nothing
    in the repository is run or changed. The same history and seed give the same tasks.

    Raises:
        BenchmarkError: not a repository, git is missing, or the history has fewer than ``num_tasks`` fit changes.
    """
    if num_tasks <= 0:
        raise BenchmarkError(f"the number of tasks must be positive, got {num_tasks}")
    name = Path(_git(path, "rev-parse", "--show-toplevel").strip()).name
    form = "--format=%H%x09%P%x09%h %s"
    rows = [line.split("\t", 2) for line in _git(path, "log", "--no-merges", f"-{MAX_COMMITS}", form).splitlines()]
    log = [subject for _, _, subject in rows]
    tasks: list[Task] = []
    order = sorted(range(len(rows)), key=lambda i: rank(seed, rows[i][0]))
    for i in order:
        commit, parent, subject = rows[i]
        if not parent:
            continue
        step = _step(path, name, parent, commit, subject.partition(" ")[2], log[i + 1 :])
        specs = select(step, "commit", f"commit-{commit[:10]}", 2, seed) if step is not None else []
        tasks += [build_edit_task(spec, step) for spec in specs if step is not None]
        if len(tasks) >= num_tasks:
            return tasks[:num_tasks]
    raise BenchmarkError(
        f"the last {len(rows)} commits of {path} give only {len(tasks)} tasks, {num_tasks} were asked for; "
        "ask for fewer, or fetch the full history (git fetch --unshallow)"
    )


def _step(path: Path, name: str, parent: str, commit: str, title: str, log: list[str]) -> Step | None:
    """The Python files a commit modified, before and after, and a few neighbours; None when it is too large."""
    raw = _git(path, "diff-tree", "-r", "-z", "--no-ext-diff", "--diff-filter=M", "--name-only", parent, commit)
    names = [file for file in raw.split("\0") if file.endswith(SUFFIXES)]
    if not names or len(names) > MAX_FILES_PER_COMMIT:
        return None
    old, new = {}, {}
    for file in names:
        before, after = _blob(path, parent, file), _blob(path, commit, file)
        if before is not None and after is not None:
            old[file], new[file] = before, after
    folders = {file.rpartition("/")[0] for file in names}
    tree = _git(path, "ls-tree", "-r", "-z", "--name-only", parent).split("\0")
    near = [file for file in tree if file.endswith(SUFFIXES) and file.rpartition("/")[0] in folders and file not in old]
    for file in near[:MAX_TREE_FILES]:  # the same on both sides: for the repository map and search only
        text = _blob(path, parent, file)
        if text is not None:
            old[file] = new[file] = text
    return Step(project=name, old=old, new=new, aim="this commit", title=title, log=log)


def _blob(path: Path, commit: str, file: str) -> str | None:
    """A file of a commit, or None when it is large, binary, or not UTF-8."""
    data = _run(path, "cat-file", "blob", f"{commit}:{file}")
    if len(data) > MAX_FILE_BYTES or b"\0" in data:
        return None
    try:
        return data.decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError:
        return None


def _git(path: Path, *arguments: str) -> str:
    return _run(path, *arguments).decode("utf-8", errors="replace")


def _run(path: Path, *arguments: str) -> bytes:
    """One plumbing command; hooks, pagers, external diffs and prompts of the repository stay out."""
    command = ["git", "--no-pager", "-c", "core.fsmonitor=false", "-c", "log.showSignature=false", "-C", str(path)]
    environment = os.environ | {"LC_ALL": "C", "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0"}
    try:
        result = subprocess.run([*command, *arguments], capture_output=True, env=environment, timeout=120, check=False)
    except FileNotFoundError:
        raise BenchmarkError("git was not found; install it to build tasks from a repository") from None
    except subprocess.TimeoutExpired:
        raise BenchmarkError(f"git {arguments[0]} took more than two minutes in {path}") from None
    if result.returncode != 0:
        reason = result.stderr.decode("utf-8", errors="replace").strip().partition("\n")[0]
        raise BenchmarkError(f"cannot read the history of {path}: {reason or f'git ended with {result.returncode}'}")
    return result.stdout

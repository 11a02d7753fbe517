"""The user's own repository: the files that git tracks."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

from paceline.errors import TrainingError
from paceline.train.corpus import SourceFile, read_source


def tracked_files(repository: Path) -> Iterator[SourceFile]:
    """The tracked source files of a working tree; what .gitignore hides is not seen, and nothing is run.

    Raises:
        TrainingError: not a repository, or git is missing.
    """
    command = ["git", "--no-pager", "-c", "core.fsmonitor=false", "-C", str(repository), "ls-files", "-z"]
    environment = os.environ | {"LC_ALL": "C", "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0"}
    try:
        result = subprocess.run(command, capture_output=True, env=environment, timeout=120, check=False)
    except FileNotFoundError:
        raise TrainingError("git was not found; install it to train on a repository") from None
    except subprocess.TimeoutExpired:
        raise TrainingError(f"git ls-files took more than two minutes in {repository}") from None
    if result.returncode != 0:
        reason = result.stderr.decode("utf-8", errors="replace").strip().partition("\n")[0]
        raise TrainingError(f"cannot list the files of {repository}: {reason or 'git failed'}; give a git repository")
    package = f"repository.{repository.resolve().name}"
    for name in sorted(filter(None, result.stdout.decode("utf-8", errors="surrogateescape").split("\0"))):
        path = repository / name
        if path.is_symlink():
            continue
        if file := read_source(path, name, package, "the user's own"):
            yield file

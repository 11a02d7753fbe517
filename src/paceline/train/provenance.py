"""Where weights come from: written beside them, complete enough to make them again."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
import subprocess
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from paceline.train.corpus import SourceFile

_DISTRIBUTIONS = ("paceline", "torch", "numpy", "tokenizers", "safetensors", "tree-sitter")


def environment() -> dict[str, Any]:
    """The command, the code and the machine."""
    return {
        "argv": ["paceline", *map(_without_home, sys.argv[1:])],
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "git_commit": _git_commit(),
        "python": platform.python_version(),
        "versions": {name: version for name in _DISTRIBUTIONS if (version := _version(name)) is not None},
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
    }


def files_sha256(files: Iterable[SourceFile]) -> str:
    """A fingerprint of a corpus: names and contents, in their order."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.package}\0{file.path}\0".encode("utf-8", errors="surrogateescape"))
        digest.update(hashlib.sha256(file.text.encode()).digest())
    return digest.hexdigest()


def packages_and_licences(files: Iterable[SourceFile]) -> dict[str, str]:
    """Each package with its licence, by name."""
    return dict(sorted({file.package: file.licence for file in files}.items()))


def _without_home(argument: str) -> str:
    """A draft may be passed on; whose home it was trained in is nobody's business."""
    home = str(Path.home())
    return f"~{argument[len(home) :]}" if argument == home or argument.startswith(f"{home}/") else argument


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git_commit() -> str | None:
    """The commit of Paceline's own checkout, marked where it was changed since; None for an installed package."""
    folder = Path(__file__).resolve().parent
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() or None

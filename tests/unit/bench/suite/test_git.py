from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from paceline.bench.suite import build_from_git, suite_sha256
from paceline.errors import BenchmarkError
from tests.unit.bench.suite.wheels import NEW, OLD


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    path = tmp_path / "bank"
    path.mkdir()

    def git(*arguments: str) -> None:
        names = {f"GIT_{who}_{what}": "x" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
        dates = {"GIT_AUTHOR_DATE": "2024-01-01T00:00:00Z", "GIT_COMMITTER_DATE": "2024-01-01T00:00:00Z"}
        environment = os.environ | names | dates
        subprocess.run(["git", *arguments], cwd=path, check=True, capture_output=True, env=environment)

    git("init", "-q")
    for subject, text in (("Start a bank", OLD), ("Charge a fee", NEW)):
        (path / "core.py").write_text(text)
        git("add", ".")
        git("commit", "-q", "-m", subject)
    return path


def test_a_commit_becomes_a_task(repository: Path) -> None:
    (task,) = build_from_git(repository, 1, seed=0)
    opening = task.turns[0].messages[-1]["content"]
    assert task.part == "commit"
    assert "Charge a fee" in opening
    assert "Start a bank" in task.turns[1].messages[-1]["content"]  # what git log shows
    assert suite_sha256([task]) == suite_sha256(build_from_git(repository, 1, seed=0))


def test_too_little_history_is_an_error_that_says_so(repository: Path) -> None:
    with pytest.raises(BenchmarkError, match="give only 1 tasks, 5 were asked for"):
        build_from_git(repository, 5, seed=0)


def test_a_folder_without_git_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkError, match="cannot read the history"):
        build_from_git(tmp_path, 1, seed=0)

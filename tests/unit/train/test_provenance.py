"""What is written beside a draft says how it was made, and nothing about whose machine that was."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from paceline.train.provenance import environment


def test_the_command_is_noted_without_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    home = str(Path.home())
    arguments = ["train-draft", f"{home}/drafts/ours", "--repo", home, "--init", f"{home}-other/draft", "--steps", "4"]
    monkeypatch.setattr(sys, "argv", [f"{home}/.local/bin/paceline", *arguments])
    expected = ["train-draft", "~/drafts/ours", "--repo", "~", "--init", f"{home}-other/draft", "--steps", "4"]
    assert environment()["argv"] == ["paceline", *expected]

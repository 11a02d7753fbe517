"""The process killed outright, at moments nobody chose."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.unit.train.workshop import write_code_target, write_repository


@pytest.mark.long
def test_a_killed_command_ends_with_the_weights_of_one_that_was_left_alone(tmp_path: Path) -> None:
    target, repository = write_code_target(tmp_path / "target"), write_repository(tmp_path / "sums")
    environment = os.environ | {"PACELINE_HOME": str(tmp_path / "home")}

    def command(out: Path) -> list[str]:
        options = "--keep-out none --data none --answers 20 --steps 60 --row-tokens 128 --batch-rows 4 --threads 1"
        sizes = "--hidden-size 32 --layers 2 --vocab-size 40 --window 32"
        arguments = [str(out), "--model", str(target), "--repo", str(repository), *options.split(), *sizes.split()]
        return [sys.executable, "-m", "paceline", "train-draft", *arguments]

    whole = tmp_path / "whole"
    subprocess.run(command(whole), env=environment, check=True, capture_output=True)
    cut, dice = tmp_path / "cut", random.Random(2)
    kills = 0
    while not (cut / "model.safetensors").is_file():
        process = subprocess.Popen(command(cut), env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + (dice.uniform(2.0, 12.0) if kills < 4 else 600)
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            kills += 1
        assert process.wait() in (0, -signal.SIGKILL)
    assert kills > 0
    assert (cut / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()

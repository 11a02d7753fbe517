"""One virtual environment per peer, made on first use by the user's own pip settings."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from filelock import FileLock
from rich.console import Console

from paceline.bench.machine import Machine
from paceline.bench.peers.catalog import PeerSpec
from paceline.errors import BenchmarkError

RunLines = Callable[[Sequence[str], Mapping[str, str]], Iterator[str]]
"""(command, environment) -> the lines it prints, as they come. A non-zero exit status raises BenchmarkError."""

_MARKER = "complete.json"
_PYTHON = "bin/python"


def ensure_peer(spec: PeerSpec, home: Path, console: Console, *, run_lines: RunLines | None = None) -> Path:
    """The Python of the peer's environment under ``home``, made now unless a complete one is there.

    The marker is written last, so an installation that was interrupted, or that was of other versions, starts from
    nothing. Installations of the same peer wait for each other.

    Raises:
        BenchmarkError: it cannot be installed; the message has pip's last error, the log all of it.
    """
    folder = home / spec.name
    marker = folder / _MARKER
    build = _build_environment(spec)
    wanted = json.dumps({"requirements": list(spec.requirements), "build": build})
    python = folder / _PYTHON
    try:
        home.mkdir(parents=True, exist_ok=True)
        with FileLock(home / f".{spec.name}.lock"):
            if not _holds(marker, wanted) or not python.exists():
                shutil.rmtree(folder, ignore_errors=True)
                _install(spec, build, folder, home / f"{spec.name}.log", console, run_lines or _run_lines)
                temporary = marker.with_suffix(".partial")
                temporary.write_text(wanted, encoding="utf-8")
                os.replace(temporary, marker)
    except OSError as error:
        raise BenchmarkError(f"it cannot be installed in {home}: {error.strerror or error}") from error
    return python


def _holds(path: Path, text: str) -> bool:
    return path.is_file() and path.read_text(encoding="utf-8", errors="replace") == text


def _build_environment(spec: PeerSpec) -> dict[str, str]:
    has_amx = "amx_int8" in Machine.here().instructions
    return {**spec.build_environment, **(spec.amx_build_environment if has_amx else {})}


def _install(
    spec: PeerSpec, build: Mapping[str, str], folder: Path, log: Path, console: Console, run_lines: RunLines
) -> None:
    environment = {**os.environ, **build}
    python = str(folder / _PYTHON)
    # -I: no file of the current folder may pass for a module.
    venv = [sys.executable, "-I", "-m", "venv", str(folder)]
    pip = [python, "-I", "-m", "pip", "install", "--no-input", "--disable-pip-version-check"]
    if build:
        pip.append("--no-cache-dir")  # a wheel kept there may have been compiled with other flags
    commands = [venv, [*pip, *spec.requirements]]
    label = f"Installing {spec.name} ({spec.notice})"
    if not console.is_terminal:
        console.print(label, highlight=False, soft_wrap=True)
    last_error = ""
    try:
        with log.open("w", encoding="utf-8", buffering=1) as file, console.status(label) as status:
            for command in commands:
                for line in run_lines(command, environment):
                    file.write(line + "\n")
                    status.update(f"{label}: {line.strip()[:60]}")
                    if line.startswith("ERROR:") and not last_error:
                        last_error = line.removeprefix("ERROR:").strip()
    except BenchmarkError as error:
        raise BenchmarkError(f"its installation failed: {last_error or error}; see {log}") from error


def _run_lines(command: Sequence[str], environment: Mapping[str, str]) -> Iterator[str]:
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        errors="replace",
    )
    assert process.stdout is not None
    last = ""
    try:
        for line in process.stdout:
            last = line.strip() or last
            yield line.rstrip("\n")
        status = process.wait()
    finally:
        if process.poll() is None:  # interrupted: nothing may go on writing there
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()
        process.stdout.close()
    if status:
        raise BenchmarkError(last or f"exit status {status}")

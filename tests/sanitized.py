"""Runs the tests of the kernels with a build of them that AddressSanitizer and UBSan watch: `make sanitize`.

The installed package stays as it is; the watched build lives in build/sanitized.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SITE = ROOT / "build" / "sanitized"
TESTS = (
    "tests/unit/backends/test_cpu_kernels.py",
    "tests/unit/backends/test_cpu_threads.py",
    "tests/law/test_row_invariance.py",
)
FLAGS = "-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -g1"


def build() -> None:
    """Install a second copy of the package, with its kernels watched."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--upgrade", "--no-deps", "--no-build-isolation"]
    options = [f"--target={SITE}", f"--config-settings=build-dir={SITE}-cmake", str(ROOT)]
    subprocess.run([*command, *options], env={**os.environ, "CXXFLAGS": FLAGS}, check=True)


def library(name: str) -> str:
    """Path of a sanitizer's library, which must be loaded before Python itself."""
    return subprocess.run(
        ["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True
    ).stdout.strip()


def run(arguments: list[str]) -> int:
    """Run pytest with the watched build found first; the finder of an editable installation would hide it."""
    start = (
        "import sys; sys.meta_path = [f for f in sys.meta_path if 'Redirecting' not in type(f).__name__]; "
        "from paceline.backends import _kernels; assert 'sanitized' in _kernels.__file__; "
        "import pytest; sys.exit(pytest.main(sys.argv[1:]))"
    )
    environment = {
        **os.environ,
        "LD_PRELOAD": " ".join(map(library, ("libasan.so", "libubsan.so", "libstdc++.so"))),
        "PYTHONPATH": str(SITE),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python itself never frees everything
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    command = [sys.executable, "-c", start, "-p", "no:cacheprovider", *(arguments or TESTS)]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    build()
    sys.exit(run(sys.argv[1:]))

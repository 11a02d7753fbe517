"""Loading the kernels must not run an instruction that the processor may lack: there is nothing that could catch it."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

kernels = pytest.importorskip("paceline.backends._kernels", reason="built without kernels")


@pytest.mark.skipif(shutil.which("objdump") is None, reason="needs binutils")
def test_nothing_wider_than_sse_runs_while_the_module_is_loaded() -> None:
    code = _initialisers(kernels.__file__)
    assert code, "a C++ module has initialisers"
    wide = [line for part in code for line in part if re.search(r"\b[yz]mm\d|\bv[a-z]+\s.*%xmm|\btilez?", line)]
    assert wide == []


def _initialisers(path: str) -> list[list[str]]:
    """The instructions of each function that the dynamic linker calls, up to where it returns or hands over."""
    array = _run("objdump", "-s", "-j", ".init_array", path)
    words = "".join(re.sub(r"\s", "", line[:41].strip().split(" ", 1)[1]) for line in array.splitlines()[4:])
    starts = [int.from_bytes(bytes.fromhex(words[i : i + 16]), "little") for i in range(0, len(words) // 16 * 16, 16)]
    functions = []
    for start in starts:
        lines = _run("objdump", "-d", f"--start-address={start}", f"--stop-address={start + 4096}", path).splitlines()
        body = [line for line in lines if re.match(r"\s+[0-9a-f]+:", line)]
        end = next((i for i, line in enumerate(body) if re.search(r"\b(ret|jmp)\b", line)), len(body))
        functions.append(body[:end])
    return functions


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout

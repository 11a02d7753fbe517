"""Where and with what a benchmark ran: goes into every result, since a time without its machine says nothing."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("paceline", "torch", "numpy", "scipy", "tokenizers", "transformers", "safetensors", "gguf")
_CPU_FLAGS = (
    "avx2",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "avx_vnni",
    "amx_int8",
    "amx_bf16",
    "asimd",
    "asimddp",
    "i8mm",
)


@dataclass(frozen=True, slots=True)
class Versions:
    """Python and the installed packages that matter to a result."""

    python: str
    packages: dict[str, str]

    @classmethod
    def here(cls) -> Versions:
        """Of this process; packages that are not installed are left out."""
        packages = {}
        for name in PACKAGES:
            try:
                packages[name] = metadata.version(name)
            except metadata.PackageNotFoundError:
                continue
        return cls(platform.python_version(), packages)


@dataclass(frozen=True, slots=True)
class Machine:
    """The hardware and what was busy on it.

    Attributes:
        num_cores: logical processors of the machine.
        num_usable_cores: those this process may run on.
        instructions: the vector instructions that matter to the kernels.
        load: how many processes wanted to run on average over the last minute, when the run began.
        accelerator: name of the GPU used, if one was.
    """

    processor: str
    num_cores: int
    num_usable_cores: int
    instructions: list[str]
    memory_gib: float
    system: str
    load: float
    num_threads: int | None = None
    accelerator: str | None = None
    versions: Versions = field(default_factory=Versions.here)
    measured_at: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    @classmethod
    def here(cls, *, num_threads: int | None = None, accelerator: str | None = None) -> Machine:
        """This machine, now."""
        usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return cls(
            processor=_cpuinfo("model name") or platform.processor() or platform.machine(),
            num_cores=os.cpu_count() or 1,
            num_usable_cores=usable,
            instructions=_instructions(),
            memory_gib=_memory_gib(),
            system=platform.platform(),
            load=os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0,
            num_threads=num_threads,
            accelerator=accelerator,
        )

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def _instructions() -> list[str]:
    flags = set((_cpuinfo("flags") or _cpuinfo("Features")).split())
    return [flag for flag in _CPU_FLAGS if flag in flags]


def _cpuinfo(key: str) -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == key), "")


def _memory_gib() -> float:
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return 0.0
    return round(total / 2**30, 1)

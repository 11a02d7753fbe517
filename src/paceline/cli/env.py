"""``paceline env``: what this machine offers and what Paceline would use; made for bug reports."""

from __future__ import annotations

import platform
from importlib import metadata
from pathlib import Path

from rich.console import Console
from rich.table import Table

PACKAGES = ("torch", "numpy", "tokenizers", "safetensors", "gguf", "huggingface_hub")


def show_env() -> None:
    """Show versions, processor, backend and where models are kept."""
    import paceline
    from paceline.backends.select import num_threads, select_backend
    from paceline.config import RuntimeConfig
    from paceline.loader.catalog import CATALOG, model_path, paceline_home

    backend = select_backend(RuntimeConfig())
    table = Table(show_header=False, box=None)
    table.add_row("paceline", paceline.__version__)
    table.add_row("python", f"{platform.python_version()} on {platform.platform()}")
    for name in PACKAGES:
        table.add_row(name, metadata.version(name))
    table.add_row("processor", _processor())
    table.add_row("instructions", _instructions())
    table.add_row("threads", str(num_threads(RuntimeConfig())))
    table.add_row("backend", f"{backend.name} ({type(backend).__name__}), {backend.device}")
    table.add_row("models in", str(paceline_home()))
    for name, entry in CATALOG.items():
        state = "fetched" if model_path(entry).exists() else f"not fetched yet (paceline pull {name})"
        table.add_row(f"  {name}", state)
    Console().print(table)


def _instructions() -> str:
    from paceline.backends import cpu

    return cpu.instruction_set() if cpu.is_available() else "no kernels in this installation: torch computes"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {len(names)} logical" if names else platform.machine()

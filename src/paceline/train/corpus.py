"""Source code to train on: where it comes from, under which licence, and what is left out."""

from __future__ import annotations

import importlib.metadata
import re
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

MAX_FILE_BYTES = 200_000
MIN_FILE_BYTES = 200
# One large package must not drown the others.
MAX_PACKAGE_BYTES = 2_500_000

LANGUAGES = {
    ".py": "python",
    ".js": "javascript",
    ".mjs": "javascript",
    ".jsx": "javascript",
    ".ts": "typescript",
    ".tsx": "tsx",
    ".go": "go",
    ".rs": "rust",
    ".java": "java",
    ".c": "c",
    ".h": "c",
    ".cc": "cpp",
    ".cpp": "cpp",
    ".hpp": "cpp",
}

# SPDX identifiers and the trove classifiers' last parts, lower case. Copyleft licences are not listed.
_PERMISSIVE = frozenset(
    {
        "0bsd",
        "apache-2.0",
        "apache 2.0",
        "apache license 2.0",
        "apache license, version 2.0",
        "apache software license",
        "bsd",
        "bsd license",
        "bsd-2-clause",
        "bsd-3-clause",
        "bsd 3-clause license",
        "3-clause bsd license",
        "cnri-python",
        "isc",
        "isc license",
        "isc license (iscl)",
        "mit",
        "mit license",
        "mit-0",
        "mit-cmu",
        "psf-2.0",
        "python software foundation license",
        "python-2.0",
        "unlicense",
        "zlib",
        "zlib/libpng license",
    }
)
_JOINED = re.compile(r"\s+(?:and|or|with)\s+|[()]", re.IGNORECASE)
_SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "testing", "_vendor", "vendored", "site-packages", "idlelib", "__pycache__"}
)


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file. ``package`` is what the corpus is split by; ``licence`` as its package declares it."""

    package: str
    path: str
    language: str
    licence: str
    text: str


def standard_library() -> Iterator[SourceFile]:
    """The standard library's modules without tests (licence PSF-2.0); each top-level module counts as a package."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in _source_paths(root):
        relative = path.relative_to(root)
        package = f"stdlib.{relative.parts[0].removesuffix('.py')}"
        if file := read_source(path, str(relative), package, "PSF-2.0"):
            yield file


def installed_packages(excluded: Iterable[str] = ()) -> Iterator[SourceFile]:
    """Python files of installed packages with a permissive licence; ``excluded`` names distributions to leave out."""
    left_out = {normalised(name) for name in excluded}
    distributions = {normalised(item.metadata["Name"]): item for item in importlib.metadata.distributions()}
    for name, distribution in sorted(distributions.items()):
        licence = permissive_licence(distribution.metadata)
        if licence is None or name in left_out:
            continue
        size = 0
        for item in sorted(distribution.files or ()):
            if item.suffix != ".py" or _SKIPPED_FOLDERS.intersection(item.parts):
                continue
            if file := read_source(Path(str(distribution.locate_file(item))), str(item), name, licence):
                size += len(file.text)
                if size > MAX_PACKAGE_BYTES:
                    break
                yield file


def normalised(name: str) -> str:
    """A distribution's name as PEP 503 compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def permissive_licence(metadata: importlib.metadata.PackageMetadata) -> str | None:
    """The licence if every part of it is on the allow-list; None for others and where nothing is declared."""
    expression = (metadata.get_all("License-Expression") or [None])[0]
    if expression:
        return expression if _is_permissive(expression) else None
    classifiers = metadata.get_all("Classifier") or []
    named = [item.rpartition("::")[2].strip() for item in classifiers if item.startswith("License ::")]
    named = [item for item in named if item != "OSI Approved"]
    if named:
        return " AND ".join(named) if all(map(_is_permissive, named)) else None
    text = (metadata.get_all("License") or [""])[0].strip()
    return text if text and "\n" not in text and _is_permissive(text) else None


def read_source(path: Path, name: str, package: str, licence: str) -> SourceFile | None:
    """The file if it is text of a known language and of a sensible size."""
    language = LANGUAGES.get(path.suffix.lower())
    try:
        if language is None or not MIN_FILE_BYTES <= path.stat().st_size <= MAX_FILE_BYTES:
            return None
        text = path.read_text(encoding="utf-8").replace("\r\n", "\n")
    except (OSError, UnicodeDecodeError):
        return None
    if "\0" in text or max(map(len, text.split("\n"))) > 2000:  # data tables and minified code
        return None
    return SourceFile(package, name, language, licence, text)


def _is_permissive(expression: str) -> bool:
    text = expression.strip().lower()
    parts = [part.strip() for part in _JOINED.split(text) if part and part.strip()]
    return text in _PERMISSIVE or (bool(parts) and all(part in _PERMISSIVE for part in parts))


def _source_paths(root: Path) -> Sequence[Path]:
    paths = sorted(root.rglob("*.py"))
    return [path for path in paths if not _SKIPPED_FOLDERS.intersection(path.relative_to(root).parts)]

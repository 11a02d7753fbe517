"""The user's own files as an index that drafts are looked up in.

Tokens are kept under PACELINE_HOME, file by file, and a file is tokenised again only when it has changed. The index is
built from them at each start, which takes a fraction of a second. Of more text than the index holds, the files changed
last are kept.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from paceline.errors import InvalidParameterError
from paceline.loader.catalog import paceline_home
from paceline.loader.tokenizer import Tokenizer
from paceline.spec.index import SEPARATOR, TokenIndex

# Tokens of the user's files that are indexed: some 20 MB.
CORPUS_TOKENS = 2**20
# Larger files are data or generated, and rarely quoted.
_MAX_FILE_BYTES = 512 * 1024
# Folders that hold other people's files or build products, where git is not there to tell.
_SKIPPED_FOLDERS = frozenset({"node_modules", "__pycache__", "build", "dist", "target", "venv", "site-packages"})


@dataclass(frozen=True, slots=True)
class _File:
    """A file as it stands: its path and what tells whether it changed."""

    path: Path
    modified_ns: int
    size: int

    @property
    def stamp(self) -> list[int]:
        """Modification time and size."""
        return [self.modified_ns, self.size]


def read_corpus(
    paths: Sequence[str | Path], tokenizer: Tokenizer, *, capacity: int = CORPUS_TOKENS, home: Path | None = None
) -> TokenIndex:
    """The files at ``paths``, folders with all text files in them, as one index of bounded size.

    In a git work tree the folder's tracked files are taken; elsewhere all but hidden ones and those in folders such as
    ``node_modules``. Files that are no UTF-8 text are left out.

    Args:
        capacity: tokens that the index holds.
        home: where tokens are kept between runs; PACELINE_HOME by default.

    Raises:
        InvalidParameterError: a path does not exist or cannot be read.
    """
    index = TokenIndex(capacity)
    documents: list[npt.NDArray[np.int32]] = []
    num_tokens = 0
    with _TokenStore(_store_path(home or paceline_home(), paths, tokenizer)) as store:
        for file in sorted(_files(paths), key=lambda each: each.modified_ns, reverse=True):
            if num_tokens >= capacity:
                break
            tokens = store.get(file)
            if tokens is None:
                tokens = store.put(file, _encode(file.path, tokenizer))
            documents.append(tokens)
            num_tokens += len(tokens) + 1
    text = [token for tokens in reversed(documents) for token in (*tokens.tolist(), SEPARATOR)]
    index.extend(text[-capacity:])
    return index


def _files(paths: Sequence[str | Path]) -> Iterator[_File]:
    seen: set[Path] = set()
    for given in paths:
        root = Path(given).expanduser()
        if not root.exists():
            raise InvalidParameterError(f"--corpus {given}: no such file or folder; check the path")
        for path in _tracked(root) or _walk(root) if root.is_dir() else [root]:
            resolved = path.resolve()
            try:
                status = resolved.stat()
            except OSError:
                continue  # tracked, but deleted in the work tree
            if resolved not in seen and resolved.is_file() and 0 < status.st_size <= _MAX_FILE_BYTES:
                seen.add(resolved)
                yield _File(resolved, status.st_mtime_ns, status.st_size)


def _tracked(folder: Path) -> list[Path]:
    """The files git tracks in ``folder``; none where it is no work tree or there is no git."""
    command = ["git", "-C", str(folder), "ls-files", "-z"]
    try:
        listed = subprocess.run(command, capture_output=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [folder / os.fsdecode(name) for name in listed.split(b"\0") if name]


def _walk(folder: Path) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in _SKIPPED_FOLDERS and not name.startswith(".")]
        yield from (Path(parent, name) for name in names if not name.startswith("."))


def _encode(path: Path, tokenizer: Tokenizer) -> list[int]:
    try:
        text = path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return []
    return [] if "\0" in text else tokenizer.encode(text)


def _store_path(home: Path, paths: Sequence[str | Path], tokenizer: Tokenizer) -> Path:
    """One file per set of paths and vocabulary."""
    names = [str(Path(path).expanduser().resolve()) for path in paths]
    vocabulary = hashlib.sha256("\0".join(tokenizer.vocab()).encode(errors="replace")).hexdigest()
    key = hashlib.sha256("\0".join([vocabulary, *sorted(names)]).encode(errors="replace")).hexdigest()[:16]
    return home / "corpus" / f"{key}.npz"


class _TokenStore:
    """Tokens by file, read at the start and written back at the end if anything changed. A damaged store is empty."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._kept: dict[str, tuple[list[int], npt.NDArray[np.int32]]] = {}
        self._used: dict[str, tuple[list[int], npt.NDArray[np.int32]]] = {}
        self._is_changed = False

    def __enter__(self) -> _TokenStore:
        try:
            with self._path.open("rb") as stream, np.load(stream, allow_pickle=False) as data:
                files, tokens = json.loads(str(data["files"])), data["tokens"]
            for name, stamp, start, end in files:
                self._kept[name] = (stamp, tokens[start:end])
        except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile):
            self._kept = {}
        return self

    def __exit__(self, exception: type[BaseException] | None, *_rest: object) -> None:
        if exception is None and (self._is_changed or self._used.keys() != self._kept.keys()):
            self._write()

    def get(self, file: _File) -> npt.NDArray[np.int32] | None:
        """The tokens of a file that has not changed."""
        kept = self._kept.get(str(file.path))
        if kept is None or kept[0] != file.stamp:
            return None
        self._used[str(file.path)] = kept
        return kept[1]

    def put(self, file: _File, token_ids: list[int]) -> npt.NDArray[np.int32]:
        """Keep the tokens of a file."""
        tokens = np.array(token_ids, dtype=np.int32)
        self._used[str(file.path)] = (file.stamp, tokens)
        self._is_changed = True
        return tokens

    def _write(self) -> None:
        files: list[tuple[str, list[int], int, int]] = []
        position = 0
        for name, (stamp, tokens) in self._used.items():
            files.append((name, stamp, position, position + len(tokens)))
            position += len(tokens)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        joined = np.concatenate([tokens for _, tokens in self._used.values()] or [np.zeros(0, np.int32)])
        with tempfile.NamedTemporaryFile(dir=self._path.parent, suffix=".partial", delete=False) as file:
            np.savez(file, files=np.array(json.dumps(files)), tokens=joined)
        os.replace(file.name, self._path)

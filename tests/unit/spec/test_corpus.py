"""The user's files as an index: which are read, what is kept, what is read again."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from paceline.errors import InvalidParameterError
from paceline.spec.corpus import read_corpus
from paceline.spec.index import TokenIndex


class Characters:
    """One token per character; counts the texts it was asked to encode."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def encode(self, text: str) -> list[int]:
        self.texts.append(text)
        return [ord(character) for character in text]

    def vocab(self) -> list[str]:
        return ["a", "b"]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    return folder


def read(paths: Sequence[Path], home: Path, tokenizer: Characters | None = None, capacity: int = 4096) -> TokenIndex:
    return read_corpus(paths, tokenizer or Characters(), capacity=capacity, home=home)  # type: ignore[arg-type]


def knows(index: TokenIndex, text: str) -> bool:
    """Whether the index continues the first three characters of ``text`` with the rest."""
    match = index.match([ord(character) for character in text[:3]])
    return match is not None and index.continuation(match.position, len(text) - 3) == [ord(c) for c in text[3:]]


def write(path: Path, text: str, modified: int = 1000) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    os.utime(path, (modified, modified))


def test_files_and_folders_are_read(folder: Path, home: Path) -> None:
    write(folder / "a.py", "alpha beta")
    write(folder / "sub" / "b.py", "gamma delta")
    index = read([folder], home)
    assert knows(index, "alpha beta")
    assert knows(index, "gamma delta")
    only = read([folder / "a.py"], home)
    assert knows(only, "alpha beta")
    assert not knows(only, "gamma delta")


def test_what_is_no_text_of_the_user_is_left_out(folder: Path, home: Path) -> None:
    write(folder / "good.py", "alpha beta")
    write(folder / "node_modules" / "other.js", "gamma delta")
    write(folder / ".hidden" / "secret.txt", "epsilon zeta")
    (folder / "image.bin").write_bytes(b"\xff\xfe\x00 theta iota")
    (folder / "nul.txt").write_bytes(b"kappa\0lambda")
    (folder / "large.txt").write_text("omicron pi " * 60_000)
    (folder / "empty.txt").write_text("")
    index = read([folder], home)
    assert knows(index, "alpha beta")
    for text in ("gamma delta", "epsilon zeta", " theta iota", "kappa", "omicron pi"):
        assert not knows(index, text)


def test_in_a_work_tree_only_tracked_files_are_read(folder: Path, home: Path) -> None:
    subprocess.run(["git", "init", "-q", str(folder)], check=True)
    write(folder / "tracked.py", "alpha beta")
    write(folder / "deleted.py", "gamma delta")
    write(folder / "other.py", "epsilon zeta")
    subprocess.run(["git", "-C", str(folder), "add", "tracked.py", "deleted.py"], check=True)
    (folder / "deleted.py").unlink()
    index = read([folder], home)
    assert knows(index, "alpha beta")
    assert not knows(index, "gamma delta")
    assert not knows(index, "epsilon zeta")


def test_only_changed_files_are_tokenised_again(folder: Path, home: Path) -> None:
    write(folder / "a.py", "alpha beta", 1000)
    write(folder / "b.py", "gamma delta", 2000)
    first, second, third = Characters(), Characters(), Characters()
    read([folder], home, first)
    read([folder], home, second)
    assert (sorted(first.texts), second.texts) == (["alpha beta", "gamma delta"], [])
    write(folder / "a.py", "alpha changed", 3000)
    index = read([folder], home, third)
    assert third.texts == ["alpha changed"]
    assert knows(index, "alpha changed")
    assert knows(index, "gamma delta")
    assert not list((home / "corpus").glob("*.partial"))


@pytest.mark.parametrize("damage", [b"", b"nonsense", b"PK\x03\x04 and then nothing"])
def test_a_damaged_store_is_made_anew(folder: Path, home: Path, damage: bytes) -> None:
    write(folder / "a.py", "alpha beta")
    read([folder], home)
    [store] = (home / "corpus").iterdir()
    store.write_bytes(damage)
    tokenizer = Characters()
    assert knows(read([folder], home, tokenizer), "alpha beta")
    assert tokenizer.texts == ["alpha beta"]


def test_of_too_much_text_the_newest_files_are_kept(folder: Path, home: Path) -> None:
    for number in range(40):
        write(folder / f"{number:02}.py", f"{chr(200 + number)}{number:02} text of file", 1000 + number)
    index = read([folder], home, capacity=256)
    known = [number for number in range(40) if knows(index, f"{chr(200 + number)}{number:02} text of file")]
    assert known
    assert known == list(range(known[0], 40))
    assert known[0] > 20
    assert index.num_bytes < 20_000


def test_a_path_that_is_not_there(home: Path, folder: Path) -> None:
    with pytest.raises(InvalidParameterError, match="no such file or folder; check the path"):
        read([folder / "missing"], home)

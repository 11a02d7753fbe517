"""What is read, under which licence, and what is left out."""

from __future__ import annotations

import subprocess
from email.message import Message
from importlib.metadata import PackageMetadata
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import TrainingError
from paceline.train.corpus import installed_packages, normalised, permissive_licence, read_source, standard_library
from paceline.train.near_duplicates import HeldOutTexts, NearDuplicates, shingles
from paceline.train.repository import tracked_files
from tests.unit.train.workshop import CODE, write_repository


def metadata(**fields: str | list[str]) -> PackageMetadata:
    message = Message()
    for key, values in fields.items():
        for value in [values] if isinstance(values, str) else values:
            message[key.replace("_", "-")] = value
    return cast("PackageMetadata", message)


@pytest.mark.parametrize(
    ("fields", "is_permissive"),
    [
        ({"License_Expression": "MIT"}, True),
        ({"License_Expression": "Apache-2.0 OR BSD-2-Clause"}, True),
        ({"License_Expression": "(MIT AND PSF-2.0)"}, True),
        ({"License_Expression": "MIT AND GPL-3.0-only"}, False),
        ({"License_Expression": "LGPL-2.1"}, False),
        ({"Classifier": ["License :: OSI Approved :: BSD License", "Topic :: Utilities"]}, True),
        ({"Classifier": ["License :: OSI Approved :: GNU General Public License (GPL)"], "License": "MIT"}, False),
        ({"Classifier": ["License :: OSI Approved"], "License": "Apache 2.0"}, True),
        ({"License": "Proprietary"}, False),
        ({"License": "MIT\nbut read on: all rights reserved"}, False),
        ({}, False),
    ],
)
def test_only_permissive_licences_pass(fields: dict[str, str | list[str]], is_permissive: bool) -> None:
    assert (permissive_licence(metadata(**fields)) is not None) == is_permissive


def test_the_standard_library_is_there_without_its_tests() -> None:
    files = list(standard_library())
    assert len(files) > 200
    assert all("test" not in Path(file.path).parts for file in files)
    assert {"stdlib.json", "stdlib.ast"} <= {file.package for file in files}


def test_excluded_packages_are_not_read_however_they_are_spelled() -> None:
    packages = {file.package for file in installed_packages(excluded=["NumPy", "Typing.Extensions"])}
    assert packages
    assert not packages & {"numpy", "typing-extensions"}
    assert normalised("Typing_.Extensions") == "typing-extensions"


@pytest.mark.parametrize(
    "content",
    [b"x = 1\n", b"\xff" * 500, b"\0" * 500, b"x = '" + b"a" * 3000 + b"'\n"],
    ids=["short", "utf8", "nul", "long"],
)
def test_odd_files_are_left_out(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "odd.py"
    path.write_bytes(content)
    assert read_source(path, "odd.py", "p", "MIT") is None


def test_a_repository_gives_what_git_tracks(tmp_path: Path) -> None:
    folder = write_repository(tmp_path / "repo", num_files=3)
    (folder / "untracked.py").write_text(CODE)
    (folder / "notes.txt").write_text("words " * 100)
    (folder / "link.py").symlink_to("/etc/hostname")
    subprocess.run(["git", "-C", str(folder), "add", "notes.txt", "link.py"], check=True)
    files = list(tracked_files(folder))
    assert len(files) == 3
    assert {file.package for file in files} == {"repository.repo"}


def test_a_folder_that_is_no_repository_is_named(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="give a git repository"):
        list(tracked_files(tmp_path))


def test_copies_with_small_changes_are_found() -> None:
    seen = NearDuplicates()
    assert seen.is_new(CODE)
    assert not seen.is_new(CODE)
    assert not seen.is_new(CODE.replace("math.floor", "math.ceil"))
    assert seen.is_new("\n".join(f"def f{i}(x): return x * {i} + g{i}(y)" for i in range(40)))


def test_benchmark_code_is_recognised_inside_a_file() -> None:
    held_out = HeldOutTexts([CODE])
    function = CODE[CODE.index("def largest") : CODE.index("def smallest")]
    assert held_out.contains_part_of("# ours\n" + function)
    assert not held_out.contains_part_of("def largest(items):\n    return max(items)\n")
    assert not HeldOutTexts([]).contains_part_of(CODE)


@given(st.lists(st.sampled_from(["a", "bc", "_d", "7"]), max_size=30), st.integers(1, 6))
def test_shingles_see_words_and_not_their_spacing(words: list[str], length: int) -> None:
    found = shingles(" ".join(words), length)
    assert (found == shingles(",\n\t ".join(words), length)).all()
    assert len(found) == len({tuple(words[i : i + length]) for i in range(len(words) - length + 1)})

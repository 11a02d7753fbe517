from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from paceline.bench.suite.archives import fetch
from paceline.errors import BenchmarkError, ChecksumError
from tests.unit.bench.suite.wheels import OLD, Index


@pytest.fixture
def index(tmp_path: Path) -> Index:
    (tmp_path / "index").mkdir()
    return Index(tmp_path / "index")


def test_wheels_are_downloaded_once_and_read_without_unpacking(index: Index, tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    folder = tmp_path / "home" / "bench"
    archives = fetch(index.sources(), folder, progress=lambda *row: told.append(row), download=index.download)
    fetch(index.sources(), folder, download=index.download)
    assert archives["bank==1.0"].text("bank/core.py") == OLD
    assert index.num_downloads == 2
    assert told == [("bank==1.0", 1, 2), ("bank==2.0", 2, 2)]
    assert sorted(path.name for path in folder.glob("*.whl")) == ["bank-1.0.whl", "bank-2.0.whl"]


def test_a_damaged_file_is_fetched_again(index: Index, tmp_path: Path) -> None:
    fetch(index.sources(), tmp_path / "bench", download=index.download)
    (tmp_path / "bench" / "bank-1.0.whl").write_bytes(b"half a wheel")
    archives = fetch(index.sources(), tmp_path / "bench", download=index.download)
    assert archives["bank==1.0"].text("bank/core.py") == OLD
    assert index.num_downloads == 3


def test_another_file_than_the_manifests_is_an_error_that_names_it(index: Index, tmp_path: Path) -> None:
    wrong = [replace(index.sources()[0], sha256="0" * 64)]
    with pytest.raises(ChecksumError, match=r"bank==1\.0 has the SHA-256 .* the suite needs 0000"):
        fetch(wrong, tmp_path / "bench", download=index.download)
    assert not list((tmp_path / "bench").glob("*.whl"))


def test_an_absent_member_is_an_error(index: Index, tmp_path: Path) -> None:
    archives = fetch(index.sources(), tmp_path / "bench", download=index.download)
    with pytest.raises(BenchmarkError, match=r"no bank/gone.py"):
        archives["bank==2.0"].text("bank/gone.py")

"""Tiny wheels of an imaginary package, two releases of it, and a downloader that hands them out."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

from paceline.bench.suite.archives import Source
from paceline.loader.integrity import file_sha256

OLD = '''"""A bank."""

FEE = 1


class Account:
    def __init__(self, owner):
        self.owner = owner
        self.balance = 0

    def deposit(self, amount):
        """Put money in."""
        self.balance += amount

    def withdraw(self, amount):
        """Take money out."""
        self.balance -= amount
        return amount


def transfer(source, target, amount):
    target.deposit(source.withdraw(amount))
'''

NEW = '''"""A bank."""

FEE = 1


class Account:
    def __init__(self, owner):
        self.owner = owner
        self.balance = 0

    def deposit(self, amount, note=None):
        """Put money in."""
        if amount <= 0:
            raise ValueError("a deposit must be positive")
        self.balance += amount

    def withdraw(self, amount, fee=FEE):
        """Take money out, for a fee that goes to the bank."""
        # The fee is charged even when the account is empty afterwards.
        self.balance -= amount + fee
        return amount


def transfer(source, target, amount):
    target.deposit(source.withdraw(amount))
'''


def write_wheel(path: Path, files: Mapping[str, str]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(zipfile.ZipInfo(name), text)
    return path


class Index:
    """A package index of two wheels, counting the downloads."""

    def __init__(self, folder: Path) -> None:
        self.files = {
            "bank==1.0": write_wheel(
                folder / "bank-1.0-py3-none-any.whl", {"bank/core.py": OLD, "bank/tests/a.py": ""}
            ),
            "bank==2.0": write_wheel(folder / "bank-2.0-py3-none-any.whl", {"bank/core.py": NEW}),
        }
        self.num_downloads = 0

    def sources(self) -> tuple[Source, ...]:
        return tuple(Source(name, file_sha256(path), "MIT") for name, path in self.files.items())

    def download(self, requirement: str, folder: Path, on_progress: Callable[[int, int], None]) -> Path:
        self.num_downloads += 1
        target = folder / self.files[requirement].name
        target.write_bytes(self.files[requirement].read_bytes())
        return target

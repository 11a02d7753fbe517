"""Seeded choices that are the same on every machine and Python: a hash of the key decides, no generator state."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TypeVar

from paceline.bench.records import Task
from paceline.errors import BenchmarkError

T = TypeVar("T")


def rank(*key: object) -> int:
    """A 64-bit number that looks random and depends on nothing but the key's text."""
    return int.from_bytes(hashlib.sha256("\x1f".join(map(str, key)).encode()).digest()[:8], "big")


def pick(options: Sequence[T], *key: object) -> T:
    """The option the key falls on."""
    return options[rank(*key) % len(options)]


def stratified(tasks: Sequence[Task], n: int, seed: int) -> list[Task]:
    """``n`` of the tasks with every part in proportion, in the order of ``tasks``.

    Each part has at least one task while ``n`` allows (with fewer, the largest parts come first); the rest is shared
    by largest remainder. Within a part the seed decides, and a larger ``n`` keeps what a smaller one chose.

    Raises:
        BenchmarkError: ``n`` is not positive.
    """
    if n <= 0:
        raise BenchmarkError(f"the number of tasks must be positive, got {n}")
    parts: dict[str, list[Task]] = {}
    for task in tasks:
        parts.setdefault(task.part, []).append(task)
    for members in parts.values():
        members.sort(key=lambda task: rank(seed, task.task_id))
    n = min(n, len(tasks))
    by_size = sorted(parts, key=lambda part: -len(parts[part]))  # stable: equal sizes stay in the order of the tasks
    shares = dict.fromkeys(by_size[:n], 1)
    for _ in range(n - len(shares)):
        open_parts = [part for part in shares if shares[part] < len(parts[part])]
        shares[max(open_parts, key=lambda part: len(parts[part]) / (shares[part] + 0.5))] += 1
    chosen = {task.task_id for part, share in shares.items() for task in parts[part][:share]}
    return [task for task in tasks if task.task_id in chosen]

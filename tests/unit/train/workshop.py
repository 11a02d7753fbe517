"""A target that reads code, and drafts of a few hundred weights for it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np

from paceline.model.draft_vocabulary import DraftVocabulary
from paceline.train.dataset import RowSet, pack
from paceline.train.encoding import Example, Teacher
from paceline.train.recipe import DraftShape, Recipe
from tests.support import write_tiny_checkpoint, write_tokenizer

CHARACTERS = "abcdefghijklmnopqrstuvwxyz_()[]{}:=.,#\"'`+-*/<>!\u0120\u010a0123456789"
SHAPE = DraftShape(
    hidden_size=16, num_layers=2, num_heads=2, num_kv_heads=1, intermediate_size=32, vocab_size=40, window=8
)

CODE = '''"""numbers and their sums"""
import math
from os import path


class counter:
    """counts things"""

    def add(self, amount, other=2):
        total = self.value + amount
        if total > other:
            total = math.floor(total, other)
        return total


def largest(items):
    best = items[0]
    for item in items:
        # the larger one wins
        if item > best:
            best = item
    return best


def smallest(numbers, default):
    lowest = default
    for number in numbers:
        lowest = min(lowest, number)
    return lowest
'''


def write_code_target(folder: Path) -> Path:
    """A random Llama whose 62 characters are those that code is made of."""
    write_tiny_checkpoint(folder, "llama", max_position_embeddings=2048)
    write_tokenizer(folder, CHARACTERS)
    return folder


def write_repository(folder: Path, num_files: int = 12) -> Path:
    """A git repository of similar but different modules."""
    folder.mkdir(parents=True, exist_ok=True)
    words = ["alpha", "beta", "gamma", "delta", "omega", "sigma", "kappa", "zeta", "theta", "iota", "rho", "phi"]
    for i in range(num_files):
        text = CODE
        for j, name in enumerate(["counter", "amount", "total", "items", "item", "best", "numbers", "lowest", "value"]):
            text = text.replace(name, f"{words[(i + j) % 12]}_{words[(i * 5 + j) % 12]}")
        (folder / f"module_{words[i % 12]}{i}.py").write_text(text)
    for command in (["init", "-q"], ["add", "-A"]):
        subprocess.run(["git", "-C", str(folder), *command], check=True, capture_output=True)
    return folder


def make_rows(num_examples: int = 24, *, seed: int = 0, is_taught: bool = True) -> RowSet:
    """Rows of a language with a rule: a token is followed by its double, modulo 40 listed ones, seldom by another."""
    dice = np.random.default_rng(seed)
    examples = []
    for number in range(num_examples):
        token_ids = [int(dice.integers(2, 40))]
        while len(token_ids) < 20:
            token_ids.append(token_ids[-1] * 2 % 41 + 2 if dice.random() < 0.9 else int(dice.integers(2, 60)))
        teacher = None
        if is_taught and number % 2:
            top = np.stack([np.array(token_ids[8:]), np.full(12, 3)], axis=1).astype(np.int32)
            teacher = Teacher(top, np.log(np.tile([0.8, 0.1], (12, 1))).astype(np.float16))
        examples.append(
            Example(token_ids, np.ones(20, np.float32), np.full(20, number % 10, np.uint8), "p", "window", teacher)
        )
    return pack(examples, DraftVocabulary(range(2, 42), has_escape=True), vocab_size=64, row_tokens=32, seed=seed)


def make_recipe(**changes: object) -> Recipe:
    """A run of a few steps."""
    settings = {"shape": SHAPE, "steps": 12, "row_tokens": 32, "batch_rows": 4, "learning_rate": 1e-2}
    return Recipe(**{**settings, **changes})  # type: ignore[arg-type]

"""A target that reads code, and drafts of a few hundred weights for it."""

from __future__ import annotations

import dataclasses
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from paceline import Engine, SamplingParams, Speculation
from paceline.backends.quantized import as_tensor
from paceline.loader.draft import EMBEDDING
from paceline.loader.load import load_checkpoint
from paceline.model.draft_vocabulary import DraftVocabulary
from paceline.train.dataset import RowSet, pack
from paceline.train.encoding import Example, Teacher
from paceline.train.export import draft_config, export_draft
from paceline.train.head_start import fit_to_states
from paceline.train.loop import Trainer
from paceline.train.network import DraftNetwork, initialise_from_target, last_layer
from paceline.train.recipe import DraftShape, Recipe
from paceline.train.states import TargetStates
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


HEAD_WINDOW, HEAD_ANSWER = 24, 40
HEAD_VOCABULARY = DraftVocabulary([token for token in range(64) if token not in (7, 30, 55)], has_escape=True)
HEAD_PROMPTS = [[2 + (i * j + i) % 60 for j in range(4 + i)] for i in range(1, 13)]


def make_head(target_path: Path, num_positions: int = 128) -> DraftNetwork:
    """An untrained head for a tiny target."""
    target = load_checkpoint(target_path, dtype=torch.float32)
    shape = DraftShape.of_target(target.config, HEAD_VOCABULARY.num_tokens, HEAD_WINDOW)
    torch.manual_seed(0)
    config = draft_config("head", shape, target.config, HEAD_VOCABULARY)
    network = DraftNetwork(config, target.config.hidden_size, num_positions)
    table = as_tensor(target.weights[EMBEDDING], torch.float32)
    initialise_from_target(network, last_layer(target), table, HEAD_VOCABULARY.token_ids)
    return network


def write_head(folder: Path, network: DraftNetwork, target_path: Path) -> Path:
    """A head on disk."""
    target = load_checkpoint(target_path, dtype=torch.float32)
    export_draft(folder, network, HEAD_VOCABULARY, target, kind="head", provenance={})
    return folder


def answers_of(target_path: Path, prompts: Sequence[Sequence[int]]) -> list[Example]:
    """What the target says to ``prompts``, with its probabilities."""
    params = SamplingParams(max_tokens=HEAD_ANSWER, ignore_eos=True, logprobs=8)
    examples = []
    with Engine(target_path, draft=None) as engine:
        for prompt in prompts:
            output = engine.generate(prompt, params, speculation=Speculation("off"))
            assert output.logprobs is not None
            token_ids = [*prompt, *output.token_ids]
            weights = np.array([0.0] * len(prompt) + [1.0] * HEAD_ANSWER, np.float32)
            top = [list(row.top.items()) for row in output.logprobs]
            teacher = Teacher(
                np.array([[token for token, _ in row] for row in top], np.int32),
                np.array([[logprob for _, logprob in row] for row in top], np.float16),
            )
            examples.append(
                Example(token_ids, weights, np.zeros(len(token_ids), np.uint8), "p", "answer: task", teacher)
            )
    return examples


def train_head(folder: Path, target_path: Path, *, steps: int = 150) -> Trainer:
    """A head that knows the target's answers to HEAD_PROMPTS by heart, written to ``folder``."""
    examples = answers_of(target_path, HEAD_PROMPTS)
    rows = pack(examples, HEAD_VOCABULARY, vocab_size=64, row_tokens=64, seed=0)
    target = load_checkpoint(target_path, dtype=torch.float32)
    table = as_tensor(target.weights[EMBEDDING], torch.float32)
    with Engine(target_path, draft=None) as engine:
        states = TargetStates(rows, target.config.hidden_size, lambda: engine, folder / "rows.states")
        rows = dataclasses.replace(rows, states=states)
        network = make_head(target_path)
        fit_to_states(network, table, rows, window=HEAD_WINDOW, seed=0)
        shape = DraftShape.of_target(target.config, HEAD_VOCABULARY.num_tokens, HEAD_WINDOW)
        recipe = make_recipe(
            kind="head", shape=shape, steps=steps, row_tokens=64, learning_rate=5e-3, losses=("ce", "kl")
        )
        path = folder / "checkpoint.pt"
        trainer = Trainer(network, table, rows, rows, recipe, device=torch.device("cpu"), path=path)
        for _ in trainer.run():
            pass
    write_head(folder, network, target_path)
    return trainer

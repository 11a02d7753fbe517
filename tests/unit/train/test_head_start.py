"""A head's first weights: what is linear is found, what is not is approached, and nothing else is touched."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from paceline import Engine
from paceline.backends.quantized import as_tensor
from paceline.loader.draft import EMBEDDING, PROJECTION, STATE_PROJECTION
from paceline.loader.load import load_checkpoint
from paceline.train.dataset import RowSet, pack
from paceline.train.evaluation import evaluate
from paceline.train.head_start import fit_to_states
from paceline.train.network import ATTENTION_OUTPUT, MLP_OUTPUT, DraftNetwork
from paceline.train.states import TargetStates
from tests.unit.train.workshop import HEAD_PROMPTS, HEAD_VOCABULARY, HEAD_WINDOW, answers_of, make_head

CPU = torch.device("cpu")


class Linear:
    """A "target" whose state is a matrix times its last one and a matrix times the token's embedding."""

    def __init__(self, rows: RowSet, table: Tensor, *, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        width = table.shape[1]
        self.of_state = 0.5 * torch.linalg.qr(torch.randn(width, width, generator=generator))[0]
        self.of_token = torch.randn(width, width, generator=generator) / width**0.5
        states = torch.zeros(*rows.tokens.shape, width)
        tokens, documents = torch.from_numpy(rows.tokens.astype(np.int64)), rows.documents
        for row, at in np.ndindex(*documents.shape):
            if documents[row, at] >= 0:
                is_first = at == 0 or documents[row, at] != documents[row, at - 1]
                before = torch.zeros(width) if is_first else states[row, at - 1]
                states[row, at] = self.of_state @ before + self.of_token @ table[tokens[row, at]]
        self._states = states

    def of(self, rows: npt.NDArray[np.int64]) -> Tensor:
        return self._states[rows]


@pytest.fixture(scope="module")
def rows(sharp_target: Path) -> RowSet:
    return pack(answers_of(sharp_target, HEAD_PROMPTS), HEAD_VOCABULARY, vocab_size=64, row_tokens=64, seed=0)


@pytest.fixture(scope="module")
def table(sharp_target: Path) -> Tensor:
    return as_tensor(load_checkpoint(sharp_target, dtype=torch.float32).weights[EMBEDDING], torch.float32)


def weights(network: DraftNetwork) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in network.named_tensors().items()}


def test_a_linear_target_is_found(sharp_target: Path, rows: RowSet, table: Tensor) -> None:
    network = make_head(sharp_target)
    before = weights(network)
    network.load_tensors(before | {"model.norm.weight": torch.ones(32)})
    target = Linear(rows, table)
    fit_to_states(network, table, dataclasses.replace(rows, states=target), window=HEAD_WINDOW, seed=0)
    found = weights(network)
    assert (found[STATE_PROJECTION] - target.of_state).norm() < 0.1 * target.of_state.norm()
    assert (found[PROJECTION] - target.of_token).norm() < 0.1 * target.of_token.norm()
    outputs = {f"model.layers.0.{name}" for name in (ATTENTION_OUTPUT, MLP_OUTPUT, "mlp.up_proj.weight")}
    for name in found:  # what it does not solve for stays as it was
        if name not in (STATE_PROJECTION, PROJECTION, "model.norm.weight", *outputs):
            assert torch.equal(found[name], before[name]), name


def test_each_regression_leaves_less(sharp_target: Path, rows: RowSet, table: Tensor, tmp_path: Path) -> None:
    """On a real target's states, greedy acceptance is that of training steps saved."""
    with Engine(sharp_target, draft=None) as engine:
        known = dataclasses.replace(rows, states=TargetStates(rows, 32, lambda: engine, tmp_path / "rows.states"))
        network = make_head(sharp_target)
        fit_to_states(network, table, known, window=HEAD_WINDOW, seed=0)
        again = make_head(sharp_target)
        fit_to_states(again, table, known, window=HEAD_WINDOW, seed=0)
    assert all(torch.equal(tensor, weights(again)[name]) for name, tensor in weights(network).items())

    def acceptance(*without: str) -> float:
        network = make_head(sharp_target)
        zeros = {name: torch.zeros_like(weights(again)[name]) for name in without}
        network.load_tensors(weights(again) | zeros)
        return evaluate(network, table, known, window=HEAD_WINDOW, device=CPU).greedy

    attention, mlp = (f"model.layers.0.{name}" for name in (ATTENTION_OUTPUT, MLP_OUTPUT))
    untouched = evaluate(make_head(sharp_target), table, known, window=HEAD_WINDOW, device=CPU).greedy
    print(untouched, acceptance(attention, mlp), acceptance(mlp), acceptance())
    assert acceptance() > untouched
    assert acceptance() > acceptance(attention, mlp)

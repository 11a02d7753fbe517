"""The target's hidden states of training rows: computed once, document by document, kept on disk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline import Engine
from paceline.model.draft_vocabulary import DraftVocabulary
from paceline.train.dataset import RowSet, pack
from paceline.train.encoding import Example
from paceline.train.states import TargetStates


class Counting:
    """An engine that counts the texts it is asked for."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.num_texts = 0

    def hidden_states(self, texts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        self.num_texts += len(texts)
        return self._engine.hidden_states(texts)


@pytest.fixture(scope="module")
def engine(tiny_checkpoint: Path) -> Iterator[Engine]:
    with Engine(tiny_checkpoint, draft=None) as engine:
        yield engine


def make_rows() -> RowSet:
    """Rows of two to four short texts, most with some padding."""
    dice = np.random.default_rng(0)
    texts = [dice.integers(2, 60, 7 + number % 9).tolist() for number in range(18)]
    examples = [
        Example(text, np.ones(len(text), np.float32), np.zeros(len(text), np.uint8), "p", "window") for text in texts
    ]
    return pack(examples, DraftVocabulary(range(64), has_escape=True), vocab_size=64, row_tokens=32, seed=0)


def num_texts(rows: RowSet, *chosen: int) -> int:
    return sum(int(rows.documents[row].max()) + 1 for row in chosen)


def states_of(rows: RowSet, engine: Any, folder: Path) -> TargetStates:
    return TargetStates(rows, 32, lambda: engine, folder / "some.states")


def test_each_document_has_its_own_states_and_padding_none(engine: Engine, tmp_path: Path) -> None:
    rows = make_rows()
    found = states_of(rows, engine, tmp_path).of(np.arange(rows.num_rows))
    assert found.shape == (rows.num_rows, 32, 32)
    assert found.dtype == torch.float16
    for row in range(rows.num_rows):
        documents = rows.documents[row]
        for document in np.unique(documents):
            part = torch.from_numpy(documents == document)
            if document < 0:
                assert not found[row][part].any()
            else:
                [expected] = engine.hidden_states([rows.tokens[row][documents == document].tolist()])
                assert torch.equal(found[row][part], expected.half())


def test_a_row_is_computed_once_and_kept(engine: Engine, tmp_path: Path) -> None:
    rows, counting = make_rows(), Counting(engine)
    states = states_of(rows, counting, tmp_path)
    first = states.of(np.array([3, 1]))
    assert counting.num_texts == num_texts(rows, 3, 1) > 2
    assert torch.equal(states.of(np.array([1, 3, 1])), first[[1, 0, 1]])
    assert counting.num_texts == num_texts(rows, 3, 1)
    again = states_of(rows, counting, tmp_path)  # as another run finds them
    assert torch.equal(again.of(np.array([3, 1])), first)
    assert counting.num_texts == num_texts(rows, 3, 1)
    again.of(np.array([0, 1, 2, 3]))
    assert counting.num_texts == num_texts(rows, 0, 1, 2, 3)


def test_deleted_states_are_computed_again(engine: Engine, tmp_path: Path) -> None:
    rows, counting = make_rows(), Counting(engine)
    first = states_of(rows, counting, tmp_path).of(np.array([2]))
    (tmp_path / "some.states").unlink()
    assert torch.equal(states_of(rows, counting, tmp_path).of(np.array([2])), first)
    assert counting.num_texts == 2 * num_texts(rows, 2)


def test_a_run_that_died_within_a_row_computes_it_again(engine: Engine, tmp_path: Path) -> None:
    rows = make_rows()
    expected = states_of(rows, engine, tmp_path / "whole").of(np.array([4]))

    class Dying:
        def hidden_states(self, texts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
            return engine.hidden_states(texts[:1])

    with pytest.raises(ValueError, match="shorter"):
        states_of(rows, Dying(), tmp_path / "cut").of(np.array([4]))
    assert torch.equal(states_of(rows, engine, tmp_path / "cut").of(np.array([4])), expected)

"""Rows: nothing lost, nothing mixed, the same on disk; and the order in which they are seen."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.train.dataset import RowSet, class_table, row_order
from paceline.train.evaluation import tokens_per_pass
from paceline.train.network import of_the_token_before, visible
from tests.unit.train.workshop import make_rows

CPU = torch.device("cpu")


def test_examples_stay_whole_and_apart() -> None:
    rows = make_rows(30)
    lengths = [
        int((rows.documents[row] == number).sum())
        for row in range(rows.num_rows)
        for number in range(rows.documents[row].max() + 1)
    ]
    assert lengths == [20] * 30
    assert rows.describe()["tokens"] == 600
    assert rows.describe()["tokens_with_target_probabilities"] == 15 * 12


def test_a_batch_asks_for_the_next_token_of_the_same_example() -> None:
    rows = make_rows(6)
    batch = rows.batch(np.arange(rows.num_rows), CPU)
    table = class_table(rows.vocabulary, 64)
    expected = [
        table[rows.tokens[row, at + 1]]
        for row in range(rows.num_rows)
        for at in range(31)
        if rows.documents[row, at + 1] >= 0 and rows.documents[row, at] == rows.documents[row, at + 1]
    ]
    assert batch.targets.labels.tolist() == expected
    assert int(batch.asked.sum()) == len(expected)
    # What the target said belongs to the token it said it for.
    known = batch.targets.is_known
    assert torch.equal(batch.targets.classes[known][:, 0], batch.targets.labels[known])
    assert batch.targets.probs[known][:, 0].sub(0.8).abs().max() < 1e-3


def test_unlisted_tokens_are_the_escape() -> None:
    rows = make_rows(40)
    labels = rows.batch(np.arange(rows.num_rows), CPU).targets.labels
    assert int(labels.max()) == rows.vocabulary.num_tokens == 40


def test_rows_without_the_target_are_fine() -> None:
    batch = make_rows(4, is_taught=False).batch(np.arange(2), CPU)
    assert not batch.targets.is_known.any()


def test_rows_come_back_from_disk(tmp_path: Path) -> None:
    rows = make_rows()
    assert RowSet.load(tmp_path) is None
    rows.save(tmp_path)
    again = RowSet.load(tmp_path)
    assert again is not None
    for name in ("tokens", "weights", "roles", "documents", "taught", "classes", "probs"):
        np.testing.assert_array_equal(getattr(again, name), getattr(rows, name))
    assert again.vocabulary.token_ids.tolist() == rows.vocabulary.token_ids.tolist()


@pytest.mark.parametrize("batch_rows", [1, 4, 7, 25])
def test_every_row_is_seen_once_an_epoch_in_another_order(batch_rows: int) -> None:
    seen = np.concatenate([row_order(10, batch_rows, step, seed=2) for step in range(40)])
    epochs = seen[: len(seen) // 10 * 10].reshape(-1, 10)
    assert (np.sort(epochs, axis=1) == np.arange(10)).all()
    assert (epochs[0] != epochs[1]).any()


def test_a_token_sees_its_own_example_and_no_further_than_the_window() -> None:
    documents = torch.tensor([[0, 0, 0, 1, 1, -1]])
    seen = visible(documents, 2)[0, 0]
    assert seen.int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [0, 1, 1, 0, 0, 0],
        [0, 0, 0, 1, 0, 0],
        [0, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 0, 1],
    ]


@pytest.mark.parametrize(
    ("agrees", "horizon", "expected"),
    [
        ([0, 0, 0], 4, 1.0),
        ([1, 1, 1, 1, 1], 4, 5.0),
        ([1, 1, 1, 1], 1, 2.0),
        ([1, 0, 1, 1, 0, 1], 4, 2.0),
        ([], 4, 1.0),
    ],
)
def test_tokens_per_pass(agrees: list[int], horizon: int, expected: float) -> None:
    assert tokens_per_pass([np.array([agrees], dtype=np.bool_)], horizon) == expected


def test_tokens_per_pass_follows_each_token_of_a_draft() -> None:
    first, later = [1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 1, 1]
    agrees = [np.array([first, later], dtype=np.bool_)]
    assert tokens_per_pass(agrees, 1) == 2.0
    assert tokens_per_pass(agrees, 2) == 2.0  # a second token is right at the end only
    assert tokens_per_pass([np.array([first, first], dtype=np.bool_)], 8) == 6.0  # deeper ones are like the second


def test_a_query_after_drafted_tokens_sees_them_as_they_were_drafted() -> None:
    documents = torch.tensor([[0, 0, 0, 0, 1]])
    once = visible(documents, 3, 1)[0, 0].int()
    assert once[:, :5].tolist() == [  # read with the target's states: all but itself
        [0, 0, 0, 0, 0],
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 1, 1, 0, 0],
        [0, 0, 0, 0, 0],
    ]
    assert once[:, 5:].tolist() == torch.eye(5, dtype=torch.int32).tolist()
    twice = visible(documents, 3, 2)[0, 0].int()
    assert twice[3].view(3, 5).tolist() == [[0, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 0, 1, 0]]


def test_states_come_from_the_token_before() -> None:
    documents = torch.tensor([[0, 0, 1, 1, 1, -1]])
    states = torch.arange(1.0, 7.0)[None, :, None]
    assert of_the_token_before(states, documents).flatten().tolist() == [0, 1, 0, 3, 4, 0]

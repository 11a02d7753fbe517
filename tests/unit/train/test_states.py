"""The target's hidden states of training rows: computed once, document by document, kept on disk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline import Engine, SamplingParams, Speculation
from paceline.backends.quantized import as_tensor
from paceline.loader.load import load_checkpoint
from paceline.model.draft_vocabulary import DraftVocabulary
from paceline.train.dataset import RowSet, pack
from paceline.train.encoding import Example, Teacher
from paceline.train.states import TargetStates, taught_by_states


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


def target_head(folder: Path) -> torch.Tensor:
    weights = load_checkpoint(folder, dtype=torch.float32).weights
    return as_tensor(weights.get("lm_head.weight", weights["model.embed_tokens.weight"]), torch.float32)


def test_states_teach_what_the_target_would_say_next(engine: Engine, tiny_checkpoint: Path, tmp_path: Path) -> None:
    rows = make_rows()
    head = target_head(tiny_checkpoint)[:64]
    rows = replace(rows, states=states_of(rows, engine, tmp_path))
    batch = rows.batch(np.array([0]), torch.device("cpu"))
    taught = taught_by_states(batch, head)
    assert bool(taught.is_known.all())
    for label, (row, at) in zip(taught.labels.tolist(), batch.asked.nonzero().tolist(), strict=True):
        document = rows.documents[row]
        text = rows.tokens[row][(document == document[at]) & (np.arange(len(document)) <= at)].tolist()
        params = SamplingParams(max_tokens=1, logit_bias=dict.fromkeys(range(64, engine.tokenizer.vocab_size), -100.0))
        [token_id] = engine.generate(text, params, speculation=Speculation(mode="off")).token_ids
        assert label == token_id
    assert torch.equal(taught.classes[:, 0], taught.labels)
    assert bool((taught.probs.sum(1) <= 1.0001).all())


def test_what_an_answer_recorded_stays_and_so_does_the_escape(engine: Engine, tiny_checkpoint: Path) -> None:
    vocabulary = DraftVocabulary(range(32), has_escape=True)  # half of the tokens
    ids, logprobs = np.array([[9, 8, 7]], np.int32), np.log(np.array([[0.5, 0.25, 0.125]])).astype(np.float16)
    text = [5, 40, 6, 9]
    example = Example(
        text, np.ones(4, np.float32), np.zeros(4, np.uint8), "p", "answer", Teacher(ids, logprobs)
    )  # fmt: skip
    rows = pack([example], vocabulary, vocab_size=64, row_tokens=4, seed=0)
    [states] = engine.hidden_states([text])
    batch = replace(rows.batch(np.array([0]), torch.device("cpu")), states=states[None])
    taught = taught_by_states(batch, target_head(tiny_checkpoint)[:32])
    assert taught.labels[0] == 32  # token 40 is not listed
    assert taught.is_known.tolist() == [False, True, True]
    expected = torch.softmax(states[1] @ target_head(tiny_checkpoint)[:32].T, dim=-1)
    assert torch.allclose(taught.probs[1], expected[taught.classes[1]], atol=1e-6)
    assert taught.labels[1] == expected.argmax()
    assert taught.labels[2] == 9
    assert taught.classes[2, :3].tolist() == [9, 8, 7]
    assert taught.probs[2, :4].tolist() == pytest.approx([0.5, 0.25, 0.125, 0.0], abs=1e-3)

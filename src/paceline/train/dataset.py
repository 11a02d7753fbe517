"""Examples packed into rows of equal length, kept as arrays on disk and read through memory maps."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.model.draft_vocabulary import DraftVocabulary
from paceline.train.encoding import Example
from paceline.train.losses import Targets

_OPEN_ROWS = 64  # rows that examples may still be put into
_ARRAYS = ("tokens", "weights", "roles", "documents", "taught", "classes", "probs")


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Some rows. Position t of a row is asked for token t + 1; ``targets`` has a row for each question that counts.

    ``tokens`` and ``documents``: [num_rows, row_tokens]; ``asked``: bool [num_rows, row_tokens];
    ``weights`` and ``roles``: [num_asked]; ``states``: the target's hidden states [num_rows, row_tokens, hidden_size],
    for a head.
    """

    tokens: Tensor
    documents: Tensor
    asked: Tensor
    weights: Tensor
    roles: Tensor
    targets: Targets
    states: Tensor | None = None


class StateSource(Protocol):
    """Where a head's training finds the target's hidden states."""

    def of(self, rows: npt.NDArray[np.int64]) -> Tensor:
        """Those of the rows named, [num_rows, row_tokens, hidden_size]."""


@dataclass(frozen=True, slots=True, eq=False)
class RowSet:
    """Packed rows.

    Attributes:
        tokens: [num_rows, row_tokens], target ids.
        weights: float16, how much predicting this token counts.
        roles: uint8.
        documents: int32, which example of the row a position belongs to; -1 is padding.
        taught: int32, the row of ``classes`` and ``probs`` with what the target said for this token; -1: nothing.
        classes: [num_taught, num_top], classes of the draft's vocabulary.
        probs: [num_taught, num_top] float16.
        vocabulary: whose classes.
        states: the target's hidden states of the same rows, for a head.
    """

    tokens: npt.NDArray[np.int32]
    weights: npt.NDArray[np.float16]
    roles: npt.NDArray[np.uint8]
    documents: npt.NDArray[np.int32]
    taught: npt.NDArray[np.int32]
    classes: npt.NDArray[np.int32]
    probs: npt.NDArray[np.float16]
    vocabulary: DraftVocabulary
    states: StateSource | None = None

    @property
    def num_rows(self) -> int:
        """How many rows there are."""
        return len(self.tokens)

    def describe(self) -> dict[str, Any]:
        """Numbers for the provenance: tokens, how many of them count, how much of the rows is padding."""
        return {
            "rows": self.num_rows,
            "tokens": int((self.documents >= 0).sum()),
            "tokens_that_count": int((self.weights > 0).sum()),
            "tokens_with_target_probabilities": int((self.taught >= 0).sum()),
            "padding": round(float((self.documents < 0).mean()), 4) if self.num_rows else 0.0,
        }

    def batch(self, rows: npt.NDArray[np.int64], device: torch.device) -> Batch:
        """The rows named, as tensors."""
        tokens = torch.from_numpy(self.tokens[rows].astype(np.int64))
        weights = self.weights[rows][:, 1:].astype(np.float32)
        counts = weights > 0
        asked = np.zeros(tokens.shape, dtype=np.bool_)
        asked[:, :-1] = counts
        taught = self.taught[rows][:, 1:][counts]
        labels = class_table(self.vocabulary, int(self.tokens.max()) + 1)[self.tokens[rows][:, 1:][counts]]
        is_known = taught >= 0
        if len(self.classes):
            classes = np.where(is_known[:, None], self.classes[taught], 0)
            probs = np.where(is_known[:, None], self.probs[taught].astype(np.float32), 0)
        else:
            classes, probs = np.zeros((len(taught), 1), np.int64), np.zeros((len(taught), 1), np.float32)
        return Batch(
            tokens.to(device),
            torch.from_numpy(self.documents[rows].astype(np.int64)).to(device),
            torch.from_numpy(asked).to(device),
            torch.from_numpy(weights[counts]).to(device),
            torch.from_numpy(self.roles[rows][:, 1:][counts].astype(np.int64)),
            Targets(
                torch.from_numpy(labels).to(device),
                torch.from_numpy(classes.astype(np.int64)).to(device),
                torch.from_numpy(probs).to(device),
                torch.from_numpy(is_known).to(device),
            ),
            self.states.of(rows).to(device) if self.states is not None else None,
        )

    def save(self, folder: Path) -> None:
        """Write the arrays; the vocabulary comes last and marks the folder as whole."""
        folder.mkdir(parents=True, exist_ok=True)
        for name in _ARRAYS:
            np.save(folder / f"{name}.npy", getattr(self, name))
        part = folder / "vocabulary.part"
        part.write_text(json.dumps(self.vocabulary.token_ids.tolist()), encoding="utf-8")
        part.replace(folder / "vocabulary.json")

    @classmethod
    def load(cls, folder: Path) -> RowSet | None:
        """What `save` wrote, as memory maps; None if it was not finished."""
        if not (folder / "vocabulary.json").is_file():
            return None
        token_ids = json.loads((folder / "vocabulary.json").read_text(encoding="utf-8"))
        arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in _ARRAYS}
        return cls(**arrays, vocabulary=DraftVocabulary(token_ids, has_escape=True))


def class_table(vocabulary: DraftVocabulary, vocab_size: int) -> npt.NDArray[np.int64]:
    """Target id -> class; the escape for what is not listed."""
    listed = vocabulary.token_ids.numpy()
    table = np.full(max(vocab_size, int(listed[-1]) + 1), vocabulary.num_tokens, dtype=np.int64)
    table[listed] = np.arange(vocabulary.num_tokens)
    return table


def pack(
    examples: Iterable[Example], vocabulary: DraftVocabulary, *, vocab_size: int, row_tokens: int, seed: int
) -> RowSet:
    """Put examples into rows, in an order that ``seed`` shuffles: each into the fullest open row that has room.

    An example stays whole, so rows end with some padding; none may be longer than a row.
    """
    items = list(examples)
    random.Random(seed).shuffle(items)
    classes_of = class_table(vocabulary, vocab_size)
    rows: list[list[Example]] = []
    room: dict[int, int] = {}  # of the open rows
    for item in items:
        size = len(item.token_ids)
        assert size <= row_tokens, "examples are cut to rows where they are made"
        fitting = [row for row, left in room.items() if left >= size]
        if fitting:
            row = min(fitting, key=room.__getitem__)
        else:
            if len(room) >= _OPEN_ROWS:
                del room[min(room, key=room.__getitem__)]
            row = len(rows)
            rows.append([])
            room[row] = row_tokens
        rows[row].append(item)
        room[row] -= size
    return _fill(rows, vocabulary, classes_of, row_tokens)


def _fill(
    rows: Sequence[Sequence[Example]],
    vocabulary: DraftVocabulary,
    classes_of: npt.NDArray[np.int64],
    row_tokens: int,
) -> RowSet:
    shape = (len(rows), row_tokens)
    tokens, taught = np.zeros(shape, np.int32), np.full(shape, -1, np.int32)
    weights, roles = np.zeros(shape, np.float16), np.zeros(shape, np.uint8)
    documents = np.full(shape, -1, np.int32)
    classes: list[npt.NDArray[np.int32]] = []
    probs: list[npt.NDArray[np.float16]] = []
    num_taught = 0
    for row, items in enumerate(rows):
        start = 0
        for number, item in enumerate(items):
            part = slice(start, start + len(item.token_ids))
            tokens[row, part], weights[row, part] = item.token_ids, item.weights
            roles[row, part], documents[row, part] = item.roles, number
            weights[row, start] = 0
            if item.teacher is not None:
                size = len(item.teacher.token_ids)
                taught[row, part.stop - size : part.stop] = np.arange(num_taught, num_taught + size)
                num_taught += size
                is_there = item.teacher.token_ids >= 0
                classes.append(classes_of[np.where(is_there, item.teacher.token_ids, 0)].astype(np.int32))
                probs.append(np.where(is_there, np.exp(item.teacher.logprobs.astype(np.float32)), 0).astype(np.float16))
            start = part.stop
    width = classes[0].shape[1] if classes else 1
    return RowSet(
        tokens,
        weights,
        roles,
        documents,
        taught,
        np.concatenate(classes) if classes else np.zeros((0, width), np.int32),
        np.concatenate(probs) if probs else np.zeros((0, width), np.float16),
        vocabulary,
    )


def row_order(num_rows: int, batch_rows: int, step: int, seed: int) -> npt.NDArray[np.int64]:
    """The rows of a step: a new shuffle each epoch, a function of the step and the seed alone."""
    places = np.arange(step * batch_rows, (step + 1) * batch_rows)
    epochs, within = places // num_rows, places % num_rows
    chosen = np.empty(batch_rows, dtype=np.int64)
    for epoch in np.unique(epochs):
        order = np.random.Generator(np.random.Philox(key=[seed, int(epoch)])).permutation(num_rows)
        chosen[epochs == epoch] = order[within[epochs == epoch]]
    return chosen


def kinds_of(examples: Iterable[Example]) -> dict[str, int]:
    """How many examples of each kind."""
    return dict(sorted(Counter(item.kind for item in examples).items()))

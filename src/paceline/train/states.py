"""The target's hidden states for the rows of a training set, which a draft head reads.

The engine that will verify the draft computes them, quantised weights included. That takes about as long as training on
them once, so they are kept on disk: 2 bytes for each of a state's numbers, 1.2 kB a token for a target of width 576.

They also say what the target would have written there, so every token of a text teaches, not answers alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own idiom
from torch import Tensor

from paceline.engine.engine import Engine
from paceline.train.dataset import Batch, RowSet
from paceline.train.distill import NUM_TOP
from paceline.train.losses import LOGIT_ROWS, Targets


class TargetStates:
    """States of ``rows``, computed when a row is first asked for, by the engine that ``make_engine`` gives.

    ``path`` keeps them between runs; it belongs to these rows and this target.
    """

    def __init__(self, rows: RowSet, hidden_size: int, make_engine: Callable[[], Engine], path: Path) -> None:
        self._rows = rows
        self._shape = (*rows.tokens.shape, hidden_size)
        self._make_engine = make_engine
        self._path = path

    def of(self, rows: npt.NDArray[np.int64]) -> Tensor:
        """See `StateSource`; float16."""
        missing = np.unique(rows[~self._is_there[rows]])
        if missing.size:
            self._compute(missing)
        return torch.from_numpy(self._states[rows])

    def _compute(self, rows: npt.NDArray[np.int64]) -> None:
        texts: list[tuple[int, slice]] = []
        for row in rows.tolist():
            documents = self._rows.documents[row]
            ends = [*(np.flatnonzero(np.diff(documents)) + 1).tolist(), len(documents)]
            texts += [
                (row, slice(start, end))
                for start, end in zip([0, *ends], ends, strict=False)
                if documents[start] >= 0  # the rest of a row is padding
            ]
        tokens = self._rows.tokens
        found = self._make_engine().hidden_states([tokens[row, part].tolist() for row, part in texts])
        for (row, part), states in zip(texts, found, strict=True):
            self._states[row, part] = states.to("cpu", torch.float16).numpy()
        self._states.flush()  # before the mark that they are there
        self._is_there[rows] = True

    @property
    def _mark_path(self) -> Path:
        return self._path.with_suffix(".known")

    @cached_property
    def _states(self) -> np.memmap[Any, np.dtype[np.float16]]:
        return np.memmap(self._path, np.float16, _mode(self._path), shape=self._shape)

    @cached_property
    def _is_there(self) -> np.memmap[Any, np.dtype[np.bool_]]:
        if not self._path.exists():
            self._mark_path.unlink(missing_ok=True)  # marks of states that somebody deleted
        return np.memmap(self._mark_path, np.bool_, _mode(self._mark_path), shape=(self._shape[0],))


def _mode(path: Path) -> Any:
    path.parent.mkdir(parents=True, exist_ok=True)
    return "r+" if path.exists() else "w+"


@torch.no_grad()
def taught_by_states(batch: Batch, head: Tensor) -> Targets:
    """The questions of ``batch``, with what the target said wherever an answer did not record it.

    ``head`` [num_tokens, hidden_size] are the rows of the target's head for the listed tokens. The distribution is over
    these alone, and the label becomes its likeliest. Where the text goes on with a token that is not listed, the escape
    stays the label: that is how often the target would have said one, as far as the text is like its own.
    """
    assert batch.states is not None
    targets = batch.targets
    states = batch.states[batch.asked]
    is_taught = ~targets.is_known & (targets.labels < len(head))
    num_top = min(NUM_TOP, len(head))
    missing = max(0, num_top - targets.classes.shape[1])
    labels = targets.labels.clone()
    classes, probs = (F.pad(values, (0, missing)) for values in (targets.classes, targets.probs))
    for rows in torch.split(is_taught.nonzero()[:, 0], LOGIT_ROWS):
        top = torch.softmax(states[rows].to(head.dtype) @ head.T, dim=-1).float().topk(num_top)
        classes[rows, :num_top], probs[rows, :num_top] = top.indices, top.values
        labels[rows] = top.indices[:, 0]
    return Targets(labels, classes, probs, targets.is_known | is_taught)

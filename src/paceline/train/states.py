"""The target's hidden states for the rows of a training set, which a draft head reads.

The engine that will verify the draft computes them, quantised weights included. That takes about as long as training on
them once, so they are kept on disk: 2 bytes for each of a state's numbers, 1.2 kB a token for a target of width 576.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.engine.engine import Engine
from paceline.train.dataset import RowSet


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

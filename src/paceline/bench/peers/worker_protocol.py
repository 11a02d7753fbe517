"""The loop of a worker: one JSON object per line in, one out. It runs in a peer's environment, without Paceline.

Requests are ``{"id", "op", ...}``; every answer repeats the id. Operations:

* ``load``: options of the back-end -> ``{"weights", "version"}``.
* ``reset``: forget every cached token -> ``{}``.
* ``generate``: ``token_ids``, ``max_tokens``, ``end_token_ids`` -> ``{"token_ids", "steps", "num_cached_tokens",
  "peak_rss_mib"}``; ``steps`` holds, for each step that yielded tokens, [ms since the request arrived, tokens].
* any other public method of the back-end, by its name.

A failure is answered with ``{"error"}`` and the worker goes on. It ends with its standard input.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Sequence
from typing import Any, Protocol


class Recorder:
    """Collects the tokens of one answer with their times; cuts them at the first end token and at ``max_tokens``."""

    def __init__(self, max_tokens: int, end_token_ids: Sequence[int], started: float) -> None:
        self.max_tokens = max_tokens
        self.end_token_ids = frozenset(end_token_ids)
        self.token_ids: list[int] = []
        self.steps: list[tuple[float, int]] = []
        self._started = started
        self.is_done = max_tokens <= 0

    def add(self, token_ids: Sequence[int], *, is_new_step: bool = True) -> bool:
        """Note tokens that are there now, of a new step or of the last one; True once nothing more is wanted."""
        count = 0
        for token_id in token_ids:
            if self.is_done:
                break
            self.token_ids.append(int(token_id))
            count += 1
            self.is_done = token_id in self.end_token_ids or len(self.token_ids) >= self.max_tokens
        if count:
            now = (time.perf_counter() - self._started) * 1e3
            if is_new_step or not self.steps:
                self.steps.append((now, count))
            else:
                self.steps[-1] = (now, self.steps[-1][1] + count)
        return self.is_done


class Backend(Protocol):
    """One engine behind the protocol."""

    def load(self, **options: Any) -> dict[str, Any]:
        """Load the model; say which weights and which version of the engine."""

    def reset(self) -> None:
        """Forget every cached token."""

    def generate(self, token_ids: list[int], recorder: Recorder) -> int:
        """Decode greedily into ``recorder`` until it is done; the number of prompt tokens found in the cache."""


def serve(backend: Backend) -> None:
    """Answer requests until standard input ends. What libraries print to standard output goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        started = time.perf_counter()
        request = json.loads(line)
        try:
            answer = _answer(backend, request.pop("op"), request, started)
        except Exception as error:  # whatever an engine raises is for the other side to report
            answer = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"}
        answers.write(json.dumps({"id": request["id"], **answer}) + "\n")
        answers.flush()


def _answer(backend: Backend, operation: str, request: dict[str, Any], started: float) -> dict[str, Any]:
    options = {name: value for name, value in request.items() if name != "id"}
    if operation != "generate":
        return getattr(backend, operation)(**options) or {}
    recorder = Recorder(options["max_tokens"], options["end_token_ids"], started)
    num_cached = backend.generate(options["token_ids"], recorder)
    return {
        "token_ids": recorder.token_ids,
        "steps": recorder.steps,
        "num_cached_tokens": num_cached,
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }

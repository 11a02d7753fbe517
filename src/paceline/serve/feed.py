"""What the live view shows: steps as they happen, and the block pool a few times a second."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import Any

from paceline.engine.events import StepEvent
from paceline.engine.snapshot import FREE, CacheSnapshot
from paceline.serve.served import ServedEngine
from paceline.serve.streaming import data_event

_INTERVAL = 0.2
_MAX_STEPS = 256  # kept for the next tick; a slow viewer loses the oldest
_SMOOTHING = 0.1


class Feed:
    """Collects steps on the engine's thread; serves them to any number of viewers."""

    def __init__(self, engine: ServedEngine) -> None:
        self._engine = engine
        self._steps: deque[tuple[int, dict[str, Any]]] = deque(maxlen=_MAX_STEPS)
        self._num_steps = 0
        self._num_tokens = 0
        self._plain_ms: float | None = None  # forward pass of a step that verified no draft

    def observe_step(self, event: StepEvent) -> None:
        """Keep what a viewer needs of a step."""
        self._num_steps += 1
        self._num_tokens += event.num_accepted + 1
        if event.num_drafted == 0 and event.num_rows <= 4:  # decoding alone, no prompt in it
            before = self._plain_ms if self._plain_ms is not None else event.step_ms
            self._plain_ms = before + _SMOOTHING * (event.step_ms - before)
        step = {
            "request": event.request_id,
            "horizon": event.horizon,
            "drafted": event.num_drafted,
            "accepted": event.num_accepted,
            "source": event.source,
            "rows": event.num_rows,
            "ms": round(event.step_ms, 3),
        }
        self._steps.append((self._num_steps, step))

    async def events(self, is_over: Callable[[], bool]) -> AsyncGenerator[bytes, None]:
        """Server-sent events for one viewer, until ``is_over``."""
        seen, shown = self._num_steps, None
        while not is_over():
            new = [step for number, step in list(self._steps) if number > seen]
            seen = self._num_steps
            load = self._engine.load
            pool = _pool(await self._engine.snapshot())
            picture = {
                "steps": new,
                "running": load.num_running,
                "waiting": load.num_waiting,
                "total_tokens": self._num_tokens,
                "autoregressive_tokens_per_s": 1e3 / self._plain_ms if self._plain_ms else None,
                "pool": pool,
            }
            if new or picture != shown:
                yield data_event({"time": time.time(), **picture})
                shown = {**picture, "steps": []}
            await asyncio.sleep(_INTERVAL)


def _pool(snapshot: CacheSnapshot) -> dict[str, Any]:
    """The map run by run: [state, length, state, length, ...], the free tail left out."""
    runs: list[int] = []
    for state in snapshot.states:
        if runs and runs[-2] == state:
            runs[-1] += 1
        else:
            runs += [state, 1]
    if runs and runs[-2] == FREE:
        del runs[-2:]
    return {
        "num_blocks": len(snapshot.states),
        "block_size": snapshot.block_size,
        "runs": runs,
        "owners": [
            {"name": one.owner, "tokens": one.num_tokens, "blocks": one.num_blocks, "drafts": one.num_draft_blocks}
            for one in snapshot.owners
        ],
    }

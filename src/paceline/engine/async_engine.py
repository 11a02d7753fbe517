"""The engine for asyncio: one thread steps while there is work, callers await their deltas."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.engine.engine import Engine, Prompt
from paceline.engine.output import Delta, Output
from paceline.engine.session import Session
from paceline.request import SamplingParams, Speculation


@dataclass(frozen=True, slots=True)
class _Subscriber:
    """Where a request's deltas go: a queue that belongs to the caller's event loop."""

    loop: asyncio.AbstractEventLoop
    queue: asyncio.Queue[Delta | BaseException]

    def put(self, item: Delta | BaseException) -> None:
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.queue.put_nowait, item)


class AsyncEngine:
    """:class:`Engine` behind awaitables; the same arguments and errors.

    Requests of all callers share every step (continuous batching). Cancelling the awaiting task, or leaving the
    iterator, cancels the request before the next step.
    """

    def __init__(self, model: str | Path, *, draft: str | Path | None = "auto", **options: Any) -> None:
        self.engine = Engine(model, draft=draft, **options)
        self._subscribers: dict[str, _Subscriber] = {}
        self._left: deque[str] = deque()  # requests whose callers are gone, finished or not
        self._wake = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="paceline-engine", daemon=True)
        self._thread.start()

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(self, *_exception: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Stop stepping and cancel what is running."""
        with self._wake:
            self._is_closed = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join)
        self.engine.close()

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        speculation: Speculation | None = None,
        prediction: str | None = None,
        session: Session | None = None,
    ) -> Output:
        """See :meth:`Engine.generate`."""
        output: Output | None = None
        async for delta in self.stream(prompt, params, speculation=speculation, prediction=prediction, session=session):
            output = delta.output
        assert output is not None, "a stream ends with its output"
        return output

    async def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        speculation: Speculation | None = None,
        prediction: str | None = None,
        session: Session | None = None,
    ) -> AsyncIterator[Delta]:
        """See :meth:`Engine.stream`."""
        subscriber = _Subscriber(asyncio.get_running_loop(), asyncio.Queue())

        def submit() -> str:
            # Under the lock that the stepping thread takes between steps, so that no delta precedes its subscriber.
            with self._wake:
                request_id = self.engine.submit(
                    prompt, params, speculation=speculation, prediction=prediction, session=session
                )
                self._subscribers[request_id] = subscriber
                self._wake.notify()
                return request_id

        request_id = await asyncio.to_thread(submit)  # it waits for a step to end, the event loop must not
        try:
            while True:
                item = await subscriber.queue.get()
                if isinstance(item, BaseException):
                    raise item
                yield item
                if item.output is not None:
                    return
        finally:
            self._subscribers.pop(request_id, None)
            self._left.append(request_id)

    def _run(self) -> None:
        """The stepping thread: sleeps while idle, hands each step's deltas to their callers."""
        while True:
            with self._wake:
                while not self._is_closed and not self.engine.core.scheduler.has_work:
                    self._wake.wait()
                if self._is_closed:
                    return
            try:
                while self._left:
                    self.engine.cancel(self._left.popleft())
                self.engine.step()
                for request_id, subscriber in list(self._subscribers.items()):
                    for delta in self.engine.take(request_id):
                        subscriber.put(delta)
            except Exception as error:  # a caller must learn of it: a silent thread is a hang
                for subscriber in list(self._subscribers.values()):
                    subscriber.put(error)
                self.engine.close()

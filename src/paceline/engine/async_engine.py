"""The engine for asyncio: one thread owns the engine and steps while there is work; callers await their deltas."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from paceline.engine.build import EngineInfo
from paceline.engine.engine import Engine, Prompt
from paceline.engine.events import Listener
from paceline.engine.output import Delta, Output
from paceline.engine.session import Session
from paceline.engine.snapshot import CacheSnapshot
from paceline.loader.tokenizer import Tokenizer
from paceline.records import TokenLogprob
from paceline.request import SamplingParams, Speculation, StructuredOutput

T = TypeVar("T")
_Action = Callable[[], None]


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """How busy an engine is; without progress means that there is work, and no step has ended for so long."""

    num_running: int
    num_waiting: int
    num_used_blocks: int
    num_blocks: int
    seconds_without_progress: float


@dataclass(slots=True, eq=False)
class _Call:
    """One caller's request on its way in, and where its deltas go back out: a queue of the caller's event loop."""

    prompt: Prompt
    params: SamplingParams | None
    speculation: Speculation | None
    prediction: str | None
    session: Session | None
    loop: asyncio.AbstractEventLoop
    queue: asyncio.Queue[Delta | Exception]
    request_id: str = ""
    is_abandoned: bool = False

    def put(self, item: Delta | Exception) -> None:
        if not self.is_abandoned and not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.queue.put_nowait, item)


class AsyncEngine:
    """:class:`Engine` behind awaitables; the same arguments and errors.

    Requests of all callers share every step (continuous batching). Cancelling the awaiting task, or leaving the
    iterator, cancels the request before the next step. An error inside a step reaches every caller.
    """

    def __init__(self, model: str | Path, *, draft: str | Path | None = "auto", **options: Any) -> None:
        self.engine = Engine(model, draft=draft, **options)
        self._arrivals: deque[_Call] = deque()
        self._actions: deque[_Action] = deque()
        self._last_progress = time.monotonic()
        self._wake = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="paceline-engine", daemon=True)
        self._thread.start()

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(self, *_exception: object) -> None:
        await self.aclose()

    @property
    def info(self) -> EngineInfo:
        """What the engine runs."""
        return self.engine.info

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.engine.tokenizer

    @property
    def load(self) -> EngineLoad:
        """How busy it is; cheap, and never waits for a step."""
        scheduler, cache = self.engine.core.scheduler, self.engine.core.cache
        has_work = scheduler.has_work or bool(self._arrivals)
        return EngineLoad(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting + len(self._arrivals),
            num_used_blocks=cache.num_used_blocks,
            num_blocks=cache.num_blocks,
            seconds_without_progress=time.monotonic() - self._last_progress if has_work else 0.0,
        )

    @property
    def speculation(self) -> Speculation:
        """What requests get unless they name their own."""
        return self.engine.config.speculation

    def render(self, messages: Sequence[Mapping[str, Any]], **template_options: Any) -> str:
        """See :meth:`Engine.render`."""
        return self.engine.render(messages, **template_options)

    def subscribe(self, listener: Listener) -> None:
        """See :meth:`Engine.subscribe`."""
        self.engine.subscribe(listener)

    def session(self, session_id: str) -> Session:
        """A name under which :meth:`stream` keeps a prefix referenced."""
        return self.engine.session(session_id=session_id)

    async def release_session(self, session_id: str) -> None:
        """See :meth:`Engine.release_session`."""
        await self.between_steps(lambda: self.engine.release_session(session_id))

    async def snapshot(self) -> CacheSnapshot:
        """See :meth:`Engine.snapshot`."""
        return await self.between_steps(self.engine.snapshot)

    async def score(self, token_ids: Sequence[int], num_top: int = 0) -> list[TokenLogprob]:
        """See :meth:`Engine.score`."""
        return await self.between_steps(lambda: self.engine.score(token_ids, num_top))

    async def compile_grammar(self, structured: StructuredOutput) -> None:
        """Compile what an answer must look like, beside the engine's thread and ahead of the request.

        Raises:
            GrammarError: it cannot be compiled.
        """
        await asyncio.to_thread(self.engine.grammars.compile, structured)

    async def between_steps(self, action: Callable[[], T]) -> T:
        """The result of ``action``, called on the engine's thread before its next step."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()

        def call() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(action())
            except Exception as error:  # it is the caller's
                future.set_exception(error)

        with self._wake:
            if self._is_closed:
                raise RuntimeError("the engine is closed")
            self._actions.append(call)
            self._wake.notify()
        return await asyncio.wrap_future(future)

    async def aclose(self) -> None:
        """Stop stepping; what is running ends with the reason "cancelled"."""
        with self._wake:
            self._is_closed = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join)

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
    ) -> AsyncGenerator[Delta, None]:
        """See :meth:`Engine.stream`."""
        if params is not None and params.structured is not None:
            await self.compile_grammar(params.structured)  # it may take long, and others are in the middle of an answer
        call = _Call(prompt, params, speculation, prediction, session, asyncio.get_running_loop(), asyncio.Queue())
        with self._wake:
            if self._is_closed:
                raise RuntimeError("the engine is closed")
            self._arrivals.append(call)
            self._wake.notify()
        try:
            while True:
                item = await call.queue.get()
                if isinstance(item, Exception):
                    raise item
                yield item
                if item.output is not None:
                    return
        finally:
            call.is_abandoned = True  # no lock, no waiting: the stepping thread looks before its next step

    def _run(self) -> None:
        calls: list[_Call] = []
        while self._wait_for_work(has_calls=bool(calls)):
            while self._actions:
                self._actions.popleft()()
            while self._arrivals:
                calls += self._submit(self._arrivals.popleft())
            for call in calls:
                if call.is_abandoned:
                    self.engine.cancel(call.request_id)
            try:
                self.engine.step()
            except Exception as error:  # the callers must learn of it: a thread that dies silently is a hang
                for call in calls:
                    call.put(error)
                    call.is_abandoned = True
            calls = [call for call in calls if self._deliver(call)]
            self._last_progress = time.monotonic()
        self.engine.close()
        for call in calls:
            self._deliver(call)
        for call in self._arrivals:
            call.put(RuntimeError("the engine was closed before the request began"))
        while self._actions:
            self._actions.popleft()()

    def _wait_for_work(self, *, has_calls: bool) -> bool:
        """Sleep until there is something to do; False when the engine is closed."""
        with self._wake:
            if not (self._arrivals or has_calls):
                self._wake.wait_for(lambda: self._is_closed or self._arrivals or self._actions)
                self._last_progress = time.monotonic()  # until now there was nothing to do
            return not self._is_closed

    def _submit(self, call: _Call) -> list[_Call]:
        try:
            call.request_id = self.engine.submit(
                call.prompt,
                call.params,
                speculation=call.speculation,
                prediction=call.prediction,
                session=call.session,
            )
        except Exception as error:
            call.put(error)
            return []
        return [call]

    def _deliver(self, call: _Call) -> bool:
        """Hand a call its deltas; False when there will be no more."""
        deltas = self.engine.take(call.request_id)
        for delta in deltas:
            call.put(delta)
        return not (deltas and deltas[-1].output is not None)

"""Between the routes and the engine: admission, prompts, sessions, time limits, and what is measured and logged."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from paceline.engine.output import Delta, Output
from paceline.request import SamplingParams, Speculation
from paceline.serve.config import ServerConfig
from paceline.serve.errors import ApiError
from paceline.serve.feed import Feed
from paceline.serve.metrics import Metrics
from paceline.serve.served import ServedEngine
from paceline.serve.sessions import Conversation, Sessions

log = logging.getLogger("paceline.serve")

_HOUSEKEEPING_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids to continue; ``text`` is what they were made of, where that was one text."""

    token_ids: Sequence[int]
    text: str | None = None
    conversation: Conversation | None = None


@dataclass(frozen=True, slots=True)
class Branch:
    """One generation."""

    prompt: Prompt
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class Job:
    """One HTTP request's generations; ``outputs`` fills up with the results by the branches' index."""

    branches: Sequence[Branch]
    speculation: Speculation
    prediction: str | None = None
    outputs: dict[int, Output] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Generation:
    """One branch on its way: when it came, and how many tokens it has."""

    branch: Branch
    speculation: Speculation
    started_ns: int = field(default_factory=time.time_ns)
    num_tokens: int = 0


class Tracer(Protocol):
    """Told how generations end, in the context of the request they belong to; see :mod:`paceline.serve.tracing`."""

    def finished(self, job: Job, index: int, started_ns: int, model_name: str) -> None:
        """A generation of ``job`` has its output."""

    def failed(self, error: BaseException | None) -> None:
        """A generation ended without one."""


class Ticket:
    """A place in the queue; give it back exactly when the request is over."""

    def __init__(self, release: Callable[[], None]) -> None:
        self._release: Callable[[], None] | None = release

    def close(self) -> None:
        """Give the place back; a second call does nothing."""
        release, self._release = self._release, None
        if release is not None:
            release()

    def __enter__(self) -> Ticket:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()


class Service:
    """One engine and everything the routes share. ``load`` builds the engine, in a thread, once the server listens."""

    def __init__(self, config: ServerConfig, load: Callable[[], ServedEngine], tracer: Tracer | None = None) -> None:
        self.config = config
        self.load_error: Exception | None = None
        self.is_draining = False
        self.metrics: Metrics | None = None
        self.feed: Feed | None = None
        self.created = int(time.time())
        self._load = load
        self._tracer = tracer
        self._engine: ServedEngine | None = None
        self._sessions: Sessions | None = None
        self._num_in_flight = 0
        self._generations: dict[int, Generation] = {}
        self._num_generations = 0

    # ---- life ----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Load the engine.

        Raises:
            PacelineError: the model cannot be loaded; also kept as ``load_error``.
        """
        try:
            engine = await asyncio.to_thread(self._load)
        except Exception as error:
            self.load_error = error
            raise
        config = self.config
        self._sessions = Sessions(engine, ttl=config.session_ttl, limit=config.max_sessions)
        self.metrics = Metrics(engine, self.model_names[0] if config.served_model_names else engine.info.model)
        self.feed = Feed(engine)
        engine.subscribe(self.metrics.observe_step)
        engine.subscribe(self.feed.observe_step)
        self._engine = engine

    async def keep_house(self) -> None:
        """Release idle sessions, for ever."""
        while True:
            await asyncio.sleep(_HOUSEKEEPING_SECONDS)
            if self._sessions is not None:
                with suppress(RuntimeError):  # the engine was closed a moment ago
                    await self._sessions.release_expired()

    def drain(self) -> None:
        """Take nothing new; what runs may end."""
        self.is_draining = True

    async def close(self) -> None:
        """Stop the engine."""
        if self._engine is not None:
            await self._engine.aclose()

    # ---- queries -------------------------------------------------------------------------------------------

    @property
    def engine(self) -> ServedEngine:
        """The engine.

        Raises:
            ApiError: 503 while the model is loading.
        """
        if self._engine is None:
            raise ApiError(503, "Loading model", headers={"Retry-After": "1"})
        return self._engine

    @property
    def sessions(self) -> Sessions:
        """The conversations; see :attr:`engine` for what it raises."""
        assert self.engine is not None
        assert self._sessions is not None
        return self._sessions

    @property
    def model_names(self) -> Sequence[str]:
        """The names the model answers to, the reported one first."""
        return self.config.served_model_names or (self.engine.info.model,)

    @property
    def num_in_flight(self) -> int:
        """Generations running or waiting."""
        return self._num_in_flight

    @property
    def generations(self) -> Mapping[int, Generation]:
        """The same by their number, counted from the server's start; oldest first."""
        return self._generations

    def require_healthy(self) -> None:
        """Raises:
        ApiError: 503 while loading, while draining, or when the engine makes no progress.
        """
        if self.load_error is not None:
            raise ApiError(503, "the model could not be loaded")
        stalled = self.engine.load.seconds_without_progress
        if stalled > self.config.stall_timeout:
            raise ApiError(503, f"the engine has made no progress for {stalled:.0f} seconds")
        if self.is_draining:
            raise ApiError(503, "the server is shutting down")

    def require_model(self, name: str | None) -> str:
        """The reported name of the model; any name is accepted where it cannot be confused with another model.

        Raises:
            ApiError: 404, the server was told its names and this is none of them.
        """
        names = self.model_names
        if name and self.config.served_model_names and name not in names:
            raise ApiError(
                404, f"the model {name!r} does not exist; this server has {', '.join(names)}", code="model_not_found"
            )
        return names[0]

    # ---- verbs ---------------------------------------------------------------------------------------------

    def admit(self, num_choices: int = 1) -> Ticket:
        """A place for a request.

        Raises:
            ApiError: 400 when it could never fit, 429 when the queue is full, 503 when there is nothing to serve with.
        """
        if self.is_draining:
            raise ApiError(503, "the server is shutting down", headers={"Connection": "close", "Retry-After": "5"})
        assert self.engine is not None
        limit = self.config.max_num_seqs + self.config.max_queue
        if num_choices > limit:
            raise ApiError(400, f"one request may ask for at most {limit} generations, this one asks for {num_choices}")
        if self._num_in_flight + num_choices > limit:
            raise ApiError(
                429,
                f"{self._num_in_flight} requests are running or waiting, of at most {limit}; try again later",
                headers={"Retry-After": "1"},
            )
        self._num_in_flight += num_choices

        def release() -> None:
            self._num_in_flight -= num_choices

        return Ticket(release)

    async def text_prompt(self, text: str | Sequence[int], session_key: str | None = None) -> Prompt:
        """A prompt of plain text or token ids."""
        conversation = self._converse(session_key)
        if not isinstance(text, str):
            return Prompt(list(text), None, conversation)
        encode = self.engine.tokenizer.encode
        token_ids = await asyncio.to_thread(lambda: encode(text, add_special_tokens=True))
        return Prompt(token_ids, None, conversation)

    async def chat_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        session_key: str | None = None,
        answer_prefix: str = "",
        continued_text: str | None = None,
        **template_options: Any,
    ) -> Prompt:
        """A prompt of chat messages; ``answer_prefix`` is put into the assistant's mouth.

        With ``continued_text``, the last message's, the answer goes on where that message stops.

        Raises:
            ChatTemplateError: the template is absent or rejects the messages.
        """
        conversation, engine = self._converse(session_key), self.engine

        def build() -> Prompt:
            if continued_text is None:
                text = engine.render(messages, **template_options) + answer_prefix
            else:
                text = engine.render(messages, **{**template_options, "add_generation_prompt": False})
                before, found, _ = text.rpartition(continued_text.rstrip())
                if not found:
                    raise ApiError(400, "the chat template changes the last message, so it cannot be continued")
                text = before + found
            encode = conversation.transcript.encode if conversation is not None else engine.tokenizer.encode
            return Prompt(encode(text), text, conversation)

        return await asyncio.to_thread(build)

    async def run(self, job: Job) -> AsyncGenerator[tuple[int, Delta], None]:
        """The deltas of a job's generations by index, as they come; ``job.outputs`` is complete at the end.

        Raises:
            PacelineError: the engine does not take the request.
            TimeoutError: it took longer than the server allows.
        """
        if len(job.branches) == 1:
            async with aclosing(self._one(job, 0)) as deltas:
                async for delta in deltas:
                    yield 0, delta
            return
        queue: asyncio.Queue[tuple[int, Delta] | Exception | None] = asyncio.Queue()
        tasks = [asyncio.create_task(self._collect(job, index, queue)) for index in range(len(job.branches))]
        try:
            num_running = len(tasks)
            while num_running:
                item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    num_running -= 1
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    # ---- helpers -------------------------------------------------------------------------------------------

    def _converse(self, key: str | None) -> Conversation | None:
        return self.sessions.open(key) if key else None

    async def _collect(self, job: Job, index: int, queue: asyncio.Queue[tuple[int, Delta] | Exception | None]) -> None:
        try:
            async with aclosing(self._one(job, index)) as deltas:
                async for delta in deltas:
                    queue.put_nowait((index, delta))
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    async def _one(self, job: Job, index: int) -> AsyncGenerator[Delta, None]:
        branch, started = job.branches[index], time.monotonic()
        conversation = branch.prompt.conversation
        if conversation is not None:
            conversation.log_divergence(branch.prompt.token_ids)
            conversation.num_in_flight += 1
        stream = self.engine.stream(
            branch.prompt.token_ids,
            branch.params,
            speculation=job.speculation,
            prediction=job.prediction,
            session=conversation.session if conversation is not None else None,
        )
        number, generation = self._num_generations, Generation(branch, job.speculation)
        self._num_generations += 1
        self._generations[number] = generation
        try:
            async with aclosing(stream) as deltas:
                while True:
                    delta = await self._next(deltas, started)
                    generation.num_tokens += len(delta.token_ids)
                    output = delta.output
                    if output is None:
                        yield delta
                        continue
                    if output.finish_reason == "cancelled":
                        raise ApiError(503, "the server is shutting down")
                    job.outputs[index] = output
                    self._finished(branch, output, time.monotonic() - started)
                    if self._tracer is not None:
                        self._tracer.finished(job, index, generation.started_ns, self.model_names[0])
                    yield delta
                    return
        finally:
            del self._generations[number]
            if conversation is not None:
                conversation.num_in_flight -= 1
                conversation.last_used = time.monotonic()
            if index not in job.outputs:
                self._failed()

    async def _next(self, deltas: AsyncIterator[Delta], started: float) -> Delta:
        if not self.config.request_timeout:
            return await anext(deltas)
        remaining = started + self.config.request_timeout - time.monotonic()
        async with asyncio.timeout(remaining):
            return await anext(deltas)

    def _failed(self) -> None:
        if self.metrics is not None:
            self.metrics.observe_abort()
        if self._tracer is not None:
            self._tracer.failed(sys.exception())

    def _finished(self, branch: Branch, output: Output, seconds: float) -> None:
        prompt = branch.prompt
        if prompt.conversation is not None:
            prompt.conversation.remember(prompt.text, prompt.token_ids, output)
        assert self.metrics is not None
        self.metrics.observe_output(output, branch.params, seconds)
        log.info(
            "finished %s: %d + %d tokens, %d cached, %.3f s, %.1f tokens/s, accepted %d of %d",
            output.finish_reason,
            output.usage.prompt_tokens,
            output.usage.completion_tokens,
            output.usage.cached_tokens,
            seconds,
            output.timing.decode_tokens_per_s,
            output.speculation.num_accepted_draft_tokens,
            output.speculation.num_draft_tokens,
        )
        if self.config.log_prompts:
            log.info("prompt: %r answer: %r", prompt.text or prompt.token_ids, output.text)

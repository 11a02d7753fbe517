"""Answers over HTTP that notice when nobody listens any more: event streams, and answers in one piece."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from paceline.serve.errors import ApiError, from_exception

log = logging.getLogger("paceline.serve")
T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
_PING = b": ping\n\n"


def data_event(data: Any) -> bytes:
    """A server-sent event without a name, as OpenAI streams them."""
    return b"data: " + _to_json(data) + b"\n\n"


def named_event(name: str, data: Any) -> bytes:
    """A server-sent event with a name, as Anthropic and /v1/responses stream them."""
    return b"event: " + name.encode() + b"\ndata: " + _to_json(data) + b"\n\n"


class JSONBytes(Response):
    """A JSON answer, encoded fast."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """The body."""
        return _to_json(content)


def error_response(error: Exception, *, is_anthropic: bool = False) -> JSONBytes:
    """What a client is told about an error; unexpected ones go to the log with their traceback."""
    told = from_exception(error)
    if told.status >= 500 and not isinstance(error, ApiError):
        log.error("unexpected error", exc_info=error)
    return JSONBytes(told.body(is_anthropic=is_anthropic), told.status, headers=told.headers)


class EventStream(Response):
    """Sends the chunks of a generator; closes the generator when the client goes away.

    The headers wait for the first chunk, or for the first ping: an error before that is answered with its own status.
    ``on_close`` is called once, however the response ends.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        chunks: AsyncGenerator[bytes, None],
        *,
        ping_interval: float,
        on_close: Callable[[], None],
        is_anthropic: bool = False,
    ) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._chunks = chunks
        self._ping_interval = ping_interval
        self._on_close = on_close
        self._is_anthropic = is_anthropic
        self._is_started = False
        self._last_sent = time.monotonic()

    def init_headers(self, headers: Mapping[str, str] | None = None) -> None:
        """Without a content length: it is not known."""
        fields = {"content-type": f"{self.media_type}; charset=utf-8", **(headers or {})}
        self.raw_headers = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in fields.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send everything, or stop as soon as the client has left."""
        lock = asyncio.Lock()
        sending = asyncio.create_task(self._send_all(scope, receive, send, lock))
        others = [
            asyncio.create_task(_disconnected(receive)),
            asyncio.create_task(self._keep_alive(send, lock)),
        ]
        try:
            await asyncio.wait([sending, others[0]], return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            for task in (sending, *others):
                task.cancel()
            await asyncio.gather(sending, *others, return_exceptions=True)
            self._on_close()

    async def _send_all(self, scope: Scope, receive: Receive, send: Send, lock: asyncio.Lock) -> None:
        try:
            async with aclosing(self._chunks) as chunks:
                async for chunk in chunks:
                    await self._send(send, lock, chunk)
        except Exception as error:
            if not self._is_started:
                self._is_started = True  # no pings into a JSON body
                await error_response(error, is_anthropic=self._is_anthropic)(scope, receive, send)
                return
            body = from_exception(error).body(is_anthropic=self._is_anthropic)
            if not isinstance(error, ApiError | TimeoutError):
                log.error("error in the middle of a stream", exc_info=error)
            event = named_event("error", body) if self._is_anthropic else data_event(body)
            await self._send(send, lock, event)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _keep_alive(self, send: Send, lock: asyncio.Lock) -> None:
        while True:
            silent = time.monotonic() - self._last_sent
            if silent >= self._ping_interval:
                await self._send(send, lock, _PING)
                silent = 0.0
            await asyncio.sleep(self._ping_interval - silent)

    async def _send(self, send: Send, lock: asyncio.Lock, chunk: bytes) -> None:
        async with lock:
            if not self._is_started:
                self._is_started = True
                start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
                await send(start)
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
            self._last_sent = time.monotonic()


async def unless_disconnected(receive: Receive, answer: Coroutine[Any, Any, T]) -> T:
    """The result of ``answer``, which is cancelled when the client goes away.

    Raises:
        ApiError: 499, the client went away (nobody will read it).
    """
    answering, leaving = asyncio.create_task(answer), asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait([answering, leaving], return_when=asyncio.FIRST_COMPLETED)
        if answering.done():
            return answering.result()
        raise ApiError(499, "the client closed the connection")
    finally:
        for task in (answering, leaving):
            task.cancel()
        await asyncio.gather(answering, leaving, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _to_json(content: Any) -> bytes:
    try:
        return orjson.dumps(content)
    except orjson.JSONEncodeError as error:  # only what a request is told of itself can be such a thing
        raise ApiError(400, f"the request holds a value that no answer can repeat: {error}") from None

"""What happens to every request before a route sees it: keys, size limits, and one line in the log."""

from __future__ import annotations

import hmac
import logging
import time
import uuid
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.serve.errors import ApiError
from paceline.serve.streaming import error_response

log = logging.getLogger("paceline.serve")

# A load balancer, a scraper of versions and a browser that opens the page have no key; the page asks for one.
_OPEN_PATHS = frozenset({"/health", "/v1/health", "/ping", "/version", "/"})


def speaks_anthropic(path: str) -> bool:
    """True for the routes whose errors have Anthropic's shape."""
    return path.startswith("/v1/messages")


class Gate:
    """Asks for a key and turns away bodies that are too large, whether or not they say so; answers what goes wrong.

    An error that no route expects is answered here rather than further out, so that its answer has the request's id
    and the log its status.
    """

    def __init__(self, app: ASGIApp, *, api_keys: Sequence[str], max_body_bytes: int) -> None:
        self._app = app
        self._keys = [key.encode() for key in api_keys]
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or answer it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        path = scope["path"]
        is_started = False

        async def noting(message: Message) -> None:
            nonlocal is_started
            is_started = True
            await send(message)

        try:
            self._check_key(path, scope["method"], headers)
            self._check_size(headers.get("content-length"))
            await self._app(scope, self._counted(receive), noting)
        except Exception as error:
            if is_started:
                raise
            await error_response(error, is_anthropic=speaks_anthropic(path))(scope, receive, send)

    def _check_key(self, path: str, method: str, headers: Headers) -> None:
        if not self._keys or path in _OPEN_PATHS or method == "OPTIONS":
            return
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        if not any(hmac.compare_digest(given.encode(), key) for key in self._keys):
            raise ApiError(
                401,
                "give the server's API key as 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    def _check_size(self, content_length: str | None) -> None:
        if content_length is not None and content_length.isdecimal() and int(content_length) > self._max_body_bytes:
            raise self._too_large()

    def _counted(self, receive: Receive) -> Receive:
        num_bytes = 0

        async def counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_body_bytes:
                raise self._too_large()
            return message

        return counted

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than the {self._max_body_bytes} bytes allowed")


class AccessLog:
    """One line per request: method, path, status, time, and an id that the answer carries too."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on and note how it was answered."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if given.isascii() and given.isprintable() and 0 < len(given) <= 128 else uuid.uuid4().hex
        started, status = time.monotonic(), 499

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            await self._app(scope, receive, noting)
        finally:
            milliseconds = (time.monotonic() - started) * 1e3
            is_polled = scope["path"] in _OPEN_PATHS or scope["path"] == "/metrics"
            level = logging.DEBUG if is_polled else logging.INFO
            log.log(level, "%s %s %d %.1f ms %s", scope["method"], scope["path"], status, milliseconds, request_id)

"""The ASGI application: routes over one service."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from paceline import __version__
from paceline.errors import PacelineError
from paceline.serve import chat, completions, llama_cpp, messages, responses, utility
from paceline.serve.config import ServerConfig
from paceline.serve.errors import ApiError
from paceline.serve.middleware import AccessLog, Gate, speaks_anthropic
from paceline.serve.served import ServedEngine
from paceline.serve.service import Service
from paceline.serve.streaming import error_response

if TYPE_CHECKING:
    from paceline.serve.tracing import Tracing

log = logging.getLogger("paceline.serve")

_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": text, "content": {"application/json": {"schema": {"type": "object"}}}}
    for status, text in {
        400: "The request cannot be served as it is.",
        401: "The API key is missing or wrong.",
        404: "There is no such model or session.",
        408: "It took longer than the server allows.",
        413: "The body or the tools are too large.",
        429: "The queue is full.",
        503: "The model is loading, or the server is shutting down.",
    }.items()
}


def create_app(
    load: Callable[[], ServedEngine],
    config: ServerConfig,
    *,
    on_ready: Callable[[Service], None] = lambda _: None,
    tracing: Tracing | None = None,
) -> FastAPI:
    """An application that listens at once and serves when ``load``, called in a thread, has returned an engine.

    ``on_ready`` is called then, or when loading failed (``service.load_error``). ``tracing`` is closed at the end.
    """
    service = Service(config, load, tracing)

    async def start() -> None:
        with suppress(Exception):  # kept as load_error, which on_ready and /health look at
            await service.start()
        on_ready(service)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(start()), asyncio.create_task(service.keep_house())]
        try:
            yield
        finally:
            service.drain()
            tasks[1].cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await service.close()
            if tracing is not None:
                await tracing.aclose()

    app = FastAPI(title="Paceline", version=__version__, lifespan=lifespan, responses=_ERRORS)
    app.state.service = service
    for module in (chat, completions, responses, messages, llama_cpp, utility):
        app.include_router(module.router)
    for error_type in (
        ApiError,
        PacelineError,
        TimeoutError,
        RequestValidationError,
        HTTPException,
        UnicodeEncodeError,
    ):
        app.add_exception_handler(error_type, _answer_error)
    app.add_middleware(Gate, api_keys=config.api_keys, max_body_bytes=config.max_body_bytes)
    if config.allowed_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(config.allowed_origins), allow_methods=["*"], allow_headers=["*"]
        )
    app.add_middleware(AccessLog)
    if tracing is not None:
        app.add_middleware(tracing.around)
    return app


async def _answer_error(request: Request, error: Exception) -> Response:
    if isinstance(error, RequestValidationError):
        error = _validation_error(error)
    elif isinstance(error, HTTPException) and isinstance(error.__cause__, ApiError):
        error = error.__cause__  # the body was too large, which FastAPI takes for a fault of its syntax
    elif isinstance(error, HTTPException):
        error = ApiError(error.status_code, str(error.detail), headers=error.headers)
    return error_response(error, is_anthropic=speaks_anthropic(request.url.path))


def _validation_error(error: RequestValidationError) -> ApiError:
    """The first problem, in one line, with the path of the field."""
    first = error.errors()[0]
    path = ".".join(str(part) for part in first["loc"] if part != "body")
    message = f"{path}: {first['msg']}" if path else str(first["msg"])
    return ApiError(400, message[:500], param=path or None)

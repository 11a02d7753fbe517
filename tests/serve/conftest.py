"""Apps over a scripted engine, and the clients that talk to them without a network."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from paceline.serve.app import create_app
from paceline.serve.config import ServerConfig
from paceline.serve.service import Service
from tests.serve.scripted import ScriptedEngine

pytestmark = pytest.mark.timeout(60)
BASE = "http://server"


@asynccontextmanager
async def opened(
    engine: Any, *, tracing: Any = None, **settings: Any
) -> AsyncIterator[tuple[FastAPI, httpx.AsyncClient]]:
    """An app whose engine is there, and a client of it; afterwards nothing may be left over."""
    ready = asyncio.Event()
    app = create_app(lambda: engine, ServerConfig(**settings), on_ready=lambda _: ready.set(), tracing=tracing)
    async with app.router.lifespan_context(app):
        await ready.wait()
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url=BASE, timeout=30) as client:
            yield app, client
        service: Service = app.state.service
        assert service.num_in_flight == 0


@pytest.fixture
def serve() -> Callable[..., None]:
    """Run a coroutine function with a client of an app over a scripted engine."""

    def run(body: Callable[..., Awaitable[None]], engine: ScriptedEngine, **settings: Any) -> None:
        async def main() -> None:
            async with opened(engine, **settings) as (_, client):
                await body(client)

        asyncio.run(main())

    return run

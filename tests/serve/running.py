"""A server that listens, in a thread of the tests' process."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import uvicorn

from paceline.serve.app import create_app
from paceline.serve.config import ServerConfig
from paceline.serve.service import Service


@dataclass(frozen=True)
class Running:
    """Where it listens, and what is behind it."""

    url: str
    service: Service
    engine: Any


@contextmanager
def running_server(engine: Any, **settings: Any) -> Iterator[Running]:
    """Serve an engine at a free port of this machine."""
    ready = threading.Event()
    app = create_app(lambda: engine, ServerConfig(**settings), on_ready=lambda _: ready.set())
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, access_log=False))
    thread = threading.Thread(target=server.run)
    thread.start()
    assert ready.wait(30)
    while not server.started:
        time.sleep(0.01)
    try:
        port = server.servers[0].sockets[0].getsockname()[1]
        yield Running(f"http://127.0.0.1:{port}", app.state.service, engine)
    finally:
        app.state.service.drain()
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()

"""Requests made from the server's own description: none may break it, hang it, or leave a block behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
import uvicorn
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error

from paceline import AsyncEngine
from paceline.serve.app import create_app
from paceline.serve.config import ServerConfig
from paceline.serve.service import Service

NUM_REQUESTS = 200  # per operation at most
MIN_REQUESTS = 2000


@dataclass(frozen=True)
class Running:
    """A server in a thread of this process."""

    url: str
    service: Service
    engine: AsyncEngine


@pytest.fixture(scope="module")
def running(tiny_checkpoint: Path) -> Iterator[Running]:
    ready = threading.Event()
    engine = AsyncEngine(tiny_checkpoint, draft=tiny_checkpoint, block_size=4)
    config = ServerConfig(request_timeout=10.0)
    app = create_app(lambda: engine, config, on_ready=lambda _: ready.set())
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, access_log=False))
    thread = threading.Thread(target=server.run)
    thread.start()
    assert ready.wait(30)
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield Running(f"http://127.0.0.1:{port}", app.state.service, engine)
    server.should_exit = True
    thread.join(30)
    assert not thread.is_alive()


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_no_generated_request_breaks_the_server(running: Running) -> None:
    schema = schemathesis.openapi.from_url(f"{running.url}/openapi.json")
    num_requests = 0
    for result in schema.get_all_operations():
        operation = result.ok()

        @settings(max_examples=NUM_REQUESTS, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(case=operation.as_strategy())
        def check(case: Any) -> None:
            nonlocal num_requests
            num_requests += 1
            case.call_and_validate(checks=[not_a_server_error], timeout=30)

        check()
    for session in httpx.get(f"{running.url}/v1/sessions").json()["data"]:
        httpx.delete(f"{running.url}/v1/sessions/{session['id']}")
    assert num_requests >= MIN_REQUESTS
    assert running.service.num_in_flight == 0
    cache = running.engine.engine.core.cache
    for one in running.service.sessions.list():  # names that do not fit a path
        running.engine.engine.release_session(one.key)
    assert cache.num_used_blocks == 0
    cache.check_integrity()

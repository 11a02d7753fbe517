"""Requests made from the server's own description: none may break it, hang it, or leave a block behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error

from paceline import AsyncEngine
from tests.serve.running import Running, running_server

NUM_REQUESTS = 200  # per operation at most
MIN_REQUESTS = 2000


@pytest.fixture(scope="module")
def running(tiny_checkpoint: Path) -> Iterator[Running]:
    engine = AsyncEngine(tiny_checkpoint, draft=tiny_checkpoint, block_size=4)
    with running_server(engine, request_timeout=10.0) as server:
        yield server


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
        httpx.delete(f"{running.url}/v1/sessions/{quote(session['id'], safe='')}")
    assert num_requests >= MIN_REQUESTS
    assert running.service.num_in_flight == 0
    cache = running.engine.engine.core.cache
    for one in running.service.sessions.list():  # names that do not fit a path
        running.engine.engine.release_session(one.key)
    assert cache.num_used_blocks == 0
    cache.check_integrity()

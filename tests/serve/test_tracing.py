"""Spans of requests, as a collector would get them."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("opentelemetry.sdk", reason="needs the extra 'otel'")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from paceline import AsyncEngine
from paceline.errors import InvalidParameterError
from paceline.serve import server
from paceline.serve.config import ServerConfig
from paceline.serve.tracing import Tracing
from tests.serve.conftest import opened
from tests.serve.scripted import ScriptedEngine
from tests.serve.test_server import call_and_leave

HELLO = {"messages": [{"role": "user", "content": "Hi"}]}
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def scripted(text: str = "Sunny.", **options: Any) -> ScriptedEngine:
    return ScriptedEngine(lambda _: text, **options)


def traced(
    body: Callable[[httpx.AsyncClient, Any], Awaitable[None]], engine: Any, **settings: Any
) -> Sequence[ReadableSpan]:
    """The finished spans of what ``body`` asks a server, children before their parents."""
    exporter = InMemorySpanExporter()

    async def main() -> None:
        async with opened(engine, tracing=Tracing(SimpleSpanProcessor(exporter)), **settings) as (app, client):
            await body(client, app)

    asyncio.run(main())
    return exporter.get_finished_spans()


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_with_its_wait_prefill_and_decoding(stream: bool) -> None:
    async def body(client: httpx.AsyncClient, _app: Any) -> None:
        request = {**HELLO, "temperature": 0.5, "seed": 3, "max_tokens": 50, "session_id": "s", "stream": stream}
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "abc"}
        assert (await client.post("/v1/chat/completions", json=request, headers=headers)).status_code == 200

    queue, prefill, decode, request = traced(body, scripted(), served_model_names=("coder",))
    assert [span.name for span in (queue, prefill, decode, request)] == ["queue", "prefill", "decode", "chat coder"]
    assert request.parent is not None
    assert (f"{request.context.trace_id:032x}", f"{request.parent.span_id:016x}") == (TRACE, PARENT)
    assert request.kind is SpanKind.SERVER
    for child in (queue, prefill, decode):
        assert child.parent is not None
        assert child.parent.span_id == request.context.span_id
        assert child.context.trace_id == request.context.trace_id
    times = [queue.start_time, queue.end_time, prefill.start_time, prefill.end_time, decode.start_time, decode.end_time]
    assert times == sorted(times)  # type: ignore[type-var]
    assert queue.end_time == prefill.start_time
    assert prefill.end_time == decode.start_time
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "paceline",
        "gen_ai.request.model": "coder",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.seed": 3,
        "gen_ai.request.max_tokens": 50,
        "gen_ai.conversation.id": "s",
        "gen_ai.usage.output_tokens": len("Sunny.") + 1,
        "gen_ai.usage.cache_read.input_tokens": 7,
        "gen_ai.response.finish_reasons": ("stop",),
        "http.response.status_code": 200,
        "http.response.header.x-request-id": ("abc",),
        "url.path": "/v1/chat/completions",
        "paceline.speculation.mode": "dynamic",
        "paceline.speculation.num_draft_tokens": 8,
        "paceline.speculation.num_accepted_draft_tokens": 4,
        "paceline.speculation.accepted.suffix": 4,
    }
    assert request.attributes is not None
    assert {name: request.attributes.get(name) for name in expected} == expected
    assert "gen_ai.request.top_k" not in request.attributes
    assert decode.attributes is not None
    assert decode.attributes["paceline.speculation.num_spec_steps"] == 2
    assert request.resource.attributes["service.name"] == "paceline"


def test_choices_and_prompts_are_summed() -> None:
    async def body(client: httpx.AsyncClient, _app: Any) -> None:
        await client.post("/v1/completions", json={"prompt": ["ab", "cde"], "n": 2, "seed": 2**63})

    spans = traced(body, scripted())
    assert sorted(span.name for span in spans[:-1]) == ["decode"] * 4 + ["prefill"] * 4 + ["queue"] * 4
    request = spans[-1]
    assert request.name == "text_completion scripted"
    assert request.attributes is not None
    assert request.attributes["gen_ai.usage.input_tokens"] == 5
    assert request.attributes["gen_ai.usage.output_tokens"] == 4 * (len("Sunny.") + 1)
    assert request.attributes["gen_ai.request.choice.count"] == 4


def test_failures_are_told_apart() -> None:
    fails: list[Exception | None] = [MemoryError("secret")]

    async def body(client: httpx.AsyncClient, app: Any) -> None:
        await client.post("/v1/chat/completions", json={"messages": []})
        await client.post("/v1/chat/completions", json=HELLO)
        fails[0] = None
        await call_and_leave(app, {**HELLO, "stream": True}, after=0.05)
        await client.post("/v1/messages/count_tokens", json=HELLO)
        await client.get("/v1/models")

    refused, failed, left = traced(body, scripted("x" * 9000, pause=0.002, fails=lambda: fails[0]))
    for span, kind, status in ((refused, "400", StatusCode.UNSET), (left, "cancelled", StatusCode.UNSET)):
        assert span.attributes is not None
        assert (span.attributes["error.type"], span.status.status_code) == (kind, status)
    assert failed.attributes is not None
    assert (failed.attributes["error.type"], failed.status.status_code) == ("MemoryError", StatusCode.ERROR)
    assert failed.attributes["http.response.status_code"] == 500
    assert "secret" not in failed.to_json()


def test_the_real_engine_waits_before_it_works(tiny_checkpoint: Path) -> None:
    async def body(client: httpx.AsyncClient, _app: Any) -> None:
        request = {"prompt": "hello", "temperature": 0, "max_tokens": 40, "ignore_eos": True}
        await asyncio.gather(*(client.post("/v1/completions", json=request) for _ in range(2)))

    spans = traced(body, AsyncEngine(tiny_checkpoint, draft=None, block_size=4, max_num_seqs=1))
    waits = [span.end_time - span.start_time for span in spans if span.name == "queue"]  # type: ignore[operator]
    decodes = [span.end_time - span.start_time for span in spans if span.name == "decode"]  # type: ignore[operator]
    assert max(waits) > min(decodes) > 0  # the second waited for the first
    for span in spans:
        assert span.start_time is not None
        assert span.end_time is not None
        assert span.start_time <= span.end_time


def test_a_collector_gets_them_over_http() -> None:
    received: list[tuple[str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    async def main(tracing: Tracing) -> None:
        async with opened(scripted(), tracing=tracing) as (_, client):
            await client.post("/v1/chat/completions", json=HELLO)

    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        thread = threading.Thread(target=collector.serve_forever)
        thread.start()
        asyncio.run(main(Tracing.to_endpoint(f"http://127.0.0.1:{collector.server_port}")))
        collector.shutdown()
        thread.join()
    assert {path for path, _ in received} == {"/v1/traces"}
    spans = [
        span.name
        for _, body in received
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]
    assert spans == ["queue", "prefill", "decode", "chat scripted"]


def test_a_url_without_a_path_gets_the_standard_one() -> None:
    for endpoint in ("http://localhost:4318", "http://localhost:4318/", "http://localhost:4318/v1/traces"):
        tracing = Tracing.to_endpoint(endpoint)
        processor = tracing._provider._active_span_processor._span_processors[0]
        assert processor.span_exporter._endpoint == "http://localhost:4318/v1/traces"
        asyncio.run(tracing.aclose())
    with pytest.raises(InvalidParameterError, match="http"):
        ServerConfig(otlp_traces_endpoint="localhost:4317")


def test_without_the_extra_the_flag_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.context", None)
    monkeypatch.delitem(sys.modules, "paceline.serve.tracing")
    config = ServerConfig(otlp_traces_endpoint="http://localhost:4318")
    with pytest.raises(InvalidParameterError, match=r"paceline\[otel\]"):
        server.run_server(scripted, config, on_ready=lambda *_: None)

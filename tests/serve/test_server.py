"""Everything around the answers: keys, limits, health, sessions, disconnects, characters, and the end."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families

from paceline.errors import InvalidParameterError, ModelNotFoundError
from paceline.serve.app import create_app
from paceline.serve.config import ServerConfig, is_loopback
from paceline.serve.server import listen
from paceline.serve.sessions import Sessions
from tests.serve.conftest import BASE, opened
from tests.serve.scripted import ScriptedEngine, make_tokenizer

HELLO = {"messages": [{"role": "user", "content": "Hi"}]}
ALPHABET = "aé漢字😀👩🏽‍🚀e\u0301 \n🇨🇭"


def scripted(text: str = "Sunny.", **options: Any) -> ScriptedEngine:
    return ScriptedEngine(lambda _: text, **options)


def streamed_text(body: str) -> str:
    events = [json.loads(line[6:]) for line in body.split("\n\n") if line.startswith("data: {")]
    return "".join(choice["delta"].get("content", "") for event in events for choice in event["choices"])


# ---- characters --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("horizon", range(9))
def test_streams_never_split_characters_or_stop_strings(serve: Callable[..., None], horizon: int) -> None:
    generator = random.Random(horizon)
    text = "".join(generator.choice(ALPHABET) for _ in range(60)) + "STOP and more"

    async def body(client: httpx.AsyncClient) -> None:
        request = {**HELLO, "stop": ["STOP"]}
        whole = (await client.post("/v1/chat/completions", json=request)).json()["choices"][0]["message"]["content"]
        response = await client.post("/v1/chat/completions", json={**request, "stream": True})
        assert whole == text.removesuffix("STOP and more")
        assert streamed_text(response.text) == whole
        pieces = [json.loads(line[6:]) for line in response.text.split("\n\n") if line.startswith("data: {")]
        assert not any("\ufffd" in json.dumps(piece, ensure_ascii=False) for piece in pieces)

    serve(body, scripted(text, horizon=horizon))


def _words(path: str, event: dict[str, Any]) -> str:
    """The text that an event of a route's stream brings."""
    if path == "/v1/messages":
        return str(event.get("delta", {}).get("text", ""))
    if path == "/v1/responses":
        return str(event["delta"]) if event["type"] == "response.output_text.delta" else ""
    if path == "/infill":
        return str(event["content"])
    return "".join(str(one.get("text") or one.get("delta", {}).get("content", "")) for one in event["choices"])


@pytest.mark.parametrize("horizon", range(1, 9))
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", HELLO),
        ("/v1/completions", {"prompt": "a", "max_tokens": 5000}),
        ("/v1/messages", {**HELLO, "max_tokens": 5000}),
        ("/v1/responses", {"input": "Hi"}),
        ("/infill", {"input_prefix": "a", "input_suffix": "c"}),
    ],
)
def test_every_route_streams_whole_characters(
    serve: Callable[..., None], path: str, body: dict[str, Any], horizon: int
) -> None:
    generator = random.Random(horizon)
    text = "".join(generator.choice(ALPHABET) for _ in range(60))

    async def check(client: httpx.AsyncClient) -> None:
        async with client.stream("POST", path, json={**body, "stream": True}) as response:
            chunks = [chunk async for chunk in response.aiter_raw()]
        whole = b"".join(chunks).decode()  # strict
        data = [line.removeprefix("data: ") for line in whole.splitlines() if line.startswith("data: {")]
        words = [_words(path, json.loads(one)) for one in data]
        assert "".join(words) == text
        assert len([one for one in words if one]) > 60 / (horizon + 1)  # in pieces, not at the end
        assert all(one == one.encode().decode() and "\ufffd" not in one for one in words)

    serve(check, scripted(text, horizon=horizon))


# ---- who may come in ---------------------------------------------------------------------------------------


def test_keys(serve: Callable[..., None]) -> None:
    async def body(client: httpx.AsyncClient) -> None:
        for path in ("/health", "/ping", "/version", "/"):
            assert (await client.get(path)).status_code == 200
        for path in ("/v1/models", "/metrics", "/live/info", "/live/events", "/v1/sessions", "/openapi.json"):
            assert (await client.get(path)).status_code == 401
        for headers in ({"Authorization": "Bearer wrong"}, {"x-api-key": ""}, {"Authorization": "Bearer \u00e9"}):
            raw = {name: value.encode("latin-1") for name, value in headers.items()}
            response = await client.post("/v1/messages", json={}, headers=raw)
            assert response.status_code == 401
            assert response.json()["error"]["type"] == "authentication_error"
        for headers in ({"Authorization": "Bearer two"}, {"authorization": "bearer one"}, {"x-api-key": "two"}):
            assert (await client.get("/v1/models", headers=headers)).status_code == 200

    serve(body, scripted(), api_keys=("one", "two"))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org"])
def test_other_machines_need_a_key(host: str) -> None:
    with pytest.raises(InvalidParameterError, match="--api-key"):
        ServerConfig(host=host)
    ServerConfig(host=host, api_keys=("key",))
    ServerConfig(host=host, is_insecure=True)
    assert not is_loopback(host)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "localhost", "::1"])
def test_this_machine_needs_none(host: str) -> None:
    assert is_loopback(ServerConfig(host=host).host)


@pytest.mark.parametrize(
    "settings",
    [{"port": 70000}, {"max_num_seqs": 0}, {"max_queue": -1}, {"session_ttl": 0}, {"api_keys": ("",)}],
)
def test_settings_out_of_range(settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidParameterError):
        ServerConfig(**settings)


def test_other_origins_are_refused_unless_allowed(serve: Callable[..., None]) -> None:
    origin = {"Origin": "https://editor.example"}

    async def closed(client: httpx.AsyncClient) -> None:
        assert "access-control-allow-origin" not in (await client.get("/v1/models", headers=origin)).headers

    async def open_(client: httpx.AsyncClient) -> None:
        response = await client.get("/v1/models", headers=origin)
        assert response.headers["access-control-allow-origin"] == "https://editor.example"

    serve(closed, scripted())
    serve(open_, scripted(), allowed_origins=("https://editor.example",))


# ---- limits ------------------------------------------------------------------------------------------------


def test_bodies_that_are_too_large(serve: Callable[..., None]) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b" " * 100

    async def body(client: httpx.AsyncClient) -> None:
        assert (await client.post("/v1/completions", json={"prompt": "a" * 2000})).status_code == 413
        assert (await client.post("/v1/completions", content=chunks())).status_code == 413  # no length told
        tool = {"type": "function", "function": {"name": "f", "description": "d" * 500}}
        assert (await client.post("/v1/chat/completions", json={**HELLO, "tools": [tool]})).status_code == 413
        assert (await client.post("/v1/completions", json={"prompt": "a"})).status_code == 200

    serve(body, scripted(), max_body_bytes=1000, max_tool_schema_bytes=300)


def test_a_full_queue_answers_429(serve: Callable[..., None]) -> None:
    engine = scripted("x" * 40, pause=0.02)

    async def body(client: httpx.AsyncClient) -> None:
        responses = await asyncio.gather(*(client.post("/v1/chat/completions", json=HELLO) for _ in range(5)))
        statuses = sorted(response.status_code for response in responses)
        assert statuses == [200, 200, 200, 429, 429]
        refused = next(response for response in responses if response.status_code == 429)
        assert int(refused.headers["retry-after"]) >= 1
        assert (await client.post("/v1/chat/completions", json={**HELLO, "n": 4})).status_code == 400  # never fits
        assert (await client.post("/v1/chat/completions", json=HELLO)).status_code == 200

    serve(body, engine, max_num_seqs=2, max_queue=1)


def test_requests_that_take_too_long(serve: Callable[..., None]) -> None:
    engine = scripted("x" * 4000, pause=0.01)

    async def body(client: httpx.AsyncClient) -> None:
        assert (await client.post("/v1/chat/completions", json=HELLO)).status_code == 408
        response = await client.post("/v1/chat/completions", json={**HELLO, "stream": True})
        assert response.status_code == 200
        assert json.loads(response.text.rstrip().rsplit("data: ", 1)[1])["error"]["type"] == "timeout_error"

    serve(body, engine, request_timeout=0.1)
    assert engine.num_open == 0


def test_a_silent_stream_is_kept_alive(serve: Callable[..., None]) -> None:
    async def body(client: httpx.AsyncClient) -> None:
        response = await client.post("/v1/chat/completions", json={**HELLO, "stream": True})
        assert ": ping\n\n" in response.text
        assert streamed_text(response.text) == "Sunny."

    serve(body, scripted(pause=0.1, horizon=9), ping_interval=0.03)


# ---- errors ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", {}, "messages"),
        ("/v1/chat/completions", {**HELLO, "temperature": -1}, "temperature"),
        ("/v1/chat/completions", {**HELLO, "temperature": "hot"}, "temperature"),
        ("/v1/chat/completions", {**HELLO, "logit_bias": {"x": 1}}, "logit_bias"),
        ("/v1/chat/completions", {**HELLO, "guided_regex": 5}, "guided_regex"),
        ("/v1/chat/completions", {**HELLO, "speculative": {"drafters": ["oracle"]}}, None),
        ("/v1/completions", {"prompt": "a", "speculative": {"drafters": ["oracle"]}}, None),
        ("/v1/completions", {"prompt": "a", "speculative": {"max_tokens": 65}}, None),
        ("/v1/chat/completions", {**HELLO, "tool_choice": "required"}, "tool_choice"),
        ("/v1/chat/completions", {**HELLO, "min_tokens": 5, "max_tokens": 2}, None),
        ("/v1/completions", {"prompt": []}, "prompt"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ("/v1/completions", {"prompt": [1, 2], "suffix": "x"}, "suffix"),
        ("/v1/responses", {"input": [{"role": "robot"}]}, "input"),
        ("/v1/responses", {"text": {"format": {"type": "json_schema"}}}, "text.format"),
        ("/v1/messages", {**HELLO, "max_tokens": 5, "tool_choice": {"type": "x"}}, None),
        ("/v1/messages/count_tokens", {}, None),
        ("/tokenize", {}, "prompt"),
        ("/detokenize", {"tokens": "abc"}, "tokens"),
    ],
)
def test_bad_requests_say_what_is_wrong(
    serve: Callable[..., None], path: str, body: dict[str, Any], param: str | None
) -> None:
    async def send(client: httpx.AsyncClient) -> None:
        response = await client.post(path, json=body)
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["message"]
        assert error["type"] == "invalid_request_error"
        if param is not None:
            assert error["param"] == param

    serve(send, scripted())


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", '{"messages": [{"role": "user", "content": "\\ud800"}]}'),
        ("/v1/chat/completions", '{"messages": [{"role": "\\ud800", "content": "a"}]}'),
        ("/v1/completions", '{"prompt": "a", "stop": "\\ud800", "\\ud801": 1}'),
        ("/v1/responses", '{"input": "a", "metadata": {"a": "\\ud800"}}'),
        ("/v1/responses", '{"input": "a", "metadata": {"a": 99999999999999999999999}, "stream": true}'),
        ("/v1/messages", '{"max_tokens": 3, "messages": [{"role": "user", "content": [{"type": "\\ud800"}]}]}'),
        ("/tokenize", '{"prompt": "\\ud800"}'),
    ],
)
def test_half_characters_are_no_fault_of_the_server(serve: Callable[..., None], path: str, body: str) -> None:
    async def send(client: httpx.AsyncClient) -> None:
        response = await client.post(path, content=body, headers={"Content-Type": "application/json"})
        assert response.status_code in (200, 400)

    serve(send, scripted())


def test_bodies_that_are_no_json(serve: Callable[..., None]) -> None:
    async def body(client: httpx.AsyncClient) -> None:
        headers = {"Content-Type": "application/json"}
        for content in (b"{", b"\xff", b"[]", b"null", b""):
            response = await client.post("/v1/chat/completions", content=content, headers=headers)
            assert response.status_code == 400
        assert (await client.get("/nowhere")).json()["error"]["code"] == 404
        assert (await client.get("/v1/completions")).status_code == 405

    serve(body, scripted())


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_of_the_engine_is_told_and_nothing_leaks(serve: Callable[..., None], stream: bool) -> None:
    steps = iter([None, None, MemoryError("secret detail")])
    engine = scripted("x" * 40, fails=lambda: next(steps, None))

    async def body(client: httpx.AsyncClient) -> None:
        response = await client.post("/v1/chat/completions", json={**HELLO, "stream": stream})
        assert "the server failed to answer" in response.text
        assert "secret" not in response.text
        assert response.status_code == (200 if stream else 500)
        assert response.headers["x-request-id"]
        assert "[DONE]" not in response.text

    serve(body, engine)
    assert engine.num_open == 0


def test_unknown_fields_are_named_in_the_log(serve: Callable[..., None], caplog: pytest.LogCaptureFixture) -> None:
    async def body(client: httpx.AsyncClient) -> None:
        message = {"role": "user", "content": "Hi", "audio": None}
        request = {"messages": [message], "frobnicate": 1, "user": "me", "modalities": None}
        response = await client.post("/v1/chat/completions", json=request)
        assert response.status_code == 200

    with caplog.at_level(logging.INFO, "paceline.serve"):
        serve(body, scripted("secret answer"))
    assert "frobnicate" in caplog.text
    assert not any(name in caplog.text for name in ("user", "audio", "modalities"))
    assert "secret answer" not in caplog.text


def test_prompts_are_logged_only_when_asked(serve: Callable[..., None], caplog: pytest.LogCaptureFixture) -> None:
    async def body(client: httpx.AsyncClient) -> None:
        await client.post("/v1/chat/completions", json=HELLO)

    with caplog.at_level(logging.INFO, "paceline.serve"):
        serve(body, scripted("secret answer"), log_prompts=True)
    assert "secret answer" in caplog.text


# ---- models, tokens, health, metrics -----------------------------------------------------------------------


def test_models_by_name(serve: Callable[..., None]) -> None:
    async def body(client: httpx.AsyncClient) -> None:
        cards = (await client.get("/v1/models")).json()["data"]
        assert [card["id"] for card in cards] == ["coder", "org/coder"]
        assert cards[0]["max_model_len"] == 100_000
        assert (await client.get("/v1/models/org/coder")).json()["id"] == "org/coder"
        assert (await client.get("/v1/models/other")).status_code == 404
        wrong = await client.post("/v1/chat/completions", json={**HELLO, "model": "other"})
        assert (wrong.status_code, wrong.json()["error"]["code"]) == (404, "model_not_found")
        right = await client.post("/v1/chat/completions", json={**HELLO, "model": "org/coder"})
        assert right.json()["model"] == "coder"

    serve(body, scripted(), served_model_names=("coder", "org/coder"))


def test_tokens_there_and_back(serve: Callable[..., None]) -> None:
    async def body(client: httpx.AsyncClient) -> None:
        tokens = (await client.post("/tokenize", json={"prompt": "aé漢", "return_token_strs": True})).json()
        assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"]) == 6
        assert (await client.post("/detokenize", json={"tokens": tokens["tokens"]})).json() == {"prompt": "aé漢"}
        chat = (await client.post("/tokenize", json=HELLO)).json()["tokens"]
        text = (await client.post("/detokenize", json={"tokens": chat})).json()["prompt"]
        assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        assert (await client.get("/version")).json()["version"]

    serve(body, scripted())


def test_health_follows_the_engine(serve: Callable[..., None]) -> None:
    engine = scripted()

    async def body(client: httpx.AsyncClient) -> None:
        assert (await client.get("/v1/health")).json() == {"status": "ok"}
        engine.stalled = 500.0
        assert (await client.get("/health")).status_code == 503
        assert "no progress" in (await client.get("/ping")).json()["error"]["message"]

    serve(body, engine)


def test_while_loading_and_when_loading_fails() -> None:
    may_load, engine = threading.Event(), scripted()

    def load() -> ScriptedEngine:
        may_load.wait(10)
        return engine

    def fail() -> ScriptedEngine:
        raise ModelNotFoundError("no such model")

    async def main(loader: Callable[[], Any]) -> None:
        ready = asyncio.Event()
        app = create_app(loader, ServerConfig(), on_ready=lambda _: ready.set())
        client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=BASE)
        async with client, app.router.lifespan_context(app):
            if loader is load:
                for response in (
                    await client.get("/health"),
                    await client.post("/v1/chat/completions", json=HELLO),
                ):
                    assert response.status_code == 503
                    assert response.json()["error"]["message"] == "Loading model"
                    assert response.json()["error"]["type"] == "unavailable_error"
                may_load.set()
            await ready.wait()
            assert (await client.get("/health")).status_code == (200 if loader is load else 503)

    asyncio.run(main(load))
    assert engine.is_closed
    asyncio.run(main(fail))


def test_draining_lets_running_requests_end(serve: Callable[..., None]) -> None:
    async def main() -> None:
        engine = scripted("x" * 40, pause=0.01)
        async with opened(engine) as (app, client):
            running = asyncio.create_task(client.post("/v1/chat/completions", json={**HELLO, "stream": True}))
            viewing = asyncio.create_task(client.get("/live/events"))
            await asyncio.sleep(0.05)
            app.state.service.drain()
            refused = await client.post("/v1/chat/completions", json=HELLO)
            assert refused.status_code == 503
            assert (await client.get("/health")).status_code == 503
            assert streamed_text((await running).text) == "x" * 40
            assert (await viewing).status_code == 200  # an endless stream ends

    asyncio.run(main())


def test_metrics_and_the_answers_agree(serve: Callable[..., None]) -> None:
    engine = scripted("Sunny.", horizon=3)

    async def body(client: httpx.AsyncClient) -> None:
        for _ in range(3):
            await client.post("/v1/chat/completions", json=HELLO)
        page = await client.get("/metrics")
        assert page.headers["content-type"].startswith("text/plain")
        samples = {
            (sample.name, sample.labels.get("position") or sample.labels.get("source") or ""): sample.value
            for family in text_string_to_metric_families(page.text)
            for sample in family.samples
            if not sample.name.endswith("_bucket")
        }
        assert samples["vllm:request_success_total", ""] == 3
        assert samples["vllm:generation_tokens_total", ""] == 3 * (len("Sunny.") + 1)
        assert samples["vllm:spec_decode_num_drafts_total", ""] == 3 * 2
        assert samples["vllm:spec_decode_num_draft_tokens_total", ""] == 3 * 2 * 3
        assert samples["vllm:spec_decode_num_accepted_tokens_total", ""] == 3 * (3 + 2)
        assert samples["vllm:spec_decode_num_accepted_tokens_per_pos_total", "2"] == 3
        assert samples["vllm:prefix_cache_hits_total", ""] == 3 * 7
        assert samples["vllm:time_to_first_token_seconds_count", ""] == 3
        assert samples["vllm:num_requests_running", ""] == 0
        assert samples["vllm:verify_seconds_total", ""] > samples["vllm:draft_seconds_total", ""] > 0

    serve(body, engine)


def test_two_apps_do_not_share_metrics(serve: Callable[..., None]) -> None:
    async def main() -> None:
        async with opened(scripted()) as (_, one), opened(scripted()) as (_, other):
            await one.post("/v1/chat/completions", json=HELLO)
            assert 'finished_reason="stop"' in (await one.get("/metrics")).text
            assert 'finished_reason="stop"' not in (await other.get("/metrics")).text

    asyncio.run(main())


# ---- sessions ----------------------------------------------------------------------------------------------


def test_sessions_are_named_listed_and_released(serve: Callable[..., None]) -> None:
    engine = scripted()

    async def body(client: httpx.AsyncClient) -> None:
        await client.post("/v1/chat/completions", json={**HELLO, "prompt_cache_key": "a b/c"})
        await client.post("/v1/responses", json={"input": "Hi", "session_id": "two"})
        metadata = {"user_id": "user_1_session_2"}
        await client.post("/v1/messages", json={**HELLO, "max_tokens": 9, "metadata": metadata})
        listed = (await client.get("/v1/sessions")).json()["data"]
        assert [one["id"] for one in listed] == ["a b/c", "two", "user_1_session_2"]
        assert listed[0]["turns"] == 1
        assert (await client.delete("/v1/sessions/a b/c")).json()["deleted"]
        assert (await client.delete("/v1/sessions/a b/c")).status_code == 404

    serve(body, engine)
    assert [call.session_id for call in engine.calls] == ["a b/c", "two", "user_1_session_2"]
    assert engine.released == ["a b/c"]


def test_only_one_choice_continues_a_session(serve: Callable[..., None]) -> None:
    engine = scripted()

    async def body(client: httpx.AsyncClient) -> None:
        await client.post("/v1/chat/completions", json={**HELLO, "n": 3, "session_id": "s"})

    serve(body, engine)
    assert sorted(str(call.session_id) for call in engine.calls) == ["None", "None", "s"]


def test_a_history_that_changed_is_noted(serve: Callable[..., None], caplog: pytest.LogCaptureFixture) -> None:
    async def body(client: httpx.AsyncClient) -> None:
        user, other = HELLO["messages"][0], {"role": "user", "content": "Ho"}
        answer = {"role": "assistant", "content": "Sunny."}
        await client.post("/v1/chat/completions", json={**HELLO, "session_id": "s"})
        await client.post("/v1/chat/completions", json={"messages": [user, answer, user], "session_id": "s"})
        assert "leaves its history" not in caplog.text
        await client.post("/v1/chat/completions", json={"messages": [other, answer, user], "session_id": "s"})
        assert "session 's': prompt leaves its history at token 7 of" in caplog.text

    with caplog.at_level(logging.INFO, "paceline.serve"):
        serve(body, scripted())


def test_idle_sessions_expire_and_the_oldest_make_room() -> None:
    async def main() -> None:
        engine, now = scripted(), [0.0]
        sessions = Sessions(engine, ttl=10.0, limit=2, clock=lambda: now[0])
        for key in ("a", "b", "c"):
            sessions.open(key)
        sessions.open("a").num_in_flight = 1
        await sessions.release_expired()
        assert engine.released == ["b"]  # the oldest that nobody uses
        now[0] = 11.0
        await sessions.release_expired()
        assert engine.released == ["b", "c"]
        assert [one.key for one in sessions.list()] == ["a"]

    asyncio.run(main())


# ---- disconnects -------------------------------------------------------------------------------------------


async def call_and_leave(app: FastAPI, body: dict[str, Any], *, after: float) -> list[dict[str, Any]]:
    """One request whose client goes away; what it was sent."""
    content = json.dumps(body).encode()
    incoming = [{"type": "http.request", "body": content, "more_body": False}]
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        if incoming:
            return incoming.pop()
        await asyncio.sleep(after)
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
    path = "/v1/chat/completions"
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": headers,
        "client": ("127.0.0.1", 1),
        "server": ("server", 80),
    }
    with suppress(OSError):
        await app(scope, receive, send)
    return sent


def test_fifty_clients_leave_and_nothing_goes_on() -> None:
    async def main() -> None:
        engine, generator = scripted("x" * 9_000, pause=0.002), random.Random(1)
        async with opened(engine, max_num_seqs=50) as (app, client):
            calls = []
            for number in range(50):
                request = {**HELLO, "stream": bool(number % 2), "n": 1 + number % 3 // 2}
                calls.append(call_and_leave(app, request, after=generator.uniform(0, 0.05)))
            await asyncio.gather(*calls)
            steps = [call.num_steps for call in engine.calls]
            assert engine.num_open == 0
            assert app.state.service.num_in_flight == 0
            await asyncio.sleep(0.02)
            assert [call.num_steps for call in engine.calls] == steps
            assert 0 < sum(steps) < 5000
            assert "vllm:request_aborted_total" in (await client.get("/metrics")).text

    asyncio.run(main())


# ---- the live view -----------------------------------------------------------------------------------------


def test_the_page_needs_nothing_from_elsewhere(serve: Callable[..., None]) -> None:
    async def body(client: httpx.AsyncClient) -> None:
        page = await client.get("/")
        assert page.headers["content-type"].startswith("text/html")
        assert "default-src 'none'" in page.headers["content-security-policy"]
        markup = page.text.replace("http://www.w3.org/2000/svg", "")
        assert "http://" not in markup
        assert "https://" not in markup
        assert (await client.get("/live/info")).json()["drafters"] == ["prediction", "suffix"]

    serve(body, scripted())


def test_the_feed_shows_steps_and_blocks() -> None:
    async def main() -> None:
        async with opened(scripted("x" * 12, horizon=3, pause=0.01)) as (app, client):
            feed = app.state.service.feed.events(lambda: False)
            first = json.loads((await anext(feed)).removeprefix(b"data: "))
            assert first["pool"] == {
                "num_blocks": 64,
                "block_size": 16,
                "runs": [2, 2, 3, 1, 1, 1],
                "owners": [{"name": "request-0", "tokens": 30, "blocks": 3, "drafts": 1}],
            }
            answer = await client.post(
                "/v1/chat/completions", json={**HELLO, "stream": True, "stream_options": {"include_origins": True}}
            )
            assert '"origins":[["x","suffix"],["x","suffix"],["x","suffix"],["x","suffix"]]' in answer.text
            second = json.loads((await anext(feed)).removeprefix(b"data: "))
            assert [step["accepted"] for step in second["steps"]] == [3, 3, 3, 0]
            assert second["total_tokens"] == 13
            await feed.aclose()

    asyncio.run(main())


def test_a_base_model_has_no_chat(serve: Callable[..., None]) -> None:
    async def body(client: httpx.AsyncClient) -> None:
        response = await client.post("/v1/chat/completions", json=HELLO)
        assert response.status_code == 400
        assert "no chat template" in response.json()["error"]["message"]
        assert (await client.post("/v1/completions", json={"prompt": "a"})).status_code == 200

    serve(body, scripted(tokenizer=make_tokenizer(None)))


# ---- the socket --------------------------------------------------------------------------------------------


def test_small_writes_are_sent_at_once() -> None:
    # Or the first token of a reused connection waits for the client's delayed acknowledgement of the headers.
    with listen(ServerConfig(port=0)) as listener, socket.create_connection(listener.getsockname()[:2]):
        connection, _ = listener.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_port_in_use_is_a_typed_error() -> None:
    with listen(ServerConfig(port=0)) as listener, pytest.raises(InvalidParameterError, match="cannot listen on"):
        listen(ServerConfig(port=listener.getsockname()[1]))

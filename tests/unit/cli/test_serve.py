"""`paceline serve` as a process, its settings from three places, and `paceline chat --url` talking to it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline import AsyncEngine, Engine, SamplingParams
from paceline.cli.remote_chat import RemoteChat
from paceline.errors import ServerError
from paceline.request import Speculation
from paceline.serve import server
from paceline.serve.config import ServerConfig
from tests.unit.cli.conftest import Result


@pytest.fixture(scope="module")
def address(tiny_checkpoint: Path) -> Iterator[str]:
    """A server process; at the end it must leave when it is told to."""
    command = [sys.executable, "-m", "paceline", "serve", str(tiny_checkpoint), "--port", "0", "--draft", "none"]
    process = subprocess.Popen(
        [*command, "--log-format", "json"], stderr=subprocess.PIPE, text=True, env={**os.environ, "COLUMNS": "200"}
    )
    assert process.stderr is not None
    seen = ""
    for line in process.stderr:
        seen += line
        if "OpenAI" in line:
            break
    found = re.search(r"http://127\.0\.0\.1:\d+", seen)
    assert found, seen
    yield found.group()
    process.send_signal(signal.SIGTERM)
    _, rest = process.communicate(timeout=30)
    assert process.returncode == 0, rest
    lines = [json.loads(line) for line in rest.splitlines()]
    assert any(line["message"].startswith("POST /v1/chat/completions 200") for line in lines)


def test_a_server_answers_and_a_chat_talks_to_it(
    address: str, cli: Callable[..., Result], tiny_checkpoint: Path
) -> None:
    with Engine(tiny_checkpoint, draft=None) as engine, engine.session() as session:
        answers = [session.send(content, SamplingParams(max_tokens=8)).text for content in ("hello", "Xyz")]
    assert httpx.get(f"{address}/health").json() == {"status": "ok"}
    for url in (address, f"{address}/v1/"):
        result = cli("chat", "--url", url, "--max-tokens", 8, stdin="hello\nXyz\n/exit\n")
        assert result.status == 0
        assert result.out == "".join(f"{answer}\n" for answer in answers)
        assert result.err.count("8 tokens, ") == 2
    assert httpx.get(f"{address}/v1/sessions").json()["data"] == []  # let go at the end


def test_chat_says_when_there_is_no_server(cli: Callable[..., Result]) -> None:
    result = cli("chat", "--url", "http://127.0.0.1:9", stdin="hello\n")
    assert result.status == 2
    assert "is the server running?" in result.err


def test_a_remote_chat_reports_what_the_server_says() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"object": "list"})
        return httpx.Response(429, json={"error": {"message": "the queue is full"}})

    chat = RemoteChat("http://server", [], transport=httpx.MockTransport(answer))
    with pytest.raises(ServerError, match="does not speak OpenAI's API"):
        chat.model()
    with pytest.raises(ServerError, match="429: the queue is full"):
        list(chat.stream("hello", SamplingParams(), Speculation(), lambda: False))
    assert chat.messages == []
    chat.close()


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[ServerConfig, dict[str, Any]]]:
    """What `serve` would have started."""
    runs: list[tuple[ServerConfig, dict[str, Any]]] = []

    def record(load: Callable[[], Any], config: ServerConfig, **_: Any) -> None:
        made: dict[str, Any] = {}
        monkeypatch.setattr(AsyncEngine, "__init__", lambda self, model, **options: made.update(options, model=model))
        load()
        runs.append((config, made))

    monkeypatch.setattr(server, "run_server", record)
    return runs


def test_flags_go_before_the_environment_and_that_before_the_file(
    cli: Callable[..., Result],
    started: list[tuple[ServerConfig, dict[str, Any]]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    path = tmp_path / "serve.toml"
    path.write_text('model = "from-file"\nport = 1001\nmax-queue = 3\nctx-size = 99\napi-key = ["one", "two"]\n')
    monkeypatch.setenv("PACELINE_PORT", "1002")
    monkeypatch.setenv("PACELINE_BLOCK_SIZE", "8")
    monkeypatch.setenv("PACELINE_CONFIG", str(path))
    assert cli("serve", "--max-queue", 4).status == 0
    config, options = started[0]
    assert (config.port, config.max_queue, config.api_keys) == (1002, 4, ("one", "two"))
    assert (options["model"], options["max_model_len"], options["block_size"]) == ("from-file", 99, 8)


def test_the_aliases_of_other_servers(
    cli: Callable[..., Result], started: list[tuple[ServerConfig, dict[str, Any]]], tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("one\n\ntwo\n")
    arguments = ["-m", "big", "-md", "small", "-c", 50, "-np", 2, "-t", 1, "--alias", "a", "--spec-draft-n-max", 5]
    assert cli("serve", *arguments, "--api-key-file", keys, "--host", "0.0.0.0").status == 0
    config, options = started[0]
    assert (options["model"], options["draft"], options["max_model_len"]) == ("big", "small", 50)
    assert (options["max_num_seqs"], options["num_threads"], options["speculation"].max_tokens) == (2, 1, 5)
    assert (config.served_model_names, config.api_keys) == (("a",), ("one", "two"))


def test_vllms_speculative_config(
    cli: Callable[..., Result], started: list[tuple[ServerConfig, dict[str, Any]]]
) -> None:
    text = '{"method": "draft_model", "model": "small", "num_speculative_tokens": 4}'
    assert cli("serve", "--speculative-config", text).status == 0
    assert cli("serve", "--no-spec").status == 0
    (_, first), (_, second) = started
    assert (first["draft"], first["speculation"].max_tokens, first["speculation"].drafters) == ("small", 4, ("model",))
    assert second["speculation"].mode == "off"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--host", "0.0.0.0"], "--insecure"),
        (["--log-level", "loud"], "unknown log level"),
        (["--log-format", "xml"], "unknown log format"),
        (["--speculative-config", "{"], "not JSON"),
        (["--speculative-config", '{"method": "eagle3"}'], "eagle3"),
        (["--config", "/nowhere.toml"], "check the path"),
        (["--api-key-file", "/nowhere"], "check the path"),
        (["--port", 70000], "port"),
    ],
)
def test_settings_that_cannot_be(cli: Callable[..., Result], arguments: list[Any], message: str) -> None:
    result = cli("serve", *arguments)
    assert result.status == 2
    assert message in result.err
    assert result.err.count("\n") == 1


@pytest.mark.parametrize(("text", "message"), [("prot = 1", "'prot' is not a flag"), ("port =", "--config")])
def test_files_that_cannot_be(cli: Callable[..., Result], tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "serve.toml"
    path.write_text(text)
    result = cli("serve", "--config", path)
    assert result.status == 2
    assert message in result.err


def test_a_model_that_is_not_there_ends_the_server(cli: Callable[..., Result], tmp_path: Path) -> None:
    result = cli("serve", tmp_path / "nothing.gguf", "--port", 0)
    assert result.status == 2
    assert "nothing.gguf" in result.err


def test_a_port_that_is_taken(cli: Callable[..., Result], address: str, tiny_checkpoint: Path) -> None:
    result = cli("serve", tiny_checkpoint, "--port", address.rsplit(":", 1)[1])
    assert result.status == 2
    assert "choose another --port" in result.err

"""llama-server's routes as editors call them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from paceline.serve.errors import ApiError
from paceline.serve.fim import fill_in_middle
from tests.serve.conftest import opened
from tests.serve.scripted import ScriptedEngine, make_tokenizer

# What llama.vim sends with each key stroke, less what it knows of the cursor.
FROM_EDITOR: dict[str, Any] = {
    "input_prefix": "def f(a):\n",
    "input_suffix": "\n    return b\n",
    "input_extra": [{"text": "import os", "time": [1, 2], "filename": "os.py"}],
    "prompt": "    b",
    "n_predict": 32,
    "n_indent": 4,
    "top_k": 40,
    "top_p": 0.9,
    "stream": False,
    "samplers": ["top_k", "top_p", "infill"],
    "cache_prompt": True,
    "t_max_prompt_ms": 500,
    "t_max_predict_ms": 1000,
}
TEXT = " = a\n    b += 1"


def scripted(text: str = TEXT, **options: Any) -> ScriptedEngine:
    return ScriptedEngine(lambda _: text, **options)


def test_infill(serve: Callable[..., None], caplog: pytest.LogCaptureFixture) -> None:
    engine = scripted()

    async def body(client: httpx.AsyncClient) -> None:
        answer = (await client.post("/infill", json=FROM_EDITOR)).json()
        assert (answer["content"], answer["stop"], answer["stop_type"]) == (TEXT, True, "eos")
        assert answer["tokens_predicted"] == len(TEXT) + 1
        assert answer["tokens_evaluated"] == len(engine.calls[0].token_ids)
        assert (answer["tokens_cached"], answer["timings"]["cache_n"], answer["truncated"]) == (7, 7, False)
        assert answer["generation_settings"]["n_predict"] == 32
        assert answer["has_new_line"]
        assert answer["prompt"] == engine.calls[0].text

    serve(body, engine)
    call = engine.calls[0]
    fim = "<|fim_prefix|>def f(a):\n<|fim_suffix|>\n    return b\n<|fim_middle|>    b"
    assert call.text == "import os\n\n" + fim
    assert (call.params.max_tokens, call.params.top_k, call.params.temperature) == (32, 40, 0.0)
    assert "ignored" not in caplog.text  # nothing an editor sends is news


def test_other_files_go_where_the_model_knows_them(serve: Callable[..., None]) -> None:
    engine = scripted(tokenizer=make_tokenizer(has_repositories=True))

    async def body(client: httpx.AsyncClient) -> None:
        extra = [{"filename": "a.py", "text": "A = 1"}, {"text": "B = 2"}]
        await client.post("/infill", json={"input_prefix": "x", "input_suffix": "z", "input_extra": extra})
        await client.post("/infill", json={"input_prefix": "x", "input_suffix": "z"})

    serve(body, engine)
    expected = (
        "<|repo_name|>project\n<|file_sep|>a.py\nA = 1\n<|file_sep|>file\nB = 2\n<|file_sep|>file\n"
        "<|fim_prefix|>x<|fim_suffix|>z<|fim_middle|>"
    )
    assert [call.text for call in engine.calls] == [expected, "<|fim_prefix|>x<|fim_suffix|>z<|fim_middle|>"]


@pytest.mark.parametrize("path", ["/infill", "/v1/completions"])
def test_a_middle_ends_where_the_next_file_begins(serve: Callable[..., None], path: str) -> None:
    engine = scripted("b\n<|file_sep|>other.py\nimport os", tokenizer=make_tokenizer(has_repositories=True))

    async def body(client: httpx.AsyncClient) -> None:
        body = {"input_prefix": "a", "input_suffix": "c", "prompt": "a", "suffix": "c"}
        answer = (await client.post(path, json=body)).json()
        assert (answer["content"] if path == "/infill" else answer["choices"][0]["text"]) == "b\n"

    serve(body, engine)


def test_infill_streams(serve: Callable[..., None]) -> None:
    async def body(client: httpx.AsyncClient) -> None:
        response = await client.post("/infill", json={**FROM_EDITOR, "stream": True, "stop": ["+="]})
        events = [json.loads(line.removeprefix("data: ")) for line in response.text.split("\n\n") if line]
        assert "".join(event["content"] for event in events) == TEXT.split("+=")[0]
        assert [event["stop"] for event in events] == [False] * (len(events) - 1) + [True]
        assert (events[-1]["stop_type"], events[-1]["stopping_word"]) == ("word", "+=")
        assert len(events) > 2

    serve(body, scripted())


def test_infill_fills_the_cache_alone(serve: Callable[..., None]) -> None:
    engine = scripted()

    async def body(client: httpx.AsyncClient) -> None:
        for stream in (False, True):
            extra = {"input_extra": FROM_EDITOR["input_extra"], "n_predict": 0, "stream": stream}
            response = await client.post("/infill", json=extra)
            answer = json.loads(response.text.removeprefix("data: "))
            assert (answer["content"], answer["tokens"], answer["tokens_predicted"]) == ("", [], 0)

    serve(body, engine)
    assert [call.params.max_tokens for call in engine.calls] == [1, 1]


def test_only_the_fields_that_are_asked_for(serve: Callable[..., None]) -> None:
    async def body(client: httpx.AsyncClient) -> None:
        fields = ["content", "timings/prompt_n", "generation_settings/n_ctx", "nothing/at/all"]
        answer = (await client.post("/infill", json={**FROM_EDITOR, "response_fields": fields})).json()
        assert answer.keys() == set(fields[:3])
        assert answer["generation_settings/n_ctx"] == 100_000
        limited = (await client.post("/infill", json={**FROM_EDITOR, "n_predict": 3, "return_tokens": True})).json()
        assert (limited["content"], limited["stop_type"], len(limited["tokens"])) == (" = ", "limit", 3)

    serve(body, scripted())


def test_infill_needs_tokens_for_it(serve: Callable[..., None]) -> None:
    async def body(client: httpx.AsyncClient) -> None:
        for stream in (False, True):
            response = await client.post("/infill", json={**FROM_EDITOR, "stream": stream})
            assert response.status_code == 400
            error = response.json()["error"]
            assert error["param"] == "input_suffix"
            assert "no fill-in-the-middle tokens" in error["message"]
        bad = await client.post("/infill", json={**FROM_EDITOR, "n_predict": -2})
        assert (bad.status_code, bad.json()["error"]["param"]) == (400, "n_predict")

    serve(body, scripted(tokenizer=make_tokenizer(has_fim=False)))


def test_infill_keeps_to_a_grammar(serve: Callable[..., None]) -> None:
    engine = scripted()

    async def body(client: httpx.AsyncClient) -> None:
        for field in ({"grammar": "root ::= [0-9]+"}, {"json_schema": {"type": "string"}}, {"grammar": ""}):
            assert (await client.post("/infill", json={**FROM_EDITOR, **field})).status_code == 200
        both = {"grammar": "root ::= [0-9]+", "json_schema": {"type": "string"}}
        bad = await client.post("/infill", json={**FROM_EDITOR, **both})
        assert (bad.status_code, bad.json()["error"]["param"]) == (400, "json_schema")

    serve(body, engine)
    structures = [call.params.structured for call in engine.calls]
    assert [one.kind if one is not None else None for one in structures] == ["grammar", "json_schema", None]


def test_props(serve: Callable[..., None]) -> None:
    async def body(client: httpx.AsyncClient) -> None:
        props = (await client.get("/props")).json()
        assert (props["total_slots"], props["model_alias"], props["model_path"]) == (3, "coder", "scripted")
        assert "<|im_start|>" in props["chat_template"]
        assert props["modalities"] == {"vision": False, "audio": False}
        assert props["eos_token"] == "<|im_end|>"
        settings = props["default_generation_settings"]
        assert (settings["n_ctx"], settings["speculative"]) == (100_000, True)
        assert settings["params"]["speculative.n_max"] == 16

    serve(body, scripted(), max_num_seqs=3, served_model_names=("coder",))


def test_slots_show_what_runs() -> None:
    async def main() -> None:
        engine = scripted("x" * 400, pause=0.01)
        async with opened(engine, max_num_seqs=2) as (_, client):
            idle = (await client.get("/slots")).json()
            assert [(slot["id"], slot["id_task"], slot["is_processing"]) for slot in idle] == [
                (0, -1, False),
                (1, -1, False),
            ]
            request = {"prompt": "abc", "max_tokens": 300, "speculative": False, "temperature": 0.5}
            running = asyncio.create_task(client.post("/v1/completions", json=request))
            while not (engine.calls and engine.calls[0].num_steps > 2):
                await asyncio.sleep(0.005)
            first, second = (await client.get("/slots")).json()
            assert (first["is_processing"], second["is_processing"]) == (True, False)
            assert (first["n_prompt_tokens"], first["speculative"], second["speculative"]) == (3, False, True)
            assert (first["params"]["temperature"], first["params"]["n_predict"]) == (0.5, 300)
            decoded = first["next_token"]["n_decoded"]
            assert decoded >= 8
            assert first["next_token"]["n_remain"] == 300 - decoded
            assert "abc" not in json.dumps(first)
            assert (await client.get("/slots?fail_on_no_slot=1")).status_code == 200
            other = asyncio.create_task(client.post("/v1/completions", json=request))
            while len(engine.calls) < 2:
                await asyncio.sleep(0.005)
            full = await client.get("/slots?fail_on_no_slot=1")
            assert (full.status_code, full.json()["error"]["type"]) == (503, "unavailable_error")
            running.cancel()
            await other
            assert not any(slot["is_processing"] for slot in (await client.get("/slots")).json())

    asyncio.run(main())


def test_the_tokenizer_describes_itself(serve: Callable[..., None]) -> None:
    async def body(client: httpx.AsyncClient) -> None:
        info = (await client.get("/tokenizer_info")).json()
        assert (info["bos_token"], info["eos_token"]) == (None, "<|im_end|>")
        assert info["chat_template"].startswith("{% for m in messages %}")
        assert info["model_max_length"] == 100_000

    serve(body, scripted())


def test_minus_one_is_as_much_as_the_context_allows(serve: Callable[..., None]) -> None:
    async def body(client: httpx.AsyncClient) -> None:
        chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": -1}
        answer = (await client.post("/v1/chat/completions", json=chat)).json()
        assert answer["choices"][0]["message"]["content"] == TEXT
        answer = (await client.post("/v1/completions", json={"prompt": "a", "max_tokens": -1})).json()
        assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == (TEXT * 3, "stop")
        assert (await client.post("/v1/completions", json={"prompt": "a", "max_tokens": -2})).status_code == 400

    serve(body, ScriptedEngine(lambda prompt: TEXT if "Hi" in prompt else TEXT * 3))


class Vocabulary:
    """As much of a tokenizer as the question takes."""

    def __init__(self, *tokens: str) -> None:
        self.token_id = {token: number for number, token in enumerate(tokens)}.get


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (("<fim_prefix>", "<fim_suffix>", "<fim_middle>"), "<fim_prefix>P<fim_suffix>S<fim_middle>M"),
        (("<fim-prefix>", "<fim-suffix>", "<fim-middle>"), "<fim-prefix>P<fim-suffix>S<fim-middle>M"),
        (("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"), "\u2581<PRE> P \u2581<SUF>S \u2581<MID>M"),
        (("[PREFIX]", "[SUFFIX]"), "[SUFFIX]S[PREFIX]PM"),
        (
            ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),
            "<\uff5cfim\u2581begin\uff5c>P<\uff5cfim\u2581hole\uff5c>S<\uff5cfim\u2581end\uff5c>M",
        ),
    ],
)
def test_each_family_has_its_own_way(tokens: tuple[str, ...], expected: str) -> None:
    vocabulary: Any = Vocabulary(*tokens, "<file_sep>", "<fim_pad>")
    fim = fill_in_middle(vocabulary, param="suffix")
    assert fim.prompt("P", "S", middle="M") == expected
    assert fim.prompt("{0}", "{suffix}").count("{") == 2  # braces of a program stay as they are
    assert set(fim.stop_token_ids) == set(range(len(tokens) + 2))
    # Half of what a repository takes is not enough.
    assert fim.prompt("P", "S", middle="M", extra=[("a.py", "A"), ("", "B")]) == f"A\n\nB\n\n{expected}"
    incomplete: Any = Vocabulary(*tokens[1:])
    with pytest.raises(ApiError, match="leave out 'suffix'"):
        fill_in_middle(incomplete, param="suffix")

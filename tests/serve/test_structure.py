"""Structured output over HTTP: its spellings, what is refused and how, and the real engine behind the clients."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

import anthropic
import httpx
import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field

from paceline import AsyncEngine, StructuredOutput
from paceline.sampling.grammar import GrammarCompiler
from paceline.serve.call_grammar import call_grammar
from paceline.serve.tools import HERMES, LLAMA3, MISTRAL, PLAIN, ToolFormat
from tests.serve.conftest import opened
from tests.serve.scripted import ScriptedEngine, make_tokenizer
from tests.serve.test_clients import anthropic_client, openai_client, with_tools
from tests.support import write_byte_checkpoint

HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
BAD = {"type": "object", "not": {}}


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


class Paint(BaseModel):
    """As an application declares it."""

    model_config = ConfigDict(extra="forbid")
    colour: Colour
    litres: int = Field(ge=0, le=99)
    kind: Literal["oil", "water"]
    is_dry: bool


class Sample(BaseModel):
    """Without numbers: the client of Anthropic leaves their bounds out of the schema."""

    colour: Colour
    is_dry: bool


def scripted(text: str = "{}", **options: Any) -> ScriptedEngine:
    return ScriptedEngine(lambda _: text, **options)


# ---- how it is asked for -------------------------------------------------------------------------------------

JSON = StructuredOutput.json_schema(SCHEMA)
ASKED = [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": None}, None),
    ({"response_format": {"type": "json_object"}}, StructuredOutput.json_object()),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}},
        JSON,
    ),
    ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, JSON),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, JSON),
    ({"structured_outputs": {"json": SCHEMA}}, JSON),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, JSON),
    ({"structured_outputs": {"json_object": True}}, StructuredOutput.json_object()),
    ({"structured_outputs": {"regex": "a+"}}, StructuredOutput.regex("a+")),
    ({"structured_outputs": {"choice": ["a", "b"]}}, StructuredOutput.choice(["a", "b"])),
    ({"structured_outputs": {"grammar": 'root ::= "a"'}}, StructuredOutput.grammar('root ::= "a"')),
    ({"guided_json": SCHEMA}, JSON),
    ({"guided_regex": "a+"}, StructuredOutput.regex("a+")),
    ({"guided_choice": ["a", "b"]}, StructuredOutput.choice(["a", "b"])),
    ({"guided_grammar": 'start: "a"'}, StructuredOutput.grammar('start: "a"')),
    ({"grammar": 'root ::= "a"'}, StructuredOutput.grammar('root ::= "a"')),
    ({"grammar": ""}, None),
    ({"json_schema": SCHEMA}, JSON),
]


@pytest.mark.parametrize(("fields", "expected"), ASKED, ids=lambda value: str(value)[:40])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_every_spelling_reaches_the_engine(
    serve: Callable[..., None], path: str, fields: dict[str, Any], expected: StructuredOutput | None
) -> None:
    engine = scripted()

    async def body(client: httpx.AsyncClient) -> None:
        request = {**(HELLO if "chat" in path else {"prompt": "Hi"}), **fields, "n": 2}
        response = await client.post(path, json=request)
        assert response.status_code == 200, response.text

    serve(body, engine)
    assert [call.params.structured for call in engine.calls] == [expected] * 2


@pytest.mark.parametrize(
    ("text_format", "expected"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, StructuredOutput.json_object()),
        ({"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}, JSON),
    ],
)
def test_responses_ask_in_their_own_way(
    serve: Callable[..., None], text_format: dict[str, Any], expected: StructuredOutput | None
) -> None:
    engine = scripted()

    async def body(client: httpx.AsyncClient) -> None:
        response = await client.post("/v1/responses", json={"input": "Hi", "text": {"format": text_format}})
        assert response.status_code == 200, response.text
        assert response.json()["text"]["format"] == text_format

    serve(body, engine)
    assert [call.params.structured for call in engine.calls] == [expected]


# ---- what is refused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"response_format": {"type": "xml"}}, "response_format", "not supported"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "needs a schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}}, "response_format", "object"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": BAD}}}, "response_format", "not"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex", "one structure"),
        ({"structured_outputs": {}, "guided_regex": "("}, "guided_regex", "regular expression"),
        ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs", "needs one of"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs", "not supported"),
        ({"structured_outputs": {"json": [1]}}, "structured_outputs", "object"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs", "string"),
        ({"structured_outputs": {"choice": [5]}}, "structured_outputs", "list of strings"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs", "options"),
        ({"guided_choice": [""]}, "guided_choice", "options"),
        ({"guided_json": "{"}, "guided_json", "JSON schema"),
        ({"guided_grammar": "start: nobody"}, "guided_grammar", "nobody"),
        ({"grammar": "root ::= ("}, "grammar", "grammar cannot be used"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_be_used_is_answered_400(
    serve: Callable[..., None], fields: dict[str, Any], param: str, message: str, stream: bool
) -> None:
    engine = scripted()

    async def body(client: httpx.AsyncClient) -> None:
        for path, request in (("/v1/chat/completions", HELLO), ("/v1/completions", {"prompt": "a"})):
            response = await client.post(path, json={**request, **fields, "stream": stream})
            assert response.status_code == 400, response.text
            error = response.json()["error"]
            assert error["type"] == "invalid_request_error"
            assert error["param"].startswith(param)
            assert message in error["message"]

    serve(body, engine)
    assert engine.calls == []


def test_a_grammar_that_is_too_large(serve: Callable[..., None]) -> None:
    async def body(client: httpx.AsyncClient) -> None:
        response = await client.post("/v1/completions", json={"prompt": "a", "guided_regex": "a" * 200})
        assert response.status_code == 413
        assert response.json()["error"]["param"] == "guided_regex"
        response = await client.post("/v1/completions", json={"prompt": "a", "guided_regex": "a" * 50})
        assert response.status_code == 200

    serve(body, scripted(), max_grammar_bytes=100)


def test_responses_name_the_field(serve: Callable[..., None]) -> None:
    async def body(client: httpx.AsyncClient) -> None:
        request = {"input": "Hi", "text": {"format": {"type": "json_schema", "name": "x", "schema": BAD}}}
        response = await client.post("/v1/responses", json=request)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "text.format"

    serve(body, scripted())


# ---- calls ---------------------------------------------------------------------------------------------------

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "paint",
            "parameters": {
                "type": "object",
                "properties": {
                    "colour": {"enum": ["red", "blue"]},
                    "litres": {"type": "integer", "minimum": 0, "maximum": 9},
                },
                "required": ["colour"],
                "x-unknown": {"ignored": True},
                "not": {"required": ["nothing"]},
            },
        },
    },
    {"type": "function", "function": {"name": "paint_all"}},
]
ANSWER = StructuredOutput.json_schema({"type": "object", "properties": {"name": {"const": "paint"}, "b": {"const": 1}}})
TOKENIZER = make_tokenizer()


def accepts(structured: StructuredOutput, text: str) -> bool:
    """Whether a model may write this and then end."""
    matcher = GrammarCompiler(TOKENIZER).matcher(structured)
    ending = None
    for token_id in TOKENIZER.encode(text):
        if ending is not None or matcher.count_allowed([token_id]) == 0:
            return False
        ending = matcher.advance(token_id)
    (end_id,) = TOKENIZER.eos_token_ids
    return ending == "stop" or bool(matcher.masks(())[0][end_id // 8] >> end_id % 8 & 1)


def whole(tool_format: ToolFormat, *calls: str) -> str:
    if tool_format is MISTRAL:
        return f"[TOOL_CALLS][{', '.join(calls)}]"
    if tool_format is LLAMA3:
        return "<|python_tag|>" + "".join(calls)
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


@pytest.mark.parametrize("tool_format", [HERMES, LLAMA3, MISTRAL, PLAIN], ids=lambda value: value.name)
def test_a_begun_call_is_held_to_its_schema(tool_format: ToolFormat) -> None:
    key = tool_format.arguments_key
    red = f'{{"name": "paint", "{key}": {{"colour": "red"}}}}'
    everything = f'{{"name": "paint_all", "{key}": {{}}}}'
    prefix = tool_format.call_prefix(None)
    is_written = tool_format is not PLAIN  # whose prefix has no line break
    required = call_grammar(TOOLS, tool_format, TOKENIZER, is_named=False, is_parallel=True)

    def rest(*calls: str) -> str:
        text = whole(tool_format, *calls)
        text = text if is_written else text.replace("<tool_call>\n", "<tool_call>", 1)
        assert text.startswith(prefix)
        return text.removeprefix(prefix)

    assert accepts(required, rest(red))
    assert accepts(required, rest(everything))
    assert accepts(required, rest(red, everything)) == (tool_format is not LLAMA3)
    for bad in (red.replace("red", "pink"), red.replace("paint", "pain"), everything.replace("{}", '{"a": 1}')):
        assert not accepts(required, rest(bad))
    single = call_grammar(TOOLS, tool_format, TOKENIZER, is_named=False, is_parallel=False)
    assert accepts(single, rest(red))
    assert not accepts(single, rest(red, everything))
    named = call_grammar(TOOLS[:1], tool_format, TOKENIZER, is_named=True, is_parallel=True)
    prefix = tool_format.call_prefix("paint")
    assert accepts(named, rest(red))
    assert not accepts(named, rest(red, red))


@pytest.mark.parametrize("tool_format", [HERMES, LLAMA3, MISTRAL, PLAIN], ids=lambda value: value.name)
def test_an_answer_in_json_or_a_call(tool_format: ToolFormat) -> None:
    either = call_grammar(TOOLS, tool_format, TOKENIZER, is_named=False, is_parallel=True, answer=ANSWER)
    call = f'{{"name": "paint", "{tool_format.arguments_key}": {{"colour": "blue", "litres": 2}}}}'
    assert accepts(either, '{"name": "paint", "b": 1}')
    assert accepts(either, whole(tool_format, call))
    assert not accepts(either, "words")
    assert not accepts(either, whole(tool_format, call.replace("blue", "pink")))


def test_required_calls_and_answers_beside_tools_reach_the_engine(serve: Callable[..., None]) -> None:
    engine = with_tools('{"a": 1}')

    async def body(client: httpx.AsyncClient) -> None:
        schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
        for fields in (
            {"tool_choice": "required"},
            {"tool_choice": {"type": "function", "function": {"name": "paint"}}},
            {"tool_choice": "auto"},
            {"tool_choice": "auto", "response_format": schema},
            {"tool_choice": "none", "response_format": schema},
        ):
            response = await client.post("/v1/chat/completions", json={**HELLO, "tools": TOOLS, **fields})
            assert response.status_code == 200, response.text
        anthropic_tools: Any = [{"name": "paint", "input_schema": TOOLS[0]["function"]["parameters"]}]
        await anthropic_client(client).messages.create(
            model="m", max_tokens=9, messages=HELLO["messages"], tools=anthropic_tools, tool_choice={"type": "any"}
        )

    serve(body, engine)
    tokenizer = engine.tokenizer
    assert [call.params.structured for call in engine.calls] == [
        call_grammar(TOOLS, HERMES, tokenizer, is_named=False, is_parallel=True),
        call_grammar(TOOLS[:1], HERMES, tokenizer, is_named=True, is_parallel=True),
        None,
        call_grammar(TOOLS, HERMES, tokenizer, is_named=False, is_parallel=True, answer=JSON),
        JSON,
        call_grammar(TOOLS[:1], HERMES, tokenizer, is_named=False, is_parallel=True),
    ]


def test_a_tool_whose_schema_cannot_be_held_to(serve: Callable[..., None], caplog: pytest.LogCaptureFixture) -> None:
    engine = with_tools("weather")
    parameters = {"type": "object", "properties": {"a": {"$ref": "https://example.org/a"}}}

    async def body(client: httpx.AsyncClient) -> None:
        for strict, status in ((False, 200), (True, 400)):
            tool = {"type": "function", "function": {"name": "f", "parameters": parameters, "strict": strict}}
            request = {**HELLO, "tools": [tool], "tool_choice": "required"}
            response = await client.post("/v1/chat/completions", json=request)
            assert response.status_code == status, response.text
        assert response.json()["error"]["param"] == "tools"

    with caplog.at_level(logging.WARNING):
        serve(body, engine)
    assert [call.params.structured for call in engine.calls] == [None]
    assert "not held to their schema" in caplog.text


# ---- the real engine -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_checkpoint(tmp_path_factory.mktemp("bytes") / "llama", scale=2.0, max_position_embeddings=2048)


def run(checkpoint: Path, body: Callable[[httpx.AsyncClient], Awaitable[None]]) -> None:
    """With an app over the tiny engine; afterwards no block may be held."""

    async def main() -> None:
        engine = AsyncEngine(checkpoint, draft=checkpoint, block_size=4)
        async with opened(engine) as (_, client):
            await body(client)
            while engine.load.num_running:
                await asyncio.sleep(0.001)
            assert engine.load.num_used_blocks == 0
            engine.engine.core.cache.check_integrity()

    asyncio.run(main())


def test_openai_parse(checkpoint: Path) -> None:
    async def body(client: httpx.AsyncClient) -> None:
        openai_api = openai_client(client)
        answer = await openai_api.chat.completions.parse(
            model="m", messages=HELLO["messages"], response_format=Paint, max_completion_tokens=200
        )
        message = answer.choices[0].message
        assert isinstance(message.parsed, Paint)
        response = await openai_api.responses.parse(
            model="m", input="Hi", text_format=Paint, max_output_tokens=200, temperature=0
        )
        assert isinstance(response.output_parsed, Paint)
        async with openai_api.chat.completions.stream(
            model="m", messages=HELLO["messages"], response_format=Paint, max_completion_tokens=200
        ) as stream:
            async for _ in stream:
                pass
            final = await stream.get_final_completion()
        assert isinstance(final.choices[0].message.parsed, Paint)

    run(checkpoint, body)


def test_anthropic_parse(checkpoint: Path) -> None:
    async def body(client: httpx.AsyncClient) -> None:
        answer = await anthropic_client(client).messages.parse(
            model="m", max_tokens=200, messages=HELLO["messages"], output_format=Sample
        )
        assert isinstance(answer.parsed_output, Sample)
        with pytest.raises(anthropic.BadRequestError, match="JSON schema cannot be used"):
            await anthropic_client(client).messages.create(
                model="m",
                max_tokens=200,
                messages=HELLO["messages"],
                output_config={"format": {"type": "json_schema", "schema": BAD}},
            )

    run(checkpoint, body)


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1, "seed": 5}], ids=["greedy", "seeded"])
def test_speculation_changes_no_answer(checkpoint: Path, sampling: dict[str, Any]) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "paint", "schema": Paint.model_json_schema()}}

    async def body(client: httpx.AsyncClient) -> None:
        texts = []
        for speculative in (False, {"mode": "static", "max_tokens": 5}, {"drafters": ["grammar"]}, True):
            request = {
                **HELLO,
                **sampling,
                "response_format": schema,
                "max_tokens": 200,
                "n": 3,
                "speculative": speculative,
            }
            answer = (await client.post("/v1/chat/completions", json=request)).json()
            texts.append([choice["message"]["content"] for choice in answer["choices"]])
            for text in texts[-1]:
                Paint.model_validate_json(text)
        assert texts[0] == texts[1] == texts[2] == texts[3]

    run(checkpoint, body)


def test_a_required_call_has_arguments_of_its_schema(checkpoint: Path) -> None:
    async def body(client: httpx.AsyncClient) -> None:
        tools: Any = TOOLS
        for seed in range(8):
            answer = await openai_client(client).chat.completions.create(
                model="m",
                messages=HELLO["messages"],
                tools=tools,
                tool_choice="required",
                parallel_tool_calls=False,
                seed=seed,
                max_tokens=250,
            )
            choice = answer.choices[0]
            assert choice.message.tool_calls
            (call,) = choice.message.tool_calls
            assert call.type == "function"
            assert choice.finish_reason == "tool_calls"
            arguments = json.loads(call.function.arguments)
            if call.function.name == "paint":
                assert arguments["colour"] in ("red", "blue")
            else:
                assert (call.function.name, arguments) == ("paint_all", {})

        cut = await openai_client(client).chat.completions.create(
            model="m", messages=HELLO["messages"], tools=tools, tool_choice="required", max_tokens=25, temperature=0
        )
        assert cut.choices[0].finish_reason == "length"

    run(checkpoint, body)


def test_errors_as_the_clients_know_them(checkpoint: Path) -> None:
    async def body(client: httpx.AsyncClient) -> None:
        bad: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": BAD}}
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError, match="JSON schema cannot be used") as caught:
                await openai_client(client).chat.completions.create(
                    model="m", messages=HELLO["messages"], response_format=bad, stream=stream
                )
            assert caught.value.param == "response_format"
            assert caught.value.code == "invalid_grammar"
        tool: Any = {"name": "f", "input_schema": {"type": "object", "properties": {"a": {"type": "odd"}}}}
        answer = await anthropic_client(client).messages.create(
            model="m", max_tokens=20, messages=HELLO["messages"], tools=[tool], tool_choice={"type": "any"}
        )
        assert isinstance(answer, anthropic.types.Message)  # begun, though its schema is none

    run(checkpoint, body)

"""The official clients, unmodified, against the app."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import anthropic
import httpx
import httpx2
import openai
import pytest

from tests.serve.conftest import BASE
from tests.serve.scripted import MISTRAL_TEMPLATE, TOOL_TEMPLATE, ScriptedEngine, make_tokenizer

USER = [{"role": "user", "content": "What is the weather?"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
CALL = 'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
TWO_CALLS = CALL + '\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


def scripted(text: str, **options: Any) -> ScriptedEngine:
    return ScriptedEngine(lambda _: text, **options)


def with_tools(text: str, **options: Any) -> ScriptedEngine:
    return scripted(text, tokenizer=make_tokenizer(TOOL_TEMPLATE), **options)


def openai_client(client: httpx.AsyncClient) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{BASE}/v1", api_key="none", http_client=client, max_retries=0)


def anthropic_client(client: httpx.AsyncClient) -> anthropic.AsyncAnthropic:
    transport = httpx2.ASGITransport(client._transport.app)  # type: ignore[attr-defined]
    http_client = httpx2.AsyncClient(transport=transport, base_url=BASE)
    return anthropic.AsyncAnthropic(base_url=BASE, api_key="none", http_client=http_client, max_retries=0)


def test_openai_chat(serve: Callable[..., None]) -> None:
    async def body(client: httpx.AsyncClient) -> None:
        answer = await openai_client(client).chat.completions.create(model="m", messages=USER, temperature=0)
        choice = answer.choices[0]
        assert (choice.message.content, choice.finish_reason) == ("Sunny.", "stop")
        assert answer.usage is not None
        assert answer.usage.completion_tokens == len("Sunny.") + 1
        assert answer.usage.prompt_tokens_details is not None
        assert answer.usage.prompt_tokens_details.cached_tokens == 7
        extra = answer.model_extra or {}
        speculation = extra["metrics"]["speculative_decoding"]
        assert (speculation["num_draft_tokens"], speculation["num_spec_tokens"]) == (8, 16)
        assert speculation["acceptance_histogram"] == [0, 0, 2] + [0] * 14  # aiperf insists on num_spec_tokens + 1
        assert extra["timings"]["cache_n"] == 7

    serve(body, scripted("Sunny."))


@pytest.mark.parametrize("include_usage", [True, False])
def test_openai_chat_stream(serve: Callable[..., None], include_usage: bool) -> None:
    async def body(client: httpx.AsyncClient) -> None:
        stream = await openai_client(client).chat.completions.create(
            model="m", messages=USER, stream=True, stream_options={"include_usage": include_usage}
        )
        chunks = [chunk async for chunk in stream]
        assert chunks[0].choices[0].delta.role == "assistant"
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Sunny and warm."
        reasons = [c.choices[0].finish_reason for c in chunks if c.choices]
        assert reasons == [None] * (len(reasons) - 1) + ["stop"]
        assert len({chunk.id for chunk in chunks}) == 1
        assert chunks[-1].usage is not None  # always, in a chunk of its own where that was asked for
        assert (not chunks[-1].choices) == include_usage
        assert sum(chunk.usage is not None for chunk in chunks) == 1

    serve(body, scripted("Sunny and warm."))


def test_openai_choices_seeds_and_parameters(serve: Callable[..., None]) -> None:
    engine = scripted("Sunny. Very.")

    async def body(client: httpx.AsyncClient) -> None:
        answer = await openai_client(client).chat.completions.create(
            model="m",
            messages=USER,
            n=3,
            seed=5,
            stop=["!", ". V"],
            max_completion_tokens=50,
            logit_bias={"65": -100},
            presence_penalty=0.5,
            logprobs=True,
            top_logprobs=1,
            extra_body={"min_tokens": 2, "ignore_eos": True, "top_k": 4, "speculative": {"max_tokens": 3}},
        )
        assert [choice.message.content for choice in answer.choices] == ["Sunny"] * 3
        assert [choice.finish_reason for choice in answer.choices] == ["stop"] * 3
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.content is not None
        assert [entry.token for entry in logprobs.content] == list("Sunny. V")
        assert logprobs.content[0].top_logprobs[0].logprob == -0.25

    serve(body, engine)
    assert [call.params.seed for call in engine.calls] == [5, 6, 7]
    call = engine.calls[0]
    assert (call.params.min_tokens, call.params.ignore_eos, call.params.top_k) == (2, True, 4)
    assert (call.params.max_tokens, call.params.presence_penalty) == (50, 0.5)
    assert dict(call.params.logit_bias) == {65: -100.0}
    assert call.speculation is not None
    assert call.speculation.max_tokens == 3


def test_openai_stream_of_several_choices_with_logprobs(serve: Callable[..., None]) -> None:
    async def body(client: httpx.AsyncClient) -> None:
        stream = await openai_client(client).chat.completions.create(
            model="m", messages=USER, n=2, stream=True, logprobs=True, stream_options={"include_usage": True}
        )
        texts, tokens = ["", ""], ["", ""]
        async for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                if choice.logprobs is not None and choice.logprobs.content:
                    tokens[choice.index] += "".join(entry.token for entry in choice.logprobs.content)
            if not chunk.choices:
                assert chunk.usage is not None
                assert chunk.usage.completion_tokens == 2 * (len("Sunny.") + 1)
        assert texts == ["Sunny."] * 2
        assert tokens == ["Sunny.<|im_end|>"] * 2

    serve(body, scripted("Sunny."))


@pytest.mark.parametrize("speculative", [False, True, {"mode": "static", "max_tokens": 2, "drafters": ["suffix"]}])
def test_speculation_per_request(serve: Callable[..., None], speculative: Any) -> None:
    engine = scripted("Sunny.")

    async def body(client: httpx.AsyncClient) -> None:
        await openai_client(client).chat.completions.create(
            model="m", messages=USER, extra_body={"speculative": speculative}
        )

    serve(body, engine)
    used = engine.calls[0].speculation
    assert used is not None
    if speculative is False:
        assert used.mode == "off"
    elif speculative is True:
        assert used == engine.speculation
    else:
        assert (used.mode, used.max_tokens, list(used.drafters)) == ("static", 2, ["suffix"])


def test_prediction_counts_only_its_own_tokens(serve: Callable[..., None]) -> None:
    engine = scripted("Sunny.")

    async def body(client: httpx.AsyncClient) -> None:
        create = openai_client(client).chat.completions.create
        answer = await create(model="m", messages=USER, prediction={"type": "content", "content": "Sunny!"})
        assert answer.usage is not None
        details = answer.usage.completion_tokens_details
        assert details is not None
        assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (3, 3)
        answer = await create(model="m", messages=USER)
        assert answer.usage is not None
        details = answer.usage.completion_tokens_details
        assert details is not None
        assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (0, 0)

    serve(body, engine)
    assert engine.calls[0].prediction == "Sunny!"


@pytest.mark.parametrize("horizon", [0, 1, 4, 8])
def test_openai_tools(serve: Callable[..., None], horizon: int) -> None:
    async def body(client: httpx.AsyncClient) -> None:
        create = openai_client(client).chat.completions.create
        answer = await create(model="m", messages=USER, tools=TOOLS)
        message = answer.choices[0].message
        assert answer.choices[0].finish_reason == "tool_calls"
        assert message.content == "Let me see.\n"
        calls = message.tool_calls or []
        assert [json.loads(call.function.arguments)["city"] for call in calls] == ["Bern", "Rome"]  # type: ignore[union-attr]

        stream = await create(model="m", messages=USER, tools=TOOLS, stream=True)
        names: dict[int, str] = {}
        arguments: dict[int, str] = {}
        text, reason = "", None
        async for chunk in stream:
            choice = chunk.choices[0]
            text += choice.delta.content or ""
            reason = choice.finish_reason or reason
            for call in choice.delta.tool_calls or ():
                assert call.function is not None
                names[call.index] = names.get(call.index, "") + (call.function.name or "")
                arguments[call.index] = arguments.get(call.index, "") + (call.function.arguments or "")
        assert (text, reason) == ("Let me see.\n", "tool_calls")
        assert names == {0: "weather", 1: "weather"}
        assert [json.loads(one) for one in arguments.values()] == [{"city": "Bern"}, {"city": "Rome"}]

    serve(body, with_tools(TWO_CALLS, horizon=horizon))


def test_openai_tool_history_and_stream_helper(serve: Callable[..., None]) -> None:
    engine = with_tools(CALL)

    async def body(client: httpx.AsyncClient) -> None:
        call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}
        history: Any = [
            *USER,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "rain"},
        ]
        async with openai_client(client).chat.completions.stream(model="m", messages=history, tools=TOOLS) as stream:
            async for _ in stream:
                pass
            final = await stream.get_final_completion()
        assert final.choices[0].message.tool_calls is not None
        assert final.choices[0].message.tool_calls[0].function.name == "weather"

    serve(body, engine)
    assert "<tool_call>Bern</tool_call>" in engine.calls[0].text
    assert "tool\nrain" in engine.calls[0].text


@pytest.mark.parametrize(
    ("choice", "prefix"),
    [
        ("required", '<tool_call>\n{"name": "'),
        ({"type": "function", "function": {"name": "weather"}}, '<tool_call>\n{"name": "weather", "arguments": '),
    ],
)
def test_tool_choice_puts_the_call_into_the_models_mouth(serve: Callable[..., None], choice: Any, prefix: str) -> None:
    whole = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
    engine = with_tools(whole.removeprefix(prefix))

    async def body(client: httpx.AsyncClient) -> None:
        create = openai_client(client).chat.completions.create
        answer = await create(model="m", messages=USER, tools=TOOLS, tool_choice=choice)
        calls = answer.choices[0].message.tool_calls or []
        assert [call.function.arguments for call in calls] == ['{"city": "Bern"}']  # type: ignore[union-attr]

    serve(body, engine)
    assert engine.calls[0].text.endswith(prefix)


def test_tool_choice_none_leaves_the_text_alone(serve: Callable[..., None]) -> None:
    async def body(client: httpx.AsyncClient) -> None:
        create = openai_client(client).chat.completions.create
        answer = await create(model="m", messages=USER, tools=TOOLS, tool_choice="none")
        assert answer.choices[0].message.content == CALL
        assert answer.choices[0].finish_reason == "stop"

    serve(body, with_tools(CALL))


def test_tools_without_a_template_for_them(serve: Callable[..., None]) -> None:
    engine = scripted(CALL)

    async def body(client: httpx.AsyncClient) -> None:
        answer = await openai_client(client).chat.completions.create(model="m", messages=USER, tools=TOOLS)
        assert answer.choices[0].finish_reason == "tool_calls"

    serve(body, engine)
    assert '"name": "weather"' in engine.calls[0].text  # the tools are in the prompt all the same


def test_mistral_calls_are_special_tokens(serve: Callable[..., None]) -> None:
    text = '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Bern"}}]'
    engine = scripted(text, tokenizer=make_tokenizer(MISTRAL_TEMPLATE))

    async def body(client: httpx.AsyncClient) -> None:
        answer = await openai_client(client).chat.completions.create(model="m", messages=USER, tools=TOOLS)
        calls = answer.choices[0].message.tool_calls or []
        assert [call.function.arguments for call in calls] == ['{"city": "Bern"}']  # type: ignore[union-attr]

    serve(body, engine)


def test_openai_completions(serve: Callable[..., None]) -> None:
    engine = scripted(" b c")

    async def body(client: httpx.AsyncClient) -> None:
        create = openai_client(client).completions.create
        answer = await create(model="m", prompt=["a", "x"], logprobs=1, echo=True)
        assert [choice.text for choice in answer.choices] == ["a b c", "x b c"]
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.tokens == ["a", " ", "b", " ", "c", "<|im_end|>"]
        assert logprobs.token_logprobs == [None, *[-0.25] * 5]
        assert logprobs.text_offset == [0, 1, 2, 3, 4, 5]
        stream = await create(model="m", prompt="a", stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == " b c"

    serve(body, engine)
    assert engine.calls[0].params.max_tokens == 16  # OpenAI's default


def test_scores_of_a_given_text(serve: Callable[..., None]) -> None:
    engine = scripted("unused")

    async def body(client: httpx.AsyncClient) -> None:
        create = openai_client(client).completions.create
        answer = await create(model="m", prompt=[3, 4, 5], max_tokens=0, echo=True, logprobs=1)
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.token_logprobs == [None, -0.5, -0.5]
        assert logprobs.top_logprobs is not None
        assert logprobs.top_logprobs[1] == {engine.tokenizer.decode([4]): -0.5}

    serve(body, engine)
    assert not engine.calls


def test_fill_in_the_middle(serve: Callable[..., None]) -> None:
    engine = scripted("middle")

    async def body(client: httpx.AsyncClient) -> None:
        answer = await openai_client(client).completions.create(model="m", prompt="def f(", suffix="return 1")
        assert answer.choices[0].text == "middle"

    serve(body, engine)
    assert engine.calls[0].text == "<|fim_prefix|>def f(<|fim_suffix|>return 1<|fim_middle|>"

    async def refused(client: httpx.AsyncClient) -> None:
        with pytest.raises(openai.BadRequestError, match="no fill-in-the-middle tokens"):
            await openai_client(client).completions.create(model="m", prompt="def f(", suffix="return 1")

    serve(refused, scripted("middle", tokenizer=make_tokenizer(has_fim=False)))


def test_openai_responses(serve: Callable[..., None]) -> None:
    async def body(client: httpx.AsyncClient) -> None:
        api = openai_client(client).responses
        answer = await api.create(model="m", input="Hi", instructions="Be brief.")
        assert (answer.output_text, answer.status) == ("Sunny.", "completed")
        assert answer.usage is not None
        assert answer.usage.input_tokens_details.cached_tokens == 7
        stream = await api.create(model="m", input=[{"role": "user", "content": "Hi"}], stream=True)
        events = [event async for event in stream]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        kinds = [event.type for event in events]
        assert kinds[:4] == [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
        ]
        assert kinds[-4:] == [
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.completed",
        ]
        with pytest.raises(openai.BadRequestError, match="not stored"):
            await api.create(model="m", input="Hi", previous_response_id="resp_1")
        cut = await api.create(model="m", max_output_tokens=2)
        assert cut.status == "incomplete"
        count = await client.post("/v1/responses/input_tokens", json={"input": "Hi"})
        assert count.json()["input_tokens"] > 2

    serve(body, scripted("Sunny."))


def test_openai_responses_tools(serve: Callable[..., None]) -> None:
    tools: Any = [{"type": "function", "name": "weather", "parameters": SCHEMA}, {"type": "web_search"}]
    engine = with_tools(CALL)

    async def body(client: httpx.AsyncClient) -> None:
        api = openai_client(client).responses
        async with api.stream(model="m", input="Hi", tools=tools) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_response()
        assert "response.function_call_arguments.done" in kinds
        call = final.output[1]
        assert call.type == "function_call"
        assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Bern"})
        history: Any = [
            {"role": "user", "content": "Hi"},
            call.model_dump(),
            {"type": "function_call_output", "call_id": call.call_id, "output": "rain"},
            {"type": "reasoning", "summary": []},
        ]
        await api.create(model="m", input=history, tools=tools)

    serve(body, engine)
    assert "<tool_call>Bern</tool_call>" in engine.calls[1].text
    assert "rain" in engine.calls[1].text


def test_anthropic_messages(serve: Callable[..., None]) -> None:
    engine = scripted("Sunny. END more")

    async def body(client: httpx.AsyncClient) -> None:
        api = anthropic_client(client).messages
        answer = await api.create(model="m", max_tokens=50, system="Be brief.", messages=USER, stop_sequences=["END"])  # type: ignore[arg-type]
        assert answer.content[0].type == "text"
        assert answer.content[0].text == "Sunny. "
        assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "END")
        assert answer.usage.cache_read_input_tokens == 7
        async with api.stream(model="m", max_tokens=4, messages=USER) as stream:  # type: ignore[arg-type]
            text = "".join([piece async for piece in stream.text_stream])
            final = await stream.get_final_message()
        assert (text, final.stop_reason, final.usage.output_tokens) == ("Sunn", "max_tokens", 4)
        count = await api.count_tokens(model="m", messages=USER)  # type: ignore[arg-type]
        assert count.input_tokens == len(engine.calls[1].token_ids)

    serve(body, engine)
    assert engine.calls[0].text.startswith("<|im_start|>system\nBe brief.")


def test_anthropic_tools(serve: Callable[..., None]) -> None:
    engine = with_tools(TWO_CALLS)
    tools: Any = [{"name": "weather", "input_schema": SCHEMA}, {"type": "web_search_20250305", "name": "web_search"}]

    async def body(client: httpx.AsyncClient) -> None:
        api = anthropic_client(client).messages
        answer = await api.create(model="m", max_tokens=500, messages=USER, tools=tools)  # type: ignore[arg-type]
        async with api.stream(model="m", max_tokens=500, messages=USER, tools=tools) as stream:  # type: ignore[arg-type]
            async for _ in stream:
                pass
            streamed = await stream.get_final_message()
        for message in (answer, streamed):
            assert message.stop_reason == "tool_use"
            assert [block.type for block in message.content] == ["text", "tool_use", "tool_use"]
            assert [block.input for block in message.content[1:]] == [{"city": "Bern"}, {"city": "Rome"}]  # type: ignore[union-attr]
        result = {"type": "tool_result", "tool_use_id": answer.content[1].id, "content": "rain"}  # type: ignore[union-attr]
        history: Any = [
            *USER,
            {"role": "assistant", "content": [block.model_dump() for block in answer.content]},
            {"role": "user", "content": [result, {"type": "text", "text": "Go on."}]},
        ]
        await api.create(model="m", max_tokens=500, messages=history, tools=tools, tool_choice={"type": "any"})

    serve(body, engine)
    assert "web_search" not in engine.calls[0].text
    assert "tool\nrain" in engine.calls[2].text
    assert engine.calls[2].text.endswith('<tool_call>\n{"name": "')


def test_an_assistants_last_words_are_continued(serve: Callable[..., None]) -> None:
    engine = scripted("nny.")
    messages: Any = [*USER, {"role": "assistant", "content": "Su"}]

    async def body(client: httpx.AsyncClient) -> None:
        await anthropic_client(client).messages.create(model="m", max_tokens=9, messages=messages)
        await openai_client(client).chat.completions.create(
            model="m", messages=messages, extra_body={"continue_final_message": True}
        )

    serve(body, engine)
    assert all(call.text.endswith("<|im_start|>assistant\nSu") for call in engine.calls)


def test_errors_as_the_clients_know_them(serve: Callable[..., None]) -> None:
    async def body(client: httpx.AsyncClient) -> None:
        create = openai_client(client).chat.completions.create
        with pytest.raises(openai.BadRequestError, match="not supported yet") as caught:
            await create(model="m", messages=USER, response_format={"type": "xml"})  # type: ignore[call-overload]
        assert caught.value.param == "response_format"
        with pytest.raises(openai.BadRequestError, match="shorten the prompt") as caught:
            await create(model="m", messages=[{"role": "user", "content": "a" * 300}])
        assert caught.value.code == "context_length_exceeded"
        with pytest.raises(openai.BadRequestError, match="shorten the prompt"):
            await create(model="m", messages=[{"role": "user", "content": "a" * 300}], stream=True)
        with pytest.raises(openai.BadRequestError, match="messages"):
            await create(model="m", messages=[])
        with pytest.raises(anthropic.BadRequestError, match="max_tokens") as refused:
            await anthropic_client(client).messages.create(model="m", max_tokens=0, messages=USER)  # type: ignore[arg-type]
        assert isinstance(refused.value.body, dict)
        assert refused.value.body["error"]["type"] == "invalid_request_error"

    serve(body, scripted("Sunny.", max_model_len=200))

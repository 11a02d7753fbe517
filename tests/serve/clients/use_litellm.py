"""LiteLLM against a server: whole, streamed, asynchronous, and with tools. Prints what it got as one JSON object."""

import asyncio
import json
import sys

import litellm

MODEL = "openai/local"
USER = [{"role": "user", "content": "What is the weather?"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]


def ask(**options):
    return litellm.completion(model=MODEL, api_base=sys.argv[1] + "/v1", api_key="none", messages=USER, **options)


async def ask_async(**options):
    return await litellm.acompletion(
        model=MODEL, api_base=sys.argv[1] + "/v1", api_key="none", messages=USER, **options
    )


def calls_of(message):
    return [[call.id, call.function.name, json.loads(call.function.arguments)] for call in message.tool_calls or []]


async def asynchronous():
    whole = await ask_async()
    stream = await ask_async(stream=True)
    pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
    return whole.choices[0].message.content, "".join(pieces)


def main():
    whole = ask(temperature=0, max_tokens=50, seed=3, stop=["!"])
    chunks = list(ask(stream=True, stream_options={"include_usage": True}))
    with_tools = ask(tools=TOOLS, tool_choice="auto")
    rebuilt = litellm.stream_chunk_builder(list(ask(tools=TOOLS, stream=True)), messages=USER)
    whole_async, streamed_async = asyncio.run(asynchronous())
    completed = litellm.text_completion(
        model="text-completion-openai/local", prompt="a", api_base=sys.argv[1] + "/v1", api_key="none", max_tokens=50
    )
    print(
        json.dumps(
            {
                "whole": whole.choices[0].message.content,
                "finish_reason": whole.choices[0].finish_reason,
                "usage": whole.usage.model_dump(),
                "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices),
                "stream_usage": [chunk.usage.completion_tokens for chunk in chunks if getattr(chunk, "usage", None)],
                "tools": calls_of(with_tools.choices[0].message),
                "tools_finish_reason": with_tools.choices[0].finish_reason,
                "streamed_tools": calls_of(rebuilt.choices[0].message),
                "async": whole_async,
                "async_streamed": streamed_async,
                "completed": completed.choices[0].text,
            }
        )
    )


main()

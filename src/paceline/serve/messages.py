"""POST /v1/messages and /v1/messages/count_tokens, as Anthropic's API has them."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import Field

from paceline.engine.output import Output
from paceline.request import SamplingParams
from paceline.serve import reports
from paceline.serve.errors import ApiError
from paceline.serve.exchange import answer, service_of, stream
from paceline.serve.sampling import SpeculativeOptions, WireModel, speculation
from paceline.serve.service import Service
from paceline.serve.streaming import JSONBytes, named_event
from paceline.serve.structure import Structure, one_structure, response_format
from paceline.serve.tools import CallStart, Part, TextPart
from paceline.serve.turns import ToolUse, Turn, prepare_turn

router = APIRouter()

_SKIPPED_BLOCKS = frozenset({"thinking", "redacted_thinking"})  # of other models; no part of this one's history


class AnthropicTool(WireModel):
    """A tool the model may call; those that only Anthropic can run have another type and no schema."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    type: str | None = None
    cache_control: Any = None


class AnthropicMessage(WireModel):
    """One message."""

    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


class CountRequest(WireModel):
    """The body of count_tokens: a message's without what concerns generation."""

    messages: Annotated[list[AnthropicMessage], Field(min_length=1)]
    model: str | None = None
    system: str | list[dict[str, Any]] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None

    def tool_use(self) -> ToolUse:
        """The tools as OpenAI writes them."""
        tools = [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description or "",
                    "parameters": tool.input_schema or {"type": "object", "properties": {}},
                },
            }
            for tool in self.tools or ()
            if tool.type in (None, "custom")
        ]
        choice = self.tool_choice or {}
        kind = choice.get("type", "auto")
        is_parallel = choice.get("disable_parallel_tool_use") is not True
        if kind == "tool":
            return ToolUse(tools, str(choice.get("name")), is_named=True)
        if kind not in ("auto", "any", "none"):
            raise ApiError(400, "tool_choice.type must be auto, any, tool or none", param="tool_choice")
        return ToolUse(tools, {"any": "required"}.get(kind, kind), is_parallel=is_parallel)

    def openai_messages(self) -> list[dict[str, Any]]:
        """The conversation as OpenAI writes it."""
        converted: list[dict[str, Any]] = []
        if self.system:
            converted.append({"role": "system", "content": _plain_text(self.system)})
        for message in self.messages:
            converted += _convert(message)
        return converted


class MessagesRequest(CountRequest):
    """The body; ``speculative`` and ``session_id`` are additions."""

    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: list[str] | None = None
    stream: bool = False
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**64)] | None = None
    metadata: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None
    speculative: bool | SpeculativeOptions | None = None
    session_id: Annotated[str, Field(max_length=256)] | None = None

    def params(self) -> SamplingParams:
        """The engine's parameters."""
        return SamplingParams(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=self.top_k or 0,
            seed=self.seed,
            max_tokens=self.max_tokens,
            stop=tuple(self.stop_sequences or ()),
        )

    def structure(self) -> Structure | None:
        """What the answer must look like; ``output_format`` is the older name.

        Raises:
            ApiError: 400, it is malformed.
        """
        asked = (self.output_config or {}).get("format")
        configured = asked if isinstance(asked, Mapping) else None
        return one_structure(
            {
                "output_config.format": response_format("output_config.format", configured),
                "output_format": response_format("output_format", self.output_format),
            }
        )

    def session_key(self) -> str | None:
        """The conversation: named outright, or what an agent writes into ``metadata.user_id``."""
        user_id = (self.metadata or {}).get("user_id")
        is_session = isinstance(user_id, str) and "session" in user_id and len(user_id) <= 512
        return self.session_id or (str(user_id) if is_session else None)


@router.post("/v1/messages", summary="Answer a chat (Anthropic)")
async def create_message(body: MessagesRequest, request: Request) -> Response:
    """Anthropic's messages, tools and streaming included."""
    service = service_of(request)
    service.require_model(body.model)
    params, structure = body.params(), body.structure()
    ticket = service.admit()
    try:
        turn = await prepare_turn(
            service,
            body.openai_messages(),
            [params],
            tool_use=body.tool_use(),
            speculation=speculation(body.speculative, service.engine.speculation),
            structure=structure,
            session_key=body.session_key(),
            **_continued(body.messages[-1]),
        )
    except BaseException:
        ticket.close()
        raise
    writer = _Writer(service, turn, body.model or service.model_names[0])
    if body.stream:
        return stream(service, ticket, writer.events(), is_anthropic=True)
    return await answer(request, ticket, writer.whole())


@router.post("/v1/messages/count_tokens", summary="Count a prompt's tokens (Anthropic)")
async def count_tokens(body: CountRequest, request: Request) -> Response:
    """The size of the prompt that these messages make."""
    service = service_of(request)
    service.require_model(body.model)
    turn = await prepare_turn(
        service,
        body.openai_messages(),
        [SamplingParams()],
        tool_use=body.tool_use(),
        speculation=service.engine.speculation,
        **_continued(body.messages[-1]),
    )
    return JSONBytes({"input_tokens": len(turn.job.branches[0].prompt.token_ids)})


def _continued(last: AnthropicMessage) -> dict[str, Any]:
    """An assistant's text at the end is the beginning of the answer."""
    if last.role != "assistant":
        return {}
    text = _plain_text([block for block in _blocks(last.content) if block.get("type") == "text"])
    return {"continued_text": text} if text.strip() else {}


def _blocks(content: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _plain_text(content: Any) -> str:
    """Text of a string or of text blocks.

    Raises:
        ApiError: 400, a block of another type.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(400, "content must be a string or a list of blocks", param="messages")
    texts = []
    for block in content:
        if not isinstance(block, Mapping) or block.get("type") != "text":
            kind = block.get("type") if isinstance(block, Mapping) else type(block).__name__
            raise ApiError(
                400, f"a content block of type {str(kind)[:40]!r} is not supported; send text", param="messages"
            )
        texts.append(str(block.get("text", "")))
    return "\n".join(texts)


def _convert(message: AnthropicMessage) -> list[dict[str, Any]]:
    """One message; results of tools become messages of their own, before the user's words."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    texts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for block in message.content:
        kind = block.get("type")
        if kind == "tool_use":
            function = {"name": str(block.get("name", "")), "arguments": json.dumps(block.get("input") or {})}
            calls.append({"id": str(block.get("id", "")), "type": "function", "function": function})
        elif kind == "tool_result":
            text = _plain_text(block.get("content"))
            results.append({"role": "tool", "tool_call_id": str(block.get("tool_use_id", "")), "content": text})
        elif kind not in _SKIPPED_BLOCKS:
            texts.append(block)
    converted: list[dict[str, Any]] = list(results)
    if texts or calls or not results:
        said: dict[str, Any] = {"role": message.role, "content": _plain_text(texts)}
        if calls:
            said["tool_calls"] = calls
        converted.append(said)
    return converted


class _Writer:
    """Writes a turn as a ``message``, or as its events."""

    def __init__(self, service: Service, turn: Turn, model: str) -> None:
        self._service = service
        self._turn = turn
        self._model = model
        self._message_id = f"msg_{uuid.uuid4().hex[:24]}"

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The stream: message_start, blocks one after the other, message_delta, message_stop."""
        num_prompt = len(self._turn.job.branches[0].prompt.token_ids)
        is_started, blocks = False, _BlockWriter()
        async with aclosing(self._turn.parts(self._service)) as parts:
            async for _, _, new in parts:
                if not is_started:
                    # Sent with the first token, so that an error before it has an HTTP status of its own.
                    is_started = True
                    usage = {"input_tokens": num_prompt, "output_tokens": 0}
                    yield named_event("message_start", {"type": "message_start", "message": self._message([], usage)})
                for part in new:
                    for event in blocks.write(part):
                        yield event
        for event in blocks.close():
            yield event
        output = self._turn.job.outputs[0]
        yield named_event(
            "message_delta",
            {"type": "message_delta", "delta": self._stop(output), "usage": _usage(output), **self._report(output)},
        )
        yield named_event("message_stop", {"type": "message_stop"})

    async def whole(self) -> Response:
        """The answer in one piece."""
        content: list[dict[str, Any]] = []
        arguments: list[str] = []
        async with aclosing(self._turn.parts(self._service)) as parts:
            async for _, _, new in parts:
                for part in new:
                    _collect(part, content, arguments)
        calls = iter(arguments)
        for block in content:
            if block["type"] == "tool_use":
                block["input"] = _object(next(calls))
        output = self._turn.job.outputs[0]
        message = {**self._message(content, _usage(output)), **self._stop(output)}
        return JSONBytes({**message, **self._report(output)})

    def _message(self, content: Sequence[Mapping[str, Any]], usage: Mapping[str, int]) -> dict[str, Any]:
        return {
            "id": self._message_id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": list(content),
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }

    def _stop(self, output: Output) -> dict[str, Any]:
        stop = output.stop_reason if isinstance(output.stop_reason, str) else None
        reason = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}[self._turn.finish_reason(0)]
        return {"stop_reason": "stop_sequence" if stop is not None else reason, "stop_sequence": stop}

    def _report(self, output: Output) -> dict[str, Any]:
        job = self._turn.job
        return {"timings": reports.timings(output), "metrics": reports.metrics(output, job.speculation)}


class _BlockWriter:
    """Events of content blocks: one is open at a time."""

    def __init__(self) -> None:
        self._index = -1
        self._kind: str | None = None

    def write(self, part: Part) -> list[bytes]:
        """The events of one part."""
        if isinstance(part, TextPart):
            events = [] if self._kind == "text" else self._open("text", {"type": "text", "text": ""})
            return [*events, self._delta({"type": "text_delta", "text": part.text})]
        if isinstance(part, CallStart):
            block = {"type": "tool_use", "id": _tool_id(part.call_id), "name": part.name, "input": {}}
            return self._open("tool_use", block)
        return [self._delta({"type": "input_json_delta", "partial_json": part.fragment})]

    def close(self) -> list[bytes]:
        """The end of the block that is open; an answer without any block gets an empty one."""
        events = self._open("text", {"type": "text", "text": ""}) if self._index < 0 else []
        return [*events, self._stop()]

    def _open(self, kind: str, block: Mapping[str, Any]) -> list[bytes]:
        events = [self._stop()] if self._kind is not None else []
        self._index, self._kind = self._index + 1, kind
        start = {"type": "content_block_start", "index": self._index, "content_block": block}
        return [*events, named_event("content_block_start", start)]

    def _stop(self) -> bytes:
        self._kind = None
        return named_event("content_block_stop", {"type": "content_block_stop", "index": self._index})

    def _delta(self, delta: Mapping[str, Any]) -> bytes:
        data = {"type": "content_block_delta", "index": self._index, "delta": delta}
        return named_event("content_block_delta", data)


def _collect(part: Part, content: list[dict[str, Any]], arguments: list[str]) -> None:
    if isinstance(part, TextPart):
        if not content or content[-1]["type"] != "text":
            content.append({"type": "text", "text": ""})
        content[-1]["text"] += part.text
    elif isinstance(part, CallStart):
        content.append({"type": "tool_use", "id": _tool_id(part.call_id), "name": part.name, "input": {}})
        arguments.append("")
    else:
        arguments[-1] += part.fragment


def _tool_id(call_id: str) -> str:
    return "toolu_" + call_id.removeprefix("call_")


def _object(arguments: str) -> dict[str, Any]:
    """Arguments as an object; text that is not one stays readable under ``input``."""
    try:
        parsed = json.loads(arguments or "{}")
    except json.JSONDecodeError:
        parsed = None
    return parsed if isinstance(parsed, dict) else {"input": arguments}


def _usage(output: Output) -> dict[str, int]:
    """Anthropic's counts: ``input_tokens`` are those that had to be read anew."""
    usage = output.usage
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.completion_tokens,
    }

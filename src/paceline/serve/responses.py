"""POST /v1/responses and /v1/responses/input_tokens: OpenAI's newer format, stateless here."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import Field

from paceline.request import SamplingParams
from paceline.serve import reports
from paceline.serve.errors import ApiError
from paceline.serve.exchange import answer, service_of, stream
from paceline.serve.sampling import SpeculativeOptions, WireModel, speculation
from paceline.serve.service import Service
from paceline.serve.streaming import JSONBytes, named_event
from paceline.serve.structure import Structure, one_structure, response_format
from paceline.serve.tools import CallArguments, CallStart, Part, TextPart
from paceline.serve.turns import ToolUse, Turn, prepare_turn

router = APIRouter()


class ResponsesRequest(WireModel):
    """The body. Tools of types that only OpenAI can run are skipped."""

    input: str | list[dict[str, Any]] = ""
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**64)] | None = None
    stream: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["auto", "none", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    previous_response_id: str | None = None
    text: dict[str, Any] | None = None
    reasoning: Any = None
    include: Any = None
    truncation: Any = None
    store: bool | None = None
    metadata: dict[str, Any] | None = None
    prompt_cache_key: Annotated[str, Field(max_length=256)] | None = None
    session_id: Annotated[str, Field(max_length=256)] | None = None
    speculative: bool | SpeculativeOptions | None = None

    def params(self) -> SamplingParams:
        """The engine's parameters."""
        return SamplingParams(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            seed=self.seed,
            max_tokens=self.max_output_tokens,
        )

    def require_stateless(self) -> None:
        """Raises:
        ApiError: 400, the conversation would have to be known.
        """
        if self.previous_response_id is not None:
            raise ApiError(
                400,
                "responses are not stored; send the whole conversation as input instead of previous_response_id",
                param="previous_response_id",
                code="previous_response_not_found",
            )

    @property
    def text_format(self) -> Mapping[str, Any]:
        """``text.format``, or plain text."""
        asked = (self.text or {}).get("format")
        return asked if isinstance(asked, Mapping) else {"type": "text"}

    def structure(self) -> Structure | None:
        """What the answer must look like.

        Raises:
            ApiError: 400, it is malformed.
        """
        return one_structure({"text.format": response_format("text.format", self.text_format)})

    def tool_use(self) -> ToolUse:
        """The functions among the tools, as chat completions write them."""
        tools = []
        for tool in self.tools or ():
            if tool.get("type") == "function" and isinstance(tool.get("name"), str):
                function = {
                    key: tool[key] for key in ("name", "description", "parameters") if tool.get(key) is not None
                }
                tools.append({"type": "function", "function": function})
        if isinstance(self.tool_choice, dict):
            name = self.tool_choice.get("name")
            if not isinstance(name, str):
                raise ApiError(400, "tool_choice must name a function", param="tool_choice")
            return ToolUse(tools, name, is_named=True)
        return ToolUse(tools, self.tool_choice or "auto", is_parallel=self.parallel_tool_calls is not False)

    def messages(self) -> list[dict[str, Any]]:
        """The conversation as chat completions write it."""
        converted: list[dict[str, Any]] = []
        if self.instructions:
            converted.append({"role": "system", "content": self.instructions})
        items = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input
        for item in items:
            _add_item(item, converted)
        if not any(message["role"] != "system" for message in converted):
            converted.append({"role": "user", "content": ""})  # agents probe a server with an empty input
        return converted


@router.post("/v1/responses", summary="Answer a chat (Responses)")
async def create_response(body: ResponsesRequest, request: Request) -> Response:
    """OpenAI's responses, function tools and streaming included; nothing is stored."""
    service = service_of(request)
    model = service.require_model(body.model)
    body.require_stateless()
    ticket = service.admit()
    try:
        turn = await _prepare(service, body)
    except BaseException:
        ticket.close()
        raise
    writer = _Writer(service, turn, model, body)
    if body.stream:
        return stream(service, ticket, writer.events())
    return await answer(request, ticket, writer.whole())


@router.post("/v1/responses/input_tokens", summary="Count a prompt's tokens (Responses)")
async def count_input_tokens(body: ResponsesRequest, request: Request) -> Response:
    """The size of the prompt that this input makes."""
    service = service_of(request)
    turn = await _prepare(service, body)
    num_tokens = len(turn.job.branches[0].prompt.token_ids)
    return JSONBytes({"object": "response.input_tokens", "input_tokens": num_tokens})


async def _prepare(service: Service, body: ResponsesRequest) -> Turn:
    return await prepare_turn(
        service,
        body.messages(),
        [body.params()],
        tool_use=body.tool_use(),
        speculation=speculation(body.speculative, service.engine.speculation),
        structure=body.structure(),
        session_key=body.session_id or body.prompt_cache_key,
    )


def _add_item(item: Mapping[str, Any], messages: list[dict[str, Any]]) -> None:
    """One input item; items of types unknown here are skipped, as their output would be."""
    kind = item.get("type", "message" if "role" in item else None)
    if kind == "message":
        role = item.get("role")
        if role not in ("user", "assistant", "system", "developer"):
            raise ApiError(400, f"an input message has the role {str(role)[:40]!r}", param="input")
        messages.append({"role": role, "content": _text(item.get("content"))})
    elif kind == "function_call":
        function = {"name": str(item.get("name", "")), "arguments": item.get("arguments") or "{}"}
        call = {"id": str(item.get("call_id", "")), "type": "function", "function": function}
        if messages and messages[-1]["role"] == "assistant":
            messages[-1].setdefault("tool_calls", []).append(call)
        else:
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
    elif kind == "function_call_output":
        text = _text(item.get("output"))
        messages.append({"role": "tool", "tool_call_id": str(item.get("call_id", "")), "content": text})


def _text(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(400, "content must be a string or a list of parts", param="input")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in ("input_text", "output_text", "text", "refusal", "summary_text"):
            raise ApiError(400, f"a content part of type {str(kind)[:40]!r} is not supported; send text", param="input")
        texts.append(str(part.get("text") or part.get("refusal") or ""))
    return "\n".join(texts)


class _Writer:
    """Writes a turn as a ``response``, or as its events."""

    def __init__(self, service: Service, turn: Turn, model: str, body: ResponsesRequest) -> None:
        self._service = service
        self._turn = turn
        self._items = _Items()
        self._number = 0
        choice = body.tool_choice
        self._base: dict[str, Any] = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "tool_choice": choice or "auto",
            "tools": body.tools or [],
            "store": False,
            "text": {"format": dict(body.text_format)},
        }

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The stream."""
        is_started = False
        async with aclosing(self._turn.parts(self._service)) as parts:
            async for _, _, new in parts:
                if not is_started:
                    is_started = True
                    snapshot = {**self._base, "status": "in_progress", "output": [], "usage": None}
                    yield self._event("response.created", {"response": snapshot})
                    yield self._event("response.in_progress", {"response": snapshot})
                for part in new:
                    for name, data in self._items.write(part):
                        yield self._event(name, data)
        for name, data in self._items.close():
            yield self._event(name, data)
        response = self._response()
        yield self._event(f"response.{response['status']}", {"response": response})

    async def whole(self) -> Response:
        """The answer in one piece."""
        async with aclosing(self._turn.parts(self._service)) as parts:
            async for _, _, new in parts:
                for part in new:
                    self._items.write(part)
        self._items.close()
        return JSONBytes(self._response())

    def _event(self, name: str, data: Mapping[str, Any]) -> bytes:
        number, self._number = self._number, self._number + 1
        return named_event(name, {"type": name, "sequence_number": number, **data})

    def _response(self) -> dict[str, Any]:
        job, output = self._turn.job, self._turn.job.outputs[0]
        is_cut = output.finish_reason == "length"
        usage = output.usage
        return {
            **self._base,
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": self._items.done,
            "usage": {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            },
            "timings": reports.timings(output),
            "metrics": reports.metrics(output, job.speculation),
        }


class _Items:
    """Output items as they grow; ``done`` holds those that are complete."""

    def __init__(self) -> None:
        self.done: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None

    def write(self, part: Part) -> list[tuple[str, dict[str, Any]]]:
        """The events of one part."""
        events: list[tuple[str, dict[str, Any]]] = []
        if isinstance(part, TextPart):
            if self._open is None or self._open["type"] != "message":
                events += self.close() if self._open is not None else []
                events += self._begin_message()
            assert self._open is not None
            self._open["content"][0]["text"] += part.text
            data = {**self._place(), "content_index": 0, "delta": part.text, "logprobs": []}
            events.append(("response.output_text.delta", data))
        elif isinstance(part, CallStart):
            events += self.close() if self._open is not None else []
            self._open = {
                "type": "function_call",
                "id": f"fc_{uuid.uuid4().hex}",
                "call_id": part.call_id,
                "name": part.name,
                "arguments": "",
                "status": "in_progress",
            }
            events.append(("response.output_item.added", {**self._index(), "item": dict(self._open)}))
        elif isinstance(part, CallArguments):
            assert self._open is not None
            self._open["arguments"] += part.fragment
            events.append(("response.function_call_arguments.delta", {**self._place(), "delta": part.fragment}))
        return events

    def close(self) -> list[tuple[str, dict[str, Any]]]:
        """Complete the item that is open; an answer without any gets an empty message."""
        events: list[tuple[str, dict[str, Any]]] = []
        if self._open is None:
            if self.done:
                return events
            events += self._begin_message()
        item = self._open
        assert item is not None
        if item["type"] == "message":
            part, where = item["content"][0], {**self._place(), "content_index": 0}
            events.append(("response.output_text.done", {**where, "text": part["text"], "logprobs": []}))
            events.append(("response.content_part.done", {**where, "part": part}))
        else:
            data = {**self._place(), "name": item["name"], "arguments": item["arguments"]}
            events.append(("response.function_call_arguments.done", data))
        item["status"] = "completed"
        events.append(("response.output_item.done", {**self._index(), "item": item}))
        self.done.append(item)
        self._open = None
        return events

    def _begin_message(self) -> list[tuple[str, dict[str, Any]]]:
        head = {"type": "message", "id": f"msg_{uuid.uuid4().hex}", "role": "assistant", "status": "in_progress"}
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        self._open = {**head, "content": [part]}
        added = ("response.output_item.added", {**self._index(), "item": {**head, "content": []}})
        return [added, ("response.content_part.added", {**self._place(), "content_index": 0, "part": dict(part)})]

    def _index(self) -> dict[str, Any]:
        return {"output_index": len(self.done)}

    def _place(self) -> dict[str, Any]:
        assert self._open is not None
        return {"item_id": self._open["id"], "output_index": len(self.done)}

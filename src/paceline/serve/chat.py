"""POST /v1/chat/completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import Field

from paceline.engine.output import Delta
from paceline.records import TokenLogprob
from paceline.serve import reports
from paceline.serve.errors import ApiError
from paceline.serve.exchange import answer, service_of, stream
from paceline.serve.sampling import SamplingFields, WireModel, speculation
from paceline.serve.service import Service
from paceline.serve.streaming import DONE, JSONBytes, data_event
from paceline.serve.tools import CallArguments, CallStart, Part, TextPart
from paceline.serve.turns import ToolUse, Turn, prepare_turn

router = APIRouter()


class FunctionSpec(WireModel):
    """What a tool is called and takes."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(WireModel):
    """A function the model may call."""

    type: Literal["function"] = "function"
    function: FunctionSpec


class Message(WireModel):
    """One message; what a role may carry is the chat template's to say."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None


class Prediction(WireModel):
    """Text the answer is expected to repeat."""

    type: Literal["content"] = "content"
    content: str | list[dict[str, Any]]

    @property
    def text(self) -> str:
        """As one string."""
        if isinstance(self.content, str):
            return self.content
        return "".join(str(part.get("text", "")) for part in self.content)


class ChatRequest(SamplingFields):
    """The body."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["auto", "none", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    prediction: Prediction | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    def tool_use(self) -> ToolUse:
        """The tools and whether they must be used.

        Raises:
            ApiError: 400, a tool_choice of an unknown shape.
        """
        tools = [tool.model_dump(exclude_none=True) for tool in self.tools or ()]
        if isinstance(self.tool_choice, dict):
            function = self.tool_choice.get("function")
            name = function.get("name") if isinstance(function, dict) else None
            if not isinstance(name, str):
                raise ApiError(400, "tool_choice must name a function", param="tool_choice")
            return ToolUse(tools, name, is_named=True)
        return ToolUse(tools, self.tool_choice or "auto", is_parallel=self.parallel_tool_calls is not False)


@router.post("/v1/chat/completions", summary="Answer a chat")
async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
    """OpenAI's chat completions, with vLLM's sampling fields, ``prediction``, ``speculative`` and sessions."""
    service = service_of(request)
    model = service.require_model(body.model)
    structure = body.structure()
    num_choices = body.n or 1
    max_tokens = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    num_top = (body.top_logprobs or 0) if body.logprobs else None
    params = [body.params(max_tokens=max_tokens, logprobs=num_top, choice=index) for index in range(num_choices)]
    messages = [message.model_dump(exclude_none=True) for message in body.messages]
    ticket = service.admit(num_choices)
    try:
        turn = await prepare_turn(
            service,
            messages,
            params,
            tool_use=body.tool_use(),
            speculation=speculation(body.speculative, service.engine.speculation),
            structure=structure,
            prediction=body.prediction.text if body.prediction else None,
            session_key=body.session_key,
            **_template_options(body),
        )
    except BaseException:
        ticket.close()
        raise
    writer = _Writer(service, turn, model, body)
    if body.stream:
        return stream(service, ticket, writer.chunks())
    return await answer(request, ticket, writer.whole())


def _template_options(body: ChatRequest) -> dict[str, Any]:
    """Variables of the template, and where the answer starts: after its own opening, or where the last message stops.

    Raises:
        ApiError: 400, there is no text to continue.
    """
    options = dict(body.chat_template_kwargs or {})
    for reserved in ("messages", "tools", "session_key", "answer_prefix", "structure", "continued_text"):
        options.pop(reserved, None)
    if not body.continue_final_message:
        return {**options, "add_generation_prompt": body.add_generation_prompt}
    last = body.messages[-1]
    if last.role != "assistant" or not isinstance(last.content, str) or not last.content:
        raise ApiError(400, "continue_final_message needs an assistant's text as the last message")
    return {**options, "continued_text": last.content}


class _Writer:
    """Writes a turn as a ``chat.completion``, or as its chunks."""

    def __init__(self, service: Service, turn: Turn, model: str, body: ChatRequest) -> None:
        self._service = service
        self._turn = turn
        self._body = body
        self._options = body.stream_options
        self._head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """The stream, the closing mark included."""
        started: set[int] = set()
        async with aclosing(self._turn.parts(self._service)) as parts:
            async for index, delta, new in parts:
                first = index not in started
                started.add(index)
                yield self._chunk(index, self._delta(new, first=first), delta)
        if self._options is not None and self._options.include_usage:
            yield data_event({**self._chunk_head(), "choices": [], "usage": self._usage(), **self._report()})
        yield DONE

    async def whole(self) -> Response:
        """The answer in one piece."""
        turn, job = self._turn, self._turn.job
        texts: list[list[str]] = [[] for _ in job.branches]
        calls: list[list[dict[str, Any]]] = [[] for _ in job.branches]
        async with aclosing(turn.parts(self._service)) as parts:
            async for index, _, new in parts:
                for part in new:
                    _collect(part, texts[index], calls[index])
        choices = []
        for index, output in sorted(job.outputs.items()):
            text = "".join(texts[index])
            message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
            if calls[index]:
                message |= {"content": text or None, "tool_calls": calls[index]}
            choices.append(
                {
                    "index": index,
                    "message": message,
                    "logprobs": self._logprobs(output.logprobs or ()) if self._body.logprobs else None,
                    "finish_reason": turn.finish_reason(index),
                    "stop_reason": output.stop_reason,
                }
            )
        body = {**self._head, "object": "chat.completion", "choices": choices, "usage": self._usage()}
        return JSONBytes({**body, **self._report()})

    def _chunk(self, index: int, content: dict[str, Any], delta: Delta) -> bytes:
        turn = self._turn
        choice: dict[str, Any] = {"index": index, "delta": content, "logprobs": None, "finish_reason": None}
        if self._body.logprobs and delta.logprobs:
            choice["logprobs"] = self._logprobs(delta.logprobs)
        if self._options is not None and self._options.include_origins:
            choice["origins"] = [[piece.text, piece.origin] for piece in delta.pieces]
        chunk = {**self._chunk_head(), "choices": [choice]}
        if delta.output is not None:
            choice["finish_reason"] = turn.finish_reason(index)
            choice["stop_reason"] = delta.output.stop_reason
            is_last = len(turn.job.outputs) == len(turn.job.branches)
            if is_last and not (self._options is not None and self._options.include_usage):
                chunk |= {"usage": self._usage(), **self._report()}
        return data_event(chunk)

    def _delta(self, parts: Sequence[Part], *, first: bool) -> dict[str, Any]:
        text = "".join(part.text for part in parts if isinstance(part, TextPart))
        delta: dict[str, Any] = {"role": "assistant", "content": text} if first else {}
        if text:
            delta["content"] = text
        calls: dict[int, dict[str, Any]] = {}
        for part in parts:
            if isinstance(part, CallStart):
                function = {"name": part.name, "arguments": ""}
                calls[part.index] = {
                    "index": part.index,
                    "id": part.call_id,
                    "type": "function",
                    "function": function,
                }
            elif isinstance(part, CallArguments):
                call = calls.setdefault(part.index, {"index": part.index, "function": {"arguments": ""}})
                call["function"]["arguments"] += part.fragment
        if calls:
            delta["tool_calls"] = list(calls.values())
        return delta

    def _chunk_head(self) -> dict[str, Any]:
        return {**self._head, "object": "chat.completion.chunk"}

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        return {"content": reports.chat_logprobs(self._service.engine.tokenizer, entries), "refusal": None}

    def _usage(self) -> dict[str, Any]:
        return reports.openai_usage(self._turn.job.outputs.values(), num_predicted=self._turn.num_predicted)

    def _report(self) -> dict[str, Any]:
        output, job = self._turn.job.outputs[0], self._turn.job
        return {"timings": reports.timings(output), "metrics": reports.metrics(output, job.speculation)}


def _collect(part: Part, texts: list[str], calls: list[dict[str, Any]]) -> None:
    if isinstance(part, TextPart):
        texts.append(part.text)
    elif isinstance(part, CallStart):
        calls.append({"id": part.call_id, "type": "function", "function": {"name": part.name, "arguments": ""}})
    else:
        calls[part.index]["function"]["arguments"] += part.fragment

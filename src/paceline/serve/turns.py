"""One turn of a chat, whatever wire format asked for it: prompt, tools, generations, and their text read as parts."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from paceline.engine.output import Delta
from paceline.request import SamplingParams, Speculation
from paceline.serve.errors import ApiError
from paceline.serve.service import Branch, Job, Service
from paceline.serve.tools import Part, TextPart, ToolCallParser, adapt_messages, detect_format


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a turn, as OpenAI writes them. ``choice`` is auto, none, required, or a function's name."""

    tools: Sequence[Mapping[str, Any]] = ()
    choice: str = "auto"
    is_named: bool = False

    @property
    def names(self) -> list[str]:
        """The functions' names."""
        return [str(tool["function"]["name"]) for tool in self.tools]


@dataclass(frozen=True, slots=True)
class Turn:
    """A job and how to read its answers; ``num_predicted`` is the size of the client's prediction in tokens."""

    job: Job
    parsers: Sequence[ToolCallParser | None]
    opening: str
    num_predicted: int

    def finish_reason(self, index: int) -> str:
        """OpenAI's word for why a finished choice ended."""
        parser = self.parsers[index]
        if parser is not None and parser.num_calls:
            return "tool_calls"
        return self.job.outputs[index].finish_reason

    async def parts(self, service: Service) -> AsyncGenerator[tuple[int, Delta, list[Part]], None]:
        """Generate: (choice, delta, what is certain of its text). Text of the delta may come with a later one."""
        fresh = set(range(len(self.parsers)))
        async with aclosing(service.run(self.job)) as deltas:
            async for index, delta in deltas:
                parser = self.parsers[index]
                if parser is None:
                    parts: list[Part] = [TextPart(delta.text)] if delta.text else []
                else:
                    opening = self.opening if index in fresh else ""
                    parts = parser.push(opening + delta.text)
                    if delta.output is not None:
                        parts += parser.close()
                fresh.discard(index)
                yield index, delta, parts


async def prepare_turn(
    service: Service,
    messages: Sequence[Mapping[str, Any]],
    params: Sequence[SamplingParams],
    *,
    tool_use: ToolUse,
    speculation: Speculation,
    prediction: str | None = None,
    session_key: str | None = None,
    **template_options: Any,
) -> Turn:
    """Render, tokenise, and choose the parser.

    Raises:
        ApiError: 400 or 413, tools that cannot be used.
        ChatTemplateError: the template rejects the messages.
    """
    _check_tools(tool_use, service.config.max_tool_schema_bytes)
    tokenizer = service.engine.tokenizer
    tool_format = detect_format(tokenizer.chat_template)
    is_calling = bool(tool_use.tools) and tool_use.choice != "none"
    adapted = adapt_messages(messages, tool_use.tools, tool_format)
    opening = ""
    if is_calling and tool_use.choice != "auto":
        opening = tool_format.call_prefix(tool_use.choice if tool_use.is_named else None)
    tools = list(tool_use.tools) if tool_use.tools and tool_format.is_in_template else None
    prompt = await service.chat_prompt(
        adapted, session_key=session_key, answer_prefix=opening, tools=tools, **template_options
    )
    if is_calling and tool_format.shows_special_tokens:
        params = [replace(one, skip_special_tokens=False) for one in params]
    # A session has one continuation: the first choice's.
    prompts = [prompt, *[replace(prompt, conversation=None)] * (len(params) - 1)]
    branches = [Branch(one, choice) for one, choice in zip(prompts, params, strict=True)]
    parsers = [ToolCallParser(tool_format, tool_use.names) if is_calling else None for _ in params]
    num_predicted = len(tokenizer.encode(prediction)) if prediction else 0
    return Turn(Job(branches, speculation, prediction), parsers, opening, num_predicted)


def _check_tools(tool_use: ToolUse, max_bytes: int) -> None:
    if tool_use.is_named and tool_use.choice not in tool_use.names:
        raise ApiError(400, f"tool_choice names {tool_use.choice!r}, which is not among the tools", param="tool_choice")
    if tool_use.choice == "required" and not tool_use.tools:
        raise ApiError(400, "tool_choice 'required' needs tools", param="tool_choice")
    if tool_use.tools:
        try:
            size = len(json.dumps(list(tool_use.tools)))
        except (TypeError, ValueError, RecursionError):
            raise ApiError(400, "the tools are not plain JSON", param="tools") from None
        if size > max_bytes:
            raise ApiError(413, f"the tools take {size} bytes, more than the {max_bytes} allowed", param="tools")

"""One turn of a chat, whatever wire format asked for it: prompt, tools, generations, and their text read as parts."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from paceline.engine.output import Delta
from paceline.errors import GrammarError
from paceline.request import SamplingParams, Speculation, StructuredOutput
from paceline.serve.call_grammar import call_grammar
from paceline.serve.errors import ApiError
from paceline.serve.service import Branch, Job, Service
from paceline.serve.structure import Structure, compile_structure
from paceline.serve.tools import Part, TextPart, ToolCallParser, ToolFormat, adapt_messages, detect_format

log = logging.getLogger("paceline.serve")


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a turn, as OpenAI writes them. ``choice`` is auto, none, required, or a function's name.

    Where a call is required, ``is_parallel`` allows several; a named function is called once.
    """

    tools: Sequence[Mapping[str, Any]] = ()
    choice: str = "auto"
    is_named: bool = False
    is_parallel: bool = True

    @property
    def names(self) -> list[str]:
        """The functions' names."""
        return [str(tool["function"]["name"]) for tool in self.tools]

    @property
    def called(self) -> Sequence[Mapping[str, Any]]:
        """The tools that may be called: the named one, or all."""
        if not self.is_named:
            return self.tools
        return [tool for tool in self.tools if tool["function"]["name"] == self.choice][:1]


@dataclass(frozen=True, slots=True)
class Turn:
    """A job and how to read its answers; ``num_predicted`` is the size of the client's prediction in tokens."""

    job: Job
    parsers: Sequence[ToolCallParser | None]
    opening: str
    num_predicted: int

    def finish_reason(self, index: int) -> str:
        """OpenAI's word for why a finished choice ended; a call that was cut off is none to be made."""
        parser, reason = self.parsers[index], self.job.outputs[index].finish_reason
        return "tool_calls" if parser is not None and parser.num_calls and reason == "stop" else reason

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
    structure: Structure | None = None,
    prediction: str | None = None,
    session_key: str | None = None,
    **template_options: Any,
) -> Turn:
    """Render, tokenise, and choose the parser.

    Raises:
        ApiError: 400 or 413, tools or a structure that cannot be used.
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
    structured = await _structured(service, structure, tool_use, tool_format if is_calling else None)
    params = [replace(one, structured=structured) for one in params]
    if is_calling and tool_format.shows_special_tokens:
        params = [replace(one, skip_special_tokens=False) for one in params]
    # A session has one continuation: the first choice's.
    prompts = [prompt, *[replace(prompt, conversation=None)] * (len(params) - 1)]
    branches = [Branch(one, choice) for one, choice in zip(prompts, params, strict=True)]
    parsers = [ToolCallParser(tool_format, tool_use.names) if is_calling else None for _ in params]
    num_predicted = len(tokenizer.encode(prediction)) if prediction else 0
    return Turn(Job(branches, speculation, prediction), parsers, opening, num_predicted)


async def _structured(
    service: Service, structure: Structure | None, tool_use: ToolUse, tool_format: ToolFormat | None
) -> StructuredOutput | None:
    """What the answer must look like: a call where one is required, else what was asked for, or a call instead of it.

    A required call whose tools cannot be held to their schemas is only begun for the model, unless one is strict.
    """
    engine, limit = service.engine, service.config.max_grammar_bytes
    if structure is not None:
        await compile_structure(engine, structure, limit)
    output = structure.output if structure is not None else None
    is_begun = tool_use.choice != "auto"
    if tool_format is None or not (is_begun or (output is not None and output.kind in ("json_schema", "json_object"))):
        return output
    calls = call_grammar(
        tool_use.called,
        tool_format,
        engine.tokenizer,
        is_named=tool_use.is_named,
        is_parallel=tool_use.is_parallel,
        answer=None if is_begun else output,
    )
    try:
        await engine.compile_grammar(calls)
    except GrammarError as error:
        if output is not None or any(tool["function"].get("strict") for tool in tool_use.called):
            raise ApiError(400, f"the tools: {error}", param="tools", code="invalid_grammar") from None
        log.warning("arguments of a required call are not held to their schema: %s", error)
        return None
    return calls


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

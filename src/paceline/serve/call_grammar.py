"""The grammar of tool calls in a model's own format, with each tool's arguments held to its JSON schema."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paceline.loader.tokenizer import Tokenizer
from paceline.request import StructuredOutput
from paceline.sampling.grammar import JSON_OPTIONS
from paceline.serve.tools import LLAMA3, MISTRAL, ToolFormat


def call_grammar(
    tools: Sequence[Mapping[str, Any]],
    tool_format: ToolFormat,
    tokenizer: Tokenizer,
    *,
    is_named: bool,
    is_parallel: bool,
    answer: StructuredOutput | None = None,
) -> StructuredOutput:
    """A call of one of the tools, or several.

    Without ``answer`` the prompt ends with :meth:`ToolFormat.call_prefix`, and the grammar says how that goes on. With
    it, the model may give that answer, which is JSON, or write a call from its beginning.

    Args:
        tools: those that may be called, as OpenAI writes them.
        tool_format: how a call is written.
        tokenizer: knows which marks of the format are special tokens.
        is_named: the prefix holds the name, of the only tool.
        is_parallel: several calls may be made, where the format has a way to write them.
    """
    marks = {text: _mark(text, tokenizer) for text in (tool_format.opening, tool_format.closing) if text}
    opening, closing, between = _brackets(tool_format, marks.__getitem__)
    begin = _quoted('{"name": "')
    several = f"({between} {begin} call)*" if between and is_parallel and not is_named else ""
    calls = f"call {several} {closing}"
    lines = [f"start: {calls}" if answer is None else f"start: answer | {opening} {begin} {calls}"]
    lines.append("call: " + " | ".join(f"call_{index}" for index in range(len(tools))))
    for index, tool in enumerate(tools):
        function = tool["function"]
        name = json.dumps(function["name"])[1:-1]
        head = "" if is_named else _quoted(f'{name}", "{tool_format.arguments_key}": ')
        lines.append(f'call_{index}: {head} arguments_{index} "}}"')
        lines.append(f"arguments_{index}: %json {json.dumps(_arguments(function))}")
    if answer is not None:
        lines.append(f"answer: %json {json.dumps(_answer(answer))}")
    return StructuredOutput.grammar("\n".join(lines))


def _brackets(tool_format: ToolFormat, mark: Callable[[str], str]) -> tuple[str, str, str]:
    """What stands before the first call, behind the last one, and between two; nothing where there can be only one."""
    opening = mark(tool_format.opening)
    if tool_format is LLAMA3:
        return opening, "", ""
    if tool_format is MISTRAL:
        return f'{opening} "["', '"]"', '", "'
    closing = f'"\\n"? {mark(tool_format.closing)}'
    opening = f'{opening} "\\n"?'
    return opening, closing, f'{closing} "\\n"? {opening}'


def _mark(text: str, tokenizer: Tokenizer) -> str:
    """A mark of the format: a special token where it is one, else its letters."""
    token_ids = tokenizer.encode(text)
    return f"<[{token_ids[0]}]>" if len(token_ids) == 1 and tokenizer.is_special(token_ids[0]) else _quoted(text)


def _arguments(function: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a function's arguments; those that are not declared do not exist, unless it says so.

    Keywords the grammar knows nothing of are passed over: tools come with all sorts, and most only describe.
    """
    parameters = function.get("parameters")
    declared = parameters if isinstance(parameters, Mapping) else {}
    closed = {} if {"additionalProperties", "patternProperties"} & declared.keys() else {"additionalProperties": False}
    return {"type": "object", **declared, **closed, "x-guidance": {**JSON_OPTIONS, "lenient": True}}


def _answer(answer: StructuredOutput) -> dict[str, Any]:
    schema: dict[str, Any] = json.loads(answer.text) if answer.kind == "json_schema" else {"type": "object"}
    return {**schema, "x-guidance": {**JSON_OPTIONS, **(schema.get("x-guidance") or {})}}


def _quoted(text: str) -> str:
    """Text as a literal of the grammar."""
    return json.dumps(text)

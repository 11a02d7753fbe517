"""Tool calls in the text of a model: which format its chat template teaches, and how to read it while it streams."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.loader.chat import content_text
from paceline.serve.call_scanner import CallScanner


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a family of models writes a call.

    ``opening`` and ``closing`` stand around one call or a list of them; with ``is_bare`` a call may also start the
    answer without an opening. ``arguments_key`` is the JSON field of the arguments.
    """

    name: str
    opening: str
    closing: str
    arguments_key: str = "arguments"
    is_bare: bool = False
    shows_special_tokens: bool = False
    is_in_template: bool = True

    def call_prefix(self, name: str | None) -> str:
        """The beginning of an answer that must call a tool, as far as it is certain."""
        opening = self.opening + ("[" if self.name == "mistral" else "\n" if self.name == "hermes" else "")
        head = opening + '{"name": "'
        return head if name is None else f'{head}{name}", "{self.arguments_key}": '


HERMES = ToolFormat("hermes", "<tool_call>", "</tool_call>")
LLAMA3 = ToolFormat(
    "llama3_json", "<|python_tag|>", "", arguments_key="parameters", is_bare=True, shows_special_tokens=True
)
MISTRAL = ToolFormat("mistral", "[TOOL_CALLS]", "", shows_special_tokens=True)
PLAIN = ToolFormat("plain", "<tool_call>", "</tool_call>", is_in_template=False)


def detect_format(chat_template: str | None) -> ToolFormat:
    """The format a chat template teaches; PLAIN for one that knows nothing of tools."""
    source = chat_template or ""
    if "[TOOL_CALLS]" in source:
        return MISTRAL
    if "tools" not in source:
        return PLAIN
    if "<|python_tag|>" in source or ('"parameters"' in source and "ipython" in source):
        return LLAMA3
    return HERMES


# ---- prompts -----------------------------------------------------------------------------------------------

_INSTRUCTIONS = """You may call the functions described here, one JSON object per line:
<tools>
{tools}
</tools>
To call one, write its name and arguments as JSON between tags, and nothing after it:
<tool_call>
{{"name": "function_name", "arguments": {{"parameter": "value"}}}}
</tool_call>"""


def adapt_messages(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], tool_format: ToolFormat
) -> list[dict[str, Any]]:
    """Messages as a template expects them: arguments as objects; written out as text where it knows no tools."""
    adapted = [_with_objects(message) for message in messages]
    if tool_format.is_in_template:
        return adapted
    adapted = [_as_text(message) for message in adapted]
    if tools:
        listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
        instructions = _INSTRUCTIONS.format(tools=listed)
        if adapted and adapted[0]["role"] in ("system", "developer"):
            adapted[0] = {**adapted[0], "content": f"{_text_of(adapted[0])}\n\n{instructions}"}
        else:
            adapted.insert(0, {"role": "system", "content": instructions})
    return adapted


def _with_objects(message: Mapping[str, Any]) -> dict[str, Any]:
    plain = {key: value for key, value in message.items() if value is not None or key == "content"}
    if plain.get("content") is None:
        plain["content"] = ""
    calls = plain.get("tool_calls")
    if not calls:
        plain.pop("tool_calls", None)
        return plain
    plain["tool_calls"] = [{**call, "function": _parsed_function(call.get("function") or {})} for call in calls]
    return plain


def _parsed_function(function: Mapping[str, Any]) -> dict[str, Any]:
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except json.JSONDecodeError:
            arguments = {"input": arguments}  # a call the model got wrong, in a history that is sent back
    return {**function, "arguments": arguments}


def _as_text(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{_text_of(message)}\n</tool_response>"}
    calls = message.pop("tool_calls", None)
    if calls:
        written = [f"<tool_call>\n{json.dumps(_call_object(call), ensure_ascii=False)}\n</tool_call>" for call in calls]
        message["content"] = "\n".join(filter(None, [_text_of(message), *written]))
    return message


def _call_object(call: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": call["function"].get("name", ""), "arguments": call["function"]["arguments"]}


def _text_of(message: Mapping[str, Any]) -> str:
    return content_text(message.get("content") or "")


# ---- answers -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TextPart:
    """Words to the user."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call begins; ``index`` counts the answer's calls."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A further piece of a call's arguments, which together are JSON text."""

    index: int
    fragment: str


Part = TextPart | CallStart | CallArguments

_BETWEEN_CALLS = re.compile(r"[\s,;\[\]]*")
_NAMED = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\][\w-]*)?\[ARGS\]\s*")  # a later spelling of Mistral's


class ToolCallParser:
    """Splits an answer into text and calls as it comes. Text that only looked like a call comes out as text."""

    def __init__(self, tool_format: ToolFormat, tool_names: Sequence[str]) -> None:
        self._format = tool_format
        self._names = frozenset(tool_names)
        self._pending = ""  # not decided yet
        self._raw = ""  # what the call in progress has consumed, to be given back if it is none
        self._scanner: CallScanner | None = None
        self._is_between = False  # after an opening, outside a call
        self._is_at_start = True
        self._is_after_call = False
        self._space = ""
        self.num_calls = 0
        self._is_announced = False

    def push(self, text: str) -> list[Part]:
        """The parts that are certain with this text."""
        self._pending += text
        parts: list[Part] = []
        while self._pending and self._advance(parts):
            pass
        return parts

    def close(self) -> list[Part]:
        """The answer is over: what is undecided is text, an unfinished call stays as it is."""
        rest, self._pending = self._pending, ""
        if self._scanner is not None and not self._is_announced:
            rest = self._raw + rest
        elif self._scanner is not None or self._is_between:
            rest = rest if self._raw and not self._is_announced else ""
        self._scanner, self._is_between = None, False
        rest = self._space + rest
        if self._is_after_call:
            rest = rest.lstrip()
        return [TextPart(rest)] if rest.strip() or (rest and not self.num_calls) else []

    def _advance(self, parts: list[Part]) -> bool:
        """Consume some of what is pending; False when more text is needed."""
        if self._scanner is not None:
            return self._scan(self._scanner, parts)
        if self._is_between:
            return self._find_call(parts)
        return self._find_opening(parts)

    def _find_opening(self, parts: list[Part]) -> bool:
        text, opening = self._pending, self._format.opening
        if self._is_at_start and self._format.is_bare:
            stripped = text.lstrip()
            if not stripped:
                return False
            if stripped[0] == "{":
                self._enter(text[: len(text) - len(stripped)], stripped)
                return True
        at = text.find(opening)
        if at >= 0:
            self._say(text[:at], parts)
            self._enter(opening, text[at + len(opening) :])
            return True
        kept = _overlap(text, opening)
        self._say(text[: len(text) - kept], parts)
        self._pending = text[len(text) - kept :]
        return False

    def _enter(self, consumed: str, rest: str) -> None:
        self._is_between, self._is_at_start = True, False
        self._raw, self._pending, self._space = consumed, rest, ""

    def _find_call(self, parts: list[Part]) -> bool:
        match = _BETWEEN_CALLS.match(self._pending)
        assert match is not None
        rest = self._pending[match.end() :]
        if not rest:
            return False
        closing = self._format.closing
        if closing and rest.startswith(closing):
            self._is_between = False
            self._pending, self._raw = rest[len(closing) :], ""
            return True
        if rest[0] == "{":
            self._begin(self._pending[: match.end()], rest, "")
            return True
        if self._format is MISTRAL and (named := _NAMED.match(rest)):
            self._begin(self._pending[: match.end()] + named.group(), rest[named.end() :], named.group(1))
            return True
        if (closing and closing.startswith(rest)) or (self._format is MISTRAL and len(rest) < 200 and "{" not in rest):
            return False
        self._pending = self._raw + self._pending
        self._raw, self._is_between = "", False
        text, self._pending = self._pending, ""
        self._say(text, parts)
        return True

    def _begin(self, skipped: str, rest: str, name: str) -> None:
        self._raw += skipped
        self._pending = rest
        self._scanner = CallScanner(self._format.arguments_key, name=name)
        self._is_announced = False

    def _scan(self, scanner: CallScanner, parts: list[Part]) -> bool:
        num_used = scanner.push(self._pending)
        self._raw += self._pending[:num_used]
        self._pending = self._pending[num_used:]
        is_known = scanner.name is not None and (not self._names or scanner.name in self._names)
        if scanner.is_broken or (scanner.name is not None and not is_known) or (scanner.is_done and not is_known):
            if not self._is_announced:
                self._say(self._raw, parts)
            self._scanner, self._is_between, self._raw = None, False, ""
            return True
        if is_known and not self._is_announced and (scanner.has_arguments or scanner.is_done):
            assert scanner.name is not None
            parts.append(CallStart(self.num_calls, new_call_id(), scanner.name))
            self._is_announced = True
            self.num_calls += 1
        fragment = scanner.take_arguments() if self._is_announced else ""
        if scanner.is_done and not scanner.has_arguments:
            fragment = "{}"
        if fragment:
            parts.append(CallArguments(self.num_calls - 1, fragment))
        if scanner.is_done:
            self._scanner, self._raw = None, ""
            self._is_after_call = True
        return scanner.is_done

    def _say(self, text: str, parts: list[Part]) -> None:
        if not text.strip() and (self._is_at_start or self.num_calls):
            self._space += text  # white space around calls is the format's, not the answer's
        elif text:
            text = self._space + text
            parts.append(TextPart(text.lstrip() if self._is_after_call else text))
            self._is_at_start = self._is_after_call = False
            self._space = ""


def new_call_id() -> str:
    """Nine letters and digits after the prefix: templates of Mistral insist on that number."""
    return f"call_{uuid.uuid4().hex[:9]}"


def _overlap(text: str, marker: str) -> int:
    """Length of the longest tail of ``text`` that begins ``marker``."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if marker.startswith(text[-length:]):
            return length
    return 0

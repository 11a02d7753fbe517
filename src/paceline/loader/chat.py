"""Chat templates: messages to the prompt text a model was trained on, by the Jinja source it ships."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from paceline.errors import ChatTemplateError

Message = Mapping[str, Any]


class ChatTemplate:
    """A compiled template, to be kept beside the tokenizer it belongs to.

    Templates come with downloaded models, so they run in Jinja's immutable sandbox: they can read the messages and
    nothing else.

    Raises:
        ChatTemplateError: there is no template, or its syntax is wrong.
    """

    def __init__(self, source: str | None, *, bos_token: str = "", eos_token: str = "") -> None:
        if not source:
            raise ChatTemplateError(
                "this model has no chat template; pass --raw (or a plain string prompt) to complete text instead"
            )
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"the model's chat template is malformed: {_one_line(error)}") from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """The prompt for ``messages``, by default up to where the assistant's answer begins.

        ``kwargs`` are variables of the template, such as ``enable_thinking``.

        Raises:
            ChatTemplateError: malformed messages, or messages the template rejects.
        """
        variables = {**self._tokens, **kwargs}
        plain = [_plain_message(message) for message in messages]
        if not plain:
            raise ChatTemplateError("there are no messages; send at least one")
        try:
            return self._template.render(
                messages=plain, tools=tools, add_generation_prompt=add_generation_prompt, **variables
            )
        except Exception as error:  # the template is foreign code: an index, a type, its own raise_exception
            raise ChatTemplateError(f"the model's chat template rejects the messages: {_one_line(error)}") from error


def render_chat(
    template: ChatTemplate | str | None,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    bos_token: str = "",
    eos_token: str = "",
    **kwargs: Any,
) -> str:
    """Render once; keep a ``ChatTemplate`` instead where many prompts are rendered (it holds its own two tokens).

    Raises:
        ChatTemplateError: no template, a malformed one, or messages it rejects.
    """
    if not isinstance(template, ChatTemplate):
        template = ChatTemplate(template, bos_token=bos_token, eos_token=eos_token)
    return template.render(messages, tools=tools, add_generation_prompt=add_generation_prompt, **kwargs)


def _plain_message(message: Message) -> dict[str, Any]:
    """The message as templates expect it: text content as one string, OpenAI's ``developer`` as ``system``."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ChatTemplateError(f"a message must be an object with a role, got {_one_line(repr(message))[:80]}")
    plain = dict(message)
    if plain["role"] == "developer":
        plain["role"] = "system"
    if plain.get("content") is not None:
        plain["content"] = content_text(plain["content"])
    return plain


def content_text(content: Any) -> str:
    """A message's content as one string: it is one, or a list of OpenAI's text parts.

    Raises:
        ChatTemplateError: it is neither.
    """
    if isinstance(content, str):
        return content
    if isinstance(content, list | tuple):
        return "\n".join(map(_part_text, content))
    raise ChatTemplateError(f"message content must be a string or a list of text parts, got {type(content).__name__}")


def _part_text(part: Any) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise ChatTemplateError(f"a content part of type {kind!r} is not supported; send parts of type 'text' only")


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}`` marks the assistant's own words for training; a prompt just contains them."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own declaration

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """Jinja as templates on the hub assume it: block trimming, loop controls and a few helpers."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes <, > and & for HTML, which models never saw.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _one_line(error: Exception | str) -> str:
    return " ".join(str(error).split())

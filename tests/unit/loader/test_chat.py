from __future__ import annotations

from typing import Any

import pytest

from paceline.errors import ChatTemplateError
from paceline.loader.chat import ChatTemplate, render_chat

CHATML = (
    "{% for m in messages %}\n"
    "    {% if m.role == 'skip' %}{% continue %}{% endif %}\n"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def render(source: str, messages: Any = ({"role": "user", "content": "hi"},), **kwargs: Any) -> str:
    return render_chat(source, messages, **kwargs)


def test_blocks_are_trimmed_and_loop_controls_work() -> None:
    messages = [{"role": "skip", "content": "x"}, {"role": "user", "content": "hé"}]
    assert render(CHATML, messages) == "<|im_start|>user\nhé<|im_end|>\n<|im_start|>assistant\n"
    assert render(CHATML, messages, add_generation_prompt=False) == "<|im_start|>user\nhé<|im_end|>\n"


def test_variables_and_helpers() -> None:
    assert (
        render("{{ bos_token }}|{{ eos_token }}|{{ extra }}", bos_token="<s>", eos_token="</s>", extra=1)
        == "<s>|</s>|1"
    )
    tools = [{"name": "a<b>&'é'"}]
    assert render("{{ tools | tojson }}", tools=tools) == '[{"name": "a<b>&\'é\'"}]'
    assert render("{{ tools | tojson(indent=2) }}", tools=[1]) == "[\n  1\n]"
    assert len(render("{{ strftime_now('%Y-%m-%d') }}")) == 10
    assert render("{% if tools is none %}none{% endif %}") == "none"
    assert render("a{% generation %}b{{ messages[0].content }}{% endgeneration %}c") == "abhic"


def test_text_parts_are_joined_and_developer_becomes_system() -> None:
    messages = [
        {"role": "developer", "content": "rules"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]},
    ]
    source = "{% for m in messages %}[{{ m.role }}:{{ m.content }}:{{ m.tool_calls }}]{% endfor %}"
    assert render(source, messages) == "[system:rules:][user:a\nb:][assistant:None:[{'name': 'f'}]]"
    assert messages[0]["role"] == "developer", "the caller's messages stay as they are"


def test_one_compiled_template_renders_many() -> None:
    template = ChatTemplate(CHATML)
    assert render_chat(template, [{"role": "user", "content": "1"}]) != template.render(
        [{"role": "user", "content": "2"}]
    )


@pytest.mark.parametrize("source", [None, ""])
def test_a_model_without_template_says_how_to_go_on(source: str | None) -> None:
    with pytest.raises(ChatTemplateError, match="--raw"):
        render_chat(source, [{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% if %}", "malformed"),
        ("{{ raise_exception('roles must\nalternate') }}", "rejects the messages: roles must alternate"),
        ("{{ messages[7].content }}", "rejects the messages"),
        ("{{ 1 + 'a' }}", "rejects the messages"),
        ("{{ messages.__class__.__mro__ }}", "rejects the messages"),
        ("{{ messages.append(1) }}", "rejects the messages"),
    ],
)
def test_template_errors_are_one_line(source: str, message: str) -> None:
    with pytest.raises(ChatTemplateError, match=message) as caught:
        render(source)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "no messages"),
        (["hi"], "an object with a role"),
        ([{"content": "x"}], "an object with a role"),
        ([{"role": "user", "content": 3}], "string or a list of text parts, got int"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "'image_url' is not supported"),
        ([{"role": "user", "content": ["text"]}], "'str' is not supported"),
    ],
)
def test_malformed_messages(messages: Any, message: str) -> None:
    with pytest.raises(ChatTemplateError, match=message):
        render(CHATML, messages)

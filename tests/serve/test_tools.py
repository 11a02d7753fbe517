"""Reading calls from text: the same parts however the text is cut, and nothing lost."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ChatTemplateError
from paceline.serve.tools import (
    HERMES,
    LLAMA3,
    MISTRAL,
    PLAIN,
    CallArguments,
    CallStart,
    TextPart,
    ToolCallParser,
    ToolFormat,
    adapt_messages,
    detect_format,
)

NAMES = ("f", "get_weather")
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.dictionaries(st.text(max_size=6), JSON_VALUES, max_size=3)


def read(tool_format: ToolFormat, text: str, cuts: list[int]) -> tuple[str, list[tuple[str, str]]]:
    """Text and calls of an answer that arrives cut at ``cuts``."""
    parser = ToolCallParser(tool_format, NAMES)
    edges = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    parts = [part for start, end in pairwise(edges) for part in parser.push(text[start:end])]
    parts += parser.close()
    words, calls = "", []
    for part in parts:
        if isinstance(part, TextPart):
            words += part.text
        elif isinstance(part, CallStart):
            assert part.index == len(calls)
            calls.append((part.name, ""))
        else:
            assert isinstance(part, CallArguments)
            assert part.index == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + part.fragment)
    return words, calls


def written(tool_format: ToolFormat, calls: list[tuple[str, dict[str, object]]], *, indent: int | None = None) -> str:
    objects = [
        json.dumps({"name": name, tool_format.arguments_key: arguments}, indent=indent) for name, arguments in calls
    ]
    if tool_format is MISTRAL:
        return f"[TOOL_CALLS][{', '.join(objects)}]"
    if tool_format is LLAMA3:
        return "; ".join(objects)
    return "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in objects)


@pytest.mark.parametrize("tool_format", [HERMES, LLAMA3, MISTRAL, PLAIN])
@given(data=st.data())
def test_calls_survive_any_cutting(tool_format: ToolFormat, data: st.DataObject) -> None:
    calls = data.draw(st.lists(st.tuples(st.sampled_from(NAMES), ARGUMENTS), min_size=1, max_size=3))
    text = written(tool_format, calls, indent=data.draw(st.sampled_from([None, 2])))
    words, found = read(tool_format, text, data.draw(st.lists(st.integers(0, 10**6), max_size=30)))
    assert words == ""
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls


@pytest.mark.parametrize("tool_format", [HERMES, LLAMA3, MISTRAL, PLAIN])
@given(text=st.text(alphabet='<tool_cal>/{}"[]:, nameTOOLCALLS\\', max_size=60), cuts=st.lists(st.integers(0, 99)))
def test_cutting_never_matters_and_text_is_not_lost(tool_format: ToolFormat, text: str, cuts: list[int]) -> None:
    whole, piecewise = read(tool_format, text, []), read(tool_format, text, cuts)
    assert piecewise == whole
    if not whole[1] and tool_format.opening not in text:
        assert whole[0] == text


@pytest.mark.parametrize(
    ("tool_format", "text", "words", "calls"),
    [
        (HERMES, "Sure.\n<tool_call>\n{...", "Sure.\n<tool_call>\n{...", []),
        (HERMES, 'Ok <tool_call>{"name": "unknown", "arguments": {}}</tool_call>', None, []),
        (HERMES, '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "", [("f", '{"a": 1}')]),
        (HERMES, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}')]),
        (HERMES, '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": ', "", [("f", '{"a": ')]),
        (LLAMA3, '<|python_tag|>{"type": "function", "name": "f", "parameters": {}}', "", [("f", "{}")]),
        (HERMES, '<tool_call>{"name": "f"}</tool_call>\n\n Done.', "Done.", [("f", "{}")]),
        (LLAMA3, '{"answer": 42}', '{"answer": 42}', []),
        (LLAMA3, 'Use {"name": "f", "parameters": {}}', 'Use {"name": "f", "parameters": {}}', []),
        (MISTRAL, '[TOOL_CALLS]f[ARGS]{"a": {"b": 1}}', "", [("f", '{"a": {"b": 1}}')]),
        (MISTRAL, "plain [TOOL text", "plain [TOOL text", []),
    ],
)
def test_odd_answers(tool_format: ToolFormat, text: str, words: str | None, calls: list[tuple[str, str]]) -> None:
    for cuts in ([], list(range(len(text)))):
        assert read(tool_format, text, cuts) == (text if words is None else words, calls)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% if tools %}<tool_call>{% endif %}", HERMES),
        ("{{ tools }}<|python_tag|>", LLAMA3),
        ("{{ tools }}[TOOL_CALLS]", MISTRAL),
        ("{{ messages }}", PLAIN),
        (None, PLAIN),
    ],
)
def test_the_template_decides(template: str | None, expected: ToolFormat) -> None:
    assert detect_format(template) is expected


def test_a_plain_template_gets_calls_and_results_as_text() -> None:
    function = {"name": "f", "arguments": '{"a": 1}'}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "1", "content": "2"},
    ]
    adapted = adapt_messages(messages, [{"type": "function", "function": {"name": "f"}}], PLAIN)
    assert [message["role"] for message in adapted] == ["system", "assistant", "user"]
    assert adapted[0]["content"].startswith("Be brief.\n\nYou may call")
    assert adapted[1]["content"] == '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    assert adapted[2]["content"] == "<tool_response>\n2\n</tool_response>"
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'  # type: ignore[index]


@pytest.mark.parametrize("content", [[{"type": "text", "text": 1.5}], [{"type": "image_url"}], ["words"]])
def test_content_that_is_no_text_beside_a_call_is_refused(content: object) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    with pytest.raises(ChatTemplateError, match="send parts of type 'text' only"):
        adapt_messages([{"role": "assistant", "content": content, "tool_calls": [call]}], [], PLAIN)

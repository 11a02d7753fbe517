"""What a grammar lets through, what it says is wrong, and that stepping and rolling back leaves no trace."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import GrammarError, InvalidParameterError
from paceline.loader.tokenizer import Tokenizer
from paceline.request import StructuredOutput
from paceline.sampling.grammar import GrammarCompiler, GrammarMatcher
from tests.support import byte_tokenizer
from tests.unit.loader.test_tokenizer import sentence_piece

END_IDS = (1, 2)
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "is_true": {"type": "boolean"},
        "tags": {"type": "array", "items": {"enum": ["ab", "a", "abc"]}, "maxItems": 2},
    },
    "required": ["name", "is_true"],
    "additionalProperties": False,
}
TOKENIZER = Tokenizer(
    byte_tokenizer(), bos_token_id=0, eos_token_id=1, eos_token_ids=END_IDS, adds_bos=False, chat_template=None
)
COMPILER = GrammarCompiler(TOKENIZER)


def allowed_ids(mask: bytes) -> set[int]:
    return {token_id for token_id in range(8 * len(mask)) if mask[token_id // 8] >> token_id % 8 & 1}


def fresh(structured: StructuredOutput, token_ids: Sequence[int] = ()) -> GrammarMatcher:
    """The slow oracle: a matcher that was only ever fed what was committed, one token after the other."""
    matcher = COMPILER.matcher(structured)
    for token_id in token_ids:
        matcher.advance(token_id)
    assert matcher.failure is None
    return matcher


def accepts(structured: StructuredOutput, text: str) -> bool:
    """Whether a model that writes ``text`` byte by byte, and then ends, is let through."""
    matcher = COMPILER.matcher(structured)
    ending = None
    for byte in text.encode():
        token_id = next(i for i in range(3, 259) if TOKENIZER.token_bytes(i) == bytes([byte]))
        if ending is not None or matcher.count_allowed([token_id]) == 0:
            return False
        ending = matcher.advance(token_id)
    return ending == "stop" or set(END_IDS) <= allowed_ids(matcher.masks(())[0])


@pytest.mark.parametrize(
    ("structured", "good", "bad"),
    [
        (
            StructuredOutput.json_schema(PERSON),
            ['{"name":"ab","is_true":true}', '{"name": "é", "is_true": false, "tags": ["abc", "a"]}'],
            ['{"name":"ab"}', '{"is_true":true}', '{"name":"ababab","is_true":true}', "{}", "[]", '{"name":"ab"'],
        ),
        (StructuredOutput.json_schema('{"enum": [1, "two"]}'), ["1", '"two"'], ["2", "two", ""]),
        (
            StructuredOutput.json_object(),
            ["{}", '{"a": [1, {"b": null}],"c":""}'],
            ["[]", "1", "{a: 1}", '{"a": 1}}', '{"a":  1}', '{"a" : 1}', '{\n"a": 1}', '{"a": 1 }'],
        ),
        (
            StructuredOutput.json_schema(
                {"x-guidance": {"whitespace_flexible": True, "item_separator": ",", "key_separator": ":"}}
            ),
            ["{}", '{\n    "a" : [1 ,\t2]\n}'],
            ["{a: 1}"],
        ),
        (StructuredOutput.regex(r"\d{3}-[a-c]+"), ["123-abc", "000-a"], ["123-", "12-a", "123-d", "x123-a"]),
        (StructuredOutput.grammar('start: "a" b+\nb: "b" | "c"'), ["ab", "abcb"], ["a", "b", "aba"]),
        (StructuredOutput.grammar('root ::= "yes" | "no" [0-9]'), ["yes", "no5"], ["no", "y"]),
        (StructuredOutput.choice(["red", 'say "hi"', "re", "é\n"]), ["red", "re", 'say "hi"', "é\n"], ["r", "say", ""]),
    ],
    ids=lambda value: value.kind if isinstance(value, StructuredOutput) else "",
)
def test_what_is_let_through(structured: StructuredOutput, good: list[str], bad: list[str]) -> None:
    assert [text for text in good if not accepts(structured, text)] == []
    assert [text for text in bad if accepts(structured, text)] == []


@pytest.mark.parametrize(
    ("structured", "message"),
    [
        (StructuredOutput.json_schema("{not json"), "the JSON schema cannot be used: "),
        (StructuredOutput.json_schema("[1]"), "the JSON schema cannot be used: "),
        (StructuredOutput.json_schema({"type": "nothing"}), "nothing"),
        (StructuredOutput.json_schema({"not": {"type": "string"}}), "not"),
        (StructuredOutput.json_schema({"$ref": "https://example.org/schema"}), "the JSON schema cannot be used: "),
        (StructuredOutput.regex("(a"), "the regular expression cannot be used: "),
        (StructuredOutput.regex("(?=a)b"), "the regular expression cannot be used: "),
        (StructuredOutput.grammar("start: missing_rule"), "missing_rule"),
        (StructuredOutput.grammar("no grammar at all"), "the grammar cannot be used: "),
    ],
    ids=lambda value: value.text[:20] if isinstance(value, StructuredOutput) else "",
)
def test_what_cannot_be_used_is_a_typed_error(structured: StructuredOutput, message: str) -> None:
    with pytest.raises(GrammarError, match=message) as caught:
        COMPILER.matcher(structured)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_a_vocabulary_that_cannot_begin_the_answer(tiny_checkpoint: Path) -> None:
    letters = GrammarCompiler(Tokenizer.from_file(tiny_checkpoint))
    letters.matcher(StructuredOutput.choice(["abc"]))
    with pytest.raises(GrammarError, match="no tokens to begin"):
        letters.matcher(StructuredOutput.json_object())


@pytest.mark.parametrize("options", [[], ["a", ""]])
def test_a_choice_needs_options(options: list[str]) -> None:
    with pytest.raises(InvalidParameterError):
        StructuredOutput.choice(options)


def test_a_schema_must_be_json() -> None:
    with pytest.raises(InvalidParameterError, match="plain JSON"):
        StructuredOutput.json_schema({"a": object()})


def test_schemas_are_compiled_once() -> None:
    compiler = GrammarCompiler(TOKENIZER)
    structured = StructuredOutput.json_schema(PERSON)
    assert compiler.compile(structured) is compiler.compile(StructuredOutput.json_schema(json.dumps(PERSON)))
    for number in range(40):
        compiler.compile(StructuredOutput.choice([str(number)]))
    assert len(compiler._compiled) <= 32


def test_the_answer_may_end_where_it_is_complete_with_any_end_token() -> None:
    matcher = fresh(StructuredOutput.regex("a+"))
    a = TOKENIZER.encode("a")[0]
    assert not allowed_ids(matcher.masks(())[0]) & set(END_IDS)
    assert matcher.advance(a) is None
    assert allowed_ids(matcher.masks(())[0]) >= set(END_IDS)
    assert matcher.masks([END_IDS[1], a]) == matcher.masks(())  # nothing follows an end


def test_an_answer_that_may_not_end_goes_on_until_nothing_can_follow() -> None:
    matcher = COMPILER.matcher(StructuredOutput.regex("a{1,3}"), may_end=False)
    a = TOKENIZER.encode("a")[0]
    endings = []
    for _ in range(3):
        assert not allowed_ids(matcher.masks(())[0]) & set(END_IDS)
        endings.append(matcher.advance(a))
    assert endings == [None, None, "stop"]


def test_special_tokens_are_no_text() -> None:
    matcher = fresh(StructuredOutput.json_object(), TOKENIZER.encode('{"x": "'))
    assert not allowed_ids(matcher.masks(())[0]) & {0, 1, 2}
    forced = fresh(StructuredOutput.choice(["</s>!"]))
    token_ids = forced.forced(10)
    assert TOKENIZER.decode(token_ids, skip_special_tokens=False) == "</s>!"
    assert not set(token_ids) & {0, 1, 2}


def test_ids_that_the_tokenizer_does_not_have_are_never_allowed() -> None:
    for structured in (StructuredOutput.regex("(.|\n)*"), StructuredOutput.json_object()):
        assert max(allowed_ids(fresh(structured).masks(())[0])) < TOKENIZER.vocab_size


def test_forced_tokens_are_the_only_ones_allowed() -> None:
    matcher = fresh(StructuredOutput.json_schema(PERSON), TOKENIZER.encode('{"'))
    forced = matcher.forced(16)
    assert TOKENIZER.decode(forced).startswith("name")
    assert matcher.forced(1) == forced[:1]
    masks = matcher.masks(forced)
    assert [allowed_ids(mask) for mask in masks[:-1]] == [{token_id} for token_id in forced]
    assert len(allowed_ids(masks[-1])) > 1


def test_a_token_that_was_never_allowed_ends_the_answer() -> None:
    matcher = fresh(StructuredOutput.regex("[ab]+"))
    assert matcher.advance(TOKENIZER.encode("z")[0]) == "length"
    assert matcher.failure is not None


class _NoRollback:
    """A matcher of the library that cannot go back."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def __getattr__(self, name: str) -> Any:
        return getattr(self._matcher, name)

    def rollback(self, num_tokens: int) -> bool:
        return False


def test_where_the_library_cannot_go_back_it_starts_over() -> None:
    structured = StructuredOutput.json_schema(PERSON)
    committed, draft = TOKENIZER.encode('{"name": "'), TOKENIZER.encode('ab", "is_true": tr')
    matcher = fresh(structured, committed)
    matcher._matcher = _NoRollback(matcher._matcher)  # type: ignore[assignment]
    assert matcher.count_allowed(draft) == len(draft)
    assert matcher.masks(()) == fresh(structured, committed).masks(())
    assert matcher.masks(draft)[-1] == fresh(structured, [*committed, *draft]).masks(())[0]


class _GivesUp:
    """A matcher of the library that finds everything too complex behind some number of tokens."""

    def __init__(self, matcher: Any, limit: int) -> None:
        self._matcher, self._limit, self._num_consumed = matcher, limit, 0
        self._is_lost = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._matcher, name)

    def try_consume_tokens(self, token_ids: list[int]) -> int:
        num_consumed: int = 0 if self._is_lost else self._matcher.try_consume_tokens(token_ids)
        self._num_consumed += num_consumed
        return num_consumed

    def consume_tokens(self, token_ids: list[int]) -> bool:
        return self.try_consume_tokens(token_ids) == len(token_ids)

    def rollback(self, num_tokens: int) -> bool:
        self._num_consumed -= num_tokens
        return not self._is_lost and bool(self._matcher.rollback(num_tokens))

    def compute_bitmask(self) -> bytes:
        self._is_lost |= self._num_consumed >= self._limit
        return (1 << END_IDS[0]).to_bytes(40, "little") if self._is_lost else self._matcher.compute_bitmask()

    def is_stopped(self) -> bool:
        return self._is_lost or bool(self._matcher.is_stopped())

    def get_error(self) -> str:
        return "too complex" if self._is_lost else ""


def test_where_the_library_gives_up_only_an_end_is_allowed(caplog: pytest.LogCaptureFixture) -> None:
    """The same with drafts and without; and a draft that led there is no harm to another way."""
    structured = StructuredOutput.regex("q{9}|q{3}z{6}")
    q, z = TOKENIZER.encode("q")[0], TOKENIZER.encode("z")[0]
    compiled = COMPILER.compile(structured)
    limit = 5

    class Compiled:
        def deep_copy(self) -> _GivesUp:
            return _GivesUp(compiled.deep_copy(), limit)

    drafted, plain = (GrammarMatcher(Compiled(), TOKENIZER) for _ in range(2))  # type: ignore[arg-type]
    masks = drafted.masks([q] * 8)
    assert [allowed_ids(mask) for mask in masks] == [{q}, {q}, {q}, {q, z}, {q}, set(END_IDS)]
    assert drafted.failure is None  # nothing of it is committed
    assert "too complex" in caplog.text
    for position in range(limit):
        assert plain.masks(()) == masks[position : position + 1]
        assert drafted.advance(q) is plain.advance(q) is None
    assert plain.masks(()) == masks[-1:]
    assert plain.failure == drafted.failure == "too complex"
    limit = 99
    other = GrammarMatcher(Compiled(), TOKENIZER)  # type: ignore[arg-type]
    other.masks([q] * 8)
    for token_id in (q, q, q, z, z):
        assert other.advance(token_id) is None
    assert other.failure is None


STRUCTURES = [
    StructuredOutput.json_schema(PERSON),
    StructuredOutput.json_object(),
    StructuredOutput.regex(r"(ab|a|\d{2}){1,9}(name|true)?"),
    StructuredOutput.grammar('start: /[ab]*/ <[0]> ("name" <[0]> /[ab]+/)*'),
    StructuredOutput.grammar('start: item ("," item)*\nitem: "name" | "(" start ")" | /[ab]+/'),
]


@settings(max_examples=60, deadline=None)
@given(structured=st.sampled_from(STRUCTURES), data=st.data())
def test_stepping_and_rolling_back_leave_no_trace(structured: StructuredOutput, data: st.DataObject) -> None:
    """Random drafts, mostly lawful for a while, of which random prefixes come true."""
    matcher = COMPILER.matcher(structured)
    committed: list[int] = []

    def lawful(token_ids: Sequence[int]) -> list[int]:
        allowed = sorted(allowed_ids(fresh(structured, token_ids).masks(())[0]) - set(END_IDS))
        return allowed[: data.draw(st.integers(1, 300))]

    def draw_draft() -> list[int]:
        draft: list[int] = []
        for _ in range(data.draw(st.integers(0, 4))):
            options = lawful([*committed, *draft])
            if not options:
                break
            draft.append(data.draw(st.sampled_from(options)))
        junk = data.draw(st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=2))
        return [*draft, *junk]

    for _ in range(data.draw(st.integers(1, 6))):
        if data.draw(st.booleans()):
            matcher.count_allowed(draw_draft())
        if data.draw(st.booleans()):
            assert matcher.forced(8) == fresh(structured, committed).forced(8)
        draft = draw_draft()
        masks = matcher.masks(draft)
        for position, mask in enumerate(masks):
            assert mask == fresh(structured, [*committed, *draft[:position]]).masks(())[0]
        if len(masks) <= len(draft):  # it stopped where the draft breaks the law
            assert draft[len(masks) - 1] not in allowed_ids(masks[-1]) - set(END_IDS)
        num_true = data.draw(st.integers(0, len(masks) - 1))
        for token_id in draft[:num_true]:
            committed.append(token_id)
            if matcher.advance(token_id) is not None:
                return
        options = sorted(allowed_ids(masks[num_true]) - set(END_IDS))
        if not options:
            return
        committed.append(data.draw(st.sampled_from(options)))
        if matcher.advance(committed[-1]) is not None:
            assert fresh(structured, committed).masks(()) == matcher.masks(())
            return
    assert matcher.failure is None


def test_a_vocabulary_of_sentence_piece() -> None:
    tokenizer = sentence_piece()
    compiler = GrammarCompiler(tokenizer)
    matcher = compiler.matcher(StructuredOutput.choice(["hello hell", "</s>"]))
    matcher.advance(tokenizer.encode_exactly("h")[0])  # type: ignore[index]
    forced = matcher.forced(16)
    assert b"".join(map(tokenizer.token_bytes, forced)) == b"ello hell"
    endings = []
    for token_id in forced:
        assert token_id in allowed_ids(matcher.masks(())[0])
        endings.append(matcher.advance(token_id))
    assert endings == [None] * (len(forced) - 1) + ["stop"]
    literal = compiler.matcher(StructuredOutput.choice(["</s>"]))
    spelled = literal.forced(16)
    assert b"".join(map(tokenizer.token_bytes, spelled)) == b"</s>"
    assert 2 not in spelled

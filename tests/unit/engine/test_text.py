"""Text as it grows: stop strings wherever they fall, and nothing shown that is taken back later."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paceline.engine.text import TextStream


class Spelling:
    """A detokenizer whose tokens are spelled out; the last text is held until the flush, as half a character is."""

    def __init__(self, texts: Sequence[str], rest: str = "") -> None:
        self._texts = texts
        self._rest = rest

    def push(self, token_ids: Sequence[int]) -> str:
        return "".join(self._texts[token_id] for token_id in token_ids)

    def flush(self) -> str:
        return self._rest


def naive(texts: Sequence[str], stop: Sequence[str], *, include_stop: bool, min_tokens: int) -> tuple[str, int]:
    """The final text and how many tokens it took: after each token, look for a stop string that ends in it."""
    text = ""
    for number, new in enumerate(texts, start=1):
        before, text = text, text + new
        if not new or number < min_tokens:
            continue
        hits = [
            (at, string)
            for string in stop
            for at in range(len(text))
            if text.startswith(string, at) and at + len(string) > len(before)
        ]
        if hits:
            at, string = min(hits)
            return text[: at + len(string)] if include_stop else text[:at], number
    return text, len(texts)


def run(
    texts: Sequence[str], stop: Sequence[str], *, include_stop: bool = False, min_tokens: int = 0, drain_every: int = 1
) -> tuple[str, int, list[str]]:
    """The final text, tokens used, and what was shown; checks that the shown text is a prefix at every moment."""
    stream = TextStream(Spelling(texts), stop, include_stop=include_stop)
    shown: list[str] = []
    used = 0
    for token_id in range(len(texts)):
        used += 1
        is_stopped = stream.push(token_id, f"origin-{token_id}", may_stop=used >= min_tokens)
        if used % drain_every == 0:
            shown += [piece.text for piece in stream.drain()]
        if is_stopped:
            break
    stream.close("end")
    shown += [piece.text for piece in stream.drain()]
    assert stream.drain() == []
    return stream.text, used, shown


letters = st.text("ab", max_size=3)


@settings(max_examples=500)
@given(
    texts=st.lists(letters, max_size=20),
    stop=st.lists(st.text("abc", min_size=1, max_size=5), max_size=3),
    include_stop=st.booleans(),
    min_tokens=st.integers(0, 6),
    drain_every=st.integers(1, 4),
)
@example(["a", "b", "c", "d"], ["ab", "x" * 10], False, 3, 1)  # a stop string within the forbidden tokens
@example(["ab", "a", "bb"], ["bb", "abab"], False, 0, 1)
def test_agrees_with_looking_at_everything(
    texts: list[str], stop: list[str], include_stop: bool, min_tokens: int, drain_every: int
) -> None:
    text, used, shown = run(texts, stop, include_stop=include_stop, min_tokens=min_tokens, drain_every=drain_every)
    assert (text, used) == naive(texts, stop, include_stop=include_stop, min_tokens=min_tokens)
    assert "".join(shown) == text
    assert all(shown)


@pytest.mark.parametrize(
    ("texts", "stop", "text", "used"),
    [
        (["abc", "STOP", "def"], ["STOP"], "abc", 2),
        (["abcST", "OPdef", "x"], ["STOP"], "abc", 2),
        (["a", "S", "T", "O", "P", "x"], ["STOP"], "a", 5),
        (["aSTO", "x", "y"], ["STOP"], "aSTOxy", 3),
        (["SST", "OP"], ["STOP"], "S", 2),
        (["abab", "abc"], ["ababc"], "ab", 2),
        (["xyz"], ["yz", "xy"], "", 1),  # both at once: the earlier start
        (["xy", "z"], ["xyz", "y"], "x", 1),  # what is complete first
        (["ab", "cd"], ["abc", "bc", "bcd"], "", 2),
        (["ab"], ["b", "bc"], "a", 1),
        (["a", "", "b"], ["ab"], "", 3),
        (["STOP"], ["STOP"], "", 1),
        ([], ["x"], "", 0),
    ],
)
def test_examples(texts: list[str], stop: list[str], text: str, used: int) -> None:
    assert run(texts, stop)[:2] == (text, used)


@pytest.mark.parametrize(
    ("stop", "shown"),
    [
        ([], ["ab", "ab", "ab", "abc"]),
        (["c"], ["ab", "ab", "ab", "ab"]),
        (["bc"], ["a", "ba", "ba", "ba"]),
        (["abc"], ["", "ab", "ab", "ab"]),
        (["bab", "x"], ["a", "", "", ""]),
    ],
)
def test_only_what_may_become_a_stop_string_is_held_back(stop: list[str], shown: list[str]) -> None:
    stream = TextStream(Spelling(["ab", "ab", "ab", "abc"]), stop, include_stop=False)
    seen = []
    for token_id in range(4):
        is_stopped = stream.push(token_id, "t", may_stop=True)
        seen.append("".join(piece.text for piece in stream.drain()))
        if is_stopped:
            break
    assert seen == shown[: len(seen)]


def test_pieces_keep_the_origin_of_each_part() -> None:
    stream = TextStream(Spelling(["ab", "cS", "Td", "eSTOP"]), ["STOP"], include_stop=True)
    shown = []
    for token_id, origin in enumerate(["model", "suffix", "bonus", "recovered"]):
        stream.push(token_id, origin, may_stop=True)
        shown.append([(piece.text, piece.origin) for piece in stream.drain()])
    assert shown == [
        [("ab", "model")],
        [("c", "suffix")],
        [("S", "suffix"), ("Td", "bonus")],
        [("eSTOP", "recovered")],
    ]


def test_close_releases_what_was_held_back_and_flushes() -> None:
    stream = TextStream(Spelling(["abS"], rest="\ufffd"), ["ST", "\ufffd"], include_stop=False)
    stream.push(0, "model", may_stop=True)
    assert [piece.text for piece in stream.drain()] == ["ab"]
    stream.close("bonus")
    stream.close("bonus")  # only once
    assert [(piece.text, piece.origin) for piece in stream.drain()] == [("S", "model"), ("\ufffd", "bonus")]
    assert stream.text == "abS\ufffd"


def test_closing_after_a_stop_adds_nothing() -> None:
    stream = TextStream(Spelling(["abST"], rest="\ufffd"), ["ST"], include_stop=False)
    assert stream.push(0, "model", may_stop=True)
    stream.close("model")
    assert stream.text == "ab"
    assert [piece.text for piece in stream.drain()] == ["ab"]

"""Following an answer through its prediction: mismatches, coming back, renames."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.request import Request, SamplingParams, Speculation
from paceline.spec.prediction import PredictionCursor, PredictionLookup


class Words:
    """A codec whose tokens are words with the blank before them, line breaks, and single other characters."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._ids: dict[str, int] = {}

    def encode(self, text: str) -> list[int]:
        return [self._id(piece) for piece in re.findall(r" ?[A-Za-z]+|\n *|.", text)]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(self._texts[token_id] for token_id in token_ids)

    def _id(self, piece: str) -> int:
        if piece not in self._ids:
            self._ids[piece] = len(self._texts)
            self._texts.append(piece)
        return self._ids[piece]


FILE = """def total(items):
    value = 0
    for item in items:
        value += item.price * item.count
    print(value)
    return value

def mean(items):
    value = total(items)
    if not items:
        raise ValueError("no items")
    return value / len(items)
"""


def share_predicted(prediction: str, answer: str, horizon: int = 8, codec: Words | None = None) -> float:
    """The share of an answer's tokens that come true when each round drafts ``horizon`` tokens."""
    codec = codec or Words()
    cursor, tokens = PredictionCursor(codec.encode(prediction), codec), codec.encode(answer)
    at = num_true = 0
    while at < len(tokens):
        guess = cursor.continuation(horizon)
        length = 0
        while length < min(len(guess), len(tokens) - at - 1) and guess[length] == tokens[at + length]:
            length += 1
        num_true += length
        cursor.follow(tokens[at : at + length + 1])
        at += length + 1
    return num_true / len(tokens)


def test_an_unchanged_file_comes_from_the_prediction() -> None:
    assert share_predicted(FILE, FILE) >= 8 / 9 - 0.02


@pytest.mark.parametrize(
    ("old", "new"), [("value", "amount"), ("items", "rows"), ("item", "some_long_name"), ("total", "x")]
)
def test_a_renamed_identifier_is_learnt(old: str, new: str) -> None:
    renamed = re.sub(rf"\b{old}\b", new, FILE)
    assert share_predicted(FILE, renamed) >= 0.8
    assert share_predicted(FILE, renamed, horizon=16) >= 0.85


def test_a_rename_of_a_name_that_shares_its_beginning() -> None:
    source = FILE.replace("value", "net_value")
    assert share_predicted(source, source.replace("net_value", "net_amount")) >= 0.78


def test_a_line_put_in_and_a_line_left_out() -> None:
    put_in = FILE.replace("    print(value)\n", "    print(value)\n    log.debug(repr(value), stacklevel)\n")
    left_out = FILE.replace("    print(value)\n", "")
    assert share_predicted(FILE, put_in) >= 0.7
    assert share_predicted(FILE, left_out) >= 0.8


def test_words_before_the_file_do_not_matter() -> None:
    answer = "Certainly, here is what you asked for:\n" + FILE
    assert share_predicted(FILE, answer) >= 0.65


def test_a_function_from_further_down_is_found() -> None:
    codec = Words()
    cursor = PredictionCursor(codec.encode(FILE), codec)
    cursor.follow(codec.encode("Only this:\n    if not items:"))
    assert codec.decode(cursor.continuation(4)).strip().startswith("raise ValueError(")


def test_a_rename_that_was_wrong_is_taken_back() -> None:
    """Only the first use is renamed: at the second the old name returns, and from then on it stays."""
    answer = FILE.replace("value = 0", "amount = 0", 1)
    assert share_predicted(FILE, answer) >= 0.75


def test_a_pair_of_names_that_alternates_is_left_alone() -> None:
    source = "".join(f"x = f(a{i})\ny = g(one)\n" for i in range(8))
    names = iter(["one", "two"] * 20)
    answer = re.sub(r"\bone\b", lambda _: next(names), source)
    codec = Words()
    cursor = PredictionCursor(codec.encode(source), codec)
    rewrites: list[tuple[str, str]] = []
    original = cursor._rewrite
    cursor._rewrite = lambda old, new: (rewrites.append((old, new)), original(old, new))[1]  # type: ignore[method-assign]
    cursor.follow(codec.encode(answer))
    assert len(rewrites) <= 4


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_whatever_is_answered_a_cursor_only_guesses_what_it_was_given(data: st.DataObject) -> None:
    """No answer breaks it, and guesses never contain a token that is neither predicted nor answered."""
    codec = Words()
    alphabet = ["ab ", "cd", "\n", "(", ") ", "x_y", " "]
    prediction = "".join(data.draw(st.lists(st.sampled_from(alphabet), max_size=40)))
    answer = "".join(data.draw(st.lists(st.sampled_from(alphabet), max_size=60)))
    cursor = PredictionCursor(codec.encode(prediction), codec)
    for token in codec.encode(answer):
        guess = cursor.continuation(6)
        assert len(guess) <= 6
        cursor.follow([token])
    assert cursor.num_followed == len(codec.encode(answer))


@pytest.mark.parametrize("codec", [None, Words()])
def test_without_a_codec_places_are_still_found(codec: Words | None) -> None:
    cursor = PredictionCursor(list(range(10, 40)), None)
    assert cursor.continuation(3) == [10, 11, 12]
    cursor.follow([10, 11, 99, 98, 20, 21, 22])
    assert cursor.continuation(3) == [23, 24, 25]
    cursor.follow(list(range(23, 40)))
    assert cursor.continuation(3) == []


def test_the_lookup_follows_the_output_and_not_the_prompt() -> None:
    lookup = PredictionLookup()
    request = Request("r", [12, 13, 14], SamplingParams(), Speculation(), 1000, prediction_token_ids=range(10, 40))
    guess = lookup.look_up(request, 4)
    assert guess is not None
    assert (list(guess.token_ids), guess.source, guess.kind, guess.length) == (
        [10, 11, 12, 13],
        "prediction",
        "start",
        0,
    )
    request.token_ids += [10, 11, 12]
    guess = lookup.look_up(request, 4)
    assert guess is not None
    assert (list(guess.token_ids), guess.length) == ([13, 14, 15, 16], 3)
    lookup.release(request)
    assert lookup.look_up(Request("s", [1], SamplingParams(), Speculation(), 1000), 4) is None

"""What may be asked for, and what a request knows of its own progress."""

from __future__ import annotations

import math
from typing import Any

import pytest

from paceline import InvalidParameterError, PacelineError, SamplingParams, Speculation
from paceline.request import Request, RequestStatus


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("temperature", [0, 0.0, 1e-9, 100.0], [-0.1, math.inf, math.nan]),
        ("top_k", [0, 1, 10**6], [-1]),
        ("top_p", [1e-9, 0.5, 1.0], [0.0, -1, 1.01, math.nan]),
        ("min_p", [0.0, 1.0], [-0.1, 1.1, math.nan]),
        ("seed", [0, 2**64 - 1, None], [-1, 2**64]),
        ("repetition_penalty", [1e-3, 1.0, 5.0], [0.0, -1.0, math.inf, math.nan]),
        ("presence_penalty", [-2.0, 2.0], [-2.1, 2.1, math.nan]),
        ("frequency_penalty", [-2.0, 2.0], [-2.1, 2.1, math.nan]),
        ("max_tokens", [1, None], [0, -1]),
        ("min_tokens", [0, 5], [-1]),
        ("logprobs", [0, 20, None], [-1, 21]),
        ("stop", [(), ("a",), ["a", "b"]], [("",), ["a", ""], ""]),
    ],
)
def test_ranges(name: str, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        assert getattr(SamplingParams(**{name: value}), name) == value
    for value in bad:
        with pytest.raises(InvalidParameterError, match=name) as error:
            SamplingParams(**{name: value})
        assert isinstance(error.value, PacelineError)
        assert isinstance(error.value, ValueError)
        assert "\n" not in str(error.value)


def test_one_stop_string_is_a_sequence_of_one() -> None:
    assert SamplingParams(stop="END").stop == ("END",)


@pytest.mark.parametrize(("min_tokens", "max_tokens", "is_valid"), [(5, 5, True), (6, 5, False), (6, None, True)])
def test_min_tokens_and_max_tokens_agree(min_tokens: int, max_tokens: int | None, is_valid: bool) -> None:
    if is_valid:
        SamplingParams(min_tokens=min_tokens, max_tokens=max_tokens)
        return
    with pytest.raises(InvalidParameterError, match=r"min_tokens \(6\) must not exceed max_tokens \(5\)"):
        SamplingParams(min_tokens=min_tokens, max_tokens=max_tokens)


def test_greedy_is_temperature_zero() -> None:
    assert SamplingParams().is_greedy
    assert not SamplingParams(temperature=1e-9).is_greedy


@pytest.mark.parametrize(
    ("options", "has_penalties"),
    [
        ({}, False),
        ({"temperature": 1.0, "top_k": 5, "seed": 1, "stop": "a", "logprobs": 3, "max_tokens": 9}, False),
        ({"repetition_penalty": 1.1}, True),
        ({"repetition_penalty": 0.9}, True),
        ({"presence_penalty": -0.5}, True),
        ({"frequency_penalty": 0.5}, True),
        ({"logit_bias": {3: 1.0}}, True),
        ({"logit_bias": {}}, False),
        ({"min_tokens": 1}, True),
    ],
)
def test_has_penalties(options: dict[str, Any], has_penalties: bool) -> None:
    assert SamplingParams(**options).has_penalties == has_penalties


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("bogus",), "mode must be dynamic, static or off, got 'bogus'"),
        (("static", 0), "from 1 to 64, got 0"),
        (("static", 65), "from 1 to 64, got 65"),
        (
            ("static", 4, ("suffix", "oracle")),
            "unknown drafter 'oracle'; choose from grammar, prediction, suffix, corpus, model",
        ),
        (("dynamic", 8, ("suffix",), 1.0), "min_acceptance must be 0 or more and below 1, got 1.0"),
        (("dynamic", 8, ("suffix",), -0.1), "min_acceptance must be 0 or more and below 1, got -0.1"),
    ],
)
def test_bad_speculation(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(InvalidParameterError, match=message):
        Speculation(*arguments)


def test_speculation_defaults() -> None:
    assert (Speculation().mode, Speculation().max_tokens) == ("dynamic", 16)
    assert tuple(Speculation().drafters) == ("grammar", "prediction", "suffix", "corpus", "model")


def test_a_request_counts_its_tokens() -> None:
    prompt = [5, 6, 7]
    request = Request("r", prompt, SamplingParams(), Speculation(), max_total_tokens=10)
    assert (request.num_prompt_tokens, request.num_tokens, request.num_output_tokens) == (3, 3, 0)
    request.token_ids += [8, 9]
    assert (request.num_prompt_tokens, request.num_tokens, request.num_output_tokens) == (3, 5, 2)
    assert request.output_token_ids == [8, 9]
    assert prompt == [5, 6, 7]
    assert request.status is RequestStatus.WAITING
    assert not request.is_finished


@pytest.mark.parametrize(("num_computed", "is_decoding"), [(0, False), (1, False), (2, True), (3, False)])
def test_decoding_means_one_token_is_missing(num_computed: int, is_decoding: bool) -> None:
    request = Request("r", [5, 6, 7], SamplingParams(), Speculation(), max_total_tokens=10)
    request.num_computed_tokens = num_computed
    assert request.is_decoding == is_decoding


def test_requests_are_told_apart_by_identity() -> None:
    first, second = (Request("r", [1], SamplingParams(), Speculation(), 10) for _ in range(2))
    assert first != second

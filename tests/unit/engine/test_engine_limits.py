"""Where a generation ends: max_tokens, the context, end tokens, stop ids and strings; the same with any speculation."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from paceline import CacheCapacityError, ContextLengthError, Engine, SamplingParams, Speculation
from tests.unit.engine.conftest import ARMS, HORIZON, Arm, assert_idle

PROMPT = "abcabc"
ENDING_PROMPT = "hello"  # the tiny model ends its answer after 32 tokens
END_TOKEN = 1


@pytest.mark.parametrize("max_tokens", [1, 2, HORIZON, HORIZON + 1, HORIZON + 2, 40])
def test_max_tokens_is_exact(arm: Arm, max_tokens: int) -> None:
    output = arm.generate(PROMPT, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    assert list(output.token_ids) == arm.plain(PROMPT, max_tokens)
    assert output.finish_reason == "length"
    assert (output.usage.prompt_tokens, output.usage.completion_tokens) == (len(PROMPT), max_tokens)
    assert output.text == arm.engine.tokenizer.decode(output.token_ids)


def test_self_draft_accepts_everything(arm: Arm) -> None:
    output = arm.generate(PROMPT, SamplingParams(max_tokens=400, ignore_eos=True))
    report = output.speculation
    if arm.name == "off":
        assert report.num_draft_tokens == report.num_spec_steps == 0
    elif "self-draft" in arm.name:
        assert report.num_accepted_draft_tokens == report.num_draft_tokens
        # A draft as slow as its target never pays: the dynamic horizon tries it at most, and leaves it.
        assert report.num_draft_tokens > 300 or arm.name == "dynamic-self-draft"
    else:
        assert 0 < report.num_accepted_draft_tokens <= report.num_draft_tokens


def test_end_token_ends_and_is_counted_but_not_shown(arm: Arm) -> None:
    output = arm.generate(ENDING_PROMPT, SamplingParams(max_tokens=100))
    expected = arm.plain(ENDING_PROMPT, 100)
    at = expected.index(END_TOKEN)
    assert 2 <= at < 99, "the prompt no longer ends by itself: choose another"
    assert list(output.token_ids) == expected[: at + 1]
    assert output.finish_reason == "stop"
    assert output.usage.completion_tokens == at + 1
    assert output.text == arm.engine.tokenizer.decode(expected[:at])


def test_ignore_eos_goes_on(arm: Arm) -> None:
    output = arm.generate(ENDING_PROMPT, SamplingParams(max_tokens=60, ignore_eos=True))
    assert list(output.token_ids) == arm.plain(ENDING_PROMPT, 60)
    assert END_TOKEN in output.token_ids
    assert output.finish_reason == "length"


def test_min_tokens_forbids_the_end_token(arm: Arm) -> None:
    at = arm.plain(ENDING_PROMPT, 100).index(END_TOKEN)
    output = arm.generate(ENDING_PROMPT, SamplingParams(max_tokens=60, min_tokens=at + 4))
    assert list(output.token_ids[:at]) == arm.plain(ENDING_PROMPT, at)
    assert output.usage.completion_tokens >= at + 4
    assert END_TOKEN not in output.token_ids[: at + 4]


@pytest.mark.parametrize("at", [0, 1, 2, 3, 4, 7])
def test_stop_token_id_inside_an_accepted_run(arm: Arm, at: int) -> None:
    expected = arm.plain(PROMPT, 20)
    stop = expected[at]
    first = expected.index(stop)
    output = arm.generate(PROMPT, SamplingParams(max_tokens=20, ignore_eos=True, stop_token_ids=(stop,)))
    assert list(output.token_ids) == expected[: first + 1]
    assert output.finish_reason == "stop"
    assert output.text == arm.engine.tokenizer.decode(expected[:first])


@pytest.mark.parametrize("include_stop", [False, True])
@pytest.mark.parametrize("start", [0, 2, 7])
@pytest.mark.parametrize("length", [1, 3])
def test_stop_string_inside_an_accepted_run(arm: Arm, start: int, length: int, include_stop: bool) -> None:
    expected = arm.plain(PROMPT, 20)
    text = arm.engine.tokenizer.decode(expected)
    stop = text[start : start + length]
    first = text.index(stop)
    params = SamplingParams(max_tokens=20, stop=(stop, "nothing like it"), include_stop_str_in_output=include_stop)
    output = arm.generate(PROMPT, params)
    assert output.text == text[: first + (length if include_stop else 0)]
    assert list(output.token_ids) == expected[: first + length]  # a token is a character here
    assert output.finish_reason == "stop"
    assert output.usage.completion_tokens == first + length


@pytest.mark.parametrize(("stop_at", "max_tokens", "reason"), [(2, 5, "stop"), (6, 5, "length"), (6, 7, "stop")])
def test_stop_and_length_in_the_same_run(arm: Arm, stop_at: int, max_tokens: int, reason: str) -> None:
    expected = arm.plain(PROMPT, 20)
    stop = arm.engine.tokenizer.decode(expected[stop_at : stop_at + 1])
    assert expected.index(expected[stop_at]) == stop_at, "the stop token occurs earlier: choose another prompt"
    output = arm.generate(PROMPT, SamplingParams(max_tokens=max_tokens, stop=(stop,), ignore_eos=True))
    assert output.finish_reason == reason
    assert output.usage.completion_tokens == min(stop_at + 1, max_tokens)


def test_stop_string_within_min_tokens_is_not_one(arm: Arm) -> None:
    expected = arm.plain(PROMPT, 20)
    text = arm.engine.tokenizer.decode(expected)
    params = SamplingParams(max_tokens=20, min_tokens=5, stop=(text[:2], "x" * 12), ignore_eos=True)
    output = arm.generate(PROMPT, params)
    assert text.find(text[:2], 2) < 0, "the stop string occurs again: choose another prompt"
    assert output.text == text
    assert output.finish_reason == "length"


@pytest.fixture(scope="module", params=["off", "static", "static-self-draft", "dynamic-self-draft"])
def short_arm(
    request: pytest.FixtureRequest, make_engine: Callable[..., Engine], plain_tokens: Callable[[str, int], list[int]]
) -> Arm:
    has_draft, speculation = ARMS[request.param]
    engine = make_engine(block_size=4, max_model_len=22, draft="self" if has_draft else None)
    return Arm(request.param, engine, speculation, plain_tokens)


@pytest.mark.parametrize("room", [1, 2, 3, 9])
@pytest.mark.parametrize("max_tokens", [None, 50])
def test_the_context_is_filled_to_its_last_token(short_arm: Arm, room: int, max_tokens: int | None) -> None:
    prompt = ("abc" * 10)[: 22 - room]
    output = short_arm.generate(prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    assert list(output.token_ids) == short_arm.plain(prompt, room)
    assert output.finish_reason == "length"


@pytest.mark.parametrize("excess", [0, 1, 30])
def test_a_prompt_without_room_for_an_answer_is_refused(short_arm: Arm, excess: int) -> None:
    with pytest.raises(ContextLengthError, match=f"has {22 + excess} tokens and the context holds 22"):
        short_arm.engine.generate("a" * (22 + excess))
    assert_idle(short_arm.engine)


def test_a_budget_below_one_context_is_refused(make_engine: Callable[..., Engine]) -> None:
    info = make_engine(max_model_len=64, block_size=4).info
    one_context = info.kv_bytes // info.num_blocks * 16  # how wide a token is stored is the backend's choice
    assert make_engine(max_model_len=64, block_size=4, kv_memory_bytes=one_context).info.num_blocks == 16
    with pytest.raises(CacheCapacityError, match="budget holds 60 tokens"):
        make_engine(max_model_len=64, block_size=4, kv_memory_bytes=one_context - 1)


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("prompt_length", range(2, 12))
def test_drafts_cross_block_edges(
    make_engine: Callable[..., Engine],
    plain_tokens: Callable[[str, int], list[int]],
    block_size: int,
    prompt_length: int,
) -> None:
    key = f"edges-{block_size}"
    engine = _ENGINES.get(key) or _ENGINES.setdefault(key, make_engine(block_size=block_size, draft="self"))
    prompt = "hfqabzXYkkhf"[:prompt_length]
    for horizon in (1, 2, 3, 5):
        params = SamplingParams(max_tokens=14, ignore_eos=True)
        output = engine.generate(prompt, params, speculation=Speculation("static", horizon, ("model",)))
        assert list(output.token_ids) == plain_tokens(prompt, 14)
        assert output.speculation.draft_acceptance_rate == 1.0
    assert_idle(engine)


_ENGINES: dict[str, Engine] = {}

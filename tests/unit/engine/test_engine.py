"""The public engine: streams, errors, cancellation, batches, logprobs, the prefix cache."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from paceline import (
    ChatTemplateError,
    Engine,
    InvalidParameterError,
    InvalidPromptError,
    SamplingParams,
    Speculation,
)
from paceline.engine.events import StepEvent
from paceline.engine.output import Delta
from tests.unit.engine.conftest import ARMS, Arm, assert_idle

PROMPT = "abc"  # the tiny model goes on for long, without special tokens
SELF_DRAFT = Speculation("static", 4, ("model",))


# ---- streams -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=30),
        SamplingParams(max_tokens=30, temperature=0.8, seed=7),
        SamplingParams(max_tokens=30, stop=("K7K7",)),
        SamplingParams(max_tokens=60, repetition_penalty=1.3, stop=("qF",)),
    ],
    ids=["greedy", "seeded", "stop", "penalised"],
)
def test_stream_adds_up_to_generate(arm: Arm, params: SamplingParams) -> None:
    deltas = list(arm.engine.stream(PROMPT, params, speculation=arm.speculation))
    output = arm.generate(PROMPT, params)
    last = deltas[-1].output
    assert last is not None
    assert all(delta.output is None for delta in deltas[:-1])
    assert "".join(delta.text for delta in deltas) == output.text == last.text
    assert [token_id for delta in deltas for token_id in delta.token_ids] == output.token_ids == last.token_ids
    for delta in deltas:
        assert "".join(piece.text for piece in delta.pieces) == delta.text


def test_pieces_name_their_origin(draft_engine: Engine) -> None:
    params = SamplingParams(max_tokens=21, ignore_eos=True)
    pieces = [piece for delta in draft_engine.stream(PROMPT, params, speculation=SELF_DRAFT) for piece in delta.pieces]
    origins = [piece.origin for piece in pieces]
    assert origins == ["bonus"] + 4 * (["model"] * 4 + ["bonus"])
    plain = draft_engine.stream(PROMPT, params, speculation=Speculation("off"))
    assert {piece.origin for delta in plain for piece in delta.pieces} == {"bonus"}


@pytest.mark.parametrize(
    "params", [SamplingParams(max_tokens=60), SamplingParams(max_tokens=60, temperature=1, seed=3)]
)
def test_prompt_forms_are_equivalent(plain_engine: Engine, params: SamplingParams) -> None:
    by_text = plain_engine.generate(PROMPT, params)
    assert plain_engine.generate(plain_engine.tokenizer.encode(PROMPT), params).token_ids == by_text.token_ids
    messages = [{"role": "user", "content": "abc"}]
    by_messages = plain_engine.generate(messages, params)
    assert by_messages.token_ids == plain_engine.generate(plain_engine.render(messages), params).token_ids


def test_a_prediction_is_only_ever_a_draft(arm: Arm) -> None:
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    expected = arm.plain(PROMPT, 40)
    right = arm.engine.tokenizer.decode(expected)
    speculation = Speculation(arm.speculation.mode, arm.speculation.max_tokens)
    for prediction in (right, right[20:], "q" * 40, "M", ""):
        output = arm.engine.generate(PROMPT, params, speculation=speculation, prediction=prediction)
        assert list(output.token_ids) == expected
        if prediction == right and arm.name != "off":
            accepted = output.speculation.accepted_by_source
            # Whether it drafts all along is the clock's affair where horizons follow measured costs.
            assert accepted["prediction"] > (20 if speculation.mode == "static" else 0)
            assert sum(accepted.values()) == output.speculation.num_draft_tokens


# ---- errors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", ["", [], ()])
def test_an_empty_prompt_is_refused(plain_engine: Engine, prompt: Any) -> None:
    with pytest.raises(InvalidPromptError, match="empty"):
        plain_engine.generate(prompt)


@pytest.mark.parametrize("token_id", [-1, 64, 10**9])
def test_a_token_outside_the_vocabulary_is_refused(plain_engine: Engine, token_id: int) -> None:
    with pytest.raises(InvalidPromptError, match=f"token id {token_id} is outside the vocabulary of 64"):
        plain_engine.stream([2, token_id, 3])  # before the first step
    assert_idle(plain_engine)


@pytest.mark.parametrize("messages", [[{"content": "abc"}], [{"role": "user", "content": 3}], [{"role": 1}, "abc"]])
def test_malformed_messages_are_refused(plain_engine: Engine, messages: Any) -> None:
    with pytest.raises(ChatTemplateError):
        plain_engine.generate(messages)


@pytest.mark.parametrize("prompt", [["abc"], [2, "abc"], [2, None], [2.5], [[2]], [2, {"role": "user"}]])
def test_what_is_no_prompt_is_refused(plain_engine: Engine, prompt: Any) -> None:
    with pytest.raises(InvalidPromptError):
        plain_engine.generate(prompt)
    assert_idle(plain_engine)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_sise": 4}, "did you mean 'block_size'"),
        ({"zzz": 4}, "known options: .*max_num_seqs"),
        ({"block_size": 0}, "block_size must be"),
        ({"max_model_len": 1}, "max_model_len must be 2 or more"),
        ({"max_model_len": 513}, "more than the model's context of 512"),
        ({"dtype": "fp8"}, "dtype must be one of"),
        ({"num_threads": 0}, "num_threads must be"),
    ],
)
def test_bad_options_are_refused(make_engine: Callable[..., Engine], options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidParameterError, match=message):
        make_engine(**options)


@pytest.mark.parametrize(
    ("bias", "message"), [({64: 1.0}, "names token 64"), ({3: math.nan}, "token 3 is not a number")]
)
def test_bad_logit_bias_is_refused(plain_engine: Engine, bias: dict[int, float], message: str) -> None:
    with pytest.raises(InvalidParameterError, match=message):
        plain_engine.generate(PROMPT, SamplingParams(logit_bias=bias))
    assert_idle(plain_engine)


# ---- ends before the end -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_deltas", [0, 1, 3])
def test_an_abandoned_stream_gives_everything_back(draft_engine: Engine, num_deltas: int) -> None:
    stream = draft_engine.stream(PROMPT, SamplingParams(ignore_eos=True), speculation=SELF_DRAFT)
    for _ in range(num_deltas):
        next(stream)
    assert draft_engine.core.scheduler.has_work
    del stream
    gc.collect()
    assert_idle(draft_engine)
    assert not draft_engine._inboxes


def test_many_abandoned_streams_leak_nothing(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(block_size=4, max_model_len=64, draft="self")
    for number in range(60):
        stream = engine.stream(PROMPT + "xyz"[: number % 4], speculation=SELF_DRAFT)
        for _ in range(number % 7):
            next(stream, None)
        del stream
    assert_idle(engine)
    full = engine.generate("a" * 63, SamplingParams(max_tokens=1))
    assert full.finish_reason == "length"


@pytest.mark.timeout(30)
@pytest.mark.parametrize("num_deltas", [0, 2])
def test_a_stream_cancelled_elsewhere_ends(make_engine: Callable[..., Engine], num_deltas: int) -> None:
    engine = make_engine(block_size=4)
    stream = engine.stream(PROMPT, SamplingParams(ignore_eos=True))
    for _ in range(num_deltas):
        next(stream)
    engine.close()
    last = list(stream)[-1].output
    assert last is not None
    assert last.finish_reason == "cancelled"
    assert last.usage.completion_tokens == num_deltas
    assert_idle(engine)
    assert not engine._inboxes


def test_cancelling_what_is_unknown_or_done_is_ignored(plain_engine: Engine) -> None:
    plain_engine.cancel("request-x")
    request_id = plain_engine.submit(PROMPT, SamplingParams(max_tokens=1))
    plain_engine.step()
    plain_engine.cancel(request_id)
    assert [delta.output is not None for delta in plain_engine.take(request_id)] == [True]
    assert plain_engine.take(request_id) == []
    assert not plain_engine.step()


def test_a_step_that_fails_leaves_the_other_requests_whole(
    make_engine: Callable[..., Engine], plain_tokens: Callable[[str, int], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    class BrokenRunner:
        def run(self, inputs: Any) -> Any:
            raise MemoryError("no room for the activations")

    engine = make_engine(block_size=4, draft="self")
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    failing, surviving = (engine.stream(prompt, params, speculation=SELF_DRAFT) for prompt in ("abcabc", PROMPT))
    tokens = [token_id for _ in range(2) for token_id in (next(failing), next(surviving))[1].token_ids]
    with monkeypatch.context() as patch:
        patch.setattr(engine.core, "_runner", BrokenRunner())
        with pytest.raises(MemoryError):
            list(failing)
    tokens += [token_id for delta in surviving for token_id in delta.token_ids]
    assert tokens == plain_tokens(PROMPT, 40)
    assert_idle(engine)


# ---- batches -------------------------------------------------------------------------------------------------------


def run_together(engine: Engine, requests: Sequence[tuple[str, SamplingParams, Speculation]]) -> list[list[Delta]]:
    ids = [engine.submit(prompt, params, speculation=speculation) for prompt, params, speculation in requests]
    deltas: dict[str, list[Delta]] = {request_id: [] for request_id in ids}
    while engine.step():
        for request_id in ids:
            deltas[request_id] += engine.take(request_id)
    return list(deltas.values())


@pytest.mark.parametrize(
    "options",
    [{}, {"max_num_batched_tokens": 7}, {"max_num_seqs": 2}, {"max_model_len": 64, "kv_memory_bytes": 64 * 2048}],
    ids=["roomy", "chunked", "queued", "preempted"],
)
@pytest.mark.parametrize(
    "params", [SamplingParams(max_tokens=24), SamplingParams(max_tokens=24, temperature=1, seed=5)]
)
def test_a_batch_gives_what_each_alone_gives(
    make_engine: Callable[..., Engine], params: SamplingParams, options: dict[str, Any]
) -> None:
    engine = make_engine(block_size=4, draft="self", **options)
    prompts = ["abcabcabc", "hello", "q" * 21, "zZ", "Hfqab" * 4, "a"]
    alone = [engine.generate(prompt, params, speculation=Speculation("off")).token_ids for prompt in prompts]
    engine.reset_prefix_cache()
    together = run_together(engine, list(zip(prompts, [params] * 6, [s for _, s in ARMS.values()], strict=True)))
    for prompt, expected, deltas in zip(prompts, alone, together, strict=True):
        assert [token_id for delta in deltas for token_id in delta.token_ids] == expected, prompt
    assert_idle(engine)


def test_speculation_off_in_a_mixed_batch_drafts_nothing(draft_engine: Engine) -> None:
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    off, on = run_together(draft_engine, [(PROMPT, params, Speculation("off")), (PROMPT, params, SELF_DRAFT)])
    assert off[-1].output is not None
    assert on[-1].output is not None
    assert off[-1].output.speculation.num_draft_tokens == 0
    assert on[-1].output.speculation.num_draft_tokens > 10
    assert off[-1].output.token_ids == on[-1].output.token_ids


# ---- logprobs and reports ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(temperature=1.0, seed=11)], ids=["greedy", "seeded"]
)
@pytest.mark.parametrize("stop", [(), ("U",)])
def test_logprobs_do_not_depend_on_speculation(
    arm: Arm, plain_engine: Engine, params: SamplingParams, stop: tuple[str, ...]
) -> None:
    options = {"temperature": params.temperature, "seed": params.seed, "max_tokens": 30, "stop": stop}
    wanted = SamplingParams(logprobs=3, **options)
    expected = plain_engine.generate(PROMPT, wanted, speculation=Speculation("off"))
    output = arm.generate(PROMPT, wanted)
    assert output.token_ids == expected.token_ids
    assert output.logprobs is not None
    assert expected.logprobs is not None
    assert [entry.token_id for entry in output.logprobs] == output.token_ids
    for ours, theirs in zip(output.logprobs, expected.logprobs, strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        assert ours.top == pytest.approx(theirs.top, abs=1e-4)
        assert list(ours.top) == list(theirs.top)
        assert ours.logprob < 0.0
    assert arm.generate(PROMPT, SamplingParams(**options)).logprobs is None


def test_events_add_up_to_the_report(arm: Arm) -> None:
    events: list[StepEvent] = []
    arm.engine.subscribe(events.append)
    try:
        deltas = list(
            arm.engine.stream(PROMPT, SamplingParams(max_tokens=40, ignore_eos=True), speculation=arm.speculation)
        )
    finally:
        arm.engine.core.listeners.remove(events.append)
    output = deltas[-1].output
    assert output is not None
    report = output.speculation
    assert len(events) == len(deltas)  # one per sampled step
    assert len({event.request_id for event in events}) == 1
    assert [event.step for event in events] == list(range(events[0].step, events[0].step + len(events)))
    assert sum(event.num_drafted for event in events) == report.num_draft_tokens
    assert sum(event.num_accepted for event in events) == report.num_accepted_draft_tokens
    assert sum(event.num_accepted + 1 for event in events) == output.usage.completion_tokens
    assert sum(event.num_drafted > 0 for event in events) == report.num_spec_steps == sum(report.acceptance_histogram)
    assert max(event.num_blocks for event in events) == output.kv.peak_blocks_used
    for event in events:
        assert 0 <= event.num_accepted <= event.num_drafted <= event.horizon <= arm.speculation.max_tokens
        assert (event.final_token == "bonus") == (event.num_accepted == event.num_drafted)
        assert (event.source == "none") == (event.num_drafted == 0)
    assert [event.num_rows for event in events[1:]] == [event.num_drafted + 1 for event in events[1:]]
    for source, accepted in report.accepted_by_source.items():
        assert accepted == sum(event.num_accepted for event in events if event.source == source)


def test_events_come_only_with_sampled_steps(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(max_num_batched_tokens=4)
    events: list[StepEvent] = []
    engine.subscribe(events.append)
    engine.generate("a" * 14, SamplingParams(max_tokens=1))
    assert [event.step for event in events] == [4]  # after three chunks of prefill


def test_a_prompt_of_one_token_may_draft_at_once(arm: Arm) -> None:
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    output = arm.generate("q", params)
    assert list(output.token_ids) == arm.plain("q", 5)
    report = output.speculation
    assert report.mean_horizon <= arm.speculation.max_tokens
    assert (report.mean_horizon > 0) == (report.num_draft_tokens > 0)


def test_kv_report(plain_engine: Engine) -> None:
    plain_engine.reset_prefix_cache()
    output = plain_engine.generate(
        "abcde", SamplingParams(max_tokens=3, ignore_eos=True), speculation=Speculation("off")
    )
    # K/V of 5, 6 and 7 tokens in two blocks of four.
    assert output.kv.peak_blocks_used == 2
    assert output.kv.waste == pytest.approx((3 + 2 + 1) / 8 / 3)
    assert (output.kv.block_size, output.kv.num_blocks) == (4, plain_engine.info.num_blocks)


# ---- the prefix cache ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("prompt_length", "cached"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (30, 28)])
def test_a_repeated_prompt_is_found(arm: Arm, prompt_length: int, cached: int) -> None:
    prompt = ("abcdefghij" * 3)[:prompt_length]
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    cold, hot = arm.generate(prompt, params), arm.generate(prompt, params)
    assert (cold.usage.cached_tokens, hot.usage.cached_tokens) == (0, cached)
    assert list(hot.token_ids) == list(cold.token_ids) == arm.plain(prompt, 6)
    changed = arm.generate(prompt[:-1] + "Q", params)
    assert changed.usage.cached_tokens <= cached
    assert list(changed.token_ids) == arm.plain(prompt[:-1] + "Q", 6)
    arm.engine.reset_prefix_cache()
    assert arm.generate(prompt, params).usage.cached_tokens == 0


def test_rejected_drafts_are_never_found(draft_engine: Engine) -> None:
    draft_engine.reset_prefix_cache()
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    wrong = "Q" * 20
    static = Speculation("static", 8, ("prediction",))
    output = draft_engine.generate("abcd", params, speculation=static, prediction=wrong)
    text = draft_engine.tokenizer.decode(output.token_ids)
    assert "Q" not in text[:2], "the answer repeats the wrong draft: choose another prompt"
    assert draft_engine.generate("abcd" + wrong, SamplingParams(max_tokens=1)).usage.cached_tokens == 4
    assert draft_engine.generate("abcd" + text[:12], SamplingParams(max_tokens=1)).usage.cached_tokens >= 12


def test_without_prefix_cache_nothing_is_found(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(block_size=4, enable_prefix_cache=False)
    for _ in range(2):
        assert engine.generate("abcdefghij", SamplingParams(max_tokens=2)).usage.cached_tokens == 0
    assert_idle(engine)

"""What the engine tells the ladder, and what the ladder remembers between requests."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from paceline import Engine, SamplingParams, Speculation
from paceline.engine.events import StepEvent

PROMPT = [2 + (5 * i) % 37 for i in range(24)]
PARAMS = SamplingParams(max_tokens=40, ignore_eos=True)
CORPUS = Speculation("static", 4, ("corpus",))


def test_earlier_answers_draft_for_later_requests_until_they_are_forgotten(plain_engine: Engine) -> None:
    plain_engine.reset_prefix_cache()
    first = plain_engine.generate(PROMPT, PARAMS, speculation=CORPUS)
    again = plain_engine.generate(PROMPT, PARAMS, speculation=CORPUS)
    assert again.token_ids == first.token_ids
    assert again.speculation.accepted_by_source["corpus"] > 20
    assert again.speculation.draft_acceptance_rate > 0.9
    plain_engine.reset_prefix_cache()
    after = plain_engine.generate(PROMPT, PARAMS, speculation=CORPUS)
    assert after.speculation.num_draft_tokens == first.speculation.num_draft_tokens


def test_a_cancelled_request_leaves_its_verified_tokens(plain_engine: Engine) -> None:
    plain_engine.reset_prefix_cache()
    stream = plain_engine.stream(PROMPT, PARAMS, speculation=Speculation("off"))
    tokens: list[int] = []
    for delta in stream:
        tokens += delta.token_ids
        if len(tokens) >= 20:
            break
    del stream
    output = plain_engine.generate(PROMPT, PARAMS, speculation=CORPUS)
    assert output.speculation.accepted_by_source.get("corpus", 0) > 5


def test_decoding_steps_teach_costs_and_prefills_do_not(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(max_num_batched_tokens=8)
    costs = engine.core.ladder.costs
    engine.generate(PROMPT, SamplingParams(max_tokens=1, ignore_eos=True))
    assert costs.num_passes == 0
    engine.generate(PROMPT, SamplingParams(max_tokens=11, ignore_eos=True), speculation=Speculation("off"))
    assert costs.num_passes == 10
    assert 0.0 < costs.plain_ms(30) < 1e4


def test_events_carry_what_was_expected(plain_engine: Engine) -> None:
    events: list[StepEvent] = []
    plain_engine.subscribe(events.append)
    plain_engine.reset_prefix_cache()
    output = plain_engine.generate([2, 3, 4] * 8, PARAMS, speculation=Speculation("static", 3))
    plain_engine.core.listeners.remove(events.append)
    drafted = [event for event in events if event.num_drafted]
    assert drafted
    assert all(len(event.expected_acceptances) == event.num_drafted == event.horizon for event in drafted)
    assert all(0.0 <= value <= 1.0 for event in drafted for value in event.expected_acceptances)
    report = output.speculation
    assert sum(report.horizon_histogram) == len(events) - 1
    assert sum(n * count for n, count in enumerate(report.horizon_histogram)) == report.num_draft_tokens
    assert report.calibration_error is not None


def test_nothing_is_kept_of_requests_that_ended(plain_engine: Engine) -> None:
    ladder = plain_engine.core.ladder
    for number in range(30):
        plain_engine.generate([2 + number, *PROMPT], SamplingParams(max_tokens=6, ignore_eos=True), prediction="abcabc")
    assert ladder._states == {}
    for lookup in ladder._lookups.values():
        assert not getattr(lookup, "_indexes", {})
        assert not getattr(lookup, "_cursors", {})
    assert not ladder.calibration._sessions


@pytest.mark.parametrize("num_requests", [3, 9])
def test_a_batch_shares_one_budget(make_engine: Callable[..., Engine], num_requests: int) -> None:
    """All of them at once, each as it would be alone, and within the step's token budget."""
    engine = make_engine(max_num_batched_tokens=24, block_size=4)
    events: list[StepEvent] = []
    engine.subscribe(events.append)
    prompts = [[2 + i, 3, 4, 2 + i, 3, 4, 2 + i, 3] for i in range(num_requests)]
    expected = [engine.generate(prompt, PARAMS, speculation=Speculation("off")).token_ids for prompt in prompts]
    events.clear()
    ids = [engine.submit(prompt, PARAMS) for prompt in prompts]
    while engine.step():
        engine.core.cache.check_integrity()
    for request_id, tokens in zip(ids, expected, strict=True):
        output = engine.take(request_id)[-1].output
        assert output is not None
        assert output.token_ids == tokens
    assert all(event.num_rows <= 24 for event in events)

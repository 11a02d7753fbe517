"""Counts and rates on traces whose answers are known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace

import pytest

from paceline.engine import tracker as tracker_module
from paceline.engine.events import StepEvent
from paceline.engine.tracker import RequestTracker
from paceline.request import Request, SamplingParams, Speculation

# Of one step: (at second, tokens, drafted, accepted, source)
Step = tuple[float, int, int, int, str]


class Clock:
    """time.perf_counter under the test's control."""

    now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(tracker_module, "time", clock)
    return clock


def request() -> Request:
    return Request("r", [1, 2, 3, 4], SamplingParams(), Speculation("static", 4), 1000)


def event(drafted: int = 0, accepted: int = 0, source: str = "none") -> StepEvent:
    return StepEvent("r", 1, drafted, drafted, accepted, "bonus", source, drafted + 1, 1, 0, 0.0, 0.0, 0.0)


def follow(clock: Clock, steps: Sequence[Step]) -> RequestTracker:
    item = request()
    tracker = RequestTracker(item)
    start = clock.now
    for at, num_tokens, drafted, accepted, source in steps:
        clock.now = start + at
        item.token_ids += [9] * num_tokens
        tracker.record_tokens(num_tokens, event(drafted, accepted, source))
    return tracker


def test_nothing_generated_is_all_zeros(clock: Clock) -> None:
    tracker = follow(clock, [])
    assert set(asdict(tracker.timing()).values()) == {0.0}
    report = tracker.speculation()
    assert (report.draft_acceptance_rate, report.mean_horizon, report.mean_acceptance_length) == (0.0, 0.0, 1.0)
    assert (list(report.acceptance_histogram), dict(report.accepted_by_source)) == ([], {})
    assert tracker.kv(block_size=4, num_blocks=9).waste == 0.0
    assert asdict(tracker.usage()) == {"prompt_tokens": 4, "cached_tokens": 0, "completion_tokens": 0}


def test_one_token_has_a_first_token_time_and_no_rate(clock: Clock) -> None:
    timing = follow(clock, [(0.25, 1, 0, 0, "none")]).timing()
    assert timing.ttft_ms == pytest.approx(250.0)
    assert (timing.decode_ms, timing.decode_tokens_per_s, timing.p50_token_ms, timing.p95_token_ms) == (0, 0, 0, 0)


def test_waiting_ends_with_the_first_step_that_works_on_a_request(clock: Clock) -> None:
    tracker = RequestTracker(request())
    for at in (0.25, 0.5):  # a prompt in two chunks
        tracker.record_scheduled(clock.now + at)
    assert tracker.timing().queue_ms == pytest.approx(250.0)


def test_rates_run_from_the_first_token_to_the_last(clock: Clock) -> None:
    steps = [(1.0, 1, 0, 0, "none"), (1.5, 5, 4, 4, "model"), (2.0, 1, 4, 0, "model"), (3.0, 4, 3, 3, "suffix")]
    timing = follow(clock, steps).timing()
    assert timing.ttft_ms == pytest.approx(1000.0)
    assert timing.decode_ms == pytest.approx(2000.0)
    assert timing.decode_tokens_per_s == pytest.approx(10 / 2)


@pytest.mark.parametrize(
    ("latencies", "p50", "p95"),
    # The smallest value that at least that share of the values do not exceed.
    [
        ([5], 5, 5),
        ([1, 9], 1, 9),
        ([3, 1, 2], 2, 3),
        ([1, 2, 3, 4], 2, 4),
        (list(range(1, 21)), 10, 19),
        (list(range(20, 0, -1)), 10, 19),
        (list(range(1, 22)), 11, 20),
        (list(range(1, 101)), 50, 95),
    ],
)
def test_quantiles(clock: Clock, latencies: list[int], p50: int, p95: int) -> None:
    at = 1.0
    steps: list[Step] = [(at, 1, 0, 0, "none")]
    for latency in latencies:
        at += latency / 1000
        steps.append((at, 1, 0, 0, "none"))
    timing = follow(clock, steps).timing()
    assert timing.p50_token_ms == pytest.approx(p50)
    assert timing.p95_token_ms == pytest.approx(p95)


def test_a_steps_time_is_shared_by_its_tokens(clock: Clock) -> None:
    # Four tokens of 2 ms each and one of 10 ms.
    timing = follow(clock, [(1.0, 1, 0, 0, "none"), (1.008, 4, 3, 3, "model"), (1.018, 1, 3, 0, "model")]).timing()
    assert timing.p50_token_ms == pytest.approx(2.0)
    assert timing.p95_token_ms == pytest.approx(10.0)


def test_speculation_report(clock: Clock) -> None:
    steps = [
        (1.0, 1, 0, 0, "none"),  # the prefill
        (1.1, 5, 4, 4, "model"),
        (1.2, 1, 4, 0, "model"),
        (1.3, 1, 0, 0, "none"),  # nobody had anything to say
        (1.4, 3, 2, 2, "suffix"),
        (1.5, 3, 4, 2, "suffix"),
        (1.6, 1, 1, 0, "prediction"),
    ]
    report = follow(clock, steps).speculation()
    assert report.mode == "static"
    assert (report.num_spec_steps, report.num_draft_tokens, report.num_accepted_draft_tokens) == (5, 15, 8)
    assert report.draft_acceptance_rate == pytest.approx(8 / 15)
    assert report.mean_acceptance_length == pytest.approx(1 + 8 / 5)
    assert list(report.acceptance_histogram) == [2, 0, 2, 0, 1]
    assert report.mean_horizon == pytest.approx(15 / 6)
    assert report.accepted_by_source == {"model": 4, "suffix": 4, "prediction": 0}
    assert report.drafted_by_source == {"model": 8, "suffix": 6, "prediction": 1}
    assert list(report.horizon_histogram) == [1, 1, 1, 0, 3]
    assert report.calibration_error is None  # nobody said what was expected


def test_a_first_step_that_drafts_is_a_decoding_step(clock: Clock) -> None:
    report = follow(clock, [(1.0, 4, 4, 3, "model"), (1.1, 3, 2, 2, "model")]).speculation()
    assert report.mean_horizon == pytest.approx(6 / 2)


def test_calibration_error_is_over_what_was_judged() -> None:
    tracker = RequestTracker(request())
    for accepted in (2, 1, 0, 2):
        tracker.record_tokens(
            accepted + 1, replace(event(3, accepted, "suffix"), expected_acceptances=(0.95, 0.95, 0.05))
        )
    # Judged: 0.95 seven times with 5 true (three firsts, two seconds), 0.05 twice with none true.
    assert tracker.speculation().calibration_error == pytest.approx((7 * 0.95 - 5 + 2 * 0.05) / 9)


def test_kv_report_averages_over_steps() -> None:
    item = request()
    tracker = RequestTracker(item)
    for num_computed, num_blocks in ((4, 1), (5, 2), (8, 3), (9, 3)):
        item.num_computed_tokens = num_computed
        tracker.record_cache(num_blocks=num_blocks, block_size=4)
    report = tracker.kv(block_size=4, num_blocks=20)
    assert (report.block_size, report.num_blocks, report.peak_blocks_used) == (4, 20, 3)
    assert report.waste == pytest.approx((0 + 3 / 8 + 4 / 12 + 3 / 12) / 4)


def test_usage_counts_the_cached_part() -> None:
    item = request()
    item.num_cached_tokens = 3
    item.token_ids += [7, 8]
    assert asdict(RequestTracker(item).usage()) == {"prompt_tokens": 4, "cached_tokens": 3, "completion_tokens": 2}

"""Counts and times of one request, collected step by step and summed up at the end."""

from __future__ import annotations

import math
import time
from collections import Counter

from paceline.engine.events import StepEvent
from paceline.engine.output import KVReport, SpeculationReport, Timing, Usage
from paceline.request import Request
from paceline.spec.calibration import CalibrationError


class RequestTracker:
    """Collects what :class:`~paceline.engine.output.Output` reports about one request."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._submitted_at = time.perf_counter()
        self._scheduled_at = 0.0
        self._first_token_at = 0.0
        self._last_token_at = 0.0
        self._num_first_tokens = 0  # tokens of the step that brought the first one
        self._token_seconds: list[float] = []
        self._accepted_lengths: Counter[int] = Counter()
        self._accepted_by_source: Counter[str] = Counter()
        self._drafted_by_source: Counter[str] = Counter()
        self._horizons: Counter[int] = Counter()  # of decoding steps
        self._calibration_error = CalibrationError()
        self._num_drafted = 0
        self._waste_sum = 0.0
        self._num_steps = 0
        self._peak_blocks = 0

    def record_scheduled(self, at: float) -> None:
        """In each step: when it began, on ``time.perf_counter``'s clock. The first one ends the wait."""
        self._scheduled_at = self._scheduled_at or at

    def record_cache(self, *, num_blocks: int, block_size: int) -> None:
        """After each step: the blocks this request holds."""
        self._num_steps += 1
        self._peak_blocks = max(self._peak_blocks, num_blocks)
        if num_blocks:
            self._waste_sum += 1.0 - self._request.num_computed_tokens / (num_blocks * block_size)

    def record_tokens(self, num_tokens: int, event: StepEvent) -> None:
        """After each step that yielded tokens."""
        now = time.perf_counter()
        if self._first_token_at == 0.0:
            self._first_token_at, self._num_first_tokens = now, num_tokens
            if event.num_drafted:  # a prompt of one token is decoded, not prefilled
                self._horizons[event.num_drafted] += 1
        else:
            self._token_seconds += [(now - self._last_token_at) / num_tokens] * num_tokens
            self._horizons[event.num_drafted] += 1
        self._last_token_at = now
        if event.num_drafted:
            self._num_drafted += event.num_drafted
            self._accepted_lengths[event.num_accepted] += 1
            self._accepted_by_source[event.source] += event.num_accepted
            self._drafted_by_source[event.source] += event.num_drafted
            self._calibration_error.add(event.expected_acceptances, event.num_accepted)

    def usage(self) -> Usage:
        """Token counts."""
        request = self._request
        return Usage(request.num_prompt_tokens, request.num_cached_tokens, request.num_output_tokens)

    def timing(self) -> Timing:
        """Latencies; zeros where nothing was generated."""
        ttft = max(0.0, self._first_token_at - self._submitted_at)
        decode = max(0.0, self._last_token_at - self._first_token_at)
        num_decoded = self._request.num_output_tokens - self._num_first_tokens
        latencies = sorted(self._token_seconds)
        return Timing(
            ttft_ms=ttft * 1e3,
            decode_ms=decode * 1e3,
            decode_tokens_per_s=num_decoded / decode if decode > 0 else 0.0,
            p50_token_ms=_quantile(latencies, 0.50) * 1e3,
            p95_token_ms=_quantile(latencies, 0.95) * 1e3,
            queue_ms=max(0.0, self._scheduled_at - self._submitted_at) * 1e3,
        )

    def speculation(self) -> SpeculationReport:
        """Acceptance; rates are 0 where nothing was drafted."""
        rounds = self._accepted_lengths.total()
        accepted = sum(length * count for length, count in self._accepted_lengths.items())
        longest = max(self._accepted_lengths, default=-1)
        num_decode_steps = self._horizons.total()
        return SpeculationReport(
            mode=self._request.speculation.mode,
            num_spec_steps=rounds,
            num_draft_tokens=self._num_drafted,
            num_accepted_draft_tokens=accepted,
            draft_acceptance_rate=accepted / self._num_drafted if self._num_drafted else 0.0,
            mean_acceptance_length=1.0 + (accepted / rounds if rounds else 0.0),
            acceptance_histogram=[self._accepted_lengths[length] for length in range(longest + 1)],
            mean_horizon=self._num_drafted / num_decode_steps if num_decode_steps else 0.0,
            accepted_by_source=dict(self._accepted_by_source),
            drafted_by_source=dict(self._drafted_by_source),
            horizon_histogram=[self._horizons[length] for length in range(max(self._horizons, default=-1) + 1)],
            calibration_error=self._calibration_error.value,
        )

    def kv(self, *, block_size: int, num_blocks: int) -> KVReport:
        """The cache as this request used it; ``num_blocks`` is the size of the pool."""
        waste = self._waste_sum / self._num_steps if self._num_steps else 0.0
        return KVReport(block_size, num_blocks, self._peak_blocks, waste)


def _quantile(ordered: list[float], fraction: float) -> float:
    """The smallest value that at least ``fraction`` of the values do not exceed."""
    if not ordered:
        return 0.0
    return ordered[max(0, math.ceil(fraction * len(ordered)) - 1)]

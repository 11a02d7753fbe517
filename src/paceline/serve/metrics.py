"""Prometheus metrics under the names the field shares; one registry per server."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from paceline import __version__
from paceline.engine.events import StepEvent
from paceline.engine.output import Output
from paceline.request import DRAFTERS, MAX_SPEC_TOKENS, SamplingParams
from paceline.serve.served import ServedEngine

CONTENT_TYPE = CONTENT_TYPE_LATEST

_TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
_TOKEN = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5)
_LATENCY = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640, 1280)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000)
_HORIZON = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


class Metrics:
    """Counts steps (on the engine's thread) and finished requests (on the event loop)."""

    def __init__(self, engine: ServedEngine, model_name: str) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        self._labels = {"model_name": model_name, "engine": "0"}
        self._last_step = 0
        self.registry.register(_Gauges(engine, self._labels))

        counter, histogram = self._counter, self._histogram
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens of finished requests.")
        self._generation_tokens = counter("generation_tokens", "Generated tokens.")
        self._prefix_queries = counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self._prefix_hits = counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self._success = self._labelled("request_success", "Finished requests.", "finished_reason")
        self._aborted = counter("request_aborted", "Requests that ended without an answer.")
        self._ttft = histogram("time_to_first_token_seconds", "From submission to the first token.", _TTFT)
        self._itl = histogram("inter_token_latency_seconds", "Step time over the tokens it brought.", _TOKEN)
        self._tpot = histogram("request_time_per_output_token_seconds", "Mean per request, after the first.", _TOKEN)
        self._e2e = histogram("e2e_request_latency_seconds", "From arrival to the last token.", _LATENCY)
        self._queue = histogram("request_queue_time_seconds", "From submission to the first step.", _LATENCY)
        self._prefill = histogram("request_prefill_time_seconds", "From the first step to the first token.", _LATENCY)
        self._decode = histogram("request_decode_time_seconds", "From the first to the last token.", _LATENCY)
        self._prompt_sizes = histogram("request_prompt_tokens", "Prompt tokens per request.", _TOKENS)
        self._output_sizes = histogram("request_generation_tokens", "Generated tokens per request.", _TOKENS)
        self._max_tokens = histogram("request_params_max_tokens", "max_tokens of requests that named it.", _TOKENS)
        self._iteration = histogram("iteration_tokens_total", "Rows of one forward pass.", _TOKENS)

        self._drafts = counter("spec_decode_num_drafts", "Verified drafts.")
        self._draft_tokens = counter("spec_decode_num_draft_tokens", "Drafted tokens.")
        self._accepted = counter("spec_decode_num_accepted_tokens", "Accepted draft tokens.")
        self._accepted_at = self._labelled(
            "spec_decode_num_accepted_tokens_per_pos", "Accepted draft tokens by position in the draft.", "position"
        )
        self._by_source = self._labelled("draft_source_tokens", "Drafted tokens by source.", "source", "accepted")
        self._horizon = histogram("spec_length_chosen", "Horizon chosen per request and step.", _HORIZON)
        self._draft_seconds = counter("draft_seconds", "Time spent scheduling and drafting.")
        self._verify_seconds = counter("verify_seconds", "Time spent in the target's forward pass.")
        self._overhead_seconds = counter("overhead_seconds", "Time of steps beyond drafting and the forward pass.")
        for source in DRAFTERS:
            for accepted in ("true", "false"):
                self._by_source.labels(**self._labels, source=source, accepted=accepted)

    def observe_step(self, event: StepEvent) -> None:
        """A step's outcome for one request; the times of a step are counted once."""
        num_tokens = event.num_accepted + 1
        self._generation_tokens.inc(num_tokens)
        self._itl.observe(event.step_ms / 1e3 / num_tokens)
        self._horizon.observe(event.horizon)
        if event.num_drafted:
            self._drafts.inc()
            self._draft_tokens.inc(event.num_drafted)
            self._accepted.inc(event.num_accepted)
            for position in range(min(event.num_accepted, MAX_SPEC_TOKENS)):
                self._accepted_at.labels(**self._labels, position=str(position)).inc()
            by_source = self._by_source.labels
            by_source(**self._labels, source=event.source, accepted="true").inc(event.num_accepted)
            by_source(**self._labels, source=event.source, accepted="false").inc(event.num_drafted - event.num_accepted)
        if event.step != self._last_step:
            self._last_step = event.step
            self._iteration.observe(event.num_rows)
            self._draft_seconds.inc(event.draft_ms / 1e3)
            self._verify_seconds.inc(event.forward_ms / 1e3)
            self._overhead_seconds.inc(max(0.0, event.step_ms - event.draft_ms - event.forward_ms) / 1e3)

    def observe_output(self, output: Output, params: SamplingParams, seconds: float) -> None:
        """A finished request; ``seconds`` from its arrival to its end."""
        usage, timing = output.usage, output.timing
        self._prompt_tokens.inc(usage.prompt_tokens)
        self._prefix_queries.inc(usage.prompt_tokens)
        self._prefix_hits.inc(usage.cached_tokens)
        self._success.labels(**self._labels, finished_reason=output.finish_reason).inc()
        self._ttft.observe(timing.ttft_ms / 1e3)
        self._queue.observe(timing.queue_ms / 1e3)
        self._prefill.observe((timing.ttft_ms - timing.queue_ms) / 1e3)
        self._decode.observe(timing.decode_ms / 1e3)
        if usage.completion_tokens > 1:
            self._tpot.observe(timing.decode_ms / 1e3 / (usage.completion_tokens - 1))
        self._e2e.observe(seconds)
        self._prompt_sizes.observe(usage.prompt_tokens)
        self._output_sizes.observe(usage.completion_tokens)
        if params.max_tokens is not None:
            self._max_tokens.observe(params.max_tokens)

    def observe_abort(self) -> None:
        """A request that ended early: its client left, it took too long, or it failed."""
        self._aborted.inc()

    def render(self) -> bytes:
        """The page for a scraper."""
        return generate_latest(self.registry)

    def _labelled(self, name: str, help_text: str, *labels: str) -> Counter:
        return Counter(f"vllm:{name}", help_text, ["model_name", "engine", *labels], registry=self.registry)

    def _counter(self, name: str, help_text: str) -> Any:
        return self._labelled(name, help_text).labels(**self._labels)

    def _histogram(self, name: str, help_text: str, buckets: Sequence[float]) -> Any:
        labels = ["model_name", "engine"]
        family = Histogram(f"vllm:{name}", help_text, labels, buckets=buckets, registry=self.registry)
        return family.labels(**self._labels)


class _Gauges(Collector):
    """What is read off the engine when somebody asks."""

    def __init__(self, engine: ServedEngine, labels: dict[str, str]) -> None:
        self._engine = engine
        self._labels = labels

    def collect(self) -> Iterable[Metric]:
        """The gauges of this moment."""
        load, info = self._engine.load, self._engine.info
        values = {
            "num_requests_running": ("Requests that take part in steps.", load.num_running),
            "num_requests_waiting": ("Requests that wait for room.", load.num_waiting),
            "kv_cache_usage_perc": ("Used share of the block pool, 0 to 1.", load.num_used_blocks / load.num_blocks),
        }
        for name, (help_text, value) in values.items():
            gauge = GaugeMetricFamily(f"vllm:{name}", help_text, labels=list(self._labels))
            gauge.add_metric(list(self._labels.values()), value)
            yield gauge
        facts = {
            **self._labels,
            "block_size": str(info.block_size),
            "num_blocks": str(info.num_blocks),
            "version": __version__,
        }
        gauge = GaugeMetricFamily("vllm:cache_config_info", "Settings of the KV cache.", labels=list(facts))
        gauge.add_metric(list(facts.values()), 1)
        yield gauge

"""What a caller gets back: deltas while it runs, one Output when it is done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from paceline.records import TokenLogprob
from paceline.request import FinishReason


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts; ``cached_tokens`` of the prompt came from the prefix cache."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds. Time to first token runs from submission; decoding from the first token to the last.

    A token's latency is its step's time divided by the tokens the step yielded for the request. ``queue_ms`` is the
    part of the time to first token before the first step that worked on the request began.
    """

    ttft_ms: float
    decode_ms: float
    decode_tokens_per_s: float
    p50_token_ms: float
    p95_token_ms: float
    queue_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class SpeculationReport:
    """What drafting did for one request.

    ``num_spec_steps`` counts the steps in which something was drafted; ``acceptance_histogram[n]`` those of them that
    accepted exactly n drafts. ``mean_horizon`` is the mean number of tokens drafted per decoding step,
    ``horizon_histogram[n]`` counts the decoding steps that drafted n. ``calibration_error`` is the mean distance of the
    acceptance expected of draft tokens from the one observed, in ten bins (ECE); None where nothing was judged.
    """

    mode: str
    num_spec_steps: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    draft_acceptance_rate: float
    mean_acceptance_length: float
    acceptance_histogram: Sequence[int]
    mean_horizon: float
    accepted_by_source: Mapping[str, int]
    drafted_by_source: Mapping[str, int]
    horizon_histogram: Sequence[int]
    calibration_error: float | None


@dataclass(frozen=True, slots=True)
class KVReport:
    """The cache as one request saw it; ``waste`` = 1 - filled slots / reserved slots, averaged over its steps."""

    block_size: int
    num_blocks: int
    peak_blocks_used: int
    waste: float


@dataclass(frozen=True, slots=True)
class Output:
    """A finished generation. ``token_ids`` holds every generated token, an end token included.

    ``stop_reason`` is the stop string or the id of the ``stop_token_ids`` that ended it, None for anything else.
    """

    text: str
    token_ids: Sequence[int]
    finish_reason: FinishReason
    usage: Usage
    timing: Timing
    speculation: SpeculationReport
    kv: KVReport
    logprobs: Sequence[TokenLogprob] | None = None
    stop_reason: str | int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as ``paceline run --json`` prints it; logprobs only where they were asked for."""
        data = asdict(self)
        del data["stop_reason"], data["timing"]["queue_ms"]
        if self.logprobs is None:
            del data["logprobs"]
        return data


@dataclass(frozen=True, slots=True)
class TokenPiece:
    """A stretch of text and where it came from: a proposer's name for accepted drafts, else recovered or bonus."""

    text: str
    origin: str


@dataclass(frozen=True, slots=True)
class Delta:
    """New text of a running generation, possibly of several tokens; ``output`` is set on the last one.

    ``logprobs`` has one entry per token of ``token_ids`` where log-probabilities were asked for.
    """

    text: str
    pieces: Sequence[TokenPiece]
    token_ids: Sequence[int]
    output: Output | None = None
    logprobs: Sequence[TokenLogprob] = ()

"""What a caller asks for (SamplingParams, Speculation) and what the engine tracks of it (Request).

A request's whole progress is three counters (law 1): the scheduler only ever makes ``num_computed_tokens`` catch
up with ``num_tokens`` plus the drafts, and a rollback is a smaller number, never a copy.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, Protocol

from paceline.errors import InvalidParameterError

FinishReason = Literal["stop", "length", "cancelled"]
SpeculationMode = Literal["dynamic", "static", "off"]
StructuredKind = Literal["json_schema", "json_object", "regex", "grammar"]

DRAFTERS = ("grammar", "prediction", "suffix", "corpus", "model")
MAX_LOGPROBS = 20
MAX_SPEC_TOKENS = 64


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise InvalidParameterError(message)


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """What an answer must look like, whole; the class methods make one.

    ``text`` is the JSON schema, the regular expression or the grammar; it is compiled, and refused if it cannot be,
    when the request is submitted.
    """

    kind: StructuredKind
    text: str = ""

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str) -> StructuredOutput:
        """JSON that a schema (draft 2020-12) accepts, with its properties in the schema's order.

        Raises:
            InvalidParameterError: it cannot be written as JSON.
        """
        if isinstance(schema, str):
            return cls("json_schema", schema)
        try:
            return cls("json_schema", json.dumps(schema))
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidParameterError(f"the JSON schema is not plain JSON ({error})") from None

    @classmethod
    def json_object(cls) -> StructuredOutput:
        """Any JSON object."""
        return cls("json_object")

    @classmethod
    def regex(cls, pattern: str) -> StructuredOutput:
        """Text that a regular expression matches from beginning to end; no look-around and no back references."""
        return cls("regex", pattern)

    @classmethod
    def grammar(cls, text: str) -> StructuredOutput:
        """Text of a context-free grammar, in llguidance's dialect of Lark or in llama.cpp's GBNF."""
        return cls("grammar", text)

    @classmethod
    def choice(cls, options: Sequence[str]) -> StructuredOutput:
        """Exactly one of some texts.

        Raises:
            InvalidParameterError: there is none, or one is empty.
        """
        _require(bool(options) and all(options), "a choice needs options, and none of them may be empty")
        return cls("grammar", "start: " + " | ".join(json.dumps(option) for option in options))


class Constraint(Protocol):
    """A structured output at work in one request: what may follow the committed tokens.

    A mask has one bit per token id, the lowest bit of the first byte for id 0.
    """

    @property
    def failure(self) -> str | None:
        """Why no promise about the answer can be kept; None as long as all is well."""

    def masks(self, token_ids: Sequence[int]) -> list[bytes]:
        """What may follow the committed tokens and ``token_ids[:i]``, for each i from 0.

        As many masks as there are tokens and one more; fewer where a token is forbidden or ends the answer.
        """

    def count_allowed(self, token_ids: Sequence[int]) -> int:
        """How many of ``token_ids`` may follow the committed tokens, one after the other."""

    def forced(self, num_tokens: int) -> list[int]:
        """The tokens that must come next, at most ``num_tokens`` of them; empty where there is a choice."""

    def advance(self, token_id: int) -> FinishReason | None:
        """A token was committed that does not end the answer; "stop" when nothing can follow it, "length" when the
        constraint failed."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen; the same meaning as in the OpenAI API and vLLM.

    ``temperature`` 0 is greedy. ``top_k`` 0 and ``top_p`` 1 are off. With ``seed`` the text depends on nothing but
    the prompt, the model and these parameters (law 5). ``max_tokens`` None means as many as the context allows.
    ``min_tokens`` forbids the end token, stop ids and stop strings until that many tokens are out.
    ``logprobs`` n returns the log-probability of each token and of the n likeliest alternatives.
    ``skip_special_tokens`` False shows control tokens in the text, which formats of tool calls may consist of.
    ``structured`` is what the answer must look like. The end token is allowed only where the answer is complete; the
    answer ends at once when nothing more can follow, ``min_tokens`` and ``ignore_eos`` or not. A penalty or bias that
    forbids everything the structure allows is passed over for that token.

    Raises:
        InvalidParameterError: a value is outside its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    skip_special_tokens: bool = True
    structured: StructuredOutput | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        _require(0.0 <= self.temperature < float("inf"), f"temperature must be 0 or more, got {self.temperature}")
        _require(self.top_k >= 0, f"top_k must be 0 (off) or more, got {self.top_k}")
        _require(0.0 < self.top_p <= 1.0, f"top_p must be in (0, 1], got {self.top_p}")
        _require(0.0 <= self.min_p <= 1.0, f"min_p must be in [0, 1], got {self.min_p}")
        _require(
            self.seed is None or 0 <= self.seed < 2**64,
            f"seed must be a whole number from 0 to 2**64 - 1, got {self.seed}",
        )
        _require(
            0.0 < self.repetition_penalty < float("inf"),
            f"repetition_penalty must be above 0, got {self.repetition_penalty}",
        )
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _require(-2.0 <= value <= 2.0, f"{name} must be in [-2, 2], got {value}")
        _require(
            self.max_tokens is None or self.max_tokens >= 1, f"max_tokens must be 1 or more, got {self.max_tokens}"
        )
        _require(self.min_tokens >= 0, f"min_tokens must be 0 or more, got {self.min_tokens}")
        _require(
            self.max_tokens is None or self.min_tokens <= self.max_tokens,
            f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})",
        )
        _require(all(self.stop), "stop strings must not be empty")
        _require(
            self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS,
            f"logprobs must be from 0 to {MAX_LOGPROBS}, got {self.logprobs}",
        )

    @property
    def is_greedy(self) -> bool:
        """True when the most likely token is always taken."""
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        """True when a row's logits depend on the tokens before it beyond what the model saw."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or bool(self.logit_bias)
            or self.min_tokens > 0
        )


@dataclass(frozen=True, slots=True)
class Speculation:
    """Whether and how far to draft.

    ``max_tokens`` bounds the horizon. ``drafters`` may draft; of two that promise the same, the one named first does.
    ``min_acceptance`` is the share of drafted tokens that should be accepted: the dynamic horizon drafts less where
    promise is small until it is. 0 asks for speed alone.

    Raises:
        InvalidParameterError: an unknown mode or drafter, a horizon outside 1 to 64, or an acceptance outside 0 to 1.
    """

    mode: SpeculationMode = "dynamic"
    max_tokens: int = 16
    drafters: Sequence[str] = DRAFTERS
    min_acceptance: float = 0.5

    def __post_init__(self) -> None:
        _require(
            self.mode in ("dynamic", "static", "off"),
            f"speculation mode must be dynamic, static or off, got {self.mode!r}",
        )
        _require(
            1 <= self.max_tokens <= MAX_SPEC_TOKENS,
            f"speculation max_tokens must be from 1 to {MAX_SPEC_TOKENS}, got {self.max_tokens}",
        )
        for name in self.drafters:
            _require(name in DRAFTERS, f"unknown drafter {name!r}; choose from {', '.join(DRAFTERS)}")
        _require(
            0.0 <= self.min_acceptance < 1.0,
            f"speculation min_acceptance must be 0 or more and below 1, got {self.min_acceptance}",
        )


class RequestStatus(enum.Enum):
    """Where a request stands in the scheduler."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """One generation in flight. Token ids hold the prompt and every committed output token, never a draft.

    Attributes:
        num_computed_tokens: the target's K/V are valid for token_ids[:num_computed_tokens].
        num_draft_computed_tokens: the draft model's K/V are valid for token_ids[draft_start:num_draft_computed_tokens].
        draft_start: above 0 where a draft model was spared tokens that are out of its reach.
        num_cached_tokens: prompt tokens served from the prefix cache when the request was first admitted.
        max_total_tokens: prompt plus output may not exceed this (max_tokens and the context length together).
        arrival: order of arrival, the scheduler's tie breaker.
        due: when its prompt should have been read, on the scheduler's clock of tokens done.
        constraint: what the answer may consist of, at the state of the committed tokens; None for free text.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    speculation: Speculation
    max_total_tokens: int
    prediction_token_ids: Sequence[int] = ()
    session_id: str | None = None
    arrival: int = 0
    constraint: Constraint | None = None
    token_ids: list[int] = field(init=False)
    num_computed_tokens: int = 0
    num_draft_computed_tokens: int = 0
    draft_start: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    due: int = 0
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Committed tokens: prompt and output."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        """The generated tokens."""
        return self.token_ids[len(self.prompt_token_ids) :]

    @property
    def is_decoding(self) -> bool:
        """True when only the newest token lacks its K/V, so that this step samples from a single row or drafts."""
        return self.num_tokens - self.num_computed_tokens == 1

    @property
    def is_finished(self) -> bool:
        """True once a finish reason is set."""
        return self.status is RequestStatus.FINISHED

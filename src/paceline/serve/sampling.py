"""The request fields that OpenAI's chat and completion routes share, and what they mean to the engine."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from paceline.request import MAX_SPEC_TOKENS, SamplingParams, Speculation, StructuredOutput
from paceline.serve.errors import ApiError
from paceline.serve.structure import (
    Structure,
    choice,
    json_schema,
    one_structure,
    response_format,
    structured_outputs,
)

log = logging.getLogger("paceline.serve")

# Fields that clients send as a matter of course and that change nothing here: not worth a warning.
_HARMLESS = frozenset(
    {"user", "metadata", "store", "service_tier", "safety_identifier", "verbosity", "reasoning_effort"}
)


def _unlimited(max_tokens: Any) -> Any:
    """llama.cpp's clients write -1 for as many tokens as the context allows."""
    return 2**31 - 1 if max_tokens == -1 else max_tokens


class WireModel(BaseModel):
    """A request body. Unknown fields are let in, and named in the log where they are not null."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    @model_validator(mode="after")
    def _warn_of_unknown(self) -> WireModel:
        # Clients send an answer back with all its fields, most of them null: nothing was asked for by those.
        asked = (name for name, value in (self.model_extra or {}).items() if value is not None)
        unknown = sorted(set(asked) - _HARMLESS)
        if unknown:
            log.warning("ignored unknown fields of %s: %s", type(self).__name__, ", ".join(map(repr, unknown))[:200])
        return self


class SpeculativeOptions(WireModel):
    """Speculation of one request; a field that is left out is the server's."""

    mode: Literal["dynamic", "static", "off"] | None = None
    max_tokens: Annotated[int, Field(ge=1, le=MAX_SPEC_TOKENS)] | None = None
    drafters: list[str] | None = None
    min_acceptance: Annotated[float, Field(ge=0, lt=1)] | None = None


class StreamOptions(WireModel):
    """What a stream carries beside text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_origins: bool = False


class SamplingFields(WireModel):
    """Fields of /v1/chat/completions and /v1/completions alike, vLLM's additions included."""

    model: str | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    n: Annotated[int, Field(ge=1, le=16)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: Annotated[int, Field(ge=0), BeforeValidator(_unlimited)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    logit_bias: dict[str, float] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    skip_special_tokens: bool = True
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    speculative: bool | SpeculativeOptions | None = None
    prompt_cache_key: Annotated[str, Field(max_length=256)] | None = None
    session_id: Annotated[str, Field(max_length=256)] | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    grammar: str | None = None
    json_schema: dict[str, Any] | str | None = None

    @property
    def session_key(self) -> str | None:
        """The name of the conversation, under either of its spellings."""
        return self.session_id or self.prompt_cache_key

    def structure(self) -> Structure | None:
        """What the answer must look like, under any of its names.

        Raises:
            ApiError: 400, it is malformed, or there are two.
        """
        return one_structure(
            {
                "response_format": response_format("response_format", self.response_format),
                "structured_outputs": structured_outputs(self.structured_outputs or {}),
                "guided_json": json_schema("guided_json", self.guided_json),
                "guided_regex": StructuredOutput.regex(self.guided_regex) if self.guided_regex else None,
                "guided_choice": choice("guided_choice", self.guided_choice),
                "guided_grammar": StructuredOutput.grammar(self.guided_grammar) if self.guided_grammar else None,
                "grammar": StructuredOutput.grammar(self.grammar) if self.grammar else None,
                "json_schema": json_schema("json_schema", self.json_schema),
            }
        )

    def params(self, *, max_tokens: int | None, logprobs: int | None, choice: int = 0) -> SamplingParams:
        """The engine's parameters for one of the ``n`` choices; with a seed each choice has its own.

        Raises:
            ApiError: 400, a value the engine does not accept.
        """
        seed = None if self.seed is None else (self.seed + choice) % 2**64
        return SamplingParams(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=max(0, self.top_k or 0),
            top_p=1.0 if self.top_p is None else self.top_p,
            min_p=self.min_p or 0.0,
            seed=seed,
            repetition_penalty=self.repetition_penalty or 1.0,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            logit_bias=_logit_bias(self.logit_bias or {}),
            max_tokens=max_tokens,
            min_tokens=self.min_tokens or 0,
            stop=stop_strings(self.stop),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            include_stop_str_in_output=self.include_stop_str_in_output,
            ignore_eos=self.ignore_eos,
            logprobs=logprobs,
            skip_special_tokens=self.skip_special_tokens,
        )


def stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    """One, several or no stop strings."""
    if stop is None:
        return ()
    return (stop,) if isinstance(stop, str) else tuple(stop)


def speculation(asked: bool | SpeculativeOptions | None, default: Speculation) -> Speculation:
    """A request's speculation: false is off, true the server's, an object changes what it names.

    Raises:
        InvalidParameterError: an unknown drafter.
    """
    if asked is None or asked is True:
        return default
    if asked is False:
        return Speculation(mode="off")
    return Speculation(
        mode=asked.mode or (default.mode if default.mode != "off" else "dynamic"),
        max_tokens=asked.max_tokens or default.max_tokens,
        drafters=tuple(asked.drafters) if asked.drafters is not None else default.drafters,
        min_acceptance=default.min_acceptance if asked.min_acceptance is None else asked.min_acceptance,
    )


def _logit_bias(bias: Mapping[str, float]) -> dict[int, float]:
    try:
        return {int(token_id): value for token_id, value in bias.items()}
    except ValueError:
        raise ApiError(400, "the keys of logit_bias must be token ids", param="logit_bias") from None

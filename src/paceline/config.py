"""Engine settings: small frozen sections, resolved once from flat keyword options; no component gets the whole."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from paceline.errors import InvalidParameterError
from paceline.request import Speculation

BackendName = Literal["auto", "torch", "cpu", "cuda"]
DTypeName = Literal["auto", "fp32", "bf16", "int8", "int4"]
KVDTypeName = Literal["auto", "int8"]


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The paged KV cache.

    Attributes:
        block_size: token slots per block. Smaller wastes less, larger has shorter tables; one as long as the context
            is the contiguous buffer that paging replaced.
        kv_memory_bytes: budget for the K/V of target and draft together; None takes room for a few full contexts,
            at most a quarter of the machine's memory.
        enable_prefix_cache: keep verified blocks after a request ends and share them between requests.
    """

    block_size: int = 16
    kv_memory_bytes: int | None = None
    enable_prefix_cache: bool = True

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise InvalidParameterError(f"block_size must be 1 or more, got {self.block_size}")
        if self.kv_memory_bytes is not None and self.kv_memory_bytes < 1:
            raise InvalidParameterError(f"kv_memory_bytes must be positive, got {self.kv_memory_bytes}")


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Who runs in a step.

    Attributes:
        max_num_seqs: requests that may run at once.
        max_num_batched_tokens: token budget of a step; longer prompts are prefilled in chunks of this size.
        max_num_prompt_tokens: how much of it prompts may take while others decode, whose next tokens wait for the step.
        max_model_len: prompt plus output of one request; None is the model's own context length.
    """

    max_num_seqs: int = 16
    max_num_batched_tokens: int = 512
    max_num_prompt_tokens: int = 128
    max_model_len: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_num_prompt_tokens"):
            if getattr(self, name) < 1:
                raise InvalidParameterError(f"{name} must be 1 or more, got {getattr(self, name)}")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise InvalidParameterError(f"max_model_len must be 2 or more, got {self.max_model_len}")


@dataclass(frozen=True, slots=True)
class RuntimeConfig:
    """What computes, and in which number formats. ``auto`` picks what this machine serves best.

    Attributes:
        dtype: of the weights.
        kv_cache_dtype: of the K/V; int8 takes about half the memory of the CPU backend's bf16.
    """

    backend: BackendName = "auto"
    device: str = "auto"
    dtype: DTypeName = "auto"
    kv_cache_dtype: KVDTypeName = "auto"
    num_threads: int | None = None

    def __post_init__(self) -> None:
        for name, choices in (
            ("backend", get_args(BackendName)),
            ("dtype", get_args(DTypeName)),
            ("kv_cache_dtype", get_args(KVDTypeName)),
        ):
            if getattr(self, name) not in choices:
                raise InvalidParameterError(f"{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}")
        if self.num_threads is not None and self.num_threads < 1:
            raise InvalidParameterError(f"num_threads must be 1 or more, got {self.num_threads}")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """All sections of one engine, plus the speculation that requests get unless they name their own."""

    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    speculation: Speculation = field(default_factory=Speculation)

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> EngineConfig:
        """Sort flat options (``block_size=16, dtype="fp32"``) into their sections.

        Raises:
            InvalidParameterError: an unknown option (the nearest known name is suggested) or a bad value.
        """
        sections: dict[str, Any] = {}
        remaining = dict(options)
        if "speculation" in remaining:
            sections["speculation"] = remaining.pop("speculation")
        known: list[str] = ["speculation"]
        for name, section in (("cache", CacheConfig), ("scheduler", SchedulerConfig), ("runtime", RuntimeConfig)):
            names = [f.name for f in fields(section)]
            known += names
            sections[name] = section(**{key: remaining.pop(key) for key in names if key in remaining})
        if remaining:
            unknown = next(iter(remaining))
            close = difflib.get_close_matches(unknown, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else f"; known options: {', '.join(sorted(known))}"
            raise InvalidParameterError(f"unknown engine option {unknown!r}{hint}")
        return cls(**sections)

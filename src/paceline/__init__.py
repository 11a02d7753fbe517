"""Paceline: a low-latency LLM inference engine for AI coding agents.

engine = paceline.Engine("smollm2-135m")
print(engine.generate([{"role": "user", "content": "Write a hello world in Python."}]).text)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.engine.async_engine import AsyncEngine
    from paceline.engine.engine import Engine
    from paceline.engine.events import StepEvent
    from paceline.engine.output import Delta, Output
    from paceline.engine.session import Session
    from paceline.errors import (
        BackendUnavailableError,
        CacheCapacityError,
        ChatTemplateError,
        ChecksumError,
        ContextLengthError,
        DraftMismatchError,
        GrammarError,
        InvalidParameterError,
        InvalidPromptError,
        ModelFormatError,
        ModelNotFoundError,
        PacelineError,
        TrainingError,
    )
    from paceline.request import SamplingParams, Speculation, StructuredOutput

__version__ = "0.1.0"

# Names are imported at first use, so that `paceline --help` need not wait for torch.
_HOMES = {
    "AsyncEngine": "paceline.engine.async_engine",
    "BackendUnavailableError": "paceline.errors",
    "CacheCapacityError": "paceline.errors",
    "ChatTemplateError": "paceline.errors",
    "ChecksumError": "paceline.errors",
    "ContextLengthError": "paceline.errors",
    "Delta": "paceline.engine.output",
    "DraftMismatchError": "paceline.errors",
    "Engine": "paceline.engine.engine",
    "GrammarError": "paceline.errors",
    "InvalidParameterError": "paceline.errors",
    "InvalidPromptError": "paceline.errors",
    "ModelFormatError": "paceline.errors",
    "ModelNotFoundError": "paceline.errors",
    "Output": "paceline.engine.output",
    "PacelineError": "paceline.errors",
    "SamplingParams": "paceline.request",
    "Session": "paceline.engine.session",
    "Speculation": "paceline.request",
    "StepEvent": "paceline.engine.events",
    "StructuredOutput": "paceline.request",
    "TrainingError": "paceline.errors",
}

__all__ = [
    "AsyncEngine",
    "BackendUnavailableError",
    "CacheCapacityError",
    "ChatTemplateError",
    "ChecksumError",
    "ContextLengthError",
    "Delta",
    "DraftMismatchError",
    "Engine",
    "GrammarError",
    "InvalidParameterError",
    "InvalidPromptError",
    "ModelFormatError",
    "ModelNotFoundError",
    "Output",
    "PacelineError",
    "SamplingParams",
    "Session",
    "Speculation",
    "StepEvent",
    "StructuredOutput",
    "TrainingError",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)

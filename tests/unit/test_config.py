"""Flat options into sections: defaults, checks, and help with misspelt names."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import pytest

from paceline import InvalidParameterError, Speculation
from paceline.config import CacheConfig, EngineConfig, RuntimeConfig, SchedulerConfig

OPTIONS: dict[str, Any] = {
    "block_size": 8,
    "kv_memory_bytes": 10**6,
    "enable_prefix_cache": False,
    "max_num_seqs": 3,
    "max_num_batched_tokens": 100,
    "max_num_prompt_tokens": 50,
    "max_model_len": 50,
    "backend": "torch",
    "device": "cpu",
    "dtype": "fp32",
    "kv_cache_dtype": "int8",
    "num_threads": 2,
    "speculation": Speculation("off"),
}
SECTIONS = {"cache": CacheConfig, "scheduler": SchedulerConfig, "runtime": RuntimeConfig}


def test_no_options_are_the_defaults() -> None:
    assert EngineConfig.from_options({}) == EngineConfig()
    assert EngineConfig().cache.block_size == 16
    assert EngineConfig().speculation == Speculation()


def test_every_option_reaches_its_section() -> None:
    config = EngineConfig.from_options(OPTIONS)
    names = {f.name for section in SECTIONS.values() for f in dataclasses.fields(section)} | {"speculation"}
    assert names == OPTIONS.keys(), "an option without a test"
    for name, section in SECTIONS.items():
        for f in dataclasses.fields(section):
            assert getattr(getattr(config, name), f.name) == OPTIONS[f.name]
    assert config.speculation.mode == "off"


def test_options_are_not_consumed() -> None:
    options = dict(OPTIONS)
    EngineConfig.from_options(options)
    assert options == OPTIONS


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("blocksize", "did you mean 'block_size'"),
        ("max_num_seq", "did you mean 'max_num_seqs'"),
        ("speculate", "did you mean 'speculation'"),
        ("quux", "known options: backend, block_size, device"),
    ],
)
def test_unknown_options_get_a_hint(name: str, hint: str) -> None:
    with pytest.raises(InvalidParameterError, match=f"unknown engine option '{name}'") as error:
        EngineConfig.from_options({"block_size": 8, name: 1})
    assert hint in str(error.value)


@pytest.mark.parametrize(
    ("section", "name", "good", "bad"),
    [
        (CacheConfig, "block_size", [1, 1024, 8192], [0, -1]),
        (CacheConfig, "kv_memory_bytes", [1, None], [0, -5]),
        (SchedulerConfig, "max_num_seqs", [1], [0, -1]),
        (SchedulerConfig, "max_num_batched_tokens", [1], [0, -1]),
        (SchedulerConfig, "max_num_prompt_tokens", [1], [0, -1]),
        (SchedulerConfig, "max_model_len", [2, None], [1, 0]),
        (RuntimeConfig, "backend", ["auto", "torch", "cpu", "cuda"], ["", "gpu", "Torch"]),
        (RuntimeConfig, "dtype", ["auto", "fp32", "bf16"], ["fp16", "float32"]),
        (RuntimeConfig, "num_threads", [1, None], [0, -2]),
    ],
)
def test_ranges(section: Any, name: str, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        assert getattr(section(**{name: value}), name) == value
    for value in bad:
        with pytest.raises(InvalidParameterError, match=f"{name} must be") as error:
            section(**{name: value})
        assert str(value) in str(error.value)


def test_sections_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        EngineConfig().cache.block_size = 4  # type: ignore[misc]


def test_settings_and_help_need_no_torch() -> None:
    code = (
        "import sys, paceline, paceline.config, paceline.request, paceline.cli.main;"
        "paceline.SamplingParams(), paceline.Speculation();"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0

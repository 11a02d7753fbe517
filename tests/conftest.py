"""Shared fixtures: the embedded model, and tiny random checkpoints that load in milliseconds."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: see docs/decisions/0011

import torch

from paceline import Engine
from paceline.loader.resolve import resolve_source
from tests.support import write_tiny_checkpoint


@pytest.fixture(autouse=True)
def _threads(request: pytest.FixtureRequest) -> None:
    """A tiny model has no work for two threads, and on a busy machine it would only wait for the second one."""
    torch.set_num_threads(2 if request.node.get_closest_marker("embedded") else 1)


@pytest.fixture(scope="session")
def embedded_model_path() -> Path:
    """The embedded model's file, fetched on first use."""
    return resolve_source("smollm2-135m")


@pytest.fixture(scope="session")
def embedded_engine(embedded_model_path: Path) -> Iterator[Engine]:
    """The embedded model with the draft that is shipped for it."""
    with Engine("smollm2-135m", max_model_len=2048) as engine:
        yield engine


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of 64 tokens of vocabulary in Hugging Face format."""
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "llama", "llama")


@pytest.fixture(scope="session")
def sharp_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama that is sure of what it says, at a temperature too."""
    return write_tiny_checkpoint(tmp_path_factory.mktemp("sharp") / "target", "llama", scale=3.0)


@pytest.fixture(scope="session")
def trained_head(tmp_path_factory: pytest.TempPathFactory, sharp_target: Path) -> Path:
    """A draft head that knows by heart what ``sharp_target`` answers to a dozen prompts."""
    from tests.unit.train.workshop import train_head

    folder = tmp_path_factory.mktemp("head") / "head"
    train_head(folder, sharp_target)
    return folder

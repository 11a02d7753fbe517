"""A model that drafts for itself must be accepted always: any error in the draft's K/V bookkeeping shows here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline import Engine, SamplingParams, Speculation
from tests.law.test_losslessness import run_batch


@pytest.fixture(scope="module")
def engine(tiny_checkpoint: Path) -> Iterator[Engine]:
    with Engine(tiny_checkpoint, draft=tiny_checkpoint, block_size=4, max_num_batched_tokens=64) as engine:
        yield engine


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("seed", [None, 11])
@pytest.mark.parametrize("horizon", [1, 3, 4])
def test_alone(engine: Engine, temperature: float, seed: int | None, horizon: int) -> None:
    # A prompt and 1 + n (horizon + 1) tokens, so that the last round is a full one too.
    num_tokens = 1 + 480 // (horizon + 1) * (horizon + 1)
    params = SamplingParams(temperature=temperature, seed=seed, max_tokens=num_tokens, ignore_eos=True)
    mode = Speculation("static", horizon, drafters=("model",))
    report = engine.generate([5, 9, 3, 17], params, speculation=mode).speculation
    assert report.draft_acceptance_rate == 1.0
    assert report.acceptance_histogram == [0] * horizon + [report.num_spec_steps]
    assert report.mean_acceptance_length == horizon + 1
    assert report.num_spec_steps * (horizon + 1) == num_tokens - 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_in_a_batch_of_mixed_lengths(engine: Engine, temperature: float) -> None:
    prompts = [[2 + (i + j) % 60 for j in range(length)] for i, length in enumerate((1, 4, 31, 130, 7, 64))]
    params = SamplingParams(temperature=temperature, max_tokens=100, ignore_eos=True)
    outputs = run_batch(engine, prompts, params, Speculation("static", 4, drafters=("model",)))
    for output in outputs:
        assert output.speculation.draft_acceptance_rate == 1.0
        assert output.usage.completion_tokens == 100


@pytest.mark.long
@pytest.mark.embedded
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_embedded_model(embedded_model_path: Path, temperature: float) -> None:
    with Engine(embedded_model_path, draft=embedded_model_path, max_model_len=2048) as engine:
        prompt = engine.tokenizer.encode("def quicksort(items):\n")
        params = SamplingParams(temperature=temperature, max_tokens=501, ignore_eos=True)
        report = engine.generate(prompt, params, speculation=Speculation("static", 4, drafters=("model",))).speculation
    assert report.num_draft_tokens == 400
    assert report.draft_acceptance_rate == 1.0
    assert report.mean_acceptance_length == 5

"""Promises 1 and 4 for the whole ladder: all sources at once, dynamic horizons, right and wrong predictions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline import Engine, SamplingParams, Speculation
from paceline.sampling.goodness import chi_square_p_value
from tests.support import write_tiny_checkpoint

OFF = Speculation("off")
LADDERS = [
    Speculation("dynamic", 8, min_acceptance=0.0),
    Speculation("dynamic", 16, min_acceptance=0.9),
    Speculation("static", 3),
    Speculation("dynamic", 4, ("model", "corpus", "suffix", "prediction")),
]
PROMPT = [2 + (i * 3) % 11 for i in range(30)]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A target that repeats itself, a draft that half agrees, and a corpus."""
    folder = tmp_path_factory.mktemp("ladder")
    target = write_tiny_checkpoint(folder / "target", "llama", scale=2.0)
    draft = write_tiny_checkpoint(folder / "draft", "llama", scale=2.0, noise=0.02)
    corpus: Path = folder / "corpus.txt"
    corpus.write_text("abcdefghabcdefghijklmnop" * 20)
    with Engine(target, draft=draft, corpus=[corpus], block_size=4, max_num_seqs=16) as engine:
        # Drafts and rows that cost nothing, so that every rung takes part however long a step takes here.
        engine.core.ladder.costs.draft_ms = lambda source: 0.0  # type: ignore[method-assign]
        engine.core.ladder.costs.shape = lambda num_rows: 1.0  # type: ignore[method-assign]
        yield engine


@pytest.mark.parametrize("speculation", LADDERS, ids=str)
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=80, ignore_eos=True),
        SamplingParams(temperature=0.9, seed=5, max_tokens=80, ignore_eos=True),
    ],
    ids=["greedy", "seeded"],
)
def test_the_text_is_the_same_whatever_is_drafted(
    engine: Engine, params: SamplingParams, speculation: Speculation
) -> None:
    engine.reset_prefix_cache()
    plain = engine.generate(PROMPT, params, speculation=OFF)
    right = engine.tokenizer.decode(plain.token_ids)
    edited = right[:20] + "XYZ" + right[25:]
    sources: Counter[str] = Counter()
    for prediction in (None, right, edited, right[30:], "zq" * 40):
        for _ in range(2):  # the second time the answer stands among the earlier ones
            output = engine.generate(PROMPT, params, speculation=speculation, prediction=prediction)
            assert list(output.token_ids) == list(plain.token_ids)
            sources.update(output.speculation.drafted_by_source)
    assert len(sources) >= 2, "a ladder of one rung proves little"


@pytest.mark.parametrize("speculation", LADDERS[:2], ids=str)
def test_samples_are_distributed_as_the_targets(engine: Engine, speculation: Speculation) -> None:
    """Two tokens after the prompt, drawn many times, with a prediction that is often right and often wrong."""
    engine.reset_prefix_cache()
    params = SamplingParams(temperature=1.2, top_k=12, max_tokens=3, ignore_eos=True)
    likeliest = engine.generate(PROMPT, SamplingParams(max_tokens=6, ignore_eos=True), speculation=OFF)
    prediction = engine.tokenizer.decode(likeliest.token_ids)
    ids = [engine.submit(PROMPT, params, speculation=speculation, prediction=prediction) for _ in range(1200)]
    while engine.step():
        pass
    outputs = [output for each in ids if (output := engine.take(each)[-1].output) is not None]
    assert sum(output.speculation.num_draft_tokens for output in outputs) > 300
    firsts = Counter(output.token_ids[0] for output in outputs)
    first, _ = firsts.most_common(1)[0]
    seconds = Counter(output.token_ids[1] for output in outputs if output.token_ids[0] == first)
    for prefix, counts in ((PROMPT, firsts), ([*PROMPT, first], seconds)):
        expected = _next_probs(engine, prefix, params)
        assert set(counts) <= set(expected)
        assert chi_square_p_value([counts[token] for token in expected], list(expected.values())) > 1e-3


def _next_probs(engine: Engine, prefix: list[int], params: SamplingParams) -> dict[int, float]:
    probe = SamplingParams(max_tokens=1, logprobs=params.top_k, ignore_eos=True)
    output = engine.generate(prefix, probe, speculation=OFF)
    assert output.logprobs is not None
    weights = {token: math.exp(value / params.temperature) for token, value in output.logprobs[0].top.items()}
    return {token: weight / sum(weights.values()) for token, weight in weights.items()}

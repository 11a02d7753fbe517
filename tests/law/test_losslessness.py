"""Promise 1: speculation never changes what comes out, whatever horizon, batch, block size or drafter.

The grid runs on a tiny model by default and on the embedded model in the long suite.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from paceline import Engine, Output, SamplingParams, Speculation
from tests.support import write_tiny_checkpoint

NEAR_TIE = 1e-4
OFF = Speculation("off")
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.8, seed=7)
HORIZONS = (1, 2, 3, 4, 8)
BATCHES = (1, 4)
BLOCK_SIZES = (1, 4, 16)


def code_prompts(count: int) -> list[str]:
    """Functions of this repository's own source, each with a request; the same ones on every machine."""
    root = Path(__file__).parents[2] / "src" / "paceline"
    prompts = []
    for path in sorted(root.rglob("*.py")):
        source = path.read_text()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef) and 4 <= (node.end_lineno or 0) - node.lineno <= 12:
                text = ast.get_source_segment(source, node)
                prompts.append(f"```python\n{text}\n```\nAdd type hints and repeat the function.\n```python\n")
    step = len(prompts) // count
    return prompts[:: max(1, step)][:count]


def run_batch(engine: Engine, prompts: Sequence[list[int]], params: SamplingParams, mode: Speculation) -> list[Output]:
    """All prompts in one batch."""
    ids = [engine.submit(prompt, params, speculation=mode) for prompt in prompts]
    outputs: dict[str, Output] = {}
    while engine.step():
        for request_id in ids:
            for delta in engine.take(request_id):
                if delta.output is not None:
                    outputs[request_id] = delta.output
        engine.core.cache.check_integrity()
    return [outputs[request_id] for request_id in ids]


def explain_difference(engine: Engine, prompt: list[int], plain: Sequence[int], other: Sequence[int]) -> float:
    """The target's top-2 margin at the first token that differs; printed for whoever reads the failure."""
    at = next(i for i, (a, b) in enumerate(itertools.zip_longest(plain, other)) if a != b)
    probe = SamplingParams(max_tokens=1, logprobs=2, ignore_eos=True)
    output = engine.generate([*prompt, *plain[:at]], probe, speculation=OFF)
    assert output.logprobs is not None
    best, second = output.logprobs[0].top.values()
    print(f"token {at}: {plain[at]} became {other[at]}; top-2 margin {best - second:.3g}")
    return best - second


def assert_same(
    engine: Engine, prompts: Sequence[list[int]], expected: Sequence[Output], got: Sequence[Output]
) -> None:
    for prompt, plain, output in zip(prompts, expected, got, strict=True):
        if list(plain.token_ids) != list(output.token_ids):
            margin = explain_difference(engine, prompt, plain.token_ids, output.token_ids)
            assert margin < NEAR_TIE, f"speculation changed the text although the choice was clear ({margin:.3g})"


def check_grid(engine: Engine, prompts: Sequence[list[int]], expected: Sequence[Output], params: SamplingParams) -> int:
    """Every horizon, alone and in batches of four; returns how many draft tokens were accepted on the way."""
    num_accepted = 0
    for horizon, batch in itertools.product(HORIZONS, BATCHES):
        mode = Speculation("static", horizon)
        got = [
            output
            for start in range(0, len(prompts), batch)
            for output in run_batch(engine, prompts[start : start + batch], params, mode)
        ]
        assert_same(engine, prompts, expected, got)
        num_accepted += sum(output.speculation.num_accepted_draft_tokens for output in got)
    return num_accepted


@pytest.fixture(scope="module")
def sharp_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target so sure of itself that it repeats itself even at a temperature; and a draft that half agrees."""
    folder = tmp_path_factory.mktemp("sharp")
    return (
        write_tiny_checkpoint(folder / "target", "llama", scale=3.0),
        write_tiny_checkpoint(folder / "draft", "llama", scale=3.0, noise=0.01),
    )


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("has_draft_model", [False, True], ids=["suffix", "model"])
def test_tiny_model_grid(
    sharp_pair: tuple[Path, Path], params: SamplingParams, block_size: int, has_draft_model: bool
) -> None:
    target, draft = sharp_pair
    prompts = [[2 + (i * j) % 6 for j in range(5 + 3 * i)] for i in range(1, 9)]
    with Engine(target, draft=draft if has_draft_model else None, block_size=block_size, max_model_len=64) as engine:
        expected = [engine.generate(prompt, params, speculation=OFF) for prompt in prompts]
        num_accepted = check_grid(engine, prompts, expected, params)
        assert num_accepted > 0, "nothing was drafted successfully: the grid proves nothing"
        dynamic = run_batch(engine, prompts, params, Speculation("dynamic"))
        assert_same(engine, prompts, expected, dynamic)


@pytest.mark.embedded
@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_embedded_model_sample(embedded_engine: Engine, params: SamplingParams) -> None:
    """A corner of the grid below that is quick enough for every day."""
    prompts = [embedded_engine.tokenizer.encode(text) for text in code_prompts(4)]
    expected = [embedded_engine.generate(prompt, params, speculation=OFF) for prompt in prompts]
    for mode in (Speculation("static", 4), Speculation("static", 4, ("model",)), Speculation("dynamic")):
        assert_same(embedded_engine, prompts, expected, run_batch(embedded_engine, prompts, params, mode))


@pytest.mark.long
@pytest.mark.embedded
@pytest.mark.timeout(5400)
@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.usefixtures("embedded_model_path")
def test_embedded_model_grid(params: SamplingParams) -> None:
    params = replace(params, max_tokens=16)
    expected: list[Output] = []
    for block_size in BLOCK_SIZES:
        with Engine("smollm2-135m", max_model_len=1024, block_size=block_size, dtype="fp32") as engine:
            prompts = [engine.tokenizer.encode(text) for text in code_prompts(40)]
            assert len(prompts) == 40
            if not expected:
                expected = [engine.generate(prompt, params, speculation=OFF) for prompt in prompts]
            num_accepted = check_grid(engine, prompts, expected, params)
        print(f"block size {block_size}: {num_accepted} draft tokens accepted")
        assert num_accepted > 1000


def test_preemption_changes_nothing(tiny_checkpoint: Path) -> None:
    """A pool too small for all requests: some are preempted midway and recomputed."""
    params = SamplingParams(max_tokens=60, ignore_eos=True, temperature=0.8, seed=3)
    prompts = [[2 + (i + 3 * j) % 60 for j in range(20)] for i in range(6)]
    with Engine(tiny_checkpoint, draft=tiny_checkpoint) as engine:
        expected = [engine.generate(prompt, params, speculation=OFF) for prompt in prompts]
        bytes_per_block = engine.info.kv_bytes // engine.info.num_blocks
    with Engine(
        tiny_checkpoint, draft=tiny_checkpoint, max_model_len=128, kv_memory_bytes=15 * bytes_per_block
    ) as engine:
        for prompt in prompts:
            engine.submit(prompt, params, speculation=Speculation("static", 4))
        requests = list(engine.core.scheduler._waiting)
        outputs: dict[str, Output] = {}
        while engine.step():
            for request in requests:
                for delta in engine.take(request.request_id):
                    if delta.output is not None:
                        outputs[request.request_id] = delta.output
            engine.core.cache.check_integrity()
        num_preemptions = sum(request.num_preemptions for request in requests)
        assert num_preemptions > 0
        assert_same(engine, prompts, expected, [outputs[request.request_id] for request in requests])


def test_prefix_hits_change_nothing(tiny_checkpoint: Path) -> None:
    """Cold, hot, and with the ending changed inside the last block; and a prompt that holds once rejected drafts."""
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    prompt = [2 + (7 * j) % 60 for j in range(50)]
    variants = [prompt, prompt, [*prompt[:-1], 3], [*prompt, 5, 6, 7]]
    with Engine(tiny_checkpoint, draft=None, enable_prefix_cache=False) as engine:
        expected = [engine.generate(variant, params, speculation=OFF) for variant in variants]
    with Engine(tiny_checkpoint, draft=None) as engine:
        got = [engine.generate(variant, params, speculation=Speculation("static", 8)) for variant in variants]
        assert [output.usage.cached_tokens for output in got] == [0, 48, 48, 48]
        assert_same(engine, variants, expected, got)


def test_tied_logits_still_commit(tmp_path: Path) -> None:
    """Duplicated vocabulary rows tie every logit with a twin's; each pass must still commit at least one token."""
    folder = write_tiny_checkpoint(tmp_path / "tied", "llama")
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["lm_head.weight"][:32].repeat(2, 1).contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    events = []
    with Engine(folder, draft=None) as engine:
        engine.subscribe(events.append)
        prompt = [2 + j % 5 for j in range(40)]
        plain = engine.generate(prompt, GREEDY, speculation=OFF)
        output = engine.generate(prompt, GREEDY, speculation=Speculation("static", 4, drafters=("suffix",)))
    assert output.token_ids == plain.token_ids
    assert all(token < 32 for token in output.token_ids)  # the lower id of two equals
    assert len(output.token_ids) == GREEDY.max_tokens

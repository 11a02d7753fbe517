"""Logits of every model family against transformers, in fp32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from paceline.backends.kv_store import KVShape
from paceline.backends.onednn import PackedTorchBackend
from paceline.backends.torch_ref import TorchBackend
from paceline.loader.load import load_checkpoint
from paceline.model.decoder import Decoder
from paceline.model.runner import ModelRunner, SequenceInput
from tests.support import write_tiny_checkpoint

CPU = torch.device("cpu")
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("llama", "llama", {}),
    ("llama-tied", "llama", {"tie_word_embeddings": True}),
    ("llama-biases", "llama", {"attention_bias": True, "mlp_bias": True}),
    ("llama-wide-heads", "llama", {"head_dim": 16}),
    ("llama-linear", "llama", {"rope_parameters": LINEAR}),
    ("llama-llama3", "llama", {"rope_parameters": LLAMA3}),
    ("llama-yarn", "llama", {"rope_parameters": YARN}),
    ("llama-yarn-factor", "llama", {"rope_parameters": {**YARN, "attention_factor": 1.3, "beta_fast": 16.0}}),
    ("mistral", "mistral", {"sliding_window": None}),
    ("mistral-window", "mistral", {"sliding_window": 8}),
    ("qwen2", "qwen2", {}),
    (
        "qwen2-tied-window",
        "qwen2",
        {"tie_word_embeddings": True, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    ("qwen3", "qwen3", {"head_dim": 16}),
    ("qwen3-yarn", "qwen3", {"head_dim": 16, "rope_parameters": YARN}),
]


def make_runner(folder: Path, backend: TorchBackend, *, block_size: int = 4, num_blocks: int = 64) -> ModelRunner:
    checkpoint = load_checkpoint(folder, dtype=backend.dtype)
    shape = checkpoint.config
    decoder = Decoder(shape, checkpoint.weights, backend, num_positions=num_blocks * block_size)
    store = backend.make_kv_store(
        KVShape(num_blocks * block_size, shape.num_layers, shape.num_kv_heads, shape.head_dim)
    )
    return ModelRunner(decoder, store, block_size=block_size, device=CPU)


@pytest.mark.parametrize("backend_class", [TorchBackend, PackedTorchBackend])
@pytest.mark.parametrize(("name", "family", "overrides"), CASES, ids=[case[0] for case in CASES])
def test_logits_match_transformers(
    name: str, family: str, overrides: dict[str, Any], backend_class: type[TorchBackend], tmp_path: Path
) -> None:
    folder = write_tiny_checkpoint(tmp_path / name, family, **overrides)
    token_ids = torch.randint(2, 64, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    oracle = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        expected = oracle(torch.tensor([token_ids])).logits[0]

    runner = make_runner(folder, backend_class(CPU, torch.float32))
    scattered = [7, 3, 11, 0, 20, 5, 9, 13, 2, 30, 31]  # blocks out of order, so that tables are really read
    whole = runner.run([SequenceInput(token_ids, 0, scattered, len(token_ids))])
    torch.testing.assert_close(whole, expected, rtol=0, atol=1e-4)

    # The same sequence in chunks, on other blocks, beside a second one.
    own, other = list(range(40, 52)), list(range(52, 64))
    parts = []
    for start, end in ((0, 13), (13, 14), (14, 33), (33, 40)):
        rows = end - start
        logits = runner.run(
            [
                SequenceInput(token_ids[start:end], start, own, rows),
                SequenceInput(token_ids[:5], 0, other, 1),
            ]
        )
        parts.append(logits[:rows])
        torch.testing.assert_close(logits[-1], expected[4], rtol=0, atol=1e-4)
    torch.testing.assert_close(torch.cat(parts), expected, rtol=0, atol=1e-4)


def test_bf16_stays_close(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path / "llama", "llama")
    token_ids = list(range(2, 42))
    fp32 = make_runner(folder, TorchBackend(CPU, torch.float32))
    bf16 = make_runner(folder, TorchBackend(CPU, torch.bfloat16))
    inputs = [SequenceInput(token_ids, 0, list(range(10)), 40)]
    expected, got = fp32.run(inputs), bf16.run(inputs).float()
    assert torch.nn.functional.cosine_similarity(got, expected, dim=-1).min() > 0.995

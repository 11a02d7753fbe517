"""Logits of the native decoder against the plain torch one, for every model family and instruction set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline import BackendUnavailableError
from paceline.backends.cpu import CpuBackend, WeightFormat
from paceline.backends.kv_store import KVShape, KVStore
from paceline.backends.metadata import AttentionMetadata
from paceline.backends.quantized import QuantizedTensor, quantize
from paceline.backends.torch_ref import TorchBackend
from paceline.loader.load import load_checkpoint
from paceline.model.decoder import Decoder
from paceline.model.runner import ModelRunner, SequenceInput
from tests.parity.test_models import CASES, CPU
from tests.support import write_tiny_checkpoint

_kernels = pytest.importorskip("paceline.backends._kernels")
NativeDecoder = pytest.importorskip("paceline.model.native").NativeDecoder

BLOCK_SIZE, NUM_BLOCKS, LENGTH = 4, 128, 300
ROUNDING_SETS = ("amx", "avx512bf16")
SOME = [case for case in CASES if case[0] in ("llama-biases", "mistral-window", "qwen2-tied-window", "qwen3")]


class RoundingBackend(TorchBackend):
    """The reference in fp32, with K, V and, where the kernels do it, scaled queries rounded to bf16."""

    def __init__(self, instruction_set: str) -> None:
        super().__init__(CPU, torch.float32)
        self._rounds_queries = instruction_set in ROUNDING_SETS

    def write_kv(self, store: KVStore, layer: int, k: Tensor, v: Tensor, metadata: AttentionMetadata) -> None:
        super().write_kv(store, layer, k.bfloat16().float(), v.bfloat16().float(), metadata)

    def attention(
        self, q: Tensor, store: KVStore, layer: int, metadata: AttentionMetadata, window: int | None
    ) -> Tensor:
        if self._rounds_queries:
            scale = 1 / torch.tensor(q.shape[-1], dtype=torch.float32).sqrt()
            q = (q * scale).bfloat16().float() / scale
        return super().attention(q, store, layer, metadata, window)


def tokens(count: int = LENGTH) -> list[int]:
    return torch.randint(2, 64, (count,), generator=torch.Generator().manual_seed(1)).tolist()


def runner_of(decoder: Decoder, backend: TorchBackend | CpuBackend) -> ModelRunner:
    config = decoder.config
    shape = KVShape(NUM_BLOCKS * BLOCK_SIZE, config.num_layers, config.num_kv_heads, config.head_dim)
    return ModelRunner(decoder, backend.make_kv_store(shape), block_size=BLOCK_SIZE, device=CPU)


def torch_logits(folder: Path, backend: TorchBackend, weight_format: str) -> Tensor:
    """Logits of a prompt by the plain decoder, on weights rounded as ``weight_format`` rounds them."""
    checkpoint = load_checkpoint(folder, dtype=torch.float32)
    weights = dict(checkpoint.weights)
    for name, weight in weights.items():
        assert not isinstance(weight, QuantizedTensor)
        # Matrices are what a format concerns; norms and biases stay in fp32.
        if weight.ndim == 2 and weight_format != "fp32":
            bits = {"int4": 4, "int8": 8}.get(weight_format)
            weights[name] = weight.bfloat16().float() if bits is None else quantize(weight, bits).dequantize()
    decoder = Decoder(checkpoint.config, weights, backend, num_positions=NUM_BLOCKS * BLOCK_SIZE)
    return runner_of(decoder, backend).run([SequenceInput(tokens(), 0, range(NUM_BLOCKS), LENGTH)])


def native_logits(folder: Path, weight_format: WeightFormat) -> Tensor:
    """Logits of the same prompt by the native decoder, in scattered blocks."""
    checkpoint = load_checkpoint(folder, dtype=torch.float32, keep_quantized=True)
    backend = CpuBackend(1, weight_format)
    decoder = NativeDecoder(checkpoint.config, checkpoint.weights, backend, num_positions=NUM_BLOCKS * BLOCK_SIZE)
    scattered = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(2)).tolist()
    return runner_of(decoder, backend).run([SequenceInput(tokens(), 0, scattered, LENGTH)])


def mean_kl(logits: Tensor, expected: Tensor) -> float:
    """The divergence of the next-token distributions from the expected ones, in nats per position."""
    ours, theirs = logits.double().log_softmax(-1), expected.double().log_softmax(-1)
    return float((theirs.exp() * (theirs - ours)).sum(-1).mean())


@pytest.mark.parametrize("instruction_set", _kernels.instruction_sets())
@pytest.mark.parametrize(("name", "family", "overrides"), CASES, ids=[case[0] for case in CASES])
def test_logits_in_bf16_match_the_plain_decoder(
    name: str,
    family: str,
    overrides: dict[str, Any],
    instruction_set: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PACELINE_ISA", instruction_set)
    folder = write_tiny_checkpoint(tmp_path / name, family, **overrides)
    expected = torch_logits(folder, RoundingBackend(instruction_set), "bf16")
    error, spread = (native_logits(folder, "bf16") - expected).abs(), expected.std()
    print(f"{float(error.median() / spread):.2g} {float(error.max() / spread):.2g} of the spread")
    if instruction_set in ROUNDING_SETS:
        # Probabilities are off by up to 2^-9 too, in every row and layer; small gates and norms make that more.
        assert error.median() < 2.0**-8 * spread
        assert error.max() < 2.0**-3 * spread
    else:
        # Sums in another order move a logit by some 1e-6 of the spread. Now and then that tips a number of K or V over
        # the middle between two bf16, which moves it by 2^-8 and the logits of later positions by a part of that.
        assert error.median() < 1e-4 * spread
        assert error.max() < 2.0**-7 * spread


@pytest.mark.parametrize("instruction_set", _kernels.instruction_sets())
@pytest.mark.parametrize(("name", "family", "overrides"), SOME, ids=[case[0] for case in SOME])
@pytest.mark.parametrize(("weight_format", "bound"), [("bf16", 1e-3), ("int8", 5e-3), ("int4", 1.0)])
def test_next_token_distributions_stay_near_those_of_fp32(
    weight_format: WeightFormat,
    bound: float,
    name: str,
    family: str,
    overrides: dict[str, Any],
    instruction_set: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PACELINE_ISA", instruction_set)
    folder = write_tiny_checkpoint(tmp_path / name, family, **overrides)
    plain = TorchBackend(CPU, torch.float32)
    logits = native_logits(folder, weight_format)
    on_exact, on_rounded = (mean_kl(logits, torch_logits(folder, plain, kept)) for kept in ("fp32", weight_format))
    print(f"mean KL {on_exact:.2g} to the exact weights, {on_rounded:.2g} to the rounded ones")
    assert on_exact < bound
    assert on_rounded < 5e-3


@pytest.mark.parametrize("overrides", [{"head_dim": 258}, {"hidden_size": 1040, "num_attention_heads": 130}])
def test_heads_that_the_kernels_have_no_room_for_are_refused(overrides: dict[str, Any], tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path / "wide", "llama", **{"head_dim": 8, **overrides})
    with pytest.raises(BackendUnavailableError, match="use --backend torch"):
        native_logits(folder, "bf16")

"""load_checkpoint(keep_quantized=True): the same numbers as without, still as codes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gguf.constants import GGMLQuantizationType as Kind

from paceline.backends.quantized import QuantizedTensor
from paceline.errors import InvalidParameterError
from paceline.loader import gguf
from paceline.loader.load import load_checkpoint
from tests.unit.loader.tiny_checkpoints import random_weights, tiny_config, write_gguf, write_hf

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
# Types that gguf can also write, met in turn by the matrices of one file.
KINDS = [Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0]


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("first", range(len(KINDS)), ids=lambda first: KINDS[first].name)
def test_kept_weights_are_the_dequantised_ones(tmp_path: Path, architecture: str, first: int) -> None:
    config = tiny_config(architecture, has_tied_embeddings=False)
    weights = random_weights(config)
    matrices = [name for name, weight in weights.items() if weight.dim() == 2]
    kinds = {name: KINDS[(first + i) % len(KINDS)] for i, name in enumerate(matrices)}
    path = write_gguf(tmp_path / "m.gguf", config, weights, kinds=kinds)
    plain = load_checkpoint(path, dtype=torch.float32)
    kept = load_checkpoint(path, dtype=torch.float32, keep_quantized=True)
    assert kept.config == plain.config
    assert kept.weights.keys() == plain.weights.keys()
    for name, weight in kept.weights.items():
        expected = plain.weights[name]
        assert isinstance(expected, torch.Tensor)
        if name in kinds:
            assert isinstance(weight, QuantizedTensor), name
            assert weight.bits == (4 if kinds[name] in (Kind.Q4_0, Kind.Q4_1) else 8)
            weight = weight.dequantize()
        assert isinstance(weight, torch.Tensor), name
        assert torch.equal(weight, expected), name


def test_other_types_and_vectors_are_read_into_dtype(tmp_path: Path) -> None:
    config = tiny_config(has_qkv_bias=True)
    query, bias, up = (
        f"model.layers.0.{name}" for name in ("self_attn.q_proj.weight", "self_attn.q_proj.bias", "mlp.up_proj.weight")
    )
    kinds = {query: Kind.F16, bias: Kind.Q8_0, up: Kind.Q8_0}
    path = write_gguf(tmp_path / "m.gguf", config, random_weights(config), kinds=kinds)
    plain = load_checkpoint(path, dtype=torch.bfloat16).weights
    kept = load_checkpoint(path, dtype=torch.bfloat16, keep_quantized=True).weights
    assert [name for name, weight in kept.items() if isinstance(weight, QuantizedTensor)] == [up]
    for name in kept.keys() - {up}:
        weight, expected = kept[name], plain[name]
        assert isinstance(weight, torch.Tensor)
        assert isinstance(expected, torch.Tensor)
        assert weight.dtype == torch.bfloat16
        assert torch.equal(weight, expected)


@pytest.mark.parametrize(
    ("head_kind", "head_seed", "is_tied"), [(Kind.Q4_1, 0, True), (Kind.Q4_1, 1, False), (Kind.Q8_0, 0, False)]
)
def test_a_head_beside_tied_embeddings_counts_only_if_its_codes_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, head_kind: Kind, head_seed: int, is_tied: bool
) -> None:
    config = tiny_config()
    weights = random_weights(config)
    head = random_weights(config, head_seed)[EMBEDDING]
    kinds = {EMBEDDING: Kind.Q4_1, HEAD: head_kind}
    path = write_gguf(tmp_path / "m.gguf", config, weights | {HEAD: head}, kinds=kinds)
    # GGUF says that embeddings are tied by leaving the head out; here the config insists.
    read_config = gguf._read_config
    monkeypatch.setattr(gguf, "_read_config", lambda file: replace(read_config(file), has_tied_embeddings=True))
    loaded = load_checkpoint(path, dtype=torch.float32, keep_quantized=True)
    assert loaded.config.has_tied_embeddings == is_tied
    assert (HEAD in loaded.weights) != is_tied
    assert isinstance(loaded.weights[EMBEDDING], QuantizedTensor)


def test_a_float_head_differs_from_quantised_embeddings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config()
    weights = random_weights(config)
    weights[HEAD] = weights[EMBEDDING]
    path = write_gguf(tmp_path / "m.gguf", config, weights, kinds={EMBEDDING: Kind.Q8_0})
    read_config = gguf._read_config
    monkeypatch.setattr(gguf, "_read_config", lambda file: replace(read_config(file), has_tied_embeddings=True))
    loaded = load_checkpoint(path, dtype=torch.float32, keep_quantized=True)
    assert not loaded.config.has_tied_embeddings
    assert isinstance(loaded.weights[HEAD], torch.Tensor)


def test_a_folder_ignores_it(tmp_path: Path) -> None:
    config = tiny_config()
    folder = write_hf(tmp_path / "m", config, random_weights(config))
    kept = load_checkpoint(folder, dtype=torch.float32, keep_quantized=True).weights
    for name, weight in load_checkpoint(folder, dtype=torch.float32).weights.items():
        assert isinstance(weight, torch.Tensor)
        same = kept[name]
        assert isinstance(same, torch.Tensor)
        assert torch.equal(same, weight)


def test_only_the_cpu_keeps_codes(tmp_path: Path) -> None:
    config = tiny_config()
    path = write_gguf(tmp_path / "m.gguf", config, random_weights(config))
    with pytest.raises(InvalidParameterError, match="on the CPU only, not on cuda"):
        load_checkpoint(path, dtype=torch.float32, device="cuda", keep_quantized=True)

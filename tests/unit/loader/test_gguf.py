from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Kind
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.errors import ModelFormatError
from paceline.loader import gguf_file
from paceline.loader.gguf import GgufCheckpoint
from paceline.loader.gguf_file import GgufFile
from paceline.loader.load import load_checkpoint
from paceline.model.config import ModelConfig, RopeScaling
from tests.unit.loader.tiny_checkpoints import random_weights, tiny_config, write_gguf


def read_config(tmp_path: Path, config: ModelConfig | None = None, **kwargs: Any) -> ModelConfig:
    config = config or tiny_config()
    return GgufCheckpoint(write_gguf(tmp_path / "m.gguf", config, random_weights(config), **kwargs)).config


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3"])
def test_config_and_weights_survive_the_round_trip(tmp_path: Path, architecture: str, is_tied: bool) -> None:
    config = tiny_config(architecture, has_tied_embeddings=is_tied)
    weights = random_weights(config)
    loaded = load_checkpoint(write_gguf(tmp_path / "tiny.gguf", config, weights), dtype=torch.float32)
    assert loaded.name == "tiny"
    assert loaded.config.rms_norm_eps == pytest.approx(config.rms_norm_eps)
    assert {**_fields(loaded.config), "rms_norm_eps": 0} == {**_fields(config), "rms_norm_eps": 0}
    assert loaded.weights.keys() == weights.keys()
    for name, tensor in weights.items():
        assert torch.equal(loaded.weights[name], tensor), name


def _fields(config: ModelConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in config.__dataclass_fields__}


def test_llama_biases_are_found_and_put_back_in_order(tmp_path: Path) -> None:
    config = tiny_config(has_qkv_bias=True, has_output_bias=True, has_mlp_bias=True)
    weights = random_weights(config)
    loaded = load_checkpoint(write_gguf(tmp_path / "m.gguf", config, weights), dtype=torch.float32)
    assert loaded.config.has_qkv_bias
    assert loaded.config.has_output_bias
    assert loaded.config.has_mlp_bias
    assert all(torch.equal(loaded.weights[name], tensor) for name, tensor in weights.items())


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_1, Kind.Q5_0])
def test_quantised_weights_are_dequantised_then_reordered(tmp_path: Path, kind: Kind) -> None:
    config = tiny_config()
    weights = random_weights(config)
    name = "model.layers.1.self_attn.q_proj.weight"
    path = write_gguf(tmp_path / "m.gguf", config, weights, kinds={name: kind})
    expected = gguf.quants.dequantize(gguf.quants.quantize(weights[name].numpy(), kind), kind)
    loaded = load_checkpoint(path, dtype=torch.bfloat16).weights[name]
    assert torch.equal(loaded, torch.from_numpy(expected.astype(np.float32)).bfloat16())


DEQUANTISABLE = sorted(gguf.quants._type_traits, key=lambda kind: kind.name)


@pytest.mark.parametrize("kind", DEQUANTISABLE, ids=lambda kind: kind.name)
def test_every_type_is_read_alike_in_slabs_and_at_once(
    tmp_path: Path, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    block_elements, block_bytes = GGML_QUANT_SIZES[kind]
    rows, columns = 5, 2 * block_elements
    raw = np.random.default_rng(0).integers(0, 100, (rows, 2 * block_bytes), dtype=np.uint8)  # no infinite scales
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("t", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    monkeypatch.setattr(gguf_file, "_SLAB_ELEMENTS", 2 * columns)
    file = GgufFile(tmp_path / "m.gguf")
    assert file.tensors["t"].shape == (rows, columns)
    assert np.array_equal(
        file.read("t", dtype=torch.float32).numpy(), gguf.quants.dequantize(raw, kind), equal_nan=True
    )


def test_a_type_that_cannot_be_dequantised_is_named(tmp_path: Path) -> None:
    config = tiny_config()
    path = write_gguf(tmp_path / "m.gguf", config, random_weights(config))
    file = GgufFile(path)
    tensor = file.tensors["output_norm.weight"]
    file.tensors["output_norm.weight"] = gguf_file.GgufTensor(tensor.name, (4,), Kind.I32, tensor.offset, 16)
    with pytest.raises(ModelFormatError, match=r"output_norm.weight has type I32"):
        file.read("output_norm.weight", dtype=torch.float32)


ROPE_CASES = [
    ({}, None),
    ({"llama.rope.scaling.type": "none"}, None),
    ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}, RopeScaling("linear", factor=4.0)),
    ({"llama.rope.scale_linear": 2.0}, RopeScaling("linear", factor=2.0)),
    (
        {
            "llama.rope.scaling.type": "yarn",
            "llama.rope.scaling.factor": 4.0,
            "llama.rope.scaling.original_context_length": 32,
        },
        RopeScaling("yarn", factor=4.0, original_context_length=32),
    ),
    (
        {
            "llama.rope.scaling.type": "yarn",
            "llama.rope.scaling.factor": 1.0,
            "llama.rope.scaling.attn_factor": 0.5,
            "llama.rope.scaling.yarn_beta_fast": 16.0,
            "llama.rope.scaling.yarn_beta_slow": 2.0,
        },
        RopeScaling(
            "yarn", factor=1.0, original_context_length=128, beta_fast=16.0, beta_slow=2.0, attention_factor=0.5
        ),
    ),
]


@pytest.mark.parametrize(("fields", "expected"), ROPE_CASES)
def test_rope_scaling(tmp_path: Path, fields: dict[str, Any], expected: RopeScaling | None) -> None:
    assert read_config(tmp_path, fields=fields).rope_scaling == expected


def test_rope_factors_come_from_their_tensor_and_are_no_weight(tmp_path: Path) -> None:
    config = tiny_config()
    factors = np.array([1.0, 2.0, 4.0, 8.0], np.float32)
    path = write_gguf(tmp_path / "m.gguf", config, random_weights(config), extra={"rope_freqs.weight": factors})
    loaded = load_checkpoint(path, dtype=torch.float32)
    assert loaded.config.rope_scaling == RopeScaling("factors", factors=(1.0, 2.0, 4.0, 8.0))


def test_optional_metadata(tmp_path: Path) -> None:
    assert read_config(tmp_path, fields={"llama.attention.sliding_window": 16}).sliding_windows == (16, 16)
    assert read_config(tmp_path, fields={"llama.attention.key_length": None}).head_dim == 8
    assert read_config(tmp_path, fields={"llama.rope.freq_base": None}).rope_theta == 10000.0
    assert read_config(tmp_path, fields={"llama.attention.head_count": [4, 4]}).num_heads == 4
    assert read_config(tmp_path, tiny_config(head_dim=16)).head_dim == 16


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"general.architecture": "gemma3"}, "'gemma3' model; supported are llama, mistral, qwen2, qwen3"),
        ({"llama.expert_count": 8}, "mixture of experts"),
        ({"llama.embedding_length": None}, "lacks the metadata llama.embedding_length"),
        ({"llama.rope.scaling.type": "longrope"}, "'longrope'"),
        ({"llama.rope.dimension_count": 4}, "part of a head"),
        ({"llama.attention.head_count": [4, 2]}, "differs between layers"),
        ({"llama.attention.head_count": 0}, "wrong kind"),
        ({"llama.block_count": 1 << 31}, "damaged"),
    ],
)
def test_unsupported_metadata_is_refused(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    config = tiny_config()
    path = write_gguf(tmp_path / "m.gguf", config, random_weights(config), fields=fields)
    if "general.architecture" in fields:
        path.write_bytes(path.read_bytes().replace(b"\x05\0\0\0\0\0\0\0llama", b"\x06\0\0\0\0\0\0\0gemma3", 1))
    with pytest.raises(ModelFormatError, match=message):
        GgufCheckpoint(path)


@pytest.fixture(scope="module")
def whole_file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    config = tiny_config()
    return write_gguf(tmp_path_factory.mktemp("gguf") / "m.gguf", config, random_weights(config)).read_bytes()


@pytest.mark.parametrize("permille", [0, 1, 2, 5, *range(10, 1000, 45), 999])
def test_a_truncated_file_says_so(tmp_path: Path, whole_file: bytes, permille: int) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole_file[: len(whole_file) * permille // 1000])
    with pytest.raises(ModelFormatError, match=r"truncated|not a GGUF file"):
        load_checkpoint(path, dtype=torch.float32)


def test_other_files_are_not_gguf(tmp_path: Path, whole_file: bytes) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"PK\x03\x04" + whole_file[4:])
    with pytest.raises(ModelFormatError, match="not a GGUF file"):
        GgufFile(path)
    path.write_bytes(b"GGUF\x01" + whole_file[5:])
    with pytest.raises(ModelFormatError, match="GGUF version 1"):
        GgufFile(path)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_header_never_escapes_the_error_tree(tmp_path: Path, whole_file: bytes, data: st.DataObject) -> None:
    header_end = whole_file.rindex(b"output_norm.weight") + 64
    damaged = bytearray(whole_file)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, header_end))] = data.draw(st.integers(0, 255))
    path = tmp_path / "damaged.gguf"
    path.write_bytes(damaged)
    with contextlib.suppress(ModelFormatError):  # damage to a value may as well go unnoticed
        load_checkpoint(path, dtype=torch.float32)

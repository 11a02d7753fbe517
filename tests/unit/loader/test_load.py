from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch

from paceline.errors import ModelFormatError, ModelNotFoundError
from paceline.loader.load import load_checkpoint
from paceline.loader.names import hugging_face_name
from paceline.model.config import expected_weights
from tests.unit.loader.tiny_checkpoints import SPECIAL, random_weights, tiny_config, write_gguf, write_hf


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3"])
def test_folder_round_trip(tmp_path: Path, architecture: str, shards: int) -> None:
    config = tiny_config(architecture, has_tied_embeddings=False)
    weights = random_weights(config)
    loaded = load_checkpoint(write_hf(tmp_path / "model", config, weights, shards=shards), dtype=torch.float32)
    assert loaded.name == "model"
    assert loaded.config == config
    assert loaded.weights.keys() == weights.keys()
    assert all(torch.equal(loaded.weights[name], tensor) for name, tensor in weights.items())
    assert loaded.tokenizer.eos_token_ids == {SPECIAL["<|im_end|>"]}


def test_weights_are_converted_and_independent_of_the_file(tmp_path: Path) -> None:
    config = tiny_config()
    folder = write_hf(tmp_path / "m", config, {k: v.bfloat16() for k, v in random_weights(config).items()})
    loaded = load_checkpoint(folder, dtype=torch.float16)
    assert {tensor.dtype for tensor in loaded.weights.values()} == {torch.float16}
    (folder / "model.safetensors").write_bytes(b"")
    assert all(torch.isfinite(tensor).all() for tensor in loaded.weights.values())


def test_missing_left_over_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    config = tiny_config()
    weights = random_weights(config)
    name = "model.layers.1.mlp.up_proj.weight"
    without = {key: tensor for key, tensor in weights.items() if key != name}
    with pytest.raises(ModelFormatError, match=f"lacks the tensor {name}"):
        load_checkpoint(write_hf(tmp_path / "a", config, without), dtype=torch.float32)
    with pytest.raises(ModelFormatError, match=r"unknown tensor model.layers.0.extra.weight"):
        load_checkpoint(
            write_hf(tmp_path / "b", config, weights | {"model.layers.0.extra.weight": torch.ones(2)}),
            dtype=torch.float32,
        )
    with pytest.raises(ModelFormatError, match=rf"{name} has shape \[3, 2\] where the config asks for \[64, 32\]"):
        load_checkpoint(write_hf(tmp_path / "c", config, weights | {name: torch.ones(3, 2)}), dtype=torch.float32)
    with pytest.raises(ModelFormatError, match=r"lacks the tensor model.layers.1.mlp.up_proj.weight"):
        load_checkpoint(write_gguf(tmp_path / "d.gguf", config, without), dtype=torch.float32)


def test_derived_rotary_frequencies_are_ignored(tmp_path: Path) -> None:
    config = tiny_config()
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    loaded = load_checkpoint(write_hf(tmp_path / "m", config, random_weights(config) | extra), dtype=torch.float32)
    assert loaded.weights.keys() == expected_weights(config).keys()


def test_a_head_beside_tied_embeddings_counts_only_if_it_differs(tmp_path: Path) -> None:
    config = tiny_config()
    weights = random_weights(config)
    same = weights | {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}
    loaded = load_checkpoint(write_hf(tmp_path / "same", config, same), dtype=torch.float32)
    assert loaded.config.has_tied_embeddings
    assert "lm_head.weight" not in loaded.weights
    other = weights | {"lm_head.weight": torch.ones(config.vocab_size, config.hidden_size)}
    loaded = load_checkpoint(write_hf(tmp_path / "other", config, other), dtype=torch.float32)
    assert not loaded.config.has_tied_embeddings
    assert torch.equal(loaded.weights["lm_head.weight"], other["lm_head.weight"])
    assert loaded.weights.keys() == expected_weights(loaded.config).keys()


def test_rows_beyond_the_tokenizer_are_padding_but_not_the_reverse(tmp_path: Path) -> None:
    padded = tiny_config(vocab_size=320)
    loaded = load_checkpoint(write_hf(tmp_path / "padded", padded, random_weights(padded)), dtype=torch.float32)
    assert loaded.config.vocab_size == 320
    assert loaded.tokenizer.vocab_size == 263
    short = tiny_config(vocab_size=200)
    with pytest.raises(ModelFormatError, match="263 tokens but the model only 200"):
        load_checkpoint(write_hf(tmp_path / "short", short, random_weights(short)), dtype=torch.float32)


def test_a_hub_snapshot_is_named_after_its_repository(tmp_path: Path) -> None:
    config = tiny_config()
    folder = write_hf(tmp_path / "models--org--a--b" / "snapshots" / "0123abc", config, random_weights(config))
    assert load_checkpoint(folder, dtype=torch.float32).name == "org/a--b"


def test_damaged_folders(tmp_path: Path) -> None:
    config = tiny_config()
    weights = random_weights(config)
    with pytest.raises(ModelNotFoundError, match="does not exist"):
        load_checkpoint(tmp_path / "nowhere", dtype=torch.float32)

    folder = write_hf(tmp_path / "cut", config, weights)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelFormatError, match=r"model.safetensors is damaged or truncated"):
        load_checkpoint(folder, dtype=torch.float32)
    file.unlink()
    with pytest.raises(ModelFormatError, match=r"no .safetensors weights"):
        load_checkpoint(folder, dtype=torch.float32)

    folder = write_hf(tmp_path / "shard", config, weights, shards=2)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelFormatError, match=r"model-00002-of-00002.safetensors is missing"):
        load_checkpoint(folder, dtype=torch.float32)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../../etc/x.safetensors"}}))
    with pytest.raises(ModelFormatError, match="outside its folder"):
        load_checkpoint(folder, dtype=torch.float32)
    index.write_text("{}")
    with pytest.raises(ModelFormatError, match="names no weight files"):
        load_checkpoint(folder, dtype=torch.float32)

    (folder / "config.json").write_text("[1]")
    with pytest.raises(ModelFormatError, match="not a JSON object"):
        load_checkpoint(folder, dtype=torch.float32)
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelFormatError, match="cannot be read"):
        load_checkpoint(folder, dtype=torch.float32)


def test_single_unusually_named_file_is_found_and_consolidated_skipped(tmp_path: Path) -> None:
    config = tiny_config()
    weights = random_weights(config)
    folder = write_hf(tmp_path / "m", config, weights)
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    safetensors.torch.save_file({"layers.0.wq": torch.ones(2)}, folder / "consolidated.safetensors")
    assert load_checkpoint(folder, dtype=torch.float32).weights.keys() == weights.keys()


def test_names_outside_the_table_are_none() -> None:
    assert hugging_face_name("blk.12.attn_q.bias") == "model.layers.12.self_attn.q_proj.bias"
    assert hugging_face_name("output.weight") == "lm_head.weight"
    assert hugging_face_name("blk.0.ffn_gate_exps.weight") is None
    assert hugging_face_name("rope_freqs.weight") is None
    assert hugging_face_name("nonsense") is None

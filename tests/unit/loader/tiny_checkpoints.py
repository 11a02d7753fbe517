"""Checkpoints of a few kilobytes, written as llama.cpp's converter and transformers write theirs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import safetensors.torch
import torch
from gguf.constants import GGMLQuantizationType as Kind
from tokenizers.pre_tokenizers import ByteLevel

from paceline.model.config import ModelConfig, expected_weights

VOCAB = [*sorted(ByteLevel.alphabet()), "he", "ll", "hell", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool>"]
MERGES = ["h e", "l l", "he ll"]
SPECIAL = {"<|endoftext|>": 259, "<|im_start|>": 260, "<|im_end|>": 261}
USER_DEFINED = {"<tool>": 262}

GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def tiny_config(architecture: str = "llama", **changes: Any) -> ModelConfig:
    values: dict[str, Any] = {
        "architecture": architecture,
        "vocab_size": len(VOCAB),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "context_length": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "has_qkv_bias": architecture == "qwen2",
        "has_qk_norm": architecture == "qwen3",
        "has_tied_embeddings": True,
    }
    return ModelConfig(**values | changes)


def random_weights(config: ModelConfig, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in expected_weights(config).items()}


def gguf_name(name: str) -> str:
    module, parameter = name.rsplit(".", 1)
    if module.startswith("model.layers."):
        _, _, layer, module = module.split(".", 3)
        return f"blk.{layer}.{GGUF_NAMES[module]}.{parameter}"
    return f"{GGUF_NAMES[module]}.{parameter}"


def interleaved(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """llama.cpp's order, row by row: pairs (i, i + half) of each head become neighbours."""
    head_dim = rows.shape[0] // num_heads
    half = head_dim // 2
    order = [head * head_dim + part * half + i for head in range(num_heads) for i in range(half) for part in (0, 1)]
    return rows[order]


def gguf_tokenizer_fields() -> dict[str, Any]:
    types = [3 if t in SPECIAL else 4 if t in USER_DEFINED else 1 for t in VOCAB]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": VOCAB,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": SPECIAL["<|im_start|>"],
        "tokenizer.ggml.eos_token_id": SPECIAL["<|im_end|>"],
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}",
    }


def gguf_model_fields(config: ModelConfig) -> dict[str, Any]:
    prefix = config.architecture
    return {
        f"{prefix}.block_count": config.num_layers,
        f"{prefix}.context_length": config.context_length,
        f"{prefix}.embedding_length": config.hidden_size,
        f"{prefix}.feed_forward_length": config.intermediate_size,
        f"{prefix}.attention.head_count": config.num_heads,
        f"{prefix}.attention.head_count_kv": config.num_kv_heads,
        f"{prefix}.attention.key_length": config.head_dim,
        f"{prefix}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{prefix}.rope.freq_base": config.rope_theta,
    }


def write_gguf(
    path: Path,
    config: ModelConfig,
    weights: dict[str, torch.Tensor],
    *,
    fields: dict[str, Any] | None = None,
    kinds: dict[str, Kind] | None = None,
    extra: dict[str, np.ndarray] | None = None,
) -> Path:
    """``fields`` override or (None) remove metadata; ``kinds`` quantise single tensors; ``extra`` adds GGUF tensors."""
    writer = gguf.GGUFWriter(path, config.architecture)
    for key, value in (gguf_model_fields(config) | gguf_tokenizer_fields() | (fields or {})).items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif value is not None:
            writer.add_array(key, value)
    for name, tensor in weights.items():
        if config.architecture in ("llama", "mistral"):
            if "q_proj" in name:
                tensor = interleaved(tensor, config.num_heads)
            elif "k_proj" in name:
                tensor = interleaved(tensor, config.num_kv_heads)
        kind = (kinds or {}).get(name, Kind.F32)
        if kind is Kind.F32:
            writer.add_tensor(gguf_name(name), tensor.numpy())
        else:
            writer.add_tensor(gguf_name(name), gguf.quants.quantize(tensor.numpy(), kind), raw_dtype=kind)
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def hf_config(config: ModelConfig, **changes: Any) -> dict[str, Any]:
    head = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}[config.architecture]
    raw = {
        "architectures": [f"{head}ForCausalLM"],
        "model_type": config.architecture,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.context_length,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "hidden_act": "silu",
        "tie_word_embeddings": config.has_tied_embeddings,
        "sliding_window": None,
        "eos_token_id": SPECIAL["<|im_end|>"],
    }
    return {key: value for key, value in (raw | changes).items() if value is not ...}


def tokenizer_json() -> dict[str, Any]:
    def added(text: str, token_id: int, special: bool) -> dict[str, Any]:
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        return {"id": token_id, "content": text, "special": special, **flags}

    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "added_tokens": [added(t, i, True) for t, i in SPECIAL.items()]
        + [added(t, i, False) for t, i in USER_DEFINED.items()],
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": {t: i for i, t in enumerate(VOCAB)}, "merges": MERGES},
    }


def write_hf(
    folder: Path, config: ModelConfig, weights: dict[str, torch.Tensor], *, shards: int = 1, **changes: Any
) -> Path:
    """A model folder; ``changes`` go into config.json (``...`` removes a key)."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf_config(config, **changes)))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json()))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}))
    if shards == 1:
        safetensors.torch.save_file(weights, folder / "model.safetensors")
        return folder
    weight_map: dict[str, str] = {}
    names = list(weights)
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = names[shard::shards]
        safetensors.torch.save_file({name: weights[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder

"""A trained network as a folder that ``--draft`` takes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from paceline.loader.draft import DRAFT_FILE, FORMAT, DraftKind, vocabulary_sha256
from paceline.loader.load import Checkpoint
from paceline.model.config import ModelConfig
from paceline.model.draft_vocabulary import DraftVocabulary
from paceline.train.network import DraftNetwork
from paceline.train.recipe import DraftShape

_WEIGHT_BITS = 8


def draft_config(kind: DraftKind, shape: DraftShape, target: ModelConfig, vocabulary: DraftVocabulary) -> ModelConfig:
    """The draft's shape: its own sizes, the target's vocabulary as input and its context.

    A head's layer is like the target's, so that it can begin as one.
    """
    is_head = kind == "head"
    return ModelConfig(
        architecture="mistral",  # of the supported families, the one whose every layer has a window
        vocab_size=target.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=target.head_dim if is_head else shape.hidden_size // shape.num_heads,
        context_length=target.context_length,
        rms_norm_eps=target.rms_norm_eps if is_head else 1e-5,
        rope_theta=target.rope_theta if is_head else 10_000.0,
        sliding_windows=(shape.window,) * shape.num_layers,
        num_logits=vocabulary.num_logits,
        state_size=target.hidden_size if is_head else None,
    )


def export_draft(
    folder: Path,
    network: DraftNetwork,
    vocabulary: DraftVocabulary,
    target: Checkpoint,
    *,
    kind: DraftKind,
    provenance: Mapping[str, Any],
) -> None:
    """Write config.json, draft.json, provenance.json and the weights in bfloat16 (the engine rounds them to 8 bits)."""
    folder.mkdir(parents=True, exist_ok=True)
    config = network.config
    _write_json(
        folder / "config.json",
        {
            "architectures": ["MistralForCausalLM"],
            "model_type": "mistral",
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
            "sliding_window": config.sliding_windows[0],
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
        },
    )
    _write_json(
        folder / DRAFT_FILE,
        {
            "format": FORMAT,
            "kind": kind,
            "target": {
                "name": target.name,
                "hidden_size": target.config.hidden_size,
                "vocabulary_sha256": vocabulary_sha256(target.tokenizer),
            },
            "has_escape": vocabulary.has_escape,
            "weight_bits": _WEIGHT_BITS,
            "token_ids": vocabulary.token_ids.tolist(),
        },
    )
    _write_json(folder / "provenance.json", provenance)
    tensors = {name: item.to("cpu", torch.bfloat16).contiguous() for name, item in network.named_tensors().items()}
    part = folder / "model.part"
    part.write_bytes(save(tensors, metadata={"format": "pt"}))  # save_file would hide it from other users
    part.replace(folder / "model.safetensors")


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    indent = None if path.name == DRAFT_FILE else 1
    path.write_text(json.dumps(content, indent=indent) + "\n", encoding="utf-8")

"""GGUF checkpoints: metadata to ModelConfig, tensors to Hugging Face names and row order."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from paceline.backends.quantized import QuantizedTensor, Weight
from paceline.errors import ModelFormatError
from paceline.loader.gguf_file import GgufFile
from paceline.loader.names import hugging_face_name
from paceline.model.config import ModelConfig, RopeScaling

SUPPORTED_ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
# llama.cpp interleaves the two halves of every rotated head for these; Qwen's rows keep Hugging Face's order.
_INTERLEAVED = ("llama", "mistral")
_ROPE_FACTORS = "rope_freqs.weight"


class GgufCheckpoint:
    """A GGUF file seen as a model: ``config``, ``metadata`` and its tensors one at a time.

    Raises:
        ModelFormatError: damaged, truncated, or of an architecture or kind Paceline does not run.
    """

    def __init__(self, path: Path) -> None:
        self._file = GgufFile(path)
        self.metadata = self._file.metadata
        architecture = self.metadata.get("general.architecture")
        if architecture not in SUPPORTED_ARCHITECTURES:
            raise ModelFormatError(
                f"{path} holds a {architecture!r} model; supported are {', '.join(SUPPORTED_ARCHITECTURES)}"
            )
        try:
            self.config = _read_config(self._file)
        except (TypeError, ValueError, ZeroDivisionError) as error:
            raise ModelFormatError(
                f"{path} has metadata of the wrong kind ({error}); convert the model anew"
            ) from error
        # Kept as read, in file order: the mapping decides what a tensor is, `load` whether it belongs there.
        self._names = {name: hugging_face_name(name) or name for name in self._file.tensors if name != _ROPE_FACTORS}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor by its Hugging Face name (its own name when the table has none)."""
        return {renamed: self._file.tensors[name].shape for name, renamed in self._names.items()}

    def tensors(
        self, *, dtype: torch.dtype, device: torch.device | str, keep_quantized: bool = False
    ) -> Iterator[tuple[str, Weight]]:
        """Every tensor with its Hugging Face name, read one at a time.

        With ``keep_quantized`` matrices keep the file's codes (on the CPU, whatever the device) where their type allows
        it; all else is dequantised.
        """
        for name, renamed in self._names.items():
            kept = self._file.read_quantized(name) if keep_quantized else None
            tensor: Weight = self._file.read(name, dtype=dtype, device=device) if kept is None else kept
            if self.config.architecture in _INTERLEAVED:
                if re.search(r"\.attn_q\.(weight|bias)$", name):
                    tensor = _separate_halves(tensor, self.config.num_heads)
                elif re.search(r"\.attn_k\.(weight|bias)$", name):
                    tensor = _separate_halves(tensor, self.config.num_kv_heads)
            yield renamed, tensor


def _separate_halves(weight: Weight, num_heads: int) -> Weight:
    """Undo llama.cpp's row order: in each head its rows are x0, y0, x1, y1, ... and ours x0, x1, ..., y0, y1, ..."""
    if isinstance(weight, QuantizedTensor):
        return weight.rows(_halves_apart(torch.arange(weight.shape[0]), num_heads))
    return _halves_apart(weight, num_heads)


def _halves_apart(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    by_pair = rows.reshape(num_heads, -1, 2, *rows.shape[1:])  # [num_heads, head_dim / 2, 2, ...]
    return by_pair.transpose(1, 2).reshape(rows.shape)


def _read_config(file: GgufFile) -> ModelConfig:
    architecture: str = file.metadata["general.architecture"]

    def get(key: str, default: Any = None) -> Any:
        return file.metadata.get(f"{architecture}.{key}", default)

    def require(key: str) -> Any:
        value = get(key)
        if value is None:
            raise ModelFormatError(f"{file.path} lacks the metadata {architecture}.{key}; convert the model anew")
        return value

    def uniform(key: str, default: Any = None) -> int:
        value = require(key) if default is None else get(key, default)
        values = set(value) if isinstance(value, list) else {value}
        if len(values) != 1:
            raise ModelFormatError(f"{file.path}: {architecture}.{key} differs between layers, which is not supported")
        return int(values.pop())

    if get("expert_count", 0):
        raise ModelFormatError(f"{file.path} is a mixture of experts; only dense models are supported")
    if "token_embd.weight" not in file.tensors:
        raise ModelFormatError(f"{file.path} has no tensor token_embd.weight: it is not a complete language model")
    num_layers, hidden_size = int(require("block_count")), int(require("embedding_length"))
    if not 1 <= num_layers <= len(file.tensors):
        raise ModelFormatError(
            f"{file.path} is damaged: {num_layers} layers in {len(file.tensors)} tensors; fetch it again"
        )
    num_heads = uniform("attention.head_count")
    head_dim = int(get("attention.key_length", hidden_size // num_heads))
    if get("attention.value_length", head_dim) != head_dim or get("rope.dimension_count", head_dim) != head_dim:
        raise ModelFormatError(f"{file.path} rotates or sizes part of a head differently, which is not supported")
    window = int(get("attention.sliding_window", 0)) or None
    return ModelConfig(
        architecture=architecture,
        vocab_size=file.tensors["token_embd.weight"].shape[0],
        hidden_size=hidden_size,
        intermediate_size=uniform("feed_forward_length"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=uniform("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        context_length=int(require("context_length")),
        rms_norm_eps=float(require("attention.layer_norm_rms_epsilon")),
        rope_theta=float(get("rope.freq_base", 10000.0)),
        rope_scaling=_read_rope_scaling(file, architecture),
        has_qkv_bias="blk.0.attn_q.bias" in file.tensors,
        has_output_bias="blk.0.attn_output.bias" in file.tensors,
        has_mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
        has_qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
        has_tied_embeddings="output.weight" not in file.tensors,
        sliding_windows=(window,) * num_layers,
    )


def _read_rope_scaling(file: GgufFile, architecture: str) -> RopeScaling | None:
    def get(key: str, default: float) -> float:
        return float(file.metadata.get(f"{architecture}.rope.scaling.{key}", default))

    if _ROPE_FACTORS in file.tensors:
        return RopeScaling("factors", factors=tuple(file.read(_ROPE_FACTORS, dtype=torch.float32).flatten().tolist()))
    kind = file.metadata.get(f"{architecture}.rope.scaling.type", "none")
    # Files of 2023 name no type, only this factor.
    legacy_factor = float(file.metadata.get(f"{architecture}.rope.scale_linear", 1.0))
    if kind == "none":
        return RopeScaling("linear", factor=legacy_factor) if legacy_factor != 1.0 else None
    factor = get("factor", legacy_factor)
    if kind == "linear":
        return RopeScaling("linear", factor=factor)
    if kind == "yarn":
        # llama.cpp multiplies the customary 0.1 ln(factor) + 1 by attn_factor instead of replacing it.
        attention = get("attn_factor", get("yarn_attn_factor", 1.0))
        return RopeScaling(
            "yarn",
            factor=factor,
            original_context_length=int(
                get("original_context_length", file.metadata[f"{architecture}.context_length"])
            ),
            beta_fast=get("yarn_beta_fast", 32.0),
            beta_slow=get("yarn_beta_slow", 1.0),
            attention_factor=None if attention == 1.0 else attention * (0.1 * math.log(factor) + 1.0),
        )
    raise ModelFormatError(
        f"{file.path} scales positions by {kind!r}; supported are linear, yarn and Llama 3's factors"
    )

"""config.json of a Hugging Face folder to ModelConfig, in the spellings of transformers 4 and 5."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from paceline.errors import ModelFormatError
from paceline.model.config import ModelConfig, RopeScaling

Json = Mapping[str, Any]

# Keyed by the class named in config.json, valued by its model_type.
SUPPORTED_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


def read_model_config(raw: Json, source: str) -> ModelConfig:
    """The shape a config.json describes; ``source`` names the file in errors.

    Keys a file leaves out take the value transformers gives them, since that is what the model was trained with.

    Raises:
        ModelFormatError: another architecture, a feature Paceline lacks, or a missing or impossible value.
    """
    try:
        return _read(raw, source)
    except KeyError as error:
        raise ModelFormatError(f"{source} lacks the key {error}; fetch the model folder again") from error
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ModelFormatError(
            f"{source} has a value of the wrong kind ({error}); fetch the model folder again"
        ) from error


def _read(raw: Json, source: str) -> ModelConfig:
    architecture = _architecture(raw, source)
    _refuse_unsupported(raw, source)
    num_layers, num_heads = int(raw["num_hidden_layers"]), int(raw["num_attention_heads"])
    hidden_size = int(raw["hidden_size"])
    # Qwen3 is alone in fixing its head size whatever the width.
    default_head_dim = 128 if architecture == "qwen3" else hidden_size // num_heads
    has_attention_bias = architecture in ("llama", "qwen3") and bool(raw.get("attention_bias", False))
    rope = _rope_parameters(raw, source)
    return ModelConfig(
        architecture=architecture,
        vocab_size=int(raw["vocab_size"]),
        hidden_size=hidden_size,
        intermediate_size=int(raw["intermediate_size"]),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=int(raw.get("num_key_value_heads") or num_heads),
        head_dim=int(raw.get("head_dim") or default_head_dim),
        context_length=int(raw["max_position_embeddings"]),
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope_theta=float(rope.get("rope_theta", raw.get("rope_theta", 10000.0))),
        rope_scaling=_rope_scaling(rope, int(raw["max_position_embeddings"]), source),
        has_qkv_bias=architecture == "qwen2" or has_attention_bias,
        has_output_bias=has_attention_bias,
        has_mlp_bias=architecture == "llama" and bool(raw.get("mlp_bias", False)),
        has_qk_norm=architecture == "qwen3",
        has_tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
        sliding_windows=_sliding_windows(raw, architecture, num_layers, source),
    )


def _architecture(raw: Json, source: str) -> str:
    named = raw.get("architectures") or []
    for name in named:
        if name in SUPPORTED_ARCHITECTURES:
            return SUPPORTED_ARCHITECTURES[name]
    # Some exporters leave the class out; the type says which decoder it is just as well.
    if not named and raw.get("model_type") in SUPPORTED_ARCHITECTURES.values():
        return str(raw["model_type"])
    found = ", ".join(map(str, named)) or raw.get("model_type") or "unnamed"
    raise ModelFormatError(
        f"{source} describes the architecture {found}; supported are {', '.join(SUPPORTED_ARCHITECTURES)}"
    )


def _refuse_unsupported(raw: Json, source: str) -> None:
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unknown")
        raise ModelFormatError(
            f"{source}: weights quantised with {method} are not supported; use the original or a GGUF file"
        )
    if (activation := raw.get("hidden_act", "silu")) != "silu":
        raise ModelFormatError(f"{source}: the activation {activation!r} is not supported; only silu is")


def _sliding_windows(raw: Json, architecture: str, num_layers: int, source: str) -> tuple[int | None, ...]:
    if architecture == "llama":
        return (None,) * num_layers
    # transformers' own default when the key is absent; an explicit null means full attention.
    window = raw.get("sliding_window", 4096) or None
    if architecture == "mistral":
        return (window,) * num_layers
    if not raw.get("use_sliding_window", False):
        return (None,) * num_layers
    kinds = raw.get("layer_types")
    if kinds is None:
        first = int(raw.get("max_window_layers", 28))
        kinds = ["sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)]
    if unknown := set(kinds) - {"sliding_attention", "full_attention"}:
        raise ModelFormatError(f"{source}: layers of type {', '.join(sorted(unknown))} are not supported")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _rope_parameters(raw: Json, source: str) -> Json:
    """The one dictionary of rotary settings: ``rope_parameters`` (transformers 5) or ``rope_scaling`` (4), or empty."""
    parameters = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if parameters and all(isinstance(value, Mapping) for value in parameters.values()):
        first, *others = parameters.values()  # keyed by layer type
        if any(other != first for other in others):
            raise ModelFormatError(f"{source}: rotary settings that differ between layers are not supported")
        parameters = first
    partial = parameters.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))
    if partial not in (None, 1.0):
        raise ModelFormatError(f"{source}: rotating only part of a head is not supported")
    return dict(parameters)


def _rope_scaling(rope: Json, context_length: int, source: str) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    original = int(rope.get("original_max_position_embeddings") or context_length)
    if kind == "linear":
        return RopeScaling("linear", factor=float(rope["factor"]))
    if kind == "llama3":
        return RopeScaling(
            "llama3",
            factor=float(rope["factor"]),
            original_context_length=original,
            low_freq_factor=float(rope["low_freq_factor"]),
            high_freq_factor=float(rope["high_freq_factor"]),
        )
    if kind == "yarn":
        if rope.get("truncate") is False:
            raise ModelFormatError(
                f"{source}: yarn without rounding of its band limits (truncate false) is not supported"
            )
        # A null factor means: as far as the context was stretched.
        factor = float(rope["factor"]) if rope.get("factor") is not None else context_length / original
        return RopeScaling(
            "yarn",
            factor=factor,
            original_context_length=original,
            beta_fast=float(rope.get("beta_fast") or 32.0),
            beta_slow=float(rope.get("beta_slow") or 1.0),
            attention_factor=_yarn_attention_factor(rope, factor),
        )
    raise ModelFormatError(
        f"{source}: rotary scaling {kind!r} is not supported; supported are default, linear, llama3, yarn"
    )


def _yarn_attention_factor(rope: Json, factor: float) -> float | None:
    """The explicit factor, or the ratio DeepSeek's two ``mscale`` weights give, or None for the paper's rule."""
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    numerator, denominator = rope.get("mscale"), rope.get("mscale_all_dim")
    if not (numerator and denominator):
        return None
    stretch = 0.1 * math.log(factor) if factor > 1.0 else 0.0
    return float((stretch * numerator + 1.0) / (stretch * denominator + 1.0))

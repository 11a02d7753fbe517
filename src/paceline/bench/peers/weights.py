"""The same weights in the formats that peers read, made once and kept under PACELINE_HOME."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.errors import BenchmarkError
from paceline.model.config import ModelConfig, RopeScaling

Quantize = Callable[[Path, Path, str], None]
"""(source, target, format) -> writes the target."""

_FILE_TYPES = {"Q4_1": 3, "Q8_0": 7}  # general.file_type of GGUF
_HF_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def gguf_in_format(model: Path, file_type: str, folder: Path, quantize: Quantize) -> Path:
    """``model`` itself if it has this format already, else a copy in ``folder``, made on first use.

    Raises:
        BenchmarkError: ``model`` is no GGUF file.
    """
    from paceline.loader.gguf import GgufCheckpoint

    require_gguf(model)
    if GgufCheckpoint(model).metadata.get("general.file_type") == _FILE_TYPES[file_type]:
        return model
    target = folder / f"{_identity(model)}.{file_type}.gguf"
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".partial-") as staging:
            made = Path(staging) / target.name
            quantize(model, made, file_type)
            os.replace(made, target)
    return target


def safetensors_folder(model: Path, folder: Path) -> Path:
    """``model`` itself if it is a folder, else its weights as bfloat16 in a folder that transformers reads.

    There is no tokenizer in it: workers are fed token ids.

    Raises:
        BenchmarkError: its rotary scaling has no name in transformers.
    """
    if model.is_dir():
        return model
    import torch
    from safetensors.torch import save_file

    from paceline.loader.load import load_checkpoint

    target = folder / f"{_identity(model)}.bf16"
    if target.exists():
        return target
    checkpoint = load_checkpoint(model, dtype=torch.float32)
    config = hf_config(checkpoint.config)
    folder.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(dir=folder, prefix=".partial-"))
    try:
        (staging / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        weights = {}
        for name, tensor in checkpoint.weights.items():
            assert isinstance(tensor, torch.Tensor), "read without keep_quantized"
            weights[name] = tensor.to(torch.bfloat16).contiguous()
        save_file(weights, staging / "model.safetensors", metadata={"format": "pt"})
        os.replace(staging, target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return target


def hf_config(config: ModelConfig) -> dict[str, Any]:
    """The config.json of a model of this shape.

    Raises:
        BenchmarkError: its rotary scaling has no name in transformers.
    """
    window = next((each for each in config.sliding_windows if each is not None), None)
    return {
        "architectures": [_HF_ARCHITECTURES[config.architecture]],
        "model_type": config.architecture,
        "dtype": "bfloat16",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.context_length,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": {"rope_theta": config.rope_theta, **_rope(config.rope_scaling)},
        "attention_bias": config.has_output_bias,
        "mlp_bias": config.has_mlp_bias,
        "tie_word_embeddings": config.has_tied_embeddings,
        "sliding_window": window,
        "hidden_act": "silu",
    }


def require_gguf(model: Path) -> None:
    """Refuse a folder.

    Raises:
        BenchmarkError: ``model`` is no GGUF file.
    """
    if model.is_dir():
        raise BenchmarkError(f"it reads GGUF files only, and {model.name} is a folder")


def _rope(scaling: RopeScaling | None) -> dict[str, Any]:
    if scaling is None:
        return {"rope_type": "default"}
    if scaling.kind == "linear":
        return {"rope_type": "linear", "factor": scaling.factor}
    raise BenchmarkError(f"rotary scaling {scaling.kind!r} is not handed on to transformers; use the model's folder")


def _identity(model: Path) -> str:
    """A file name that another file, or another content of this one, does not share."""
    stat = model.stat()
    key = f"{model.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}"
    return f"{model.stem}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"

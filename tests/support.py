"""Builders shared by tests. transformers writes the tiny checkpoints, so it is also their oracle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

FAMILIES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
}
TINY_SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'][0] }}:{{ message['content'] }}|{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def write_tiny_checkpoint(
    folder: Path, family: str, *, seed: int = 0, scale: float = 1.0, noise: float = 0.0, **overrides: Any
) -> Path:
    """A random model with a character tokenizer of 64 tokens.

    ``scale`` sharpens its next-token distributions; ``noise`` disturbs the weights, which makes of the same seed a
    draft that agrees with the undisturbed model now and then.
    """
    config_class, model_class = FAMILIES[family]
    torch.manual_seed(seed)
    model = model_class(config_class(**{**TINY_SHAPE, **overrides}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
            elif name.endswith("bias"):
                parameter.normal_(std=0.1)
            else:
                parameter.normal_(std=0.25)
        if scale != 1.0:
            model.get_output_embeddings().weight.mul_(scale)
        if noise:
            for parameter in model.parameters():
                parameter.add_(noise * torch.randn_like(parameter))
    model.eval()
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def write_byte_checkpoint(folder: Path, **overrides: Any) -> Path:
    """A random Llama that can write any text: :func:`byte_tokenizer`, and some padding in its matrices."""
    write_tiny_checkpoint(folder, "llama", **{"vocab_size": 276, **overrides})
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def byte_tokenizer() -> Tokenizer:
    """<s>, </s>, <pad>, one token per byte, and merges for what JSON is full of: 273 tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ['{"', '":', '",', '"}', ":\u0120", ",\u0120", "\u0120{", "ab", "tr", "ue", "true", "na", "me", "name"]
    merges = [(word[: len(word) // 2], word[len(word) // 2 :]) for word in words]
    tokens = ["<s>", "</s>", "<pad>", *alphabet, *words]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>", "<pad>"])
    return tokenizer


def write_tokenizer(folder: Path, characters: str | None = None) -> None:
    """One token per character: ids 0 and 1 are <s> and </s>, then 62 characters."""
    characters = characters or "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
    vocabulary = {"<s>": 0, "</s>": 1} | {character: index + 2 for index, character in enumerate(characters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": CHAT_TEMPLATE, "add_bos_token": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))

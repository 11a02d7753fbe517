from __future__ import annotations

import math
from typing import Any

import pytest

from paceline.errors import ModelFormatError
from paceline.loader.hf_config import read_model_config
from paceline.model.config import ModelConfig, RopeScaling
from tests.unit.loader.tiny_checkpoints import hf_config, tiny_config


def read(architecture: str = "llama", **changes: Any) -> ModelConfig:
    return read_model_config(hf_config(tiny_config(architecture), **changes), "config.json")


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
ROPE_CASES = [
    (None, None),
    ({"rope_type": "default"}, None),
    ({"type": "linear", "factor": 2.0}, RopeScaling("linear", factor=2.0)),
    (LLAMA3, RopeScaling("llama3", factor=8.0, original_context_length=64)),
    (YARN, RopeScaling("yarn", factor=4.0, original_context_length=32)),
    (YARN | {"factor": None}, RopeScaling("yarn", factor=4.0, original_context_length=32)),
    (
        YARN | {"attention_factor": 1.5, "beta_fast": 16, "beta_slow": 2},
        RopeScaling("yarn", 4.0, 32, beta_fast=16.0, beta_slow=2.0, attention_factor=1.5),
    ),
    (
        YARN | {"mscale": 0.5, "mscale_all_dim": 1.0},
        RopeScaling("yarn", 4.0, 32, attention_factor=(0.05 * math.log(4.0) + 1) / (0.1 * math.log(4.0) + 1)),
    ),
    ({"type": "yarn", "factor": 4.0}, RopeScaling("yarn", factor=4.0, original_context_length=128)),
]


@pytest.mark.parametrize(("rope", "expected"), ROPE_CASES)
def test_both_spellings_of_rope_settings_agree(rope: dict[str, Any] | None, expected: RopeScaling | None) -> None:
    old = read(rope_scaling=rope, rope_theta=5e5)
    new = read(rope_parameters={"rope_type": "default", **(rope or {}), "rope_theta": 5e5}, rope_theta=...)
    if rope and "type" in rope:  # transformers 5 writes rope_type only
        new = read(rope_parameters={**rope, "rope_theta": 5e5}, rope_theta=...)
    assert old == new
    assert old.rope_theta == 5e5
    assert old.rope_scaling == expected


def test_rope_settings_by_layer_type_must_agree() -> None:
    one = {"rope_type": "linear", "factor": 2.0, "rope_theta": 7.0}
    same = read(rope_parameters={"full_attention": one, "sliding_attention": dict(one)})
    assert same.rope_theta == 7.0
    assert same.rope_scaling == RopeScaling("linear", factor=2.0)
    with pytest.raises(ModelFormatError, match="differ between layers"):
        read(rope_parameters={"full_attention": one, "sliding_attention": one | {"rope_theta": 8.0}})


def test_biases_and_norms_follow_the_architecture() -> None:
    def flags(config: ModelConfig) -> tuple[bool, bool, bool, bool]:
        return config.has_qkv_bias, config.has_output_bias, config.has_mlp_bias, config.has_qk_norm

    assert flags(read("llama")) == (False, False, False, False)
    assert flags(read("llama", attention_bias=True, mlp_bias=True)) == (True, True, True, False)
    assert flags(read("mistral", attention_bias=True, mlp_bias=True)) == (False, False, False, False)
    assert flags(read("qwen2")) == (True, False, False, False)
    assert flags(read("qwen3")) == (False, False, False, True)
    assert flags(read("qwen3", attention_bias=True)) == (True, True, False, True)


def test_absent_keys_take_the_values_transformers_gives_them() -> None:
    assert read("llama", head_dim=..., num_key_value_heads=..., tie_word_embeddings=...) == ModelConfig(
        **{name: getattr(tiny_config(), name) for name in ModelConfig.__dataclass_fields__}
        | {"num_kv_heads": 4, "has_tied_embeddings": False}
    )
    assert read("qwen3", head_dim=...).head_dim == 128
    assert read("llama", head_dim=None).head_dim == 8
    assert read("mistral", sliding_window=...).sliding_windows == (4096, 4096)
    assert read("mistral", sliding_window=None).sliding_windows == (None, None)
    assert read("llama", rope_theta=..., rms_norm_eps=...).rope_theta == 10000.0


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"sliding_window": 8}, (None, None)),
        ({"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}, (None, 8)),
        ({"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 28}, (None, None)),
        (
            {"sliding_window": 8, "use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]},
            (8, None),
        ),
        ({"sliding_window": None, "use_sliding_window": True, "max_window_layers": 0}, (None, None)),
    ],
)
@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_qwen_windows(architecture: str, changes: dict[str, Any], expected: tuple[int | None, ...]) -> None:
    assert read(architecture, **changes).sliding_windows == expected


def test_the_type_stands_in_for_an_absent_class() -> None:
    assert read("qwen2", architectures=...).architecture == "qwen2"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, "GemmaForCausalLM; supported are LlamaForCausalLM"),
        ({"architectures": ..., "model_type": ...}, "unnamed"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ({"rope_scaling": {"type": "linear"}}, "lacks the key 'factor'"),
        ({"rope_scaling": YARN | {"truncate": False}}, "truncate"),
        ({"partial_rotary_factor": 0.5}, "part of a head"),
        ({"hidden_size": ...}, "lacks the key 'hidden_size'"),
        ({"hidden_size": "wide"}, "wrong kind"),
        ({"num_attention_heads": 0}, "wrong kind"),
        ({"num_attention_heads": 3}, "cannot be shared"),
    ],
)
def test_what_cannot_be_run_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelFormatError, match=message):
        read(**changes)


def test_unknown_layer_types_are_refused() -> None:
    with pytest.raises(ModelFormatError, match="chunked_attention"):
        read("qwen2", use_sliding_window=True, sliding_window=8, layer_types=["chunked_attention", "full_attention"])

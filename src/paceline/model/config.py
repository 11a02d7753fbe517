"""The shape of a decoder-only transformer, independent of the file it came from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from paceline.errors import ModelFormatError


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the original context.

    ``linear`` divides positions by ``factor``. ``llama3`` divides only the low frequencies (Llama 3.1's rule with
    ``low_freq_factor``, ``high_freq_factor``). ``yarn`` blends by wavelength (Peng et al., arXiv 2309.00071) and
    scales cos and sin by ``attention_factor`` (None: 0.1 ln(factor) + 1). ``factors`` divides each frequency by its
    own number, [head_dim / 2]; GGUF files store Llama 3's rule this way (tensor ``rope_freqs.weight``).
    """

    kind: Literal["linear", "llama3", "yarn", "factors"]
    factor: float = 1.0
    original_context_length: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    factors: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes and flags of one decoder (Llama, Mistral, Qwen2, Qwen3 differ in flags only).

    ``sliding_windows`` has one entry per layer: the number of newest positions a token sees, or None for all.
    ``num_logits`` is the height of the head where it is not the vocabulary's, as in a draft that speaks part of it.
    ``state_size`` is the width of the hidden states that are added to the token's embedding through a projection, as in
    a draft head; None: the token is all of the input.

    Raises:
        ModelFormatError: sizes that contradict each other.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    has_mlp_bias: bool = False
    has_qk_norm: bool = False
    has_tied_embeddings: bool = False
    sliding_windows: Sequence[int | None] = ()
    num_logits: int | None = None
    state_size: int | None = None

    def __post_init__(self) -> None:
        if not self.sliding_windows:
            object.__setattr__(self, "sliding_windows", (None,) * self.num_layers)
        if self.num_heads % self.num_kv_heads:
            raise ModelFormatError(
                f"{self.num_heads} attention heads cannot be shared by {self.num_kv_heads} key/value heads"
            )
        if len(self.sliding_windows) != self.num_layers:
            raise ModelFormatError(
                f"the config names a sliding window for {len(self.sliding_windows)} of {self.num_layers} layers"
            )
        if self.head_dim % 2:
            raise ModelFormatError(f"rotary embedding needs an even head size, got {self.head_dim}")

    @property
    def reach(self) -> int | None:
        """How many newest tokens an output depends on, its own included; None: all, or more than one layer's window."""
        return self.sliding_windows[0] if self.num_layers == 1 else None


def expected_weights(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor a checkpoint of this shape must hold, by its Hugging Face name, with its shape.

    Linear weights are [out_features, in_features]. A tied head has no tensor of its own.
    """
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size = config.num_heads * config.head_dim
    kv_size = config.num_kv_heads * config.head_dim
    expected: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.has_tied_embeddings:
        expected["lm_head.weight"] = (config.num_logits or config.vocab_size, hidden)
    if config.state_size is not None:
        expected["model.state_projection.weight"] = (hidden, config.state_size)
    linears = {
        "self_attn.q_proj": (q_size, hidden, config.has_qkv_bias),
        "self_attn.k_proj": (kv_size, hidden, config.has_qkv_bias),
        "self_attn.v_proj": (kv_size, hidden, config.has_qkv_bias),
        "self_attn.o_proj": (hidden, q_size, config.has_output_bias),
        "mlp.gate_proj": (inner, hidden, config.has_mlp_bias),
        "mlp.up_proj": (inner, hidden, config.has_mlp_bias),
        "mlp.down_proj": (hidden, inner, config.has_mlp_bias),
    }
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        expected[f"{prefix}.input_layernorm.weight"] = (hidden,)
        expected[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
        if config.has_qk_norm:
            expected[f"{prefix}.self_attn.q_norm.weight"] = (config.head_dim,)
            expected[f"{prefix}.self_attn.k_norm.weight"] = (config.head_dim,)
        for name, (out_features, in_features, has_bias) in linears.items():
            expected[f"{prefix}.{name}.weight"] = (out_features, in_features)
            if has_bias:
                expected[f"{prefix}.{name}.bias"] = (out_features,)
    return expected

"""One decoder for Llama, Mistral, Qwen2 and Qwen3: the families differ in flags of ModelConfig, not in code."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.backends.base import Backend, Linear
from paceline.backends.kv_store import KVStore
from paceline.backends.metadata import AttentionMetadata
from paceline.backends.quantized import Weight, as_tensor, stack_rows
from paceline.model.config import ModelConfig
from paceline.model.rope import rope_table


@dataclass(frozen=True, slots=True)
class _Layer:
    """The weights of one transformer block, products that share an input fused into one."""

    attention_norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


class Decoder:
    """Maps token ids at positions to hidden states, and hidden states to logits.

    ``weights`` holds the tensors of ``expected_weights(config)`` and is emptied as they are taken over, so that no
    weight is held twice for long. ``num_positions`` bounds the positions that will be asked for.
    """

    def __init__(
        self, config: ModelConfig, weights: dict[str, Weight], backend: Backend, *, num_positions: int
    ) -> None:
        self.config = config
        self._backend = backend
        self._cos, self._sin = rope_table(config, num_positions, device=backend.device)
        self._cos, self._sin = self._cos.to(backend.dtype), self._sin.to(backend.dtype)
        table = weights.pop("model.embed_tokens.weight")
        is_tied = config.has_tied_embeddings
        self._head = backend.prepare_linear(table if is_tied else weights.pop("lm_head.weight"), None)
        self._embedding = backend.prepare_embedding(table, self._head if is_tied else None)
        self._state_projection: Linear | None = None
        if config.state_size is not None:
            self._state_projection = backend.prepare_linear(weights.pop("model.state_projection.weight"), None)
        self._layers = [self._take_layer(weights, f"model.layers.{i}.") for i in range(config.num_layers)]
        self._norm = as_tensor(weights.pop("model.norm.weight"), backend.dtype)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        store: KVStore,
        metadata: AttentionMetadata,
        states: Tensor | None = None,
    ) -> Tensor:
        """Hidden states after the final norm, [num_tokens, hidden_size]; K/V of the tokens are written to ``store``.

        ``states`` [num_tokens, state_size] belong to the input of a decoder with a state size, and to no other.
        """
        hidden, cos, sin = self._inputs(token_ids, positions, states)
        for index in range(len(self._layers)):
            hidden = self._transform(index, hidden, cos, sin, store, metadata)
        return self._backend.rms_norm(hidden, self._norm, self.config.rms_norm_eps)

    def write_kv(
        self,
        token_ids: Tensor,
        positions: Tensor,
        store: KVStore,
        metadata: AttentionMetadata,
        states: Tensor | None = None,
    ) -> None:
        """Write the tokens' K/V as :meth:`forward` does, and no more: of the last layer only those are computed."""
        hidden, cos, sin = self._inputs(token_ids, positions, states)
        last = len(self._layers) - 1
        for index in range(last):
            hidden = self._transform(index, hidden, cos, sin, store, metadata)
        self._project(last, hidden, cos, sin, store, metadata)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of hidden states."""
        return self._backend.dtype

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of some rows of hidden states, [num_rows, vocab_size]."""
        return self._head(hidden)

    def _inputs(self, token_ids: Tensor, positions: Tensor, states: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """What enters the first layer, and the angles of the positions."""
        hidden = self._embedding(token_ids)
        if self._state_projection is not None:
            assert states is not None
            hidden = hidden + self._state_projection(states)
        return hidden, self._cos[positions], self._sin[positions]

    def _transform(
        self, index: int, hidden: Tensor, cos: Tensor, sin: Tensor, store: KVStore, metadata: AttentionMetadata
    ) -> Tensor:
        """One layer."""
        ops, layer = self._backend, self._layers[index]
        q = self._project(index, hidden, cos, sin, store, metadata)
        hidden = hidden + layer.output(ops.attention(q, store, index, metadata, self.config.sliding_windows[index]))
        normed = ops.rms_norm(hidden, layer.mlp_norm, self.config.rms_norm_eps)
        return hidden + layer.down(ops.silu_gate(layer.gate_up(normed)))

    def _project(
        self, index: int, hidden: Tensor, cos: Tensor, sin: Tensor, store: KVStore, metadata: AttentionMetadata
    ) -> Tensor:
        """Write a layer's K/V; its queries."""
        ops, config, layer = self._backend, self.config, self._layers[index]
        normed = ops.rms_norm(hidden, layer.attention_norm, config.rms_norm_eps)
        heads = layer.qkv(normed).view(normed.shape[0], -1, config.head_dim)
        k_start, v_start = config.num_heads, config.num_heads + config.num_kv_heads
        q, k, v = heads[:, :k_start], heads[:, k_start:v_start], heads[:, v_start:]
        if layer.q_norm is not None and layer.k_norm is not None:
            q = ops.rms_norm(q, layer.q_norm, config.rms_norm_eps)
            k = ops.rms_norm(k, layer.k_norm, config.rms_norm_eps)
        q, k = ops.rope(q, cos, sin), ops.rope(k, cos, sin)
        ops.write_kv(store, index, k, v, metadata)
        return q

    def _take_layer(self, weights: dict[str, Weight], prefix: str) -> _Layer:
        def vector(name: str) -> Tensor:
            return as_tensor(weights.pop(f"{prefix}{name}"), self._backend.dtype)

        def vector_if_any(name: str) -> Tensor | None:
            return vector(name) if f"{prefix}{name}" in weights else None

        def fused(*names: str) -> Linear:
            weight = stack_rows([weights.pop(f"{prefix}{name}.weight") for name in names])
            biases = [bias for name in names if (bias := vector_if_any(f"{name}.bias")) is not None]
            return self._backend.prepare_linear(weight, torch.cat(biases) if biases else None)

        return _Layer(
            attention_norm=vector("input_layernorm.weight"),
            qkv=fused("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            q_norm=vector_if_any("self_attn.q_norm.weight"),
            k_norm=vector_if_any("self_attn.k_norm.weight"),
            output=fused("self_attn.o_proj"),
            mlp_norm=vector("post_attention_layernorm.weight"),
            gate_up=fused("mlp.gate_proj", "mlp.up_proj"),
            down=fused("mlp.down_proj"),
        )

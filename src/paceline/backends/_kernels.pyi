"""Types of the native extension; csrc/module.cpp is the definition. Arrays are contiguous CPU tensors."""

from collections.abc import Sequence

from torch import Tensor

MAX_HEAD_DIM: int
MAX_GROUP_HEADS: int

def instruction_sets() -> list[str]: ...

class Weight:
    @property
    def shape(self) -> tuple[int, int]: ...

class KVStore:
    def __init__(self, num_layers: int, num_slots: int, num_heads: int, head_dim: int, bits: int) -> None: ...

class LinearLayer:
    def __init__(self, weight: Weight, bias: Tensor | None) -> None: ...

class Layer:
    def __init__(
        self,
        attention_norm: Tensor,
        qkv: LinearLayer,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        output: LinearLayer,
        mlp_norm: Tensor,
        gate_up: LinearLayer,
        down: LinearLayer,
        window: int,
    ) -> None: ...

class Decoder:
    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        rms_norm_eps: float,
        embedding: Weight,
        state_projection: LinearLayer | None,
        layers: Sequence[Layer],
        norm: Tensor,
        cos: Tensor,
        sin: Tensor,
    ) -> None: ...

class Runtime:
    def __init__(self, num_threads: int, instruction_set: str) -> None: ...
    @property
    def instruction_set(self) -> str: ...
    def pack_quantised(self, bits: int, codes: Tensor, scales: Tensor, minima: Tensor) -> Weight: ...
    def pack_bf16(self, values: Tensor) -> Weight: ...
    def linear(self, weight: Weight, bias: Tensor | None, x: Tensor, out: Tensor) -> None: ...
    def embedding(self, table: Weight, token_ids: Tensor, out: Tensor) -> None: ...
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None: ...
    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> None: ...
    def silu_gate(self, gate_up: Tensor, out: Tensor) -> None: ...
    def write_kv(self, store: KVStore, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None: ...
    def attention(
        self,
        store: KVStore,
        layer: int,
        sequences: Tensor,
        block_tables: Tensor,
        block_size: int,
        window: int,
        q: Tensor,
        out: Tensor,
    ) -> None: ...
    def forward(
        self,
        decoder: Decoder,
        store: KVStore,
        token_ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        sequences: Tensor,
        block_tables: Tensor,
        block_size: int,
        states: Tensor | None,
        hidden: Tensor,
        kv_only: bool,
    ) -> None: ...
    def draft(
        self,
        decoder: Decoder,
        head: Weight,
        store: KVStore,
        states: Tensor,
        token_ids: Sequence[int],
        start: int,
        block_ids: Sequence[int],
        block_size: int,
        listed: Tensor,
        max_tokens: int,
        rule: object | None,
    ) -> list[int]: ...
    def read_weights(self, decoder: Decoder) -> int: ...

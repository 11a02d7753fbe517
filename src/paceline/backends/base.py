"""What a backend must compute. The decoder is written once, in these operations; fast backends replace them."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from paceline.backends.kv_store import KVShape, KVStore
from paceline.backends.metadata import AttentionMetadata
from paceline.backends.quantized import Weight


class Linear(Protocol):
    """A weight prepared for one backend."""

    def __call__(self, x: Tensor, /) -> Tensor:
        """Map [num_rows, in_features] to [num_rows, out_features]."""


class Embedding(Protocol):
    """A table of token vectors prepared for one backend."""

    def __call__(self, token_ids: Tensor, /) -> Tensor:
        """Rows [num_tokens, hidden] for ``token_ids`` [num_tokens]."""


class Backend(Protocol):
    """The operations of a decoder on one device in one dtype."""

    @property
    def name(self) -> str:
        """How the backend is called in flags and reports."""

    @property
    def device(self) -> torch.device:
        """Where tensors live."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of activations, and of weights unless the backend keeps them in a format of its own."""

    @property
    def keeps_quantized(self) -> bool:
        """Whether `prepare_linear` takes weights as a file holds them quantised."""

    def kv_bytes_per_token(self, shape: KVShape) -> int:
        """Bytes that one token's K and V take over all layers."""

    def make_kv_store(self, shape: KVShape) -> KVStore:
        """Room for the K/V of one model."""

    def prepare_linear(self, weight: Weight, bias: Tensor | None) -> Linear:
        """Take over a weight [out_features, in_features] and an optional bias [out_features]."""

    def prepare_embedding(self, table: Weight, tied_head: Linear | None) -> Embedding:
        """Take over a table [vocab_size, hidden]; ``tied_head`` is the prepared linear of the same weight, if any."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Root-mean-square norm over the last dimension (Zhang & Sennrich, arXiv 1910.07467)."""

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate ``x`` [num_tokens, num_heads, head_dim]; ``cos`` and ``sin`` [num_tokens, head_dim].

        The first half of each head pairs with the second; the first half of ``sin`` is negated already.
        """

    def silu_gate(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up for ``gate_up`` [num_tokens, 2 * inner]."""

    def write_kv(self, store: KVStore, layer: int, k: Tensor, v: Tensor, metadata: AttentionMetadata) -> None:
        """Put k and v [num_tokens, num_kv_heads, head_dim] into the slots of this step."""

    def attention(
        self, q: Tensor, store: KVStore, layer: int, metadata: AttentionMetadata, window: int | None
    ) -> Tensor:
        """Causal attention of q [num_tokens, num_heads, head_dim] over each sequence's blocks.

        Returns [num_tokens, num_heads * head_dim]. ``window`` limits a token to that many newest positions.
        """

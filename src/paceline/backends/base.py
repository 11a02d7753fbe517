"""What a backend must compute. The decoder is written once, in these operations; fast backends replace them."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from paceline.backends.kv_store import KVStore
from paceline.backends.metadata import AttentionMetadata


class Linear(Protocol):
    """A weight prepared for one backend."""

    def __call__(self, x: Tensor, /) -> Tensor:
        """Map [num_rows, in_features] to [num_rows, out_features]."""


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
        """The dtype of weights, activations and K/V."""

    def prepare_linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """Take over a weight [out_features, in_features] and an optional bias [out_features]."""

    def embedding(self, token_ids: Tensor, table: Tensor) -> Tensor:
        """Rows of ``table`` [vocab_size, hidden] for ``token_ids`` [num_tokens]."""

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

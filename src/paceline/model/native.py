"""The decoder's forward pass in one native call: hundreds of calls would cost as much as a small model's sums."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.backends import _kernels
from paceline.backends.base import Linear
from paceline.backends.cpu import CpuBackend, CpuEmbedding, CpuKVStore, CpuLinear
from paceline.backends.kv_store import HiddenStore, KVStore
from paceline.backends.metadata import AttentionMetadata
from paceline.backends.quantized import Weight
from paceline.errors import BackendUnavailableError
from paceline.model.config import ModelConfig
from paceline.model.decoder import Decoder


class NativeDecoder(Decoder):
    """A decoder over the CPU backend. ``Decoder.forward`` is its definition and gives the same bits; of
    :meth:`draft` a :class:`~paceline.spec.draft_model.DraftModelProposer` is, which drafts token by token.

    Raises:
        BackendUnavailableError: heads larger, or more of them to one K/V head, than the kernels have room for.
    """

    def __init__(
        self, config: ModelConfig, weights: dict[str, Weight], backend: CpuBackend, *, num_positions: int
    ) -> None:
        group = config.num_heads // config.num_kv_heads
        if config.head_dim > _kernels.MAX_HEAD_DIM or group > _kernels.MAX_GROUP_HEADS:
            raise BackendUnavailableError(
                f"the CPU kernels take heads of up to {_kernels.MAX_HEAD_DIM} numbers and {_kernels.MAX_GROUP_HEADS} "
                f"heads for each K/V head, this model has {config.head_dim} and {group}; use --backend torch"
            )
        super().__init__(config, weights, backend, num_positions=num_positions)
        self._runtime = backend.runtime
        assert isinstance(self._embedding, CpuEmbedding)
        layers = [
            _kernels.Layer(
                layer.attention_norm,
                _native(layer.qkv),
                layer.q_norm,
                layer.k_norm,
                _native(layer.output),
                layer.mlp_norm,
                _native(layer.gate_up),
                _native(layer.down),
                window or 0,
            )
            for layer, window in zip(self._layers, config.sliding_windows, strict=True)
        ]
        self._native = _kernels.Decoder(
            config.hidden_size,
            config.intermediate_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.rms_norm_eps,
            self._embedding.table,
            _native(self._state_projection) if self._state_projection is not None else None,
            layers,
            self._norm,
            self._cos,
            self._sin,
        )

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        store: KVStore,
        metadata: AttentionMetadata,
        states: Tensor | None = None,
    ) -> Tensor:
        """See :class:`Decoder`."""
        return self._pass(token_ids, positions, store, metadata, states, kv_only=False)

    def write_kv(
        self,
        token_ids: Tensor,
        positions: Tensor,
        store: KVStore,
        metadata: AttentionMetadata,
        states: Tensor | None = None,
    ) -> None:
        """See :class:`Decoder`."""
        self._pass(token_ids, positions, store, metadata, states, kv_only=True)

    def _pass(
        self,
        token_ids: Tensor,
        positions: Tensor,
        store: KVStore,
        metadata: AttentionMetadata,
        states: Tensor | None,
        *,
        kv_only: bool,
    ) -> Tensor:
        assert isinstance(store, CpuKVStore)
        hidden = torch.empty(token_ids.shape[0], self.config.hidden_size)
        self._runtime.forward(
            self._native,
            store.native,
            token_ids,
            positions,
            metadata.slot_mapping,
            metadata.rows,
            metadata.block_tables,
            metadata.block_size,
            states,
            hidden,
            kv_only,
        )
        return hidden

    def draft(
        self,
        token_ids: Sequence[int],
        start: int,
        block_ids: Sequence[int],
        store: KVStore,
        states: HiddenStore,
        *,
        block_size: int,
        listed: Tensor,
        max_tokens: int,
        rule: object | None,
    ) -> list[int]:
        """See :class:`~paceline.model.runner.DraftsAtOnce`."""
        assert isinstance(store, CpuKVStore)
        assert isinstance(self._head, CpuLinear)
        return self._runtime.draft(
            self._native,
            self._head.weight,
            store.native,
            states.rows.view(torch.int16),
            token_ids,
            start,
            block_ids,
            block_size,
            listed,
            max_tokens,
            rule,
        )

    def read_weights(self) -> int:
        """Read all weights once with all threads, for the time it takes; returns their bytes."""
        return self._runtime.read_weights(self._native)


def _native(linear: Linear) -> _kernels.LinearLayer:
    assert isinstance(linear, CpuLinear)
    return _kernels.LinearLayer(linear.weight, linear.bias)

"""The reference backend: plain torch on any device, short enough to be read as the definition of each operation."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own idiom
from torch import Tensor

from paceline.backends.base import Embedding, Linear
from paceline.backends.kv_store import KVShape, KVStore, TorchKVStore
from paceline.backends.metadata import AttentionMetadata
from paceline.backends.quantized import Weight, as_tensor


class TorchBackend:
    """Every operation as torch writes it; the oracle that faster backends are compared with."""

    name = "torch"
    keeps_quantized = False

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device = device
        self.dtype = dtype

    def kv_bytes_per_token(self, shape: KVShape) -> int:
        """See :class:`Backend`."""
        return shape.numbers_per_token * self.dtype.itemsize

    def make_kv_store(self, shape: KVShape) -> KVStore:
        """See :class:`Backend`."""
        return TorchKVStore(shape, dtype=self.dtype, device=self.device)

    def prepare_linear(self, weight: Weight, bias: Tensor | None) -> Linear:
        """See :class:`Backend`; the weight is used as it is."""
        plain = as_tensor(weight, self.dtype)
        return lambda x: F.linear(x, plain, bias)

    def prepare_embedding(self, table: Weight, tied_head: Linear | None) -> Embedding:
        """See :class:`Backend`; a tied head uses the same tensor anyway."""
        plain = as_tensor(table, self.dtype)
        return lambda token_ids: F.embedding(token_ids, plain)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See :class:`Backend`; squares are summed in fp32 whatever the dtype, as transformers does."""
        if x.dtype == torch.float32:
            return F.rms_norm(x, weight.shape, weight, eps)
        return weight * F.rms_norm(x.float(), weight.shape, None, eps).to(x.dtype)

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """See :class:`Backend`."""
        rotated = x.roll(x.shape[-1] // 2, dims=-1)
        return torch.addcmul(x * cos[:, None], rotated, sin[:, None])

    def silu_gate(self, gate_up: Tensor) -> Tensor:
        """See :class:`Backend`."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def write_kv(self, store: KVStore, layer: int, k: Tensor, v: Tensor, metadata: AttentionMetadata) -> None:
        """See :class:`Backend`."""
        assert isinstance(store, TorchKVStore)
        store.keys[layer].index_copy_(0, metadata.slot_mapping, k)
        store.values[layer].index_copy_(0, metadata.slot_mapping, v)

    def attention(
        self, q: Tensor, store: KVStore, layer: int, metadata: AttentionMetadata, window: int | None
    ) -> Tensor:
        """See :class:`Backend`; one sequence after the other."""
        assert isinstance(store, TorchKVStore)
        num_tokens, num_heads, head_dim = q.shape
        keys, values = store.keys[layer], store.values[layer]
        num_kv_heads = keys.shape[1]
        group = num_heads // num_kv_heads
        out = q.new_empty(num_tokens, num_heads * head_dim)
        for index, sequence in enumerate(metadata.sequences):
            # Below every row's window K/V may be missing.
            first = max(0, sequence.kv_len - sequence.query_len + 1 - window) if window is not None else 0
            slots = metadata.kv_slots[index]
            k = keys[slots][first:].transpose(0, 1)  # [num_kv_heads, visible keys, head_dim]
            v = values[slots][first:].transpose(0, 1)
            rows = slice(sequence.query_start, sequence.query_start + sequence.query_len)
            # The heads that share a K/V head stand beside each other as further query rows: no K/V is expanded.
            grouped = (
                q[rows]
                .view(sequence.query_len, num_kv_heads, group, head_dim)
                .permute(1, 2, 0, 3)
                .reshape(num_kv_heads, group * sequence.query_len, head_dim)
            )
            mask = metadata.mask(index, window)
            if mask is not None:
                mask = mask[:, first:].repeat(group, 1)
            attended = F.scaled_dot_product_attention(grouped[None], k[None], v[None], attn_mask=mask)[0]
            out[rows] = (
                attended.view(num_kv_heads, group, sequence.query_len, head_dim)
                .permute(2, 0, 1, 3)
                .reshape(sequence.query_len, num_heads * head_dim)
            )
        return out

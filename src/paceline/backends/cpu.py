"""The CPU backend: native kernels in which verifying several tokens costs hardly more than decoding one.

Weights are int4 or int8 in groups of 32 (see quantized.py) or bf16, K/V is bf16 or int8. Sums are exact integers, or
float32 in a fixed order, so a row's result never depends on the rows beside it (law 6).
"""

from __future__ import annotations

import importlib.util
import os
import warnings
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from paceline.backends.base import Embedding, Linear
from paceline.backends.kv_store import KVShape, KVStore
from paceline.backends.metadata import AttentionMetadata
from paceline.backends.quantized import QuantizedTensor, Weight, as_tensor, quantize
from paceline.errors import BackendUnavailableError

if TYPE_CHECKING:
    from paceline.backends import _kernels

WeightFormat = Literal["auto", "bf16", "int8", "int4"]
KVFormat = Literal["bf16", "int8"]
_HEAD_STEP = 32  # a head is stored in multiples of this


def is_available() -> bool:
    """True when the package was built with its kernels."""
    return importlib.util.find_spec("paceline.backends._kernels") is not None


def warn_unavailable() -> None:
    """Say once why a CPU without the kernels is slow."""
    warnings.warn(
        "paceline was installed without its CPU kernels (no C++ compiler or Python headers were found), so torch "
        "computes, several times slower; install them and reinstall",
        RuntimeWarning,
        stacklevel=2,
    )


def instruction_set() -> str:
    """The best instruction set of this processor, or the one that PACELINE_ISA names.

    Raises:
        BackendUnavailableError: the processor does not have the one asked for.
    """
    from paceline.backends import _kernels

    available = _kernels.instruction_sets()
    asked = os.environ.get("PACELINE_ISA") or available[0]
    if asked not in available:
        raise BackendUnavailableError(f"PACELINE_ISA={asked}: this processor offers {', '.join(available)}")
    return asked


class CpuKVStore(KVStore):
    """K/V in tiles of 16 slots that the attention kernel reads in place."""

    def __init__(self, shape: KVShape, kv_format: KVFormat) -> None:
        from paceline.backends import _kernels

        bits = 8 if kv_format == "int8" else 16
        self.native = _kernels.KVStore(shape.num_layers, shape.num_slots, shape.num_kv_heads, shape.head_dim, bits)


class CpuLinear:
    """x @ weight.T + bias with a packed weight."""

    def __init__(self, runtime: _kernels.Runtime, weight: _kernels.Weight, bias: Tensor | None) -> None:
        self._runtime = runtime
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Tensor, /) -> Tensor:
        """Map [num_rows, in_features] to [num_rows, out_features]."""
        out = torch.empty(x.shape[0], self.weight.shape[0])
        self._runtime.linear(self.weight, self.bias, x.contiguous(), out)
        return out


class CpuEmbedding:
    """Rows of a packed table."""

    def __init__(self, runtime: _kernels.Runtime, table: _kernels.Weight) -> None:
        self._runtime = runtime
        self.table = table

    def __call__(self, token_ids: Tensor, /) -> Tensor:
        """Rows [num_tokens, hidden] for ``token_ids`` [num_tokens]."""
        out = torch.empty(token_ids.shape[0], self.table.shape[1])
        self._runtime.embedding(self.table, token_ids, out)
        return out


class CpuBackend:
    """The operations of a decoder in native kernels, one call each.

    ``weight_format`` "auto" keeps weights as the checkpoint holds them: quantised ones as they are, others in bf16.
    ``kv_format`` "int8" keeps a key or value as codes from -127 to 127 with a float32 scale for each head.

    Raises:
        BackendUnavailableError: PACELINE_ISA names what this processor does not have.
    """

    name = "cpu"
    device = torch.device("cpu")
    dtype = torch.float32
    keeps_quantized = True

    def __init__(self, num_threads: int, weight_format: WeightFormat = "auto", kv_format: KVFormat = "bf16") -> None:
        from paceline.backends import _kernels

        self._format = weight_format
        self._kv_format = kv_format
        self.runtime = _kernels.Runtime(num_threads, instruction_set())

    def kv_bytes_per_token(self, shape: KVShape) -> int:
        """See :class:`Backend`; heads are padded to 32."""
        padded = -(-shape.head_dim // _HEAD_STEP) * _HEAD_STEP
        bytes_per_head = padded + 4 if self._kv_format == "int8" else 2 * padded
        return shape.numbers_per_token // shape.head_dim * bytes_per_head

    def make_kv_store(self, shape: KVShape) -> KVStore:
        """See :class:`Backend`."""
        return CpuKVStore(shape, self._kv_format)

    def prepare_linear(self, weight: Weight, bias: Tensor | None) -> CpuLinear:
        """See :class:`Backend`; the packed copy replaces the weight."""
        return CpuLinear(self.runtime, self._pack(weight), bias)

    def prepare_embedding(self, table: Weight, tied_head: Linear | None) -> Embedding:
        """See :class:`Backend`; a tied head's packed weight serves as the table too."""
        packed = tied_head.weight if isinstance(tied_head, CpuLinear) else self._pack(table)
        return CpuEmbedding(self.runtime, packed)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See :class:`Backend`."""
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        out = torch.empty_like(rows)
        self.runtime.rms_norm(rows, weight, eps, out)
        return out.view(x.shape)

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """See :class:`Backend`."""
        out = x.clone(memory_format=torch.contiguous_format)
        self.runtime.rope(out, cos, sin)
        return out

    def silu_gate(self, gate_up: Tensor) -> Tensor:
        """See :class:`Backend`."""
        out = torch.empty(gate_up.shape[0], gate_up.shape[1] // 2)
        self.runtime.silu_gate(gate_up, out)
        return out

    def write_kv(self, store: KVStore, layer: int, k: Tensor, v: Tensor, metadata: AttentionMetadata) -> None:
        """See :class:`Backend`."""
        assert isinstance(store, CpuKVStore)
        self.runtime.write_kv(store.native, layer, metadata.slot_mapping, k.contiguous(), v.contiguous())

    def attention(
        self, q: Tensor, store: KVStore, layer: int, metadata: AttentionMetadata, window: int | None
    ) -> Tensor:
        """See :class:`Backend`; blocks are read in place when their size is a multiple of 16."""
        assert isinstance(store, CpuKVStore)
        out = torch.empty(q.shape[0], q.shape[1] * q.shape[2])
        self.runtime.attention(
            store.native,
            layer,
            metadata.rows,
            metadata.block_tables,
            metadata.block_size,
            window or 0,
            q.contiguous(),
            out,
        )
        return out

    def _pack(self, weight: Weight) -> _kernels.Weight:
        if self._format == "bf16" or (self._format == "auto" and isinstance(weight, Tensor)):
            return self.runtime.pack_bf16(as_tensor(weight, torch.float32).float().contiguous())
        if isinstance(weight, Tensor):
            weight = quantize(weight, 4 if self._format == "int4" else 8)
        elif self._format == "int8":
            weight = QuantizedTensor(weight.codes, weight.scales, weight.mins, 8)
        return self.runtime.pack_quantised(
            weight.bits, weight.codes.contiguous(), weight.scales.contiguous(), weight.mins.contiguous()
        )

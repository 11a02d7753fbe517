"""Each operation against its definition, and rows that do not see each other."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from paceline.backends import onednn
from paceline.backends.kv_store import KVShape, TorchKVStore
from paceline.backends.metadata import AttentionMetadata, SequenceSlice
from paceline.backends.onednn import PackedTorchBackend
from paceline.backends.torch_ref import TorchBackend

CPU = torch.device("cpu")
BLOCK_SIZE = 4
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 8


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=[TorchBackend, PackedTorchBackend], ids=["reference", "packed"])
def backend(request: pytest.FixtureRequest) -> TorchBackend:
    if request.param is PackedTorchBackend and not onednn.is_available():
        pytest.skip("this build of torch has no packed linear")
    return request.param(CPU, torch.float32)


# ---- linear --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inner", [1, 48, 1024, 1025, 2049, 3000])
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear(backend: TorchBackend, inner: int, has_bias: bool) -> None:
    weight, bias = randn(40, inner) / math.sqrt(inner), randn(40, seed=1) if has_bias else None
    linear = backend.prepare_linear(weight, bias)
    x = randn(9, inner, seed=2)
    expected = x.double() @ weight.double().T + (bias.double() if bias is not None else 0.0)
    torch.testing.assert_close(linear(x), expected.float(), rtol=0, atol=1e-5)
    torch.testing.assert_close(linear(x), expected.float(), rtol=0, atol=1e-5)  # a second call: nothing was added up
    assert linear(x[:0]).shape == (0, 40)


@pytest.mark.skipif(not onednn.is_available(), reason="this build of torch has no packed linear")
@pytest.mark.parametrize("inner", [48, 576, 1024, 1536])
@pytest.mark.parametrize("num_rows", [2, 3, 8, 9, 17])
def test_packed_rows_do_not_see_each_other(inner: int, num_rows: int) -> None:
    linear = PackedTorchBackend(CPU, torch.float32).prepare_linear(randn(96, inner), randn(96, seed=1))
    x = randn(num_rows, inner, seed=2)
    together = linear(x)
    for row in range(num_rows):
        assert torch.equal(together[row], linear(x[row : row + 1])[0])  # bit for bit


# ---- element-wise --------------------------------------------------------------------------------------------------


def test_rms_norm(backend: TorchBackend) -> None:
    x, weight = randn(5, 16), randn(16, seed=1)
    expected = weight * x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + 1e-5)
    torch.testing.assert_close(backend.rms_norm(x, weight, 1e-5), expected)


def test_rms_norm_sums_in_fp32_also_for_bf16() -> None:
    x, weight = randn(5, 4096).bfloat16(), randn(4096, seed=1).bfloat16()
    normed = TorchBackend(CPU, torch.bfloat16).rms_norm(x, weight, 1e-5)
    exact = x.float() / torch.sqrt((x.float() ** 2).mean(dim=-1, keepdim=True) + 1e-5)
    assert normed.dtype == torch.bfloat16
    assert torch.equal(normed, weight * exact.bfloat16())


def test_silu_gate(backend: TorchBackend) -> None:
    x = randn(5, 12)
    expected = x[:, :6] / (1 + torch.exp(-x[:, :6])) * x[:, 6:]
    torch.testing.assert_close(backend.silu_gate(x), expected)


def test_rope_turns_pairs_by_their_angles(backend: TorchBackend) -> None:
    x, angles = randn(3, 2, 8), randn(3, 4, seed=1)
    cos = torch.cat((angles.cos(), angles.cos()), dim=-1)
    sin = torch.cat((-angles.sin(), angles.sin()), dim=-1)
    pairs = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones(3, 1, 4), angles[:, None])
    torch.testing.assert_close(backend.rope(x, cos, sin), torch.cat((pairs.real, pairs.imag), dim=-1))


def test_embedding(backend: TorchBackend) -> None:
    table = randn(7, 4)
    assert torch.equal(backend.prepare_embedding(table, None)(torch.tensor([3, 0, 3])), table[[3, 0, 3]])


# ---- attention -----------------------------------------------------------------------------------------------------


def make_store(num_blocks: int = 16) -> TorchKVStore:
    """Full of NaN: whatever is read without having been written shows."""
    store = TorchKVStore(KVShape(num_blocks * BLOCK_SIZE, 2, NUM_KV_HEADS, HEAD_DIM), dtype=torch.float32, device=CPU)
    for tensor in (*store.keys, *store.values):
        tensor.fill_(torch.nan)
    return store


def slow_attention(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """One query, one head, one key at a time. q: the last of the k's positions."""
    out = torch.zeros_like(q)
    for row in range(q.shape[0]):
        position = k.shape[0] - q.shape[0] + row
        first = 0 if window is None else max(0, position - window + 1)
        for head in range(NUM_HEADS):
            kv_head = head * NUM_KV_HEADS // NUM_HEADS
            scores = k[first : position + 1, kv_head] @ q[row, head] / math.sqrt(HEAD_DIM)
            out[row, head] = torch.softmax(scores, dim=0) @ v[first : position + 1, kv_head]
    return out.flatten(1)


@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize(
    "shapes",  # (query_len, kv_len, blocks)
    [
        [(1, 1, [0])],
        [(5, 5, [0, 1])],
        [(1, 9, [3, 4, 5])],
        [(1, 9, [7, 2, 5])],
        [(3, 11, [7, 2, 5]), (1, 4, [9]), (6, 6, [14, 0])],
        [(4, 8, [6, 7, 12])],  # a block in reserve
    ],
)
def test_attention(backend: TorchBackend, shapes: list[tuple[int, int, list[int]]], window: int | None) -> None:
    store = make_store()
    slices, queries, expected = [], [], []
    num_rows = 0
    for index, (query_len, kv_len, block_ids) in enumerate(shapes):
        k, v, q = (randn(kv_len, heads, HEAD_DIM, seed=10 * index + i) for i, heads in enumerate((2, 2, 4)))
        # The past was written by earlier steps, the rest by this one.
        past = kv_len - query_len
        if past:
            metadata = AttentionMetadata([SequenceSlice(0, past, past, block_ids)], BLOCK_SIZE, CPU)
            backend.write_kv(store, 1, k[:past], v[:past], metadata)
        slices.append(SequenceSlice(num_rows, query_len, kv_len, block_ids))
        queries.append((q[past:], k[past:], v[past:]))
        expected.append(slow_attention(q[past:], k, v, window))
        num_rows += query_len
    metadata = AttentionMetadata(slices, BLOCK_SIZE, CPU)
    q, k, v = (torch.cat(parts) for parts in zip(*queries, strict=True))
    backend.write_kv(store, 1, k, v, metadata)
    torch.testing.assert_close(backend.attention(q, store, 1, metadata, window), torch.cat(expected))
    assert store.keys[0].isnan().all()  # the other layer is untouched


def test_slots_are_block_by_block() -> None:
    scattered = SequenceSlice(0, 3, 7, [5, 2, 9])
    straight = SequenceSlice(3, 2, 6, [3, 4])
    metadata = AttentionMetadata([scattered, straight], BLOCK_SIZE, CPU)
    assert metadata.slot_mapping.tolist() == [8, 9, 10, 16, 17]
    assert metadata.kv_slots[0].tolist() == [20, 21, 22, 23, 8, 9, 10]  # type: ignore[union-attr]
    assert metadata.kv_slots[1] == slice(12, 18)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_per_token(dtype: torch.dtype) -> None:
    backend = TorchBackend(CPU, dtype)
    shape = KVShape(BLOCK_SIZE, 2, NUM_KV_HEADS, HEAD_DIM)
    store = backend.make_kv_store(shape)
    assert isinstance(store, TorchKVStore)
    total = sum(tensor.numel() * tensor.element_size() for tensor in (*store.keys, *store.values))
    assert backend.kv_bytes_per_token(shape) == total // BLOCK_SIZE

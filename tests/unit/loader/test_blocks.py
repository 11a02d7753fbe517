"""The file's own codes: the same numbers as gguf's dequantisation, and none of them lost."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Kind

from paceline.backends.quantized import GROUP, QuantizedTensor
from paceline.loader import blocks
from paceline.loader.blocks import can_unpack, unpack_blocks

BITS = {Kind.Q4_0: 4, Kind.Q4_1: 4, Kind.Q5_0: 8, Kind.Q5_1: 8, Kind.Q8_0: 8, Kind.Q4_K: 4, Kind.Q5_K: 8}
NUM_ROWS, BLOCKS_PER_ROW = 37, 3

every_kind = pytest.mark.parametrize("kind", BITS, ids=lambda kind: kind.name)


def random_blocks(kind: Kind, seed: int = 0) -> np.ndarray:
    """Any bytes for the codes, and of every magnitude float16 has for the one or two numbers at a block's front."""
    rng = np.random.default_rng(seed)
    block_bytes = GGML_QUANT_SIZES[kind][1]
    raw = rng.integers(0, 256, (NUM_ROWS, BLOCKS_PER_ROW, block_bytes), dtype=np.uint8)
    front = 1 if kind in (Kind.Q4_0, Kind.Q5_0, Kind.Q8_0) else 2
    magnitudes = rng.standard_normal((NUM_ROWS, BLOCKS_PER_ROW, front)) * 10.0 ** rng.integers(-7, 4, (NUM_ROWS, 1, 1))
    raw[..., : 2 * front] = magnitudes.astype(np.float16).view(np.uint8)
    return raw.reshape(NUM_ROWS, -1)


def unpack(kind: Kind, raw: np.ndarray) -> QuantizedTensor:
    return unpack_blocks(raw, kind, (NUM_ROWS, BLOCKS_PER_ROW * GGML_QUANT_SIZES[kind][0]))


@every_kind
def test_the_numbers_are_those_of_gguf_to_the_last_bit(kind: Kind) -> None:
    raw = random_blocks(kind)
    unpacked = unpack(kind, raw)
    assert can_unpack(kind)
    assert unpacked.bits == BITS[kind]
    assert unpacked.shape == (NUM_ROWS, BLOCKS_PER_ROW * GGML_QUANT_SIZES[kind][0])
    assert unpacked.scales.shape == (NUM_ROWS, unpacked.shape[1] // GROUP)
    assert torch.equal(unpacked.dequantize(), torch.from_numpy(gguf.quants.dequantize(raw, kind)))


@every_kind
def test_every_code_is_met_and_fits_its_bits(kind: Kind) -> None:
    levels = {Kind.Q8_0: 256, Kind.Q5_0: 32, Kind.Q5_1: 32, Kind.Q5_K: 32}.get(kind, 16)
    assert unpack(kind, random_blocks(kind)).codes.unique().tolist() == list(range(levels))


@every_kind
def test_slabs_make_no_difference(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = random_blocks(kind)
    at_once = unpack(kind, raw)
    monkeypatch.setattr(blocks, "_SLAB_ELEMENTS", 7 * GGML_QUANT_SIZES[kind][0])
    in_slabs = unpack(kind, raw)
    assert torch.equal(at_once.codes, in_slabs.codes)
    assert torch.equal(at_once.scales, in_slabs.scales)
    assert torch.equal(at_once.mins, in_slabs.mins)


@every_kind
def test_bytes_that_are_read_only_unaligned_or_apart(kind: Kind) -> None:
    raw = random_blocks(kind)
    expected = unpack(kind, raw).dequantize()
    shifted = np.frombuffer(b"\0" + raw.tobytes(), np.uint8)[1:].reshape(raw.shape)
    assert torch.equal(unpack(kind, shifted).dequantize(), expected)
    apart = np.concatenate([raw, raw], axis=1)[:, : raw.shape[1]]
    assert torch.equal(unpack(kind, apart).dequantize(), expected)


def test_the_result_does_not_share_the_files_bytes() -> None:
    raw = random_blocks(Kind.Q8_0)
    unpacked = unpack(Kind.Q8_0, raw)
    before = unpacked.dequantize()
    raw[:] = 0
    assert torch.equal(unpacked.dequantize(), before)


@pytest.mark.parametrize("kind", [Kind.Q6_K, Kind.Q2_K, Kind.Q3_K, Kind.IQ4_NL, Kind.MXFP4, Kind.F16, Kind.F32])
def test_other_types_cannot_be_unpacked(kind: Kind) -> None:
    assert not can_unpack(kind)

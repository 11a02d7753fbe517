"""GGUF's quantised blocks as codes, scales and minima, without a detour through float weights.

The layouts are those of ggml (ggml-common.h, ggml-quants.c). Listed are the types whose weights, in groups of 32 along
a row, are a scale times a code plus a minimum; the codes are the file's own. Q6_K is not among them: its groups have
16 weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from paceline.backends.quantized import GROUP, QuantizedTensor

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

_SLAB_ELEMENTS = 1 << 18  # unpacked at once: the intermediate results stay in the cache


@dataclass(frozen=True, slots=True)
class _Layout:
    """One block type: its fields, the bits a code needs (4 or 8), and what writes codes and returns (scales, mins).

    ``unpack`` takes blocks [n] and fills uint8 codes [n, block_elements]; scales and minima are float32 [n, groups].
    """

    fields: np.dtype[Any]
    bits: int
    unpack: Callable[[npt.NDArray[Any], Bytes], tuple[Floats, Floats]]


def can_unpack(kind: GGMLQuantizationType) -> bool:
    """True for the types `unpack_blocks` takes."""
    return kind in _LAYOUTS


def unpack_blocks(raw: Bytes, kind: GGMLQuantizationType, shape: tuple[int, int]) -> QuantizedTensor:
    """The tensor of ``shape`` (out_features, in_features) whose blocks are ``raw``, uint8 [out_features, row_bytes].

    Its weights equal those of ``gguf.quants.dequantize`` to the last bit. Slabs bound the temporaries, so peak memory
    is the result.
    """
    layout = _LAYOUTS[kind]
    block_elements, block_bytes = GGML_QUANT_SIZES[kind]
    assert layout.fields.itemsize == block_bytes
    num_rows, num_columns = shape
    assert num_columns % block_elements == 0
    assert raw.shape == (num_rows, num_columns // block_elements * block_bytes)
    blocks = np.ascontiguousarray(raw).reshape(-1).view(layout.fields)
    codes = np.empty((len(blocks), block_elements), np.uint8)
    scales = np.empty((len(blocks), block_elements // GROUP), np.float32)
    mins = np.empty_like(scales)
    slab_blocks = _SLAB_ELEMENTS // block_elements
    for start in range(0, len(blocks), slab_blocks):
        slab = slice(start, start + slab_blocks)
        scales[slab], mins[slab] = layout.unpack(blocks[slab], codes[slab])
    return QuantizedTensor(
        torch.from_numpy(codes.reshape(shape)),
        torch.from_numpy(scales.reshape(num_rows, -1)),
        torch.from_numpy(mins.reshape(num_rows, -1)),
        layout.bits,
    )


def _split_nibbles(packed: npt.NDArray[Any], codes: Bytes) -> None:
    """Fill ``codes`` from ``packed`` chunks [n, chunks]: each chunk's low halves of bytes first, then its high halves.

    Chunks are of a void type, which numpy moves as a unit: five times sooner than bytes in rows of 16.
    """
    pairs = np.ascontiguousarray(packed).view(np.uint8)
    halves = codes.view(packed.dtype)  # [n, 2 * chunks]
    halves[:, 0::2] = (pairs & np.uint8(0x0F)).view(packed.dtype)
    halves[:, 1::2] = (pairs >> np.uint8(4)).view(packed.dtype)


def _column(halfs: npt.NDArray[np.float16]) -> Floats:
    return halfs.astype(np.float32)[:, None]


def _unpack_4_0(blocks: npt.NDArray[Any], codes: Bytes) -> tuple[Floats, Floats]:
    _split_nibbles(blocks["codes"], codes)
    scale = _column(blocks["d"])
    return scale, scale * np.float32(-8)


def _unpack_4_1(blocks: npt.NDArray[Any], codes: Bytes) -> tuple[Floats, Floats]:
    _split_nibbles(blocks["codes"], codes)
    return _column(blocks["d"]), _column(blocks["m"])


def _add_fifth_bits(blocks: npt.NDArray[Any], codes: Bytes) -> None:
    """Bit i of a block's 32-bit word ``high`` is the fifth bit of its code i."""
    codes |= np.unpackbits(blocks["high"], axis=-1, bitorder="little") << np.uint8(4)


def _unpack_5_0(blocks: npt.NDArray[Any], codes: Bytes) -> tuple[Floats, Floats]:
    _split_nibbles(blocks["codes"], codes)
    _add_fifth_bits(blocks, codes)
    scale = _column(blocks["d"])
    return scale, scale * np.float32(-16)


def _unpack_5_1(blocks: npt.NDArray[Any], codes: Bytes) -> tuple[Floats, Floats]:
    scale, least = _unpack_4_1(blocks, codes)
    _add_fifth_bits(blocks, codes)
    return scale, least


def _unpack_8_0(blocks: npt.NDArray[Any], codes: Bytes) -> tuple[Floats, Floats]:
    # Flipping the sign bit of a signed byte adds 128.
    np.bitwise_xor(blocks["codes"], np.uint8(0x80), out=codes)
    scale = _column(blocks["d"])
    return scale, scale * np.float32(-128)


def _unpack_4_k(blocks: npt.NDArray[Any], codes: Bytes) -> tuple[Floats, Floats]:
    """A super-block of 256: eight groups whose scales and minima are 6-bit multiples of ``d`` and ``dmin``."""
    _split_nibbles(blocks["codes"], codes)
    # Groups 0 to 3 have bytes of their own in the first two words; the high two bits of those bytes are the high bits
    # of groups 4 to 7, whose low four bits share the third word.
    first, second, third = (np.ascontiguousarray(blocks["scales"][:, word]) for word in range(3))  # [n, 4] each
    multiples = np.concatenate([first & 0x3F, (third & 0x0F) | ((first >> 2) & 0x30)], axis=1)
    min_multiples = np.concatenate([second & 0x3F, (third >> 4) | ((second >> 2) & 0x30)], axis=1)
    return _column(blocks["d"]) * multiples, -_column(blocks["dmin"]) * min_multiples


def _unpack_5_k(blocks: npt.NDArray[Any], codes: Bytes) -> tuple[Floats, Floats]:
    """As Q4_K; bit g of byte i of ``high`` is the fifth bit of code i in group g."""
    scales, mins = _unpack_4_k(blocks, codes)
    high = np.ascontiguousarray(blocks["high"])  # [n, 32]
    for group in range(8):
        fifth_bits = ((high >> np.uint8(group)) & np.uint8(1)) << np.uint8(4)
        codes[:, group * GROUP : (group + 1) * GROUP] |= fifth_bits
    return scales, mins


_D, _M = ("d", "<f2"), ("m", "<f2")
_HALVES = ("codes", "V16", (1,))  # 32 codes: those of the first half in the low nibbles, of the second in the high
_SUPER_HALVES = ("codes", "V32", (4,))  # 256 codes, nibbles of 64 at a time
_SUPER_SCALES = ("scales", "u1", (3, 4))
_LAYOUTS = {
    GGMLQuantizationType.Q4_0: _Layout(np.dtype([_D, _HALVES]), 4, _unpack_4_0),
    GGMLQuantizationType.Q4_1: _Layout(np.dtype([_D, _M, _HALVES]), 4, _unpack_4_1),
    GGMLQuantizationType.Q5_0: _Layout(np.dtype([_D, ("high", "u1", (4,)), _HALVES]), 8, _unpack_5_0),
    GGMLQuantizationType.Q5_1: _Layout(np.dtype([_D, _M, ("high", "u1", (4,)), _HALVES]), 8, _unpack_5_1),
    GGMLQuantizationType.Q8_0: _Layout(np.dtype([_D, ("codes", "u1", (32,))]), 8, _unpack_8_0),
    GGMLQuantizationType.Q4_K: _Layout(np.dtype([_D, ("dmin", "<f2"), _SUPER_SCALES, _SUPER_HALVES]), 4, _unpack_4_k),
    GGMLQuantizationType.Q5_K: _Layout(
        np.dtype([_D, ("dmin", "<f2"), _SUPER_SCALES, ("high", "u1", (32,)), _SUPER_HALVES]), 8, _unpack_5_k
    ),
}

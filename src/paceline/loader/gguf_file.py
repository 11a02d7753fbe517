"""The GGUF container: header, metadata and tensor directory, read straight from the mapped file.

The gguf package's own reader builds several NumPy arrays per string, which takes seconds for a vocabulary of 49,152
tokens, and answers a truncated file with whatever NumPy trips over first. This one takes a tenth of a second and says
where the file ends; the package still does what it alone knows, the quantisation formats.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from paceline.backends.quantized import QuantizedTensor
from paceline.errors import ModelFormatError
from paceline.loader.blocks import can_unpack, unpack_blocks

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_MAX_ARRAY_DEPTH = 4
_MAX_DIMENSIONS = 4
_DEFAULT_ALIGNMENT = 32
_SLAB_ELEMENTS = 1 << 22  # dequantised at once: 16 MB of float32, so that peak memory stays near the result
_ROW_ELEMENTS = 1 << 13  # what is handed to gguf as one row, at most: see _merge_rows


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where one tensor lies. ``shape`` is in torch order (slowest first); ``offset`` counts from the file's start."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int
    num_bytes: int


class _Cursor:
    """Reads little-endian values one after the other, and never past the end."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data, self._path = data, path
        self.position = 0

    def take(self, num_bytes: int) -> bytes:
        start, end = self.position, self.position + num_bytes
        if end > len(self._data):
            raise truncated(self._path, end, len(self._data))
        self.position = end
        return self._data[start:end]

    def scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        return self.take(self.scalar("Q")).decode("utf-8", "replace")

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY and depth < _MAX_ARRAY_DEPTH:
            item_kind, count = self.scalar("I"), self.scalar("Q")
            if code := _SCALARS.get(item_kind):
                raw = self.take(count * struct.calcsize("<" + code))
                return np.frombuffer(raw, np.dtype("<" + code)).tolist()
            return [self.value(item_kind, depth + 1) for _ in range(count)]
        if code := _SCALARS.get(kind):
            return self.scalar(code)
        raise ModelFormatError(f"{self._path} is damaged: its metadata uses the unknown type {kind}; fetch it again")


def truncated(path: Path, needed: int, size: int) -> ModelFormatError:
    """The error for a file that ends too early."""
    return ModelFormatError(
        f"{path} is truncated: {needed:,} bytes are needed and it has {size:,}; download the file again"
    )


class GgufFile:
    """An open GGUF file: ``metadata`` by key, ``tensors`` by name, ``read`` for numbers, ``read_quantized`` for codes.

    Raises:
        ModelFormatError: not a GGUF file, an unsupported version, damaged, or shorter than its directory says.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        size = path.stat().st_size
        with path.open("rb") as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                raise ModelFormatError(f"{path} is not a GGUF file (it does not start with 'GGUF'); check the path")
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        cursor = _Cursor(self._data, path)
        cursor.take(len(_MAGIC))
        version = cursor.scalar("I")
        if version not in _VERSIONS:
            raise ModelFormatError(
                f"{path} has GGUF version {version}; supported are 2 and 3, little-endian: convert it anew"
            )
        num_tensors, num_keys = cursor.scalar("Q"), cursor.scalar("Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = cursor.string()
            self.metadata[key] = cursor.value(cursor.scalar("I"))
        headers = [self._read_header(cursor) for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise ModelFormatError(f"{path} is damaged: its alignment is {alignment!r}; fetch it again")
        data_start = -(-cursor.position // alignment) * alignment
        self.tensors: dict[str, GgufTensor] = {}
        for name, shape, kind, relative_offset in headers:
            tensor = _locate(path, name, shape, kind, data_start + relative_offset)
            if tensor.offset + tensor.num_bytes > size:
                raise truncated(path, tensor.offset + tensor.num_bytes, size)
            self.tensors[name] = tensor

    def _read_header(self, cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
        name, num_dimensions = cursor.string(), cursor.scalar("I")
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise ModelFormatError(
                f"{self.path} is damaged: tensor {name} has {num_dimensions} dimensions; fetch it again"
            )
        fastest_first = [cursor.scalar("Q") for _ in range(num_dimensions)]
        return name, tuple(reversed(fastest_first)), cursor.scalar("I"), cursor.scalar("Q")

    def read(self, name: str, *, dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
        """A new tensor with the dequantised numbers, in slabs of rows so that no float32 copy of the whole exists.

        Raises:
            ModelFormatError: the gguf package cannot dequantise this tensor's type.
        """
        tensor = self.tensors[name]
        row_elements = tensor.shape[-1]
        raw = self._rows(tensor)
        num_rows = raw.shape[0]
        result = torch.empty((num_rows, row_elements), dtype=dtype, device=device)
        slab_rows = max(1, _SLAB_ELEMENTS // row_elements // 64 * 64)
        for start in range(0, num_rows, slab_rows):
            try:
                numbers = dequantize(_merge_rows(raw[start : start + slab_rows], row_elements), tensor.kind)
            except NotImplementedError:
                raise ModelFormatError(
                    f"{self.path}: tensor {name} has type {tensor.kind.name}, which cannot be dequantised; "
                    "use another quantisation of this model, for instance Q4_K_M or Q8_0"
                ) from None
            # The mapping is read-only; torch wants memory it may write to (float32 would otherwise be a view of it).
            slab = torch.from_numpy(np.require(numbers, np.float32, ("C", "W")))
            result[start : start + slab_rows].copy_(slab.view(-1, row_elements))
        return result.reshape(tensor.shape)

    def read_quantized(self, name: str) -> QuantizedTensor | None:
        """A matrix with the file's own codes, on the CPU and independent of the file.

        None where that is not possible, and ``read`` is left: another number of dimensions, or a type whose weights
        are not a scale times a code plus a minimum in groups of 32.
        """
        tensor = self.tensors[name]
        if len(tensor.shape) != 2 or not can_unpack(tensor.kind):
            return None
        num_rows, num_columns = tensor.shape
        return unpack_blocks(self._rows(tensor), tensor.kind, (num_rows, num_columns))

    def _rows(self, tensor: GgufTensor) -> npt.NDArray[np.uint8]:
        """The tensor's bytes as they lie in the mapped file, [rows, bytes of one row]."""
        raw: npt.NDArray[np.uint8] = np.frombuffer(self._data, np.uint8, tensor.num_bytes, tensor.offset)
        return raw.reshape(int(np.prod(tensor.shape[:-1], dtype=np.int64)), -1)


def _merge_rows(rows: npt.NDArray[np.uint8], row_elements: int) -> npt.NDArray[np.uint8]:
    """The same blocks in fewer, longer rows.

    gguf dequantises 16 rows per numpy call, whatever their length; short rows then cost more in calls than in work
    (11 ms against 3 ms for a 576-wide tensor of 1,536 rows).
    """
    num_rows = rows.shape[0]
    merged = 1
    while 2 * merged * row_elements <= _ROW_ELEMENTS and num_rows % (2 * merged) == 0:
        merged *= 2
    return rows.reshape(num_rows // merged, -1)


def _locate(path: Path, name: str, shape: tuple[int, ...], kind: int, offset: int) -> GgufTensor:
    """A directory entry with its type resolved and its bytes counted."""
    try:
        quantisation = GGMLQuantizationType(kind)
    except ValueError:
        raise ModelFormatError(
            f"{path}: tensor {name} has the unknown type {kind}; update the gguf package or use another file"
        ) from None
    block_elements, block_bytes = GGML_QUANT_SIZES[quantisation]
    if 0 in shape or shape[-1] % block_elements:
        raise ModelFormatError(f"{path} is damaged: tensor {name} cannot have shape {list(shape)}; fetch it again")
    num_elements = 1
    for extent in shape:  # Python integers: absurd extents of a damaged file must not wrap around
        num_elements *= extent
    return GgufTensor(name, shape, quantisation, offset, num_elements // block_elements * block_bytes)

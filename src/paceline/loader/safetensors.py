"""Hugging Face folders: config.json and one or many safetensors files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from paceline.backends.quantized import Weight
from paceline.errors import ModelFormatError
from paceline.loader.hf_config import read_model_config

_INDEX = "model.safetensors.index.json"


def read_json(path: Path) -> dict[str, Any]:
    """The object a JSON file holds.

    Raises:
        ModelFormatError: missing, unreadable, or not an object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelFormatError(f"{path} cannot be read ({error}); fetch the model folder again") from error
    if not isinstance(content, dict):
        raise ModelFormatError(f"{path} is not a JSON object; fetch the model folder again")
    return content


class SafetensorsCheckpoint:
    """A model folder: ``config``, and its tensors one at a time under the names in the files.

    Raises:
        ModelFormatError: a missing, damaged or truncated file, or a model Paceline does not run.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.config = read_model_config(read_json(folder / "config.json"), str(folder / "config.json"))
        self._files = _weight_files(folder)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor; only the files' headers are read."""
        shapes: dict[str, tuple[int, ...]] = {}
        for path in self._files:
            with _opened(path) as handle:
                for name in handle.keys():  # noqa: SIM118 - a handle cannot be iterated
                    shapes[name] = tuple(handle.get_slice(name).get_shape())
        return shapes

    def tensors(
        self, *, dtype: torch.dtype, device: torch.device | str, keep_quantized: bool = False
    ) -> Iterator[tuple[str, Weight]]:
        """Every tensor with its name, converted one at a time. ``keep_quantized`` has no effect: none is quantised."""
        for path in self._files:
            with _opened(path) as handle:
                for name in handle.keys():  # noqa: SIM118
                    # A copy even when dtype and device already fit: the tensor must not keep the whole file mapped.
                    yield name, handle.get_tensor(name).to(device=device, dtype=dtype, copy=True)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """``safe_open`` whose errors say which file is damaged and what to do."""
    try:
        with safe_open(path, framework="pt", device="cpu") as handle:
            yield handle
    except (SafetensorError, OSError) as error:
        raise ModelFormatError(f"{path} is damaged or truncated ({error}); download the file again") from error


def _weight_files(folder: Path) -> list[Path]:
    """The files that together hold the weights: those the index names, else every safetensors file of the folder."""
    index = folder / _INDEX
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelFormatError(f"{index} names no weight files; fetch the model folder again")
        names = sorted(set(map(str, weight_map.values())))
        if outside := [name for name in names if Path(name).name != name]:
            raise ModelFormatError(f"{index} points outside its folder ({outside[0]}); do not trust this model")
        files = [folder / name for name in names]
    elif (folder / "model.safetensors").is_file():
        files = [folder / "model.safetensors"]
    else:
        # Mistral ships the same weights a second time in its own layout as consolidated.safetensors.
        files = [path for path in sorted(folder.glob("*.safetensors")) if not path.name.startswith("consolidated")]
    if not files:
        raise ModelFormatError(f"{folder} holds no .safetensors weights; convert them, or fetch a folder that has them")
    for path in files:
        if not path.is_file():
            raise ModelFormatError(f"{path} is missing although {_INDEX} names it; fetch the model folder again")
    return files

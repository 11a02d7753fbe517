"""One door to every checkpoint: a path in; config, weights and tokenizer out."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from paceline.backends.quantized import QuantizedTensor, Weight
from paceline.errors import InvalidParameterError, ModelFormatError, ModelNotFoundError
from paceline.loader.tokenizer import Tokenizer
from paceline.model.config import ModelConfig, expected_weights

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_DERIVED = "rotary_emb.inv_freq"  # old exports store these frequencies, which follow from the config


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model ready to run. ``weights`` has exactly the names and shapes of ``expected_weights(config)``."""

    name: str
    config: ModelConfig
    weights: dict[str, Weight]
    tokenizer: Tokenizer


class _Reader(Protocol):
    """What the two file formats have in common."""

    @property
    def config(self) -> ModelConfig: ...
    def shapes(self) -> dict[str, tuple[int, ...]]: ...
    def tensors(
        self, *, dtype: torch.dtype, device: torch.device | str, keep_quantized: bool
    ) -> Iterator[tuple[str, Weight]]: ...


def load_checkpoint(
    path: Path, *, dtype: torch.dtype, device: torch.device | str = "cpu", keep_quantized: bool = False
) -> Checkpoint:
    """Read a .gguf file or a Hugging Face folder into ``dtype`` on ``device``.

    With ``keep_quantized`` (on the CPU only) matrices of a GGUF file whose type is a scale times a code plus a minimum
    in groups of 32 become `QuantizedTensor`s with the file's own codes; all other tensors, and those of a folder, are
    read into ``dtype`` as ever.

    Names, shapes and the tokenizer are checked before the first number is read; tensors are then converted one at
    a time, so peak memory is the result plus one tensor of the file.

    Raises:
        InvalidParameterError: ``keep_quantized`` for another device than the CPU.
        ModelNotFoundError: nothing at ``path``.
        ModelFormatError: damaged, unsupported, or with a tensor missing, left over or of the wrong shape.
    """
    if not path.exists():
        raise ModelNotFoundError(f"{path} does not exist; check the path")
    if keep_quantized and torch.device(device).type != "cpu":
        raise InvalidParameterError(f"quantised weights are kept on the CPU only, not on {device}; use device cpu")
    reader, tokenizer = _open(path)
    config = reader.config
    if tokenizer.vocab_size > config.vocab_size:  # the reverse is padding of the matrix, and harmless
        raise ModelFormatError(
            f"{path}: the tokenizer has {tokenizer.vocab_size} tokens but the model only {config.vocab_size}; "
            "the two do not belong together"
        )
    expected = _expected_in_file(config, reader.shapes(), path)
    tensors = reader.tensors(dtype=dtype, device=device, keep_quantized=keep_quantized)
    weights = {name: tensor for name, tensor in tensors if name in expected}
    if config.has_tied_embeddings and _HEAD in weights:
        if _is_same(weights[_HEAD], weights[_EMBEDDING]):
            del weights[_HEAD]
        else:
            # Training or quantisation told the two apart after all. The file's head is what the model was judged
            # with, so it is used, as transformers 5 does.
            config = dataclasses.replace(config, has_tied_embeddings=False)
    return Checkpoint(_display_name(path), config, weights, tokenizer)


def _is_same(one: Weight, other: Weight) -> bool:
    """Equal in every number. A matrix kept in two representations counts as two: either serves, at a cost in memory."""
    if isinstance(one, QuantizedTensor) and isinstance(other, QuantizedTensor):
        fields = ((one.codes, other.codes), (one.scales, other.scales), (one.mins, other.mins))
        return all(torch.equal(mine, theirs) for mine, theirs in fields)
    return isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and torch.equal(one, other)


def _open(path: Path) -> tuple[_Reader, Tokenizer]:
    """The reader for the format found, each imported where it is chosen."""
    if path.is_dir():
        from paceline.loader.safetensors import SafetensorsCheckpoint

        return SafetensorsCheckpoint(path), Tokenizer.from_file(path)
    from paceline.loader.gguf import GgufCheckpoint

    reader = GgufCheckpoint(path)
    return reader, Tokenizer.from_gguf(reader.metadata)


def _expected_in_file(
    config: ModelConfig, found: Mapping[str, tuple[int, ...]], path: Path
) -> dict[str, tuple[int, ...]]:
    """The tensors to read, after checking that the file has each of them, in its shape, and no other."""
    expected = expected_weights(config)
    if config.has_tied_embeddings and _HEAD in found:
        expected[_HEAD] = expected[_EMBEDDING]
    check_tensors(expected, found, path)
    return expected


def check_tensors(expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]], path: Path) -> None:
    """Both give shapes by tensor name; ``path`` is what the message is about.

    Raises:
        ModelFormatError: a tensor is missing, left over, or of another shape.
    """
    for name, shape in expected.items():
        if name not in found:
            raise ModelFormatError(f"{path} lacks the tensor {name}; the download is incomplete or of another model")
        if found[name] != shape:
            raise ModelFormatError(
                f"{path}: tensor {name} has shape {list(found[name])} where the config asks for {list(shape)}; "
                "config and weights do not belong together"
            )
    for name in found:
        if name not in expected and not name.endswith(_DERIVED):
            raise ModelFormatError(
                f"{path} holds the unknown tensor {name}; this variant of the model is not supported"
            )


def _display_name(path: Path) -> str:
    """The file's or folder's name; for a hub snapshot ``org/name`` instead of the commit it is stored under."""
    resolved = path.absolute()
    if path.is_dir() and resolved.parent.name == "snapshots" and resolved.parent.parent.name.startswith("models--"):
        return resolved.parent.parent.name.removeprefix("models--").replace("--", "/", 1)
    return resolved.name if path.is_dir() else resolved.stem

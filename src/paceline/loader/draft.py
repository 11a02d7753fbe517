"""Drafts that ``paceline train-draft`` wrote: a Hugging Face style folder plus draft.json.

Two things are not in the folder. Its input embedding is the target's, seen through a small learned projection, and is
made from the target's table when the draft is loaded; one row of it is read per token, so its size costs no time. Its
head speaks only the tokens that draft.json lists. docs/decisions/0030 has the reasons.

A draft of the kind ``head`` is one layer that also reads the target's hidden states (docs/decisions/0046).
"""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from paceline.backends.quantized import Weight, as_tensor, quantize
from paceline.errors import DraftMismatchError, ModelFormatError
from paceline.loader.hf_config import read_model_config
from paceline.loader.load import Checkpoint, check_tensors, load_checkpoint
from paceline.loader.safetensors import SafetensorsCheckpoint, read_json
from paceline.loader.tokenizer import Tokenizer
from paceline.model.config import expected_weights
from paceline.model.draft_vocabulary import DraftVocabulary

DRAFT_FILE = "draft.json"
EMBEDDING = "model.embed_tokens.weight"
PROJECTION = "model.embed_projection.weight"
STATE_PROJECTION = "model.state_projection.weight"
FORMAT = 1

DraftKind = Literal["model", "head"]


@dataclass(frozen=True, slots=True)
class DraftCheckpoint:
    """A draft ready to run; ``vocabulary`` is None for an ordinary model, which speaks all of the target's tokens."""

    checkpoint: Checkpoint
    vocabulary: DraftVocabulary | None = None

    @property
    def is_head(self) -> bool:
        """Whether it reads the target's hidden states."""
        return self.checkpoint.config.state_size is not None


def vocabulary_sha256(tokenizer: Tokenizer) -> str:
    """A fingerprint of what every token id means."""
    return hashlib.sha256("\0".join(tokenizer.vocab()).encode("utf-8", errors="surrogatepass")).hexdigest()


def load_draft(
    path: Path,
    target: Checkpoint,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    keep_quantized: bool = False,
) -> DraftCheckpoint:
    """Read a draft for ``target``, whose weights must still be there: a trained one takes its embedding from them.

    Raises:
        DraftMismatchError: trained for a target of another vocabulary or width.
        ModelNotFoundError, ModelFormatError: see `load_checkpoint`.
    """
    if not (path / DRAFT_FILE).is_file():
        checkpoint = load_checkpoint(path, dtype=dtype, device=device, keep_quantized=keep_quantized)
        return DraftCheckpoint(checkpoint)
    settings = _read_settings(path / DRAFT_FILE)
    _check_target(settings["target"], target, path)
    try:
        vocabulary = DraftVocabulary(settings["token_ids"], has_escape=bool(settings["has_escape"]))
    except ModelFormatError as error:
        raise ModelFormatError(f"{path / DRAFT_FILE}: {error}") from None
    raw = read_json(path / "config.json")
    config = read_model_config(raw, str(path / "config.json"))
    state_size = target.config.hidden_size if settings["kind"] == "head" else None
    if state_size not in (None, config.hidden_size):
        # In the middle of a draft its own states are read where the target's were.
        raise ModelFormatError(
            f"{path} is a head of width {config.hidden_size} for a target of {state_size}; train it anew"
        )
    config = dataclasses.replace(config, num_logits=vocabulary.num_logits, state_size=state_size)
    reader = SafetensorsCheckpoint(path)
    expected = expected_weights(config)
    del expected[EMBEDDING]
    expected[PROJECTION] = (config.hidden_size, target.config.hidden_size)
    check_tensors(expected, reader.shapes(), path)
    tensors = dict(reader.tensors(dtype=dtype, device=device))
    assert all(isinstance(tensor, Tensor) for tensor in tensors.values())
    table = as_tensor(target.weights[EMBEDDING], torch.float32).to(device)
    projected = table @ as_tensor(tensors.pop(PROJECTION), torch.float32).T
    weights: dict[str, Weight] = {EMBEDDING: projected.to(dtype), **tensors}
    bits = settings.get("weight_bits")
    if keep_quantized and bits:
        # All but the table, of which one row is read: rounding its millions of numbers would only take time.
        weights = {
            name: weight if name == EMBEDDING else _quantized(weight, int(bits)) for name, weight in weights.items()
        }
    checkpoint = Checkpoint(path.absolute().name, config, weights, target.tokenizer)
    return DraftCheckpoint(checkpoint, vocabulary)


def _quantized(weight: Weight, bits: int) -> Weight:
    """Matrices in small integers; the head and the layers then fit into the last-level cache."""
    is_matrix = isinstance(weight, Tensor) and weight.dim() == 2
    return quantize(weight, bits) if isinstance(weight, Tensor) and is_matrix else weight


def _read_settings(path: Path) -> dict[str, Any]:
    settings = read_json(path)
    if settings.get("format") != FORMAT:
        raise ModelFormatError(
            f"{path} has the format {settings.get('format')!r}, this version of Paceline reads {FORMAT}; train it anew"
        )
    missing = [key for key in ("kind", "target", "token_ids", "has_escape") if key not in settings]
    if missing or settings["kind"] not in get_args(DraftKind):
        raise ModelFormatError(f"{path} lacks {', '.join(missing) or 'a known kind'}; train the draft anew")
    return settings


def _check_target(trained_for: dict[str, Any], target: Checkpoint, path: Path) -> None:
    name = trained_for.get("name", "another model")
    if trained_for.get("vocabulary_sha256") != vocabulary_sha256(target.tokenizer):
        raise DraftMismatchError(
            f"draft {path} was trained for {name}, whose vocabulary is not that of {target.name}; "
            f"run `paceline train-draft --model` for {target.name}"
        )
    if trained_for.get("hidden_size") != target.config.hidden_size:
        raise DraftMismatchError(
            f"draft {path} was trained for {name} of width {trained_for.get('hidden_size')}, {target.name} has "
            f"{target.config.hidden_size}; run `paceline train-draft --model` for {target.name}"
        )

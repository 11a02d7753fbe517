"""Texts as tokens that know their place in the text, and examples made of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.loader.tokenizer import Tokenizer
from paceline.train.syntax import NAMES, Role, Roles

# What a tiny draft can learn weighs 1. It cannot guess names and contents it has not seen.
FAINT = 0.3
_FAINT_ROLES = (Role.LITERAL, Role.DOCSTRING, Role.COMMENT)


@dataclass(frozen=True, slots=True, eq=False)
class Teacher:
    """What the target thought of the last tokens of an example: its likeliest ``token_ids`` with their ``logprobs``.

    Both [num_answer_tokens, num_top]; row i belongs to the token that the target chose there.
    """

    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float16]


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    """A sequence to learn from.

    Attributes:
        token_ids: [num_tokens].
        weights: [num_tokens] float32; how much predicting each token from those before it counts. The first is 0.
        roles: [num_tokens], see `Role`.
        package: where it comes from; the corpus is split by it.
        kind: the sort of example, for reports.
        teacher: the target's distributions for the last tokens, where the target wrote them.
    """

    token_ids: Sequence[int]
    weights: npt.NDArray[np.float32]
    roles: Roles
    package: str
    kind: str
    teacher: Teacher | None = None


@dataclass(frozen=True, slots=True, eq=False)
class EncodedText:
    """Token ids with the byte at which each begins, [num_tokens + 1], and its role, [num_tokens]."""

    token_ids: list[int]
    offsets: npt.NDArray[np.int64]
    roles: Roles
    begins_name: npt.NDArray[np.bool_]

    def first_token_at(self, byte: int) -> int:
        """The first token that begins at or after a byte."""
        return int(np.searchsorted(self.offsets, byte))

    def role_weights(self) -> npt.NDArray[np.float32]:
        """Loss weights by role: structure, punctuation and the rest of a name 1; what cannot be guessed little."""
        faint = np.isin(self.roles, _FAINT_ROLES) | (np.isin(self.roles, NAMES) & self.begins_name)
        return np.where(faint, FAINT, 1.0).astype(np.float32)


def encode(text: str, tokenizer: Tokenizer, byte_roles: Roles) -> EncodedText:
    """Tokenise a text whose bytes have the roles given. Tokens are placed by the bytes that they stand for."""
    return place(tokenizer.encode(text), text.encode(), tokenizer, byte_roles)


def place(token_ids: list[int], data: bytes, tokenizer: Tokenizer, byte_roles: Roles) -> EncodedText:
    """Find the byte and the role of each token; special tokens have no bytes in ``data`` and count as structure."""
    sizes = [0 if tokenizer.is_special(token) else len(tokenizer.token_bytes(token)) for token in token_ids]
    offsets = np.minimum(np.concatenate(([0], np.cumsum(sizes))), len(data)).astype(np.int64)
    roles = np.full(len(token_ids), Role.OPERATOR, dtype=np.uint8)
    begins_name = np.zeros(len(token_ids), dtype=np.bool_)
    for i, (start, end) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)):
        piece = data[start:end]
        if not piece:
            continue
        blank = len(piece) - len(piece.lstrip())
        at = start + blank if blank < len(piece) else start
        roles[i] = byte_roles[at] if at < len(byte_roles) else Role.PROSE
        begins_name[i] = at == 0 or byte_roles[at - 1] != byte_roles[at] or not _is_word(data[at - 1])
    return EncodedText(token_ids, offsets, roles, begins_name)


def _is_word(byte: int) -> bool:
    return byte == 0x5F or byte >= 0x80 or chr(byte).isalnum()

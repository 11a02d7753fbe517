"""A vocabulary as the grammar's parser takes it: the bytes of every token, and text cut into tokens."""

from __future__ import annotations

from typing import Protocol


class Vocabulary(Protocol):
    """What is needed of a tokenizer."""

    eos_token_ids: frozenset[int]

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for; empty for an unused id."""

    def is_special(self, token_id: int) -> bool:
        """True for control tokens, which no text can spell."""

    def encode_exactly(self, text: str) -> list[int] | None:
        """Token ids that spell exactly this text, as the model would; None where there are none."""


class TokenTable:
    """A vocabulary in the shape in which llguidance takes it."""

    is_tokenizer_wrapper = True

    def __init__(self, vocabulary: Vocabulary) -> None:
        ends = vocabulary.eos_token_ids
        ids = range(vocabulary.vocab_size)
        self.tokens = [vocabulary.token_bytes(token_id) for token_id in ids]
        self.special_token_ids = [token_id for token_id in ids if vocabulary.is_special(token_id) or token_id in ends]
        self.eos_token_id = min(ends.intersection(ids), default=None)
        self.bos_token_id = None
        self._encode = vocabulary.encode_exactly
        special = set(self.special_token_ids)
        self._by_bytes = {piece: i for i, piece in enumerate(self.tokens) if piece and i not in special}
        self._longest = max(map(len, self._by_bytes), default=0)

    def __call__(self, text: str) -> list[int]:
        """Token ids of text that the grammar forces."""
        token_ids = self._encode(text)
        return token_ids if token_ids is not None else self._greedy(text.encode())

    def _greedy(self, rest: bytes) -> list[int]:
        """The longest token that fits, again and again; up to bytes for which there is none."""
        token_ids: list[int] = []
        while rest:
            length = next((n for n in range(min(self._longest, len(rest)), 0, -1) if rest[:n] in self._by_bytes), 0)
            if length == 0:
                break
            token_ids.append(self._by_bytes[rest[:length]])
            rest = rest[length:]
        return token_ids

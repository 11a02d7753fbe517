"""Text of one generation as it grows: never half a character, never a part of a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from paceline.engine.output import TokenPiece


class Detokenizer(Protocol):
    """Turns token ids into text piece by piece."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Text that is complete with these tokens."""

    def flush(self) -> str:
        """What is left of an unfinished character."""


class TextStream:
    """Collects text token by token, looks for stop strings, and holds back what might still become one.

    ``stopped_by`` is the stop string that was found, if any.
    """

    def __init__(self, detokenizer: Detokenizer, stop: Sequence[str], *, include_stop: bool) -> None:
        self._detokenizer = detokenizer
        self._stop = tuple(stop)
        self._include_stop = include_stop
        self._longest_stop = max(map(len, self._stop), default=0)
        self._text = ""
        self._pending: list[TokenPiece] = []  # pieces not shown yet; together the tail of the text
        self._num_shown = 0
        self._is_closed = False
        self.stopped_by: str | None = None

    @property
    def text(self) -> str:
        """All text so far; final once a stop string was found or :meth:`close` was called."""
        return self._text

    def push(self, token_id: int, origin: str, *, may_stop: bool) -> bool:
        """Add one token; True when its text completes a stop string, at which the text is cut."""
        return self._add(self._detokenizer.push((token_id,)), origin, may_stop=may_stop)

    def close(self, origin: str) -> None:
        """The generation ended by other means: nothing more is held back."""
        if not self._is_closed:
            self._add(self._detokenizer.flush(), origin, may_stop=False)
            self._is_closed = True

    def drain(self) -> list[TokenPiece]:
        """The pieces that may be shown now and were not before."""
        budget = len(self._text) - self._num_shown - (0 if self._is_closed else self._num_held_back())
        shown: list[TokenPiece] = []
        while self._pending and budget > 0:
            piece = self._pending.pop(0)
            if len(piece.text) > budget:
                self._pending.insert(0, TokenPiece(piece.text[budget:], piece.origin))
                piece = TokenPiece(piece.text[:budget], piece.origin)
            shown.append(piece)
            budget -= len(piece.text)
            self._num_shown += len(piece.text)
        return shown

    def _add(self, new_text: str, origin: str, *, may_stop: bool) -> bool:
        if not new_text:
            return False
        length_before = len(self._text)
        self._text += new_text
        self._pending.append(TokenPiece(new_text, origin))
        if not may_stop or not self._stop:
            return False
        # Only what ends in the new text counts: an earlier one was passed over while stopping was not allowed.
        hits = [
            (at, stop)
            for stop in self._stop
            if (at := self._text.find(stop, max(0, length_before - len(stop) + 1))) >= 0
        ]
        if not hits:
            return False
        at, stop = min(hits)
        self.stopped_by = stop
        self._cut(at + len(stop) if self._include_stop else at)
        self._is_closed = True
        return True

    def _cut(self, length: int) -> None:
        excess = len(self._text) - length
        self._text = self._text[:length]
        while excess > 0:
            piece = self._pending.pop()
            kept = max(0, len(piece.text) - excess)
            excess -= len(piece.text) - kept
            if kept:
                self._pending.append(TokenPiece(piece.text[:kept], piece.origin))

    def _num_held_back(self) -> int:
        """Length of the longest tail that begins a stop string."""
        longest = min(self._longest_stop - 1, len(self._text))
        for length in range(longest, 0, -1):
            tail = self._text[-length:]
            if any(stop.startswith(tail) for stop in self._stop):
                return length
        return 0

"""Drafting from a client's prediction: the proposed new content of a file, of which most is expected to come true.

A cursor follows the answer through the prediction. While they agree it is *aligned*. At the first mismatch three
hypotheses say where the prediction may go on: behind the identifier at the cursor (it was replaced), behind the place
where the new token stands a little further on (something was left out), or at the cursor itself once a line is complete
(something was put in). The first that agrees with what follows wins; until then, and when none does, the newest tokens
are looked for in the whole prediction.

A replaced identifier is remembered: the rest of the prediction is rewritten with the new name. A rewrite that turns out
wrong is undone by the same rule the other way round, and a pair of names that was wrong twice is left alone.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from paceline.request import Request
from paceline.spec.index import MAX_MATCH, TokenIndex
from paceline.spec.proposer import Guess

# How far ahead of the cursor a left-out stretch may end, in tokens.
_LONGEST_DELETION = 64
# Places of the prediction that are compared when the cursor is lost: the nearest one need not be the newest.
_MAX_PLACES = 64
# Tokens that must agree for a lost cursor to be found again: two stand together in too many places.
_SHORTEST_FIND = 3
# Going back further than this many tokens needs a match of _SURE tokens: an answer seldom returns.
_SHORT_WAY_BACK, _SURE = 60, 8
# A cursor lost for longer than this leaves the drafting to others.
_PATIENCE = 24
# Agreeing tokens that confirm a supposed place.
_CONFIRMED = 2
# A rewrite is given up after this many mistakes.
_MAX_MISTAKES = 2
_IDENTIFIER = re.compile(r"[^\W\d]\w*")


class TextCodec(Protocol):
    """Token ids from text and back."""

    def encode(self, text: str, /) -> list[int]:
        """Token ids of a text."""

    def decode(self, token_ids: Sequence[int], /) -> str:
        """The text of token ids."""


class PredictionLookup:
    """Guesses what the prediction says next; one cursor per request."""

    name = "prediction"

    def __init__(self, codec: TextCodec | None = None) -> None:
        self._codec = codec
        self._cursors: dict[str, PredictionCursor] = {}

    def look_up(self, request: Request, num_tokens: int) -> Guess | None:
        """See :class:`Lookup`."""
        if not request.prediction_token_ids:
            return None
        cursor = self._cursors.get(request.request_id)
        if cursor is None:
            cursor = self._cursors[request.request_id] = PredictionCursor(request.prediction_token_ids, self._codec)
        cursor.follow(request.token_ids[request.num_prompt_tokens + cursor.num_followed :])
        token_ids = cursor.continuation(num_tokens)
        return Guess(token_ids, self.name, cursor.kind, cursor.run) if token_ids else None

    def release(self, request: Request) -> None:
        """See :class:`Lookup`."""
        self._cursors.pop(request.request_id, None)

    def forget_answers(self) -> None:
        """See :class:`Lookup`; nothing is kept."""


class _Hypothesis:
    """Where the prediction goes on after a mismatch, and how many tokens have agreed since."""

    __slots__ = ("kind", "run", "start")

    def __init__(self, kind: str, start: int) -> None:
        self.kind = kind
        self.start = start
        self.run = 0


class PredictionCursor:
    """Where an answer stands in its prediction.

    Attributes:
        kind: how the place was found: "start", "aligned", or the hypothesis in hand ("replaced", "left out", "put
            in", "found").
        run: tokens that agreed since.
    """

    def __init__(self, prediction: Sequence[int], codec: TextCodec | None = None) -> None:
        self.kind = "start"
        self.run = 0
        self.num_followed = 0
        self._tokens = list(prediction)
        self._codec = codec
        self._position: int | None = 0  # of the token that comes next, None while lost
        self._mismatch = 0  # where the cursor stood when it last agreed
        self._hypotheses: list[_Hypothesis] = []
        self._recent: list[int] = []  # newest answer tokens
        self._since: list[int] = []  # answer tokens since the mismatch
        self._index: TokenIndex | None = None
        self._mistakes: Counter[frozenset[str]] = Counter()
        self._rewritten: dict[str, str] = {}  # new name -> old name

    def follow(self, token_ids: Sequence[int]) -> None:
        """The answer went on with these tokens."""
        for token_id in token_ids:
            self.num_followed += 1
            self._recent.append(token_id)
            if len(self._recent) > 2 * MAX_MATCH:
                del self._recent[:-MAX_MATCH]
            self._step(token_id)

    def continuation(self, num_tokens: int) -> list[int]:
        """What the prediction says next; nothing while the cursor is lost."""
        if self._position is None:
            return []
        return self._tokens[self._position : self._position + num_tokens]

    def _step(self, token_id: int) -> None:
        position = self._position
        if position is not None and position < len(self._tokens) and self._tokens[position] == token_id:
            self._position = position + 1
            self.run += 1
            if self._hypotheses:
                self._confirm()
            return
        if not self._hypotheses and not self._since:
            self._mismatch = position if position is not None else self._mismatch
            self._since = []
        self._since.append(token_id)
        self._suppose(token_id)

    def _suppose(self, token_id: int) -> None:
        """Choose the likeliest place to go on after a token that was not predicted."""
        at, tokens = self._mismatch, self._tokens
        self.run = 0
        self._hypotheses = []
        found = self._find()
        if found is not None:
            self._propose("found", *found)
            return
        if len(self._since) > _PATIENCE:
            self._position = None
            return
        end = self._identifier(at)[1]
        try:
            left_out = tokens.index(token_id, at + 1, at + _LONGEST_DELETION)
        except ValueError:
            left_out = -1
        if self._ends_line(token_id) and self._line_start(at) is not None:
            self._propose("put in", self._line_start(at) or 0, 0)
        elif left_out >= end and not self._is_name(token_id) and self._is_distinct(token_id):
            self._propose("left out", left_out + 1, 1)
        elif end > at and self._is_name(token_id):
            self._propose("replaced", end, 0)
        elif left_out >= 0 and self._is_distinct(token_id):
            self._propose("left out", left_out + 1, 1)
        else:
            self._position = None

    def _propose(self, kind: str, position: int, run: int) -> None:
        self.kind, self.run = kind, run
        self._position = position
        self._hypotheses = [_Hypothesis(kind, position)]

    def _confirm(self) -> None:
        """The place supposed after a mismatch agrees with what followed."""
        hypothesis = self._hypotheses[0]
        hypothesis.run += 1
        if hypothesis.run == _CONFIRMED and hypothesis.kind == "replaced":
            self._learn_rename()
        if hypothesis.run >= _CONFIRMED or hypothesis.kind == "found":
            self.kind = "aligned"
            self._hypotheses, self._since = [], []

    # ---- looking around ----

    def _find(self) -> tuple[int, int] | None:
        """(position, length) of the newest answer tokens in the prediction; of the longest, the nearest place."""
        if self._index is None:
            self._index = TokenIndex()
            self._index.extend(self._tokens)
        places = self._index.candidates(self._recent[-MAX_MATCH:], _MAX_PLACES)
        at = self._mismatch
        places = [
            (position, length)
            for position, length in places
            if (position > at - _SHORT_WAY_BACK or length >= _SURE) and length >= _SHORTEST_FIND
        ]
        if not places:
            return None
        return max(places, key=lambda each: (min(each[1], _SURE), each[0] > at, -abs(each[0] - at)))

    def _identifier(self, at: int) -> tuple[int, int]:
        """The tokens [start, end) of the identifier or literal that holds token ``at``; empty where there is none."""
        if at >= len(self._tokens) or self._codec is None or not self._is_name(self._tokens[at]):
            return at, min(at + 1, len(self._tokens)) if self._codec is None else at
        start, end = at, at + 1
        while start > 0 and self._continues(start):
            start -= 1
        while end < len(self._tokens) and self._continues(end):
            end += 1
        return start, end

    def _continues(self, at: int) -> bool:
        """Whether token ``at`` belongs to the same identifier as the one before it."""
        before, text = self._text(self._tokens[at - 1]), self._text(self._tokens[at])
        return bool(before and text) and _is_word(before[-1]) and _is_word(text[0])

    def _is_name(self, token_id: int) -> bool:
        text = self._text(token_id).strip()
        return self._codec is None or (bool(text) and all(map(_is_word, text)))

    def _is_distinct(self, token_id: int) -> bool:
        """Whether a token says something about where it stands: blanks and brackets are everywhere."""
        return self._codec is None or len(self._text(token_id).strip()) > 1

    def _ends_line(self, token_id: int) -> bool:
        return "\n" in self._text(token_id)

    def _line_start(self, at: int) -> int | None:
        """The first token of the line that holds ``at``; None where it is not known."""
        while 0 < at <= len(self._tokens) and not self._ends_line(self._tokens[at - 1]):
            at -= 1
        return at if at < len(self._tokens) else None

    def _text(self, token_id: int) -> str:
        return self._codec.decode([token_id]) if self._codec is not None else ""

    # ---- renames ----

    def _learn_rename(self) -> None:
        if self._codec is None:
            return
        start, end = self._identifier(self._mismatch)
        kept = self._tokens[start : self._mismatch]
        old = self._codec.decode(self._tokens[start:end]).strip()
        new = self._codec.decode([*kept, *self._since]).strip()
        if old == new or not _IDENTIFIER.fullmatch(old) or not _IDENTIFIER.fullmatch(new):
            return
        pair = frozenset((old, new))
        if self._rewritten.get(old) == new:
            self._mistakes[pair] += 1
        if self._mistakes[pair] < _MAX_MISTAKES:
            self._rewritten[new] = old
            self._rewrite(old, new)

    def _rewrite(self, old: str, new: str) -> None:
        """Replace a name in the part of the prediction that is still to come."""
        assert self._codec is not None
        assert self._position is not None
        rest = self._codec.decode(self._tokens[self._position :])
        pattern = rf"(?<!\w){re.escape(old)}(?!\w)"
        if re.search(pattern, rest):
            self._tokens[self._position :] = self._codec.encode(re.sub(pattern, new, rest))
            self._index = None


def _is_word(character: str) -> bool:
    return character == "_" or character.isalnum()

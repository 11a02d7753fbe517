"""Longest-suffix drafting: what followed the last time the newest tokens stood here?

Agents copy: an edit repeats most of the file that stands in the prompt. Looking the newest tokens up in the request's
own text costs microseconds and no model (prompt lookup decoding; SuffixDecoding, arXiv 2411.04975). Looking them up in
the answers of earlier requests and in the user's repository costs the same (REST, arXiv 2311.08252).
"""

from __future__ import annotations

from paceline.request import Request
from paceline.spec.index import MAX_MATCH, SEPARATOR, Match, TokenIndex
from paceline.spec.proposer import Guess


class SuffixLookup:
    """Guesses from the request's own tokens, prompt and output."""

    name = "suffix"

    def __init__(self) -> None:
        self._indexes: dict[str, TokenIndex] = {}

    def look_up(self, request: Request, num_tokens: int) -> Guess | None:
        """See :class:`Lookup`."""
        index = self._indexes.get(request.request_id)
        if index is None:
            index = self._indexes[request.request_id] = TokenIndex()
        index.extend(request.token_ids[len(index) :])
        match = index.match(request.token_ids[-MAX_MATCH:])
        if match is None:
            return None
        token_ids = index.continuation(match.position, num_tokens)
        # Where the known text ends the guess goes on copying from itself: a run or a period is expected to continue.
        period = len(index) - match.position
        while len(token_ids) < num_tokens:
            token_ids.append(token_ids[-period])
        return Guess(token_ids, self.name, _kind(match), match.length)

    def release(self, request: Request) -> None:
        """See :class:`Lookup`."""
        self._indexes.pop(request.request_id, None)

    def forget_answers(self) -> None:
        """See :class:`Lookup`; nothing is kept."""


class CorpusLookup:
    """Guesses from what earlier requests were answered, and from the user's repository.

    Both are indexes of bounded size, shared by all requests: the oldest answers make room for new ones.

    Args:
        capacity: tokens of earlier answers that are kept.
        repository: an index of the user's files, or None for none.
    """

    name = "corpus"

    def __init__(self, capacity: int, repository: TokenIndex | None = None) -> None:
        self._capacity = capacity
        self._answers = TokenIndex(capacity)
        self._repository = repository

    @property
    def num_bytes(self) -> int:
        """Memory held by the indexes."""
        return self._answers.num_bytes + (self._repository.num_bytes if self._repository is not None else 0)

    def look_up(self, request: Request, num_tokens: int) -> Guess | None:
        """See :class:`Lookup`; the longer match wins, an earlier answer over the repository at a tie."""
        recent = request.token_ids[-MAX_MATCH:]
        best: tuple[Match, TokenIndex] | None = None
        for index in (self._answers, self._repository):
            match = index.match(recent) if index is not None and len(index) else None
            if index is not None and match is not None and (best is None or match.length > best[0].length):
                best = (match, index)
        if best is None:
            return None
        match, index = best
        token_ids = index.continuation(match.position, num_tokens)
        return Guess(token_ids, self.name, _kind(match), match.length) if token_ids else None

    def release(self, request: Request) -> None:
        """See :class:`Lookup`; the answer joins the index."""
        answer = request.output_token_ids
        if answer:
            self._answers.extend([*answer, SEPARATOR])

    def forget_answers(self) -> None:
        """Drop what earlier requests were answered; the repository stays."""
        self._answers = TokenIndex(self._capacity)


def _kind(match: Match) -> str:
    """Whether the places found agree on what follows."""
    if match.num_candidates == 1:
        return "single"
    return "agreed" if match.num_agreeing == match.num_candidates else "split"

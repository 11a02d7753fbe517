"""Longest-suffix drafting: what followed the last time the newest tokens stood here?

Agents copy: an edit repeats most of the file that stands in the prompt. Looking the newest tokens up in the request's
own text costs microseconds and no model (prompt lookup decoding; SuffixDecoding, arXiv 2411.04975).
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.records import Verdict
from paceline.request import Request
from paceline.spec.proposer import NO_DRAFT, Draft

# Shortest run of tokens that counts as a match; a single token follows itself by chance too often.
MIN_MATCH = 2
# Longest suffix compared: beyond it a longer match no longer says more about what follows.
MAX_MATCH = 32
# Occurrences of the newest MIN_MATCH tokens that are compared, newest first: bounds the work per lookup.
MAX_CANDIDATES = 16


class SuffixIndex:
    """An append-only token sequence in which the longest recurring suffix is found.

    Appending a token and a lookup both cost a bounded number of steps, whatever the length of the sequence. Among the
    MAX_CANDIDATES newest earlier occurrences of the last MIN_MATCH tokens, the one with the longest common suffix
    wins; the newest of equals.
    """

    def __init__(self, token_ids: Sequence[int] = ()) -> None:
        self._tokens: list[int] = []
        self._ends: dict[tuple[int, ...], list[int]] = {}  # last tokens -> positions after earlier occurrences
        self.extend(token_ids)

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens."""
        for token_id in token_ids:
            self._tokens.append(token_id)
            end = len(self._tokens)
            if end >= MIN_MATCH:
                ends = self._ends.setdefault(tuple(self._tokens[end - MIN_MATCH :]), [])
                ends.append(end)
                if len(ends) > 2 * MAX_CANDIDATES:
                    del ends[: -MAX_CANDIDATES - 1]

    def match(self, recent: Sequence[int]) -> tuple[int, int]:
        """Where ``recent`` last continued: (position after the longest match, its length); (0, 0) when nowhere.

        ``recent`` may be the tail of this sequence itself; the occurrence at its very end has no continuation and does
        not count.
        """
        if len(recent) < MIN_MATCH:
            return 0, 0
        best_end, best_length = 0, 0
        candidates = self._ends.get(tuple(recent[-MIN_MATCH:]), ())
        for end in reversed(candidates[-MAX_CANDIDATES - 1 :]):
            if end == len(self._tokens):
                continue
            length = self._common_suffix(recent, end)
            if length > best_length:
                best_end, best_length = end, length
                if length == MAX_MATCH:
                    break
        return best_end, best_length

    def continuation(self, end: int, num_tokens: int) -> list[int]:
        """The tokens that follow position ``end``, at most ``num_tokens``."""
        return self._tokens[end : end + num_tokens]

    def _common_suffix(self, recent: Sequence[int], end: int) -> int:
        limit = min(len(recent), end, MAX_MATCH)
        length = MIN_MATCH
        while length < limit and recent[-1 - length] == self._tokens[end - 1 - length]:
            length += 1
        return length


class SuffixProposer:
    """Drafts from the request's own tokens, prompt and output."""

    name = "suffix"

    def __init__(self) -> None:
        self._indexes: dict[str, SuffixIndex] = {}

    def propose(self, requests: Sequence[Request], horizons: Sequence[int]) -> list[Draft]:
        """See :class:`Proposer`; deterministic, so no draft_probs."""
        return [self._draft(request, horizon) for request, horizon in zip(requests, horizons, strict=True)]

    def observe(self, request: Request, verdict: Verdict) -> None:
        """See :class:`Proposer`; the index follows the committed tokens at the next proposal."""

    def release(self, request_id: str) -> None:
        """See :class:`Proposer`."""
        self._indexes.pop(request_id, None)

    def _draft(self, request: Request, horizon: int) -> Draft:
        index = self._indexes.setdefault(request.request_id, SuffixIndex())
        index.extend(request.token_ids[len(index) :])
        end, length = index.match(request.token_ids[-MAX_MATCH:])
        if length == 0:
            return NO_DRAFT
        token_ids = index.continuation(end, horizon)
        # Where the known text ends the draft goes on copying from itself: a run or a period is expected to continue.
        period = len(index) - end
        while len(token_ids) < horizon:
            token_ids.append(token_ids[-period])
        return Draft(token_ids, self.name)

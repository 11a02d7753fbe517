"""The one index behind every lookup drafter: where did the newest tokens stand before, and what followed?

A chain per hash of the last KEY_LENGTH tokens leads from the newest place to the ones before it (LZ77's match finder).
Appending a token and a lookup both cost a bounded number of steps, whatever the length of the text. With a capacity the
index is a ring: the oldest tokens are overwritten, chains end where they reach them, and memory never grows.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

# Tokens that must agree for a place to be a candidate: a single one follows itself by chance too often.
KEY_LENGTH = 2
# Longest suffix compared: beyond it a longer match no longer says more about what follows.
MAX_MATCH = 32
# Candidates compared, newest first: bounds the work of a lookup.
MAX_CANDIDATES = 16
# Stands between documents: no match and no continuation crosses it.
SEPARATOR = -1

_MULTIPLIERS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F)[:KEY_LENGTH]  # odd, 64 bits: Fibonacci hashing
_MASK = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Match:
    """The best place found: ``position`` follows the matched tokens.

    ``length`` tokens before it agree with the newest ones. Of the ``num_candidates`` places with at least
    KEY_LENGTH agreeing tokens, ``num_agreeing`` are followed by the same token as this one (itself included).
    """

    position: int
    length: int
    num_candidates: int
    num_agreeing: int


class TokenIndex:
    """An append-only sequence of tokens in which the longest recurring suffix is found.

    Args:
        capacity: newest tokens that are kept, rounded up to a power of two; None keeps all.
    """

    def __init__(self, capacity: int | None = None) -> None:
        self._size = 1 << max(4, (capacity - 1).bit_length()) if capacity is not None else None
        self._num_tokens = 0
        self._tokens = array("i")
        self._earlier = array("q")  # per token: the position before it that has the same hash, -1 for none
        self._bits = 10 if self._size is None else max(10, self._size.bit_length() - 1)
        self._newest = _empty_heads(self._bits)

    def __len__(self) -> int:
        """Tokens appended so far, forgotten ones included."""
        return self._num_tokens

    @property
    def num_bytes(self) -> int:
        """Memory held by the index."""
        return sum(part.itemsize * len(part) for part in (self._tokens, self._earlier, self._newest))

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append committed tokens."""
        if len(token_ids) > 64:
            self._extend_at_once(token_ids)
            return
        for token_id in token_ids:
            self._append(token_id)

    def match(self, recent: Sequence[int]) -> Match | None:
        """The longest place where ``recent`` (the newest tokens, in order) stood before; the newest of equals.

        ``recent`` may be the tail of this sequence itself; its own occurrence at the very end has no continuation and
        does not count.
        """
        candidates = self.candidates(recent, MAX_CANDIDATES)
        if not candidates:
            return None
        position, length = max(candidates, key=lambda each: each[1])  # the first of equals is the newest
        follower = self._at(position)
        num_agreeing = sum(self._at(other) == follower for other, _ in candidates)
        return Match(position, length, len(candidates), num_agreeing)

    def candidates(self, recent: Sequence[int], limit: int) -> list[tuple[int, int]]:
        """Up to ``limit`` places where ``recent`` stood, newest first: (position after it, agreeing tokens)."""
        if len(recent) < KEY_LENGTH:
            return []
        tail = list(recent[-MAX_MATCH:])
        end, oldest = self._num_tokens, self._oldest
        found: list[tuple[int, int]] = []
        position = self._newest[self._hash(tail[-KEY_LENGTH:])]
        tail.reverse()
        for _ in range(2 * limit):  # some of a chain may be other tokens with the same hash
            if position <= oldest or len(found) == limit:
                break
            if position < end and self._at(position) != SEPARATOR:
                length = self._agreement(tail, position, oldest)
                if length >= KEY_LENGTH:
                    found.append((position, length))
            position = self._earlier[self._slot(position - 1)]
        return found

    def continuation(self, position: int, num_tokens: int) -> list[int]:
        """The tokens from ``position`` on, at most ``num_tokens``, up to the end or a separator."""
        end = min(position + num_tokens, self._num_tokens)
        if self._size is None:
            token_ids = self._tokens[position:end].tolist()
        else:
            token_ids = [self._at(at) for at in range(max(position, self._oldest), end)]
        return token_ids[: token_ids.index(SEPARATOR)] if SEPARATOR in token_ids else token_ids

    @property
    def _oldest(self) -> int:
        return 0 if self._size is None else max(0, self._num_tokens - self._size)

    def _slot(self, position: int) -> int:
        return position if self._size is None else position & (self._size - 1)

    def _at(self, position: int) -> int:
        return self._tokens[position if self._size is None else position & (self._size - 1)]

    def _hash(self, key: Sequence[int]) -> int:
        total = sum(token_id * multiplier for token_id, multiplier in zip(key, _MULTIPLIERS, strict=True))
        return (total & _MASK) >> (64 - self._bits)

    def _agreement(self, reversed_tail: Sequence[int], position: int, oldest: int) -> int:
        """How many tokens before ``position`` agree with the newest ones, newest first."""
        at = position - 1
        length = 0
        for token_id in reversed_tail:
            if at < oldest or self._at(at) != token_id:
                break
            length += 1
            at -= 1
        return length

    def _append(self, token_id: int) -> None:
        position = self._num_tokens
        earlier = -1
        if position >= KEY_LENGTH - 1:
            head = self._hash([*(self._at(at) for at in range(position - KEY_LENGTH + 1, position)), token_id])
            earlier = self._newest[head]
            self._newest[head] = position + 1
        if self._size is None or position < self._size:
            self._tokens.append(token_id)
            self._earlier.append(earlier)
        else:
            self._tokens[self._slot(position)] = token_id
            self._earlier[self._slot(position)] = earlier
        self._num_tokens += 1
        if self._size is None and self._num_tokens > 1 << self._bits:
            self._grow()

    def _grow(self) -> None:
        """Twice the tokens want twice the chains; each token is moved a constant number of times on average."""
        tokens = np.array(self._tokens, dtype=np.int64)
        self._bits = max(self._bits + 1, len(tokens).bit_length())
        self._newest = _empty_heads(self._bits)
        self._earlier = array("q")
        self._chain(tokens, 0)

    def _extend_at_once(self, token_ids: Sequence[int]) -> None:
        """Like many appends, in a few array operations."""
        added = np.asarray(token_ids, dtype=np.int64)
        if self._size is not None:
            if self._num_tokens + len(added) > self._size:
                for token_id in token_ids[-self._size :]:
                    self._append(token_id)
                return
        elif self._num_tokens + len(added) > 1 << self._bits:
            self._bits = (self._num_tokens + len(added)).bit_length()
            self._newest = _empty_heads(self._bits)
            added = np.concatenate([np.array(self._tokens, dtype=np.int64), added])
            self._tokens, self._earlier, self._num_tokens = array("i"), array("q"), 0
        start = self._num_tokens
        self._tokens.frombytes(added.astype(np.int32).tobytes())
        known = min(start, KEY_LENGTH - 1)
        self._chain(np.array(self._tokens[start - known :], dtype=np.int64), start - known)
        self._num_tokens = start + len(added)

    def _chain(self, tokens: npt.NDArray[np.int64], start: int) -> None:
        """Link the positions of ``tokens``, which stand from ``start`` on, as far as they are not linked yet."""
        num_known = len(self._earlier)
        first = max(num_known, KEY_LENGTH - 1)
        earlier = np.full(start + len(tokens) - num_known, -1, dtype=np.int64)
        if start + len(tokens) > first:
            unsigned = tokens.astype(np.uint64)
            sums = np.zeros(len(tokens) - KEY_LENGTH + 1, dtype=np.uint64)
            for offset, multiplier in enumerate(_MULTIPLIERS):
                sums += unsigned[offset : offset + len(sums)] * np.uint64(multiplier)
            hashes = (sums >> np.uint64(64 - self._bits)).astype(np.int64)[first - start - KEY_LENGTH + 1 :]
            positions = np.arange(first + 1, start + len(tokens) + 1)
            order = np.argsort(hashes, kind="stable")
            grouped, places = hashes[order], positions[order]
            heads = np.frombuffer(self._newest, dtype=np.int64)
            is_first = np.ones(len(grouped), dtype=bool)
            is_first[1:] = grouped[1:] != grouped[:-1]
            linked = np.empty(len(grouped), dtype=np.int64)
            linked[1:] = places[:-1]
            linked[is_first] = heads[grouped[is_first]]
            earlier[order + (first - num_known)] = linked
            is_last = np.append(is_first[1:], True)
            heads[grouped[is_last]] = places[is_last]
        self._earlier.frombytes(earlier.tobytes())


def _empty_heads(bits: int) -> array[int]:
    heads = array("q")
    heads.frombytes(b"\xff" * (8 << bits))  # -1 everywhere
    return heads

"""Copies and near copies: removed from the corpus, and kept out of it where they belong to a benchmark.

A text is a set of hashed word n-grams. Two texts are compared by bottom-k sketches, the k smallest hashes of each set
(Broder, "On the resemblance and containment of documents", 1997): among the k smallest of the union, the share that
both hold estimates the Jaccard index. Sketches are looked up through an index of their hashes, so that the corpus is
never compared pair by pair.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

Hashes = npt.NDArray[np.uint64]

_WORD = re.compile(r"\w+")  # signs are left out: rules of dashes and closing brackets are nobody's
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # the golden ratio in 64 bits
SHINGLE, SKETCH, THRESHOLD = 5, 64, 0.7
# Texts that share 13 words in a row are taken to have a common source, as is customary for test sets.
CONTAMINATION = 13


def shingles(text: str, length: int) -> Hashes:
    """The distinct hashes of all runs of ``length`` words, ascending; signs and spacing do not matter."""
    words = np.fromiter((zlib.crc32(word.encode()) for word in _WORD.findall(text)), dtype=np.uint64)
    if len(words) < length:
        return np.empty(0, dtype=np.uint64)
    mixed = np.zeros(len(words) - length + 1, dtype=np.uint64)
    for offset in range(length):
        mixed = (mixed ^ words[offset : len(words) - length + 1 + offset]) * _MULTIPLIER
        mixed ^= mixed >> np.uint64(29)
    return np.unique(mixed)


class NearDuplicates:
    """Remembers the texts it has seen; `is_new` tells whether another is none of them, nearly or exactly."""

    def __init__(self) -> None:
        self._sketches: list[Hashes] = []
        self._index: dict[int, list[int]] = {}

    def is_new(self, text: str) -> bool:
        """True, and remembered, unless the text resembles an earlier one (Jaccard index of 0.7 or more)."""
        sketch = shingles(text, SHINGLE)[:SKETCH]
        if not len(sketch):
            return True
        keys = sketch.tolist()
        shared = Counter(number for key in keys for number in self._index.get(key, ()))
        for number, count in shared.most_common(8):
            if count < THRESHOLD * min(len(sketch), len(self._sketches[number])) / 2:
                break
            if resemblance(sketch, self._sketches[number]) >= THRESHOLD:
                return False
        for key in keys:
            self._index.setdefault(key, []).append(len(self._sketches))
        self._sketches.append(sketch)
        return True


def resemblance(one: Hashes, other: Hashes) -> float:
    """The Jaccard index of two sets as their sketches tell it."""
    union = np.union1d(one, other)[: max(len(one), len(other))]
    return float(np.isin(union, np.intersect1d(one, other)).mean())


class HeldOutTexts:
    """The texts of a benchmark; code that shares a run of 13 words with any of them is not trained on."""

    def __init__(self, texts: Iterable[str]) -> None:
        parts = [shingles(text, CONTAMINATION) for text in texts]
        self._known: Hashes = np.unique(np.concatenate(parts)) if parts else np.empty(0, dtype=np.uint64)

    def contains_part_of(self, text: str) -> bool:
        """Whether some run of 13 words of ``text`` occurs in the benchmark."""
        found = shingles(text, CONTAMINATION)
        places = np.searchsorted(self._known, found)
        places = np.minimum(places, len(self._known) - 1)
        return bool(len(self._known)) and bool((self._known[places] == found).any())

"""Which tokens the draft speaks: the ones the target writes most, and those without which no text goes on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from paceline.loader.tokenizer import Tokenizer
from paceline.model.draft_vocabulary import DraftVocabulary

# What the target wrote counts this many times what others did.
_ANSWER_WEIGHT = 20.0


def choose_vocabulary(
    tokenizer: Tokenizer,
    size: int,
    *,
    answers: Iterable[Sequence[int]],
    sources: Iterable[Sequence[int]],
) -> DraftVocabulary:
    """At most ``size`` tokens, an escape beside them: forced ones first, then by how often they occur.

    Forced are special tokens, digits, and runs of newlines and indentation. Ties go to the lower id.
    """
    counts = np.zeros(tokenizer.vocab_size)
    for weight, texts in ((_ANSWER_WEIGHT, answers), (1.0, sources)):
        for token_ids in texts:
            counts += weight * np.bincount(np.asarray(token_ids, dtype=np.int64), minlength=len(counts))
    forced = np.array([_is_forced(tokenizer, token_id) for token_id in range(len(counts))])
    known = np.array([bool(tokenizer.token_string(token_id)) for token_id in range(len(counts))])
    rank = np.lexsort((np.arange(len(counts)), -counts, ~forced))
    chosen = [int(i) for i in rank if known[i] and (forced[i] or counts[i] > 0)][:size]
    return DraftVocabulary(sorted(chosen), has_escape=True)


def coverage(vocabulary: DraftVocabulary, token_ids: npt.ArrayLike) -> float:
    """The share of a text's tokens that are listed."""
    texts = np.asarray(token_ids)
    return float(np.isin(texts, vocabulary.token_ids.numpy()).mean()) if texts.size else 0.0


def _is_forced(tokenizer: Tokenizer, token_id: int) -> bool:
    if tokenizer.is_special(token_id):
        return True
    piece = tokenizer.token_bytes(token_id)
    return piece.isspace() or piece.isdigit()

"""How likely a given text is: log-probabilities of tokens that are all known (teacher forcing)."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.cache.manager import KVCacheManager
from paceline.cache.pool import OutOfBlocksError
from paceline.errors import CacheCapacityError
from paceline.model.runner import ModelRunner, SequenceInput
from paceline.records import TokenLogprob
from paceline.sampling.distribution import logprobs_of

_OWNER = "score"
_CHUNK = 256  # logits of every row are wanted, so a chunk is smaller than one of a prefill


def score_tokens(
    runner: ModelRunner, cache: KVCacheManager, token_ids: Sequence[int], *, num_top: int, vocab_limit: int | None
) -> list[TokenLogprob]:
    """One entry per token but the first. Computes every row anew; what it computes stays findable in the cache.

    Raises:
        CacheCapacityError: too few blocks are free; nothing was changed.
    """
    cache.begin(_OWNER, ())
    try:
        cache.reserve(_OWNER, len(token_ids))
        block_ids = tuple(cache.block_ids(_OWNER))
        scores: list[TokenLogprob] = []
        for start in range(0, len(token_ids), _CHUNK):
            chunk = token_ids[start : start + _CHUNK]
            logits = runner.run([SequenceInput(chunk, start, block_ids, len(chunk))])[:, :vocab_limit]
            followers = token_ids[start + 1 : start + 1 + len(chunk)]
            scores += logprobs_of(logits[: len(followers)], followers, num_top)
            cache.commit(_OWNER, token_ids, start + len(chunk))
        return scores
    except OutOfBlocksError:
        raise CacheCapacityError(
            f"no room in the KV cache to score {len(token_ids)} tokens now; try again, or give the engine more memory"
        ) from None
    finally:
        cache.release(_OWNER)

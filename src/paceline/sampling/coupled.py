"""Seeded sampling that does not depend on the drafter (law 5).

Each token of the vocabulary gets its own noise at each position of a text, a function of (seed, position, token) alone.
The target's token is the winner of a race run with that noise, whatever was drafted. A draft that runs the same race
with its own probabilities tends to have the same winner, and is accepted exactly when it does; with total variation TV
between the two distributions that happens with probability at least (1 - TV) / (1 + TV).
Source: Daliri, Musco and Suresh, "Coupling without Communication and Drafter-Invariant Speculative Decoding",
arXiv 2408.07978.

The race: token v arrives at time -ln(u_v) / prob_v, the earliest wins. This is the Gumbel trick
argmax(ln prob_v - ln(-ln u_v)) with one logarithm fewer; it is exact for any weights, normalised or not.

The bits come from Philox 4x64-10, a counter-based generator (Salmon et al., "Parallel random numbers: as easy as 1, 2,
3", SC 2011), keyed by (seed, position): numpy promises that a bit generator's raw stream is the same in every version
and on every platform. The logarithm may differ by one unit in the last place of a float64 between platforms, which
matters only if two arrival times agree in all but their last bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from torch import Tensor

from paceline.records import Verdict
from paceline.sampling.distribution import Row, as_array


def token_uniforms(seed: int, position: int, num_tokens: int) -> npt.NDArray[np.float64]:
    """The noise of tokens 0 to ``num_tokens`` - 1 at one position: uniform, strictly between 0 and 1.

    A larger vocabulary has the same noise for the tokens it shares, so a padded one changes nothing.

    Args:
        seed: 0 to 2**64 - 1.
        position: the index of the token to be drawn, counted from the start of the prompt.
        num_tokens: the size of the vocabulary.
    """
    bits = np.random.Philox(key=np.array([seed, position], dtype=np.uint64)).random_raw(num_tokens)
    # 52 bits, and half a step up: with 53 the largest value would round to 1, whose logarithm is 0 for every token.
    uniforms = (bits >> np.uint64(12)).astype(np.float64)
    uniforms += 0.5
    uniforms *= 2.0**-52
    return uniforms


def sample_coupled(probs: Tensor, seed: int, position: int) -> int:
    """The token that wins the race at ``position``; the lowest id on a tie, never one of probability 0.

    Args:
        probs: [vocab_size] (of the target, or of a draft whose ids mean the same), not negative, not all zero.
        seed: see :func:`token_uniforms`.
        position: see :func:`token_uniforms`.
    """
    return _winner(as_array(probs), seed, position)


def verify_coupled(target_probs: Tensor, draft_token_ids: Sequence[int], seed: int, first_position: int) -> Verdict:
    """The target's own samples, for as many rows as the drafts agree with them.

    Args:
        target_probs: [num_drafted + 1, vocab_size].
        draft_token_ids: [num_drafted].
        seed: see :func:`token_uniforms`.
        first_position: where the first draft token stands.
    """
    num_drafted = len(draft_token_ids)
    rows = as_array(target_probs)
    assert rows.shape[0] == num_drafted + 1
    token_ids: list[int] = []
    for i, row in enumerate(rows):  # noise is made only for the rows that are reached
        token_ids.append(_winner(row, seed, first_position + i))
        if i < num_drafted and token_ids[i] != draft_token_ids[i]:
            break
    return Verdict(tuple(token_ids), num_drafted, len(token_ids) - 1)


def _winner(row: Row, seed: int, position: int) -> int:
    assert row.ndim == 1
    uniforms = token_uniforms(seed, position, row.size)
    runners = np.flatnonzero(row)
    assert runners.size > 0, "a row to draw from needs a token of positive probability"
    arrivals = -np.log(uniforms[runners]) / row[runners].astype(np.float64)
    return int(runners[np.argmin(arrivals)])

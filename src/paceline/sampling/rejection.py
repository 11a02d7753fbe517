"""Verification that keeps the target's distribution whatever the draft was (speculative sampling).

Source: Leviathan et al., arXiv 2211.17192, algorithm 1; Chen et al., arXiv 2302.01318. A draft token is accepted with
probability min(1, target / draft). On the first rejection the *recovered* token comes from the normalised
max(target - draft, 0); if none is rejected a *bonus* token comes from the row after the last draft.
A deterministic draft is the case of a one-hot draft row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.records import Verdict
from paceline.sampling.distribution import Row, as_array
from paceline.sampling.sampler import draw_coins, invert


def verify_greedy(target_argmax_ids: Sequence[int], draft_token_ids: Sequence[int]) -> Verdict:
    """Accepts drafts while they are what the target would have chosen; then the target's own choice.

    Args:
        target_argmax_ids: [num_drafted + 1], row i after the drafts before i.
        draft_token_ids: [num_drafted].
    """
    num_drafted = len(draft_token_ids)
    assert len(target_argmax_ids) == num_drafted + 1
    num_accepted = 0
    while num_accepted < num_drafted and draft_token_ids[num_accepted] == target_argmax_ids[num_accepted]:
        num_accepted += 1
    return Verdict(tuple(target_argmax_ids[: num_accepted + 1]), num_drafted, num_accepted)


def verify_sampled(
    target_probs: Tensor,
    draft_token_ids: Sequence[int],
    draft_probs: Tensor | None,
    generator: torch.Generator,
) -> Verdict:
    """Accepts or replaces drafts so that the output is distributed as if drawn from the target alone.

    A token missing from the smaller of two vocabularies has probability 0 in it. A draft row that is not finite carries
    no information and is rejected outright, which is exact too: the token then comes from the target's row.

    Args:
        target_probs: [num_drafted + 1, vocab_size]; never modified.
        draft_token_ids: [num_drafted]; ids beyond the target's vocabulary are rejected.
        draft_probs: [num_drafted, draft_vocab_size], exactly what each draft token was drawn from (law 4), or None for
            a draft chosen without chance.
        generator: the request's source of coins.
    """
    num_drafted = len(draft_token_ids)
    target_rows = as_array(target_probs)
    assert target_rows.shape[0] == num_drafted + 1
    draft_rows: Sequence[Row | None] = [None] * num_drafted
    if draft_probs is not None:
        assert draft_probs.shape[0] == num_drafted
        draft_rows = list(as_array(draft_probs))
    coins = draw_coins(num_drafted + 1, generator)
    for i, (token_id, draft_row) in enumerate(zip(draft_token_ids, draft_rows, strict=True)):
        if not _is_accepted(target_rows[i], token_id, draft_row, float(coins[i])):
            recovered = _draw(_residual(target_rows[i], token_id, draft_row), coins[-1:])
            return Verdict((*draft_token_ids[:i], recovered), num_drafted, i)
    bonus = _draw(target_rows[num_drafted], coins[-1:])
    return Verdict((*draft_token_ids, bonus), num_drafted, num_drafted)


def _is_accepted(target_row: Row, token_id: int, draft_row: Row | None, coin: float) -> bool:
    assert token_id >= 0
    target_prob = float(target_row[token_id]) if token_id < target_row.size else 0.0
    if draft_row is None:
        return coin < target_prob
    if not _is_usable(draft_row):
        return False
    draft_prob = float(draft_row[token_id]) if token_id < draft_row.size else 0.0
    assert draft_prob > 0.0, "a draft must report the distribution it drew from; its token has probability 0 in it"
    # Multiplied out: no division, and with a coin below 1 an equal probability is always accepted, zero never.
    return coin * draft_prob < target_prob


def _residual(target_row: Row, token_id: int, draft_row: Row | None) -> npt.NDArray[np.floating[Any]]:
    """What the target still owes after the draft's share, up to a factor; the target itself if that is nothing."""
    if draft_row is not None and not _is_usable(draft_row):
        return target_row
    residual = target_row.astype(np.float64)  # a copy: the caller's rows stay as they are
    if draft_row is None:
        if token_id < residual.size:
            residual[token_id] = 0.0
    else:
        num_shared = min(residual.size, draft_row.size)
        residual[:num_shared] -= draft_row[:num_shared]
        np.maximum(residual, 0.0, out=residual)
    return residual if residual.any() else target_row


def _is_usable(draft_row: Row) -> bool:
    # NaN and infinity both survive a sum. This looks at the whole row, not at the token that was drawn: a test that
    # depends on the drawn token would bias what is accepted.
    return math.isfinite(float(draft_row.sum()))


def _draw(weights: npt.NDArray[np.floating[Any]], coin: npt.NDArray[np.float64]) -> int:
    return int(invert(weights[np.newaxis], coin)[0])

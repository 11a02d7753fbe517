"""The judge of drafts: which tokens a step commits, for every request of the batch.

Three rules, chosen by the request's parameters alone, never by the draft: temperature 0 takes the target's argmax, a
seed takes the target's coupled sample (law 5), anything else is speculative sampling (law 4). All three hold for an
empty draft too: this is also the sampler of plain decoding, so speculation on and off share every line of it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paceline.records import Verdict
from paceline.request import Constraint, SamplingParams
from paceline.sampling.coupled import verify_coupled
from paceline.sampling.distribution import argmax_lowest, logprobs_of, to_probs
from paceline.sampling.masking import apply_masks
from paceline.sampling.penalties import TokenHistory, apply_penalties
from paceline.sampling.rejection import verify_greedy, verify_sampled
from paceline.spec.proposer import Draft


@dataclass(frozen=True, slots=True, eq=False)
class VerifyItem:
    """One request's draft and where its logits are.

    Attributes:
        params: how tokens are chosen.
        draft: what was proposed after the committed tokens; may be empty.
        rows: where the item's rows are within the logits: the first follows the newest committed token, the next the
            first draft token, and so on; one more than there are draft tokens.
        first_position: the index, from the start of the prompt, of the first token to be decided (``num_tokens``).
        history: the committed tokens; may be None where ``params.has_penalties`` is False.
        generator: the request's coins; may be None for greedy and seeded requests.
        end_token_ids: the model's end tokens, which ``min_tokens`` forbids.
        constraint: what the answer may consist of; None for free text.
    """

    params: SamplingParams
    draft: Draft
    rows: slice
    first_position: int
    history: TokenHistory | None = None
    generator: torch.Generator | None = None
    end_token_ids: Collection[int] = ()
    constraint: Constraint | None = None

    @property
    def is_plain_greedy(self) -> bool:
        """True when the argmax of the raw logits decides."""
        return self.params.is_greedy and not self.params.has_penalties and self.constraint is None

    def masks(self) -> list[bytes]:
        """What each row may decide; empty for free text."""
        return self.constraint.masks(self.draft.token_ids) if self.constraint is not None else []


class Verifier:
    """Turns drafts and the target's logits into verdicts.

    Args:
        vocab_limit: the number of ids the tokenizer knows, where the model's rows are padded beyond it: later ids are
            treated as if they did not exist. None: every row entry is a token.
    """

    def __init__(self, vocab_limit: int | None = None) -> None:
        self.vocab_limit = vocab_limit

    def verify(self, items: Sequence[VerifyItem], logits: Tensor) -> list[Verdict]:
        """One verdict per item, each of at least one token.

        Args:
            items: what was drafted; their rows do not overlap.
            logits: [total_rows, vocab_size] of any float dtype; never modified.

        Raises:
            ModelFormatError: the logits of some item hold NaN.
        """
        masks = [item.masks() for item in items]  # first: a GPU may still be at work on the logits
        logits = logits.detach()[:, : self.vocab_limit]
        argmax_ids = _plain_greedy_ids(items, logits)
        return [self._verdict(item, logits[item.rows], argmax_ids, own) for item, own in zip(items, masks, strict=True)]

    def _verdict(self, item: VerifyItem, logits: Tensor, argmax_ids: dict[int, int], masks: Sequence[bytes]) -> Verdict:
        assert logits.shape[0] == len(item.draft.token_ids) + 1, "an item needs one row more than it has draft tokens"
        if item.is_plain_greedy:
            row_ids = range(item.rows.start, item.rows.stop)
            verdict = verify_greedy([argmax_ids[row_id] for row_id in row_ids], item.draft.token_ids)
        else:
            verdict = _judge(item, apply_masks(_adjusted(item, logits), masks, logits))
        if item.params.logprobs is None:
            return verdict
        num_tokens = len(verdict.token_ids)
        return replace(verdict, logprobs=logprobs_of(logits[:num_tokens], verdict.token_ids, item.params.logprobs))


def _plain_greedy_ids(items: Sequence[VerifyItem], logits: Tensor) -> dict[int, int]:
    """Row index -> argmax for the rows that need no more than that, in one call for the whole batch."""
    rows = [row for item in items if item.is_plain_greedy for row in range(item.rows.start, item.rows.stop)]
    if not rows:
        return {}
    chosen = logits if rows == list(range(logits.shape[0])) else logits[rows]
    return dict(zip(rows, argmax_lowest(chosen).tolist(), strict=True))


def _adjusted(item: VerifyItem, logits: Tensor) -> Tensor:
    if not item.params.has_penalties:
        return logits
    assert item.history is not None, "penalties need the request's history"
    return apply_penalties(logits, item.params, item.history, item.draft.token_ids, item.end_token_ids)


def _judge(item: VerifyItem, logits: Tensor) -> Verdict:
    """The verdict on one item. ``logits``: [num_rows, vocab_size], already adjusted."""
    params, draft = item.params, item.draft
    if params.is_greedy:
        return verify_greedy(argmax_lowest(logits).tolist(), draft.token_ids)
    target_probs = to_probs(logits, params)  # [num_rows, vocab_size]
    if params.seed is not None:
        return verify_coupled(target_probs, draft.token_ids, params.seed, item.first_position)
    assert item.generator is not None, "sampling without a seed needs the request's generator"
    return verify_sampled(target_probs, draft.token_ids, draft.draft_probs, item.generator)

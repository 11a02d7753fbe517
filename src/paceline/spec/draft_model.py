"""A smaller model that speaks the target's token ids, or some of them, as the drafter.

Its K/V live in a store of their own under the request's block table (law 3), so prefix hits, rollback and preemption
need no second act. ``num_draft_computed_tokens`` says how far they are valid: after a fully accepted round the K/V of
the last draft token are missing, and the next round feeds two tokens. Of a head, which reads the target's hidden
states, only the K/V made from them are valid; those of drafted tokens came from its own states and are made anew.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from paceline.backends.kv_store import KV_GROUP
from paceline.cache.manager import KVCacheManager
from paceline.model.draft_vocabulary import DraftVocabulary
from paceline.model.runner import HeadRunner, ModelRunner, SequenceInput
from paceline.records import Verdict
from paceline.request import Request
from paceline.sampling.coupled import sample_coupled
from paceline.sampling.distribution import argmax_lowest, as_array, to_probs
from paceline.sampling.masking import apply_masks, is_forbidden
from paceline.sampling.penalties import TokenHistory, apply_penalties
from paceline.sampling.sampler import sample
from paceline.spec.proposer import NO_DRAFT, Draft, StopRule

# Tokens of one sequence that are read in one pass while the draft catches up with a prompt.
_CATCH_UP_CHUNK = 512
# So few tokens are fed together with the newest one, of which alone more than its K/V is needed.
_FEW_TOKENS = 4


@dataclass(slots=True)
class _Round:
    """One request's drafting in flight."""

    request: Request
    horizon: int
    rule: StopRule | None = None
    token_ids: list[int] = field(default_factory=list)
    probs: list[Tensor] = field(default_factory=list)
    is_stopped: bool = False  # the draft expects a token outside its vocabulary, or may or should say nothing more

    @property
    def is_complete(self) -> bool:
        if self.is_stopped or len(self.token_ids) == self.horizon:
            return True
        return self.rule is not None and not self.rule.wants_more()


class DraftModelProposer:
    """Samples drafts from a model, token by token, for all requests of a step side by side.

    With a :class:`HeadRunner` it drafts from a head. ``vocabulary`` lists the tokens that the logits stand for; None:
    all, in order. Such a draft ends early where the model expects a token that is not listed. ``reach`` is how many
    newest tokens a draft depends on; None: all. Of a long prompt no more is read.
    """

    name = "model"

    def __init__(
        self,
        runner: ModelRunner,
        cache: KVCacheManager,
        *,
        context_length: int,
        vocab_limit: int,
        end_token_ids: Collection[int],
        vocabulary: DraftVocabulary | None = None,
        reach: int | None = None,
    ) -> None:
        self._reach = reach
        self._vocabulary = vocabulary
        self._runner = runner
        self._cache = cache
        self._context_length = context_length
        self._vocab_limit = vocab_limit
        self._end_token_ids = frozenset(end_token_ids)
        self._histories: dict[str, TokenHistory] = {}
        self._generators: dict[str, torch.Generator] = {}

    def prepare(self, requests: Sequence[Request]) -> None:
        """See :class:`Proposer`."""
        for request in requests:
            if request.num_tokens <= self._context_length:
                self._catch_up(request)

    def propose(
        self, requests: Sequence[Request], horizons: Sequence[int], rules: Sequence[StopRule | None] = ()
    ) -> list[Draft]:
        """See :class:`Proposer`; with a temperature, draft_probs are what the tokens were drawn from."""
        rounds = [
            _Round(request, min(horizon, self._context_length - request.num_tokens + 1), rule)
            for request, horizon, rule in zip(requests, horizons, rules or [None] * len(requests), strict=True)
        ]
        active = [item for item in rounds if item.horizon > 0]
        self.prepare([item.request for item in active])
        if len(active) == 1 and self._drafts_at_once(active[0].request):
            self._draft_at_once(active.pop())
        while active:
            logits = self._runner.run([self._next_input(item) for item in active])
            for item, row in zip(active, logits, strict=True):
                self._draw(item, row)
            active = [item for item in active if not item.is_complete]
        if isinstance(self._runner, HeadRunner):
            for request in requests:
                request.num_draft_computed_tokens = min(request.num_draft_computed_tokens, request.num_tokens)
        return [self._draft(item) for item in rounds]

    def observe(self, request: Request, verdict: Verdict) -> None:
        """See :class:`Proposer`; the counters are rolled back with the target's."""

    def release(self, request_id: str) -> None:
        """See :class:`Proposer`."""
        self._histories.pop(request_id, None)
        self._generators.pop(request_id, None)

    def _catch_up(self, request: Request) -> None:
        """Read what the draft has not seen, but for the newest token, where that is more than a few tokens."""
        newest = request.num_tokens - 1
        # A step that failed midway leaves the counter among drafts that were never judged.
        request.num_draft_computed_tokens = min(request.num_draft_computed_tokens, newest)
        if self._reach is not None:
            first = (newest + 1 - self._reach) // KV_GROUP * KV_GROUP
            if request.num_draft_computed_tokens < first:
                request.num_draft_computed_tokens = request.draft_start = first
        while newest - request.num_draft_computed_tokens > _FEW_TOKENS:
            start = request.num_draft_computed_tokens
            chunk = request.token_ids[start : min(newest, start + _CATCH_UP_CHUNK)]
            block_ids = self._cache.block_ids(request.request_id)
            self._runner.write_kv([SequenceInput(chunk, start, block_ids, num_logits=0)])
            request.num_draft_computed_tokens += len(chunk)

    def _drafts_at_once(self, request: Request) -> bool:
        """Whether nothing but the largest logit decides, and the decoder has a call for that."""
        params = request.params
        return (
            isinstance(self._runner, HeadRunner)
            and self._runner.drafts_at_once
            and self._vocabulary is not None
            and params.is_greedy
            and not params.has_penalties
            and request.constraint is None
        )

    def _draft_at_once(self, item: _Round) -> None:
        assert isinstance(self._runner, HeadRunner)
        assert self._vocabulary is not None
        listed = self._vocabulary.token_ids
        item.token_ids += self._runner.draft(self._next_input(item), listed, item.horizon, item.rule)

    def _next_input(self, item: _Round) -> SequenceInput:
        """The tokens whose K/V are missing, up to the newest draft; counts them as computed."""
        request = item.request
        start = request.num_draft_computed_tokens
        missing = [*request.token_ids[start:], *item.token_ids[max(0, start - request.num_tokens) :]]
        request.num_draft_computed_tokens = start + len(missing)
        return SequenceInput(missing, start, self._cache.block_ids(request.request_id), num_logits=1)

    def _draw(self, item: _Round, logits: Tensor) -> None:
        """Choose the next draft token from ``logits`` [num_logits] as the target would from its own."""
        request, params = item.request, item.request.params
        if item.rule is not None and not item.rule.keeps(_confidence(logits)):
            item.is_stopped = True
            return
        if self._vocabulary is None:
            row = logits[None, : self._vocab_limit]
        elif self._vocabulary.expects_outside(logits):
            item.is_stopped = True
            return
        elif params.is_greedy and not params.has_penalties:
            item.token_ids.append(self._vocabulary.likeliest(logits))  # without laying out the whole vocabulary
            return
        else:
            row = self._vocabulary.scatter(logits[None], self._vocab_limit)
        own = row
        if params.has_penalties:
            row = apply_penalties(
                row, params, self._history(request), item.token_ids, self._end_token_ids, only_last_row=True
            )
        if request.constraint is not None:
            masks = request.constraint.masks(item.token_ids)
            row = apply_masks(row, masks[len(item.token_ids) :], own)
            if len(masks) <= len(item.token_ids) or is_forbidden(row):
                item.is_stopped = True
                return
        if params.is_greedy:
            item.token_ids.append(int(argmax_lowest(row)[0]))
            return
        probs = to_probs(row, params)[0]
        position = request.num_tokens + len(item.token_ids)
        if params.seed is not None:
            token_id = sample_coupled(probs, params.seed, position)
        else:
            token_id = sample(probs, self._generator(request))
            item.probs.append(probs)
        item.token_ids.append(token_id)

    def _draft(self, item: _Round) -> Draft:
        if not item.token_ids:
            return NO_DRAFT
        return Draft(item.token_ids, self.name, torch.stack(item.probs) if item.probs else None)

    def _history(self, request: Request) -> TokenHistory:
        history = self._histories.get(request.request_id)
        if history is None:
            history = self._histories[request.request_id] = TokenHistory(request.prompt_token_ids)
        history.append(request.output_token_ids[history.num_output_tokens :])
        return history

    def _generator(self, request: Request) -> torch.Generator:
        # A stream of its own: the verifier's coins must not depend on the noise that drew the draft.
        generator = self._generators.get(request.request_id)
        if generator is None:
            generator = self._generators[request.request_id] = torch.Generator()
            generator.seed()
        return generator


def _confidence(logits: Tensor) -> float:
    """The probability of the likeliest token, whatever the temperature; the escape counts as a token."""
    row = as_array(logits)
    return float(1.0 / np.exp(row - row.max()).sum())

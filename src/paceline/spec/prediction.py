"""Drafting from a client's prediction: the proposed new content of a file, of which most is expected to come true."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.records import Verdict
from paceline.request import Request
from paceline.spec.proposer import NO_DRAFT, Draft
from paceline.spec.suffix import MAX_MATCH, SuffixIndex


class PredictionProposer:
    """Drafts the prediction from its start, then from wherever the newest output tokens stand in it."""

    name = "prediction"

    def __init__(self) -> None:
        self._indexes: dict[str, SuffixIndex] = {}

    def propose(self, requests: Sequence[Request], horizons: Sequence[int]) -> list[Draft]:
        """See :class:`Proposer`; deterministic, so no draft_probs."""
        return [self._draft(request, horizon) for request, horizon in zip(requests, horizons, strict=True)]

    def observe(self, request: Request, verdict: Verdict) -> None:
        """See :class:`Proposer`; nothing is learnt yet."""

    def release(self, request_id: str) -> None:
        """See :class:`Proposer`."""
        self._indexes.pop(request_id, None)

    def _draft(self, request: Request, horizon: int) -> Draft:
        prediction = request.prediction_token_ids
        if not prediction:
            return NO_DRAFT
        index = self._indexes.get(request.request_id)
        if index is None:
            index = self._indexes[request.request_id] = SuffixIndex(prediction)
        recent = request.token_ids[max(request.num_prompt_tokens, request.num_tokens - MAX_MATCH) :]
        if len(recent) <= 1:
            # One output token is too few to look up; the start of the prediction is the natural guess.
            start = 0 if not recent else 1
            if recent and recent[0] != prediction[0]:
                return NO_DRAFT
            return Draft(index.continuation(start, horizon), self.name)
        end, length = index.match(recent)
        return Draft(index.continuation(end, horizon), self.name) if length else NO_DRAFT

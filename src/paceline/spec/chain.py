"""Several proposers asked in turn: the first that has something to say drafts for a request."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.records import Verdict
from paceline.request import Request
from paceline.spec.proposer import NO_DRAFT, Draft, Proposer


class ProposerChain:
    """Asks its proposers in order, each about the requests that still have no draft and allow its name."""

    name = "chain"

    def __init__(self, proposers: Sequence[Proposer]) -> None:
        self._proposers = {proposer.name: proposer for proposer in proposers}
        self._last_source: dict[str, str] = {}

    @property
    def sources(self) -> list[str]:
        """The names of the proposers, in the order they are asked."""
        return list(self._proposers)

    def propose(self, requests: Sequence[Request], horizons: Sequence[int]) -> list[Draft]:
        """See :class:`Proposer`."""
        drafts = [NO_DRAFT] * len(requests)
        for name, proposer in self._proposers.items():
            asked = [
                index
                for index, request in enumerate(requests)
                if horizons[index] > 0 and not drafts[index].token_ids and name in request.speculation.drafters
            ]
            if not asked:
                continue
            proposed = proposer.propose([requests[i] for i in asked], [horizons[i] for i in asked])
            for index, draft in zip(asked, proposed, strict=True):
                drafts[index] = draft
        for request, draft in zip(requests, drafts, strict=True):
            self._last_source[request.request_id] = draft.source
        return drafts

    def observe(self, request: Request, verdict: Verdict) -> None:
        """See :class:`Proposer`; only the source of the draft is told."""
        source = self._last_source.get(request.request_id)
        if source in self._proposers:
            self._proposers[source].observe(request, verdict)

    def release(self, request_id: str) -> None:
        """See :class:`Proposer`."""
        self._last_source.pop(request_id, None)
        for proposer in self._proposers.values():
            proposer.release(request_id)

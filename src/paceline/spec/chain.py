"""Several proposers asked in turn: the first that has something to say drafts for a request."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from paceline.records import Verdict
from paceline.request import Request
from paceline.spec.proposer import NO_DRAFT, Draft, Proposer


class ProposerChain:
    """Asks each request's drafters in turn, side by side for all requests of a step, until one has a draft."""

    name = "chain"

    def __init__(self, proposers: Sequence[Proposer]) -> None:
        self._proposers = {proposer.name: proposer for proposer in proposers}
        self._last_source: dict[str, str] = {}

    @property
    def sources(self) -> list[str]:
        """The names of the proposers."""
        return list(self._proposers)

    def propose(self, requests: Sequence[Request], horizons: Sequence[int]) -> list[Draft]:
        """See :class:`Proposer`; each request's drafters are asked in the order it names them."""
        drafts = [NO_DRAFT] * len(requests)
        queues = [
            deque(name for name in request.speculation.drafters if name in self._proposers and horizon > 0)
            for request, horizon in zip(requests, horizons, strict=True)
        ]
        while any(queues):
            for name, proposer in self._proposers.items():
                asked = [index for index, queue in enumerate(queues) if queue and queue[0] == name]
                if not asked:
                    continue
                proposed = proposer.propose([requests[i] for i in asked], [horizons[i] for i in asked])
                for index, draft in zip(asked, proposed, strict=True):
                    queues[index].popleft()
                    if draft.token_ids:
                        drafts[index] = draft
                        queues[index].clear()
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

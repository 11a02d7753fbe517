"""What every source of drafts looks like: it proposes, it learns from the verdict, it lets go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from paceline.records import Verdict
from paceline.request import Request


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """Tokens proposed to follow a request's committed tokens.

    ``draft_probs`` [num_drafted, draft_vocab_size] is exactly what each token was sampled from, or None when the
    choice was deterministic (law 4).
    """

    token_ids: Sequence[int]
    source: str
    draft_probs: Tensor | None = None


NO_DRAFT = Draft((), "none")


class Proposer(Protocol):
    """A source of drafts."""

    @property
    def name(self) -> str:
        """The source as named in settings, events and metrics."""

    def propose(self, requests: Sequence[Request], horizons: Sequence[int]) -> list[Draft]:
        """One draft per request, of at most ``horizons[i]`` tokens; empty where it has nothing to say.

        Whether to draft at all may depend only on what stands before the draft, never on a sampled draft token: that
        would change the distribution it was drawn from.
        """

    def observe(self, request: Request, verdict: Verdict) -> None:
        """What became of this source's draft; called after the request's tokens and counters are updated."""

    def release(self, request_id: str) -> None:
        """Forget a request that ended."""

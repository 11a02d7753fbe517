"""What the sources of drafts look like: lookups answer at once, proposers take their time."""

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
    choice was deterministic (law 4). ``acceptances`` are what the ladder expects: for each token, the probability that
    it is accepted given that those before it are; empty where nobody estimated it.
    """

    token_ids: Sequence[int]
    source: str
    draft_probs: Tensor | None = None
    acceptances: Sequence[float] = ()


NO_DRAFT = Draft((), "none")


@dataclass(frozen=True, slots=True)
class Guess:
    """What a lookup would draft, and on what evidence.

    Attributes:
        kind: sort of evidence, the lookup's own word; estimates are kept apart by it.
        length: tokens that agree before the guess; more of them make it likelier.
    """

    token_ids: Sequence[int]
    source: str
    kind: str
    length: int


class StopRule(Protocol):
    """Whether one draft goes on. A proposer asks before it draws each token: no answer looks at that token (law 4)."""

    def keeps(self, confidence: float) -> bool:
        """Whether the next token is worth verifying; asked once for each place, in order.

        ``confidence`` is the probability that the drafter gives the likeliest next token.
        """

    def wants_more(self) -> bool:
        """Whether, with the tokens kept so far, another is worth the time of drafting it."""


class Proposer(Protocol):
    """A source of drafts."""

    @property
    def name(self) -> str:
        """The source as named in settings, events and metrics."""

    def prepare(self, requests: Sequence[Request]) -> None:
        """Read what was committed since these requests drafted last. Called before :meth:`propose`, whose time is the
        price of tokens; this one is that of having been away."""

    def propose(
        self, requests: Sequence[Request], horizons: Sequence[int], rules: Sequence[StopRule | None] = ()
    ) -> list[Draft]:
        """One draft per request, of at most ``horizons[i]`` tokens; empty where it has nothing to say.

        ``rules``, one per request if there are any, may end a draft sooner.

        Whether to draft at all may depend only on what stands before the draft, never on a sampled draft token: that
        would change the distribution it was drawn from.
        """

    def observe(self, request: Request, verdict: Verdict) -> None:
        """What became of this source's draft; called after the request's tokens and counters are updated."""

    def release(self, request_id: str) -> None:
        """Forget a request that ended."""


class Lookup(Protocol):
    """A source that looks its drafts up: deterministic, from committed tokens alone, in microseconds."""

    @property
    def name(self) -> str:
        """The source as named in settings, events and metrics."""

    def look_up(self, request: Request, num_tokens: int) -> Guess | None:
        """What follows the request's committed tokens, at most ``num_tokens`` of it; None where nothing is known."""

    def release(self, request: Request) -> None:
        """A request ended; its tokens are final."""

    def forget_answers(self) -> None:
        """Drop what was kept of requests that ended."""

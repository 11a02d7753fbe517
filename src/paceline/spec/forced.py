"""Drafting what a grammar forces: braces, keys and quotes that can be nothing else cost no draft model."""

from __future__ import annotations

from paceline.request import Request
from paceline.spec.proposer import Guess


class GrammarLookup:
    """Guesses the tokens that the request's structured output leaves no choice about."""

    name = "grammar"

    def look_up(self, request: Request, num_tokens: int) -> Guess | None:
        """See :class:`Lookup`."""
        if request.constraint is None:
            return None
        token_ids = request.constraint.forced(num_tokens)
        return Guess(token_ids, self.name, "forced", 0) if token_ids else None

    def release(self, request: Request) -> None:
        """See :class:`Lookup`; nothing is kept."""

    def forget_answers(self) -> None:
        """See :class:`Lookup`; nothing is kept."""

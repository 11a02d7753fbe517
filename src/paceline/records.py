"""Plain records that cross layers: no tensors, no behaviour beyond derived numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

FinalToken = Literal["recovered", "bonus"]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of one emitted token under the target, and of the likeliest alternatives.

    ``top`` maps token id to log-probability, most likely first.
    """

    token_id: int
    logprob: float
    top: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What verification decided for one request in one step.

    ``token_ids`` are the accepted draft tokens followed by exactly one more: the *recovered* token that replaces the
    first rejected draft, or the *bonus* token when every draft was accepted (also when nothing was drafted).
    """

    token_ids: Sequence[int]
    num_drafted: int
    num_accepted: int
    logprobs: Sequence[TokenLogprob] | None = None

    @property
    def final_token(self) -> FinalToken:
        """How the last token came about."""
        return "bonus" if self.num_accepted == self.num_drafted else "recovered"

"""One record per request and step: what was drafted, what became of it, and what it cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.records import FinalToken


@dataclass(frozen=True, slots=True)
class StepEvent:
    """What one step did for one request.

    Attributes:
        step: number of the engine's step.
        horizon: how many tokens might have been drafted; num_drafted is how many were.
        source: the proposer of the drafts, or "none".
        final_token: whether the step's last token was recovered after a rejection or a bonus.
        num_rows: rows of the target's forward pass, over all requests.
        num_blocks: blocks the request held during the step.
        num_computed_tokens: its tokens whose K/V are computed and verified, after the step.
        draft_ms, forward_ms, step_ms: time of proposing, of the target's forward pass, and of the whole step.
        expected_acceptances: per draft token, the probability with which it was expected to be accepted, given that
            those before it were; empty where nothing was drafted.
    """

    request_id: str
    step: int
    horizon: int
    num_drafted: int
    num_accepted: int
    final_token: FinalToken
    source: str
    num_rows: int
    num_blocks: int
    num_computed_tokens: int
    draft_ms: float
    forward_ms: float
    step_ms: float
    expected_acceptances: Sequence[float] = ()


Listener = Callable[[StepEvent], None]

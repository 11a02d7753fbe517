"""What the parts of the benchmark hand to each other: tasks in, one record per turn and arm out. No tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Message = Mapping[str, Any]
TextKind = Literal["prose", "new code", "edit"]


@dataclass(frozen=True, slots=True)
class Turn:
    """One exchange: messages that join the history, and what the assistant would ideally answer.

    Attributes:
        messages: user and tool messages since the previous answer (the first turn also brings the system message).
        gold: the recorded answer; in scripted mode it becomes the history of the next turn.
        kind: what the answer mostly is.
        max_tokens: the longest answer that is generated.
        prediction: the text a client would send as its prediction (the old file of an edit), or None.
    """

    messages: Sequence[Message]
    gold: str
    kind: TextKind
    max_tokens: int
    prediction: str | None = None


@dataclass(frozen=True, slots=True)
class Task:
    """A conversation of an agent with a user about real code. ``part`` names the stratum of the suite."""

    task_id: str
    part: str
    turns: Sequence[Turn]


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One engine step of one turn that yielded tokens.

    Attributes:
        ms: time since the previous tokens of the turn (for the first step, since submission).
        num_tokens: tokens the step yielded.
        num_drafted, num_accepted: drafts verified in it, and how many were accepted.
        horizon: how many tokens might have been drafted.
        source: the proposer of the drafts, or "none".
        filled_slots, reserved_slots: KV slots with verified tokens, and slots held by requests, after the step.
        draft_ms, forward_ms: time of proposing and of the target's forward pass.
        expected_acceptances: of each draft, the probability it was expected to be accepted with, given those before it.
    """

    ms: float
    num_tokens: int
    num_drafted: int = 0
    num_accepted: int = 0
    horizon: int = 0
    source: str = "none"
    filled_slots: int = 0
    reserved_slots: int = 0
    draft_ms: float = 0.0
    forward_ms: float = 0.0
    expected_acceptances: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """One turn as one arm ran it. ``token_ids`` are what was generated; ``steps[0]`` brought the first token."""

    arm: str
    task_id: str
    part: str
    turn: int
    kind: TextKind
    is_cold: bool
    num_prompt_tokens: int
    num_cached_tokens: int
    token_ids: Sequence[int]
    turn_ms: float
    steps: Sequence[StepRecord]
    peak_rss_mib: float = 0.0
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ttft_ms(self) -> float:
        """Time to first token."""
        return self.steps[0].ms if self.steps else 0.0

    @property
    def decode_ms(self) -> float:
        """From the first token to the last."""
        return sum(step.ms for step in self.steps[1:])

    @property
    def num_decoded(self) -> int:
        """Tokens after the first step's."""
        return sum(step.num_tokens for step in self.steps[1:])

"""What the scheduler decided for one step: plain records, no tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.request import Request


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """One request's share of a step.

    ``num_new_tokens`` committed tokens get their K/V. If they reach the newest token, ``is_sampled`` is True: the
    step ends in a verdict, and up to ``horizon`` drafts are verified beside it. Slots for all of them are reserved in
    ``block_ids``, the request's block table.
    """

    request: Request
    num_new_tokens: int
    horizon: int
    is_sampled: bool
    block_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything one step will run, in the order of the batch; and who had to give up its blocks for it."""

    scheduled: list[ScheduledRequest] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)

    @property
    def sampled(self) -> list[ScheduledRequest]:
        """The part of the plan that ends in a verdict."""
        return [item for item in self.scheduled if item.is_sampled]

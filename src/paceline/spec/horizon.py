"""How many tokens to draft next. One controller per request, behind one small interface."""

from __future__ import annotations

from typing import Protocol

from paceline.request import Speculation

# Weight of the newest round in the moving average; about the last eight rounds count.
_SMOOTHING = 0.25
# Below this many accepted tokens a round, drafting pauses: the extra rows and drafts cost more than they bring.
_WORTHWHILE = 0.35
# A pause lasts this many tokens first and doubles up to the limit while probes keep failing.
_FIRST_PAUSE, _LONGEST_PAUSE = 4, 64
_PROBE_LENGTH = 2


class Horizon(Protocol):
    """Chooses before a round, learns after it."""

    def choose(self) -> int:
        """How many tokens to draft in the coming round; 0 is a legal choice. Called once per round."""

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        """The outcome of a round in which something was drafted."""


class FixedHorizon:
    """Always the same number, 0 for no speculation."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens

    def choose(self) -> int:
        """See :class:`Horizon`."""
        return self._num_tokens

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        """See :class:`Horizon`."""


class DynamicHorizon:
    """Follows a moving average of the accepted length, pauses when it is poor and probes to recover.

    A round whose drafts were all accepted says only that *at least* so many would have been (a censored observation):
    it counts as one more.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._mean_accepted = max_tokens / 2
        self._pause = _FIRST_PAUSE
        self._rounds_to_skip = 0
        self._is_probing = False

    def choose(self) -> int:
        """See :class:`Horizon`."""
        if self._rounds_to_skip > 0:
            self._rounds_to_skip -= 1
            return 0
        if self._is_probing:
            return min(_PROBE_LENGTH, self._max_tokens)
        return max(1, min(self._max_tokens, round(1.5 * self._mean_accepted + 1)))

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        """See :class:`Horizon`."""
        if num_drafted == 0:
            return
        seen = num_accepted + (1 if num_accepted == num_drafted else 0)
        if self._is_probing and num_accepted > 0:
            self._is_probing, self._pause = False, _FIRST_PAUSE
            self._mean_accepted = max(self._mean_accepted, float(seen))
            return
        self._mean_accepted += _SMOOTHING * (seen - self._mean_accepted)
        if self._mean_accepted < _WORTHWHILE:
            if self._is_probing:
                self._pause = min(2 * self._pause, _LONGEST_PAUSE)
            self._is_probing = True
            self._rounds_to_skip = self._pause


def make_horizon(speculation: Speculation) -> Horizon:
    """The controller that a request's speculation settings ask for."""
    if speculation.mode == "dynamic":
        return DynamicHorizon(speculation.max_tokens)
    return FixedHorizon(speculation.max_tokens if speculation.mode == "static" else 0)

"""When to end the draft of a model that says how sure it is."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.spec.calibration import Calibration, length_of
from paceline.spec.horizon import HorizonController, Prospect

# Kind of evidence: the probability that the drafter gives its likeliest next token.
_CONFIDENCE = "confidence"


class ConfidenceRule:
    """Ends one draft; see :class:`StopRule`.

    A confidence is worth what it was worth before: how often tokens of such a confidence were accepted. A token is kept
    while it pays for its row in the target's pass, and another is drafted while it pays for that and for the draft
    model's pass, as far as can be told before the pass: by the acceptance usual at its place.

    Args:
        session: whose counts to go by.
        prospect: what was planned; its draft_ms is the price of a token.
        places: per place of the draft, how often a token was drafted there and accepted.
        num_requests: requests that draft side by side, at a mean of ``context`` tokens.
    """

    def __init__(
        self,
        calibration: Calibration,
        controller: HorizonController,
        *,
        session: str,
        source: str,
        prospect: Prospect,
        places: Sequence[float],
        num_requests: int,
        context: float,
    ) -> None:
        self._calibration, self._controller = calibration, controller
        self._session, self._source = session, source
        self._row = Prospect(prospect.survivals, 0.0, prospect.min_acceptance)  # the pass that said it is paid for
        self._prospect, self._places = prospect, places
        self._num_requests, self._context = num_requests, context
        self._survival = 1.0
        self.confidences: list[float] = []
        self.acceptances: list[float] = []  # expected, of each of them

    def keeps(self, confidence: float) -> bool:
        """See :class:`StopRule`."""
        length = length_of(confidence)
        [acceptance] = self._calibration.acceptances(self._session, self._source, _CONFIDENCE, length, 1)
        self.confidences.append(confidence)
        self.acceptances.append(acceptance)
        self._survival *= acceptance
        return self._pays(self._survival, len(self.confidences) - 1, self._row)

    def wants_more(self) -> bool:
        """See :class:`StopRule`."""
        place = len(self.confidences)
        if place >= len(self._places):
            return False
        return self._pays(self._survival * self._places[place], place, self._prospect)

    def observe(self, num_accepted: int, *, ended_in_miss: bool) -> None:
        """The first ``num_accepted`` tokens were accepted; the next one was not, or was never judged."""
        for place, confidence in enumerate(self.confidences[: num_accepted + ended_in_miss]):
            is_accepted = place < num_accepted
            self._calibration.observe(
                self._session, self._source, _CONFIDENCE, length_of(confidence), int(is_accepted),
                ended_in_miss=not is_accepted,
            )  # fmt: skip

    def _pays(self, survival: float, place: int, prospect: Prospect) -> bool:
        return self._controller.pays(survival, place, prospect, self._num_requests, self._context)

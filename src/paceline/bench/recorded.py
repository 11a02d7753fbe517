"""A draft model's drafts, recorded beside a trace, so that rules which ask it can be replayed without running it.

Behind every token of an answer it drafts as far as it may, and says how sure it is of each token. With greedy decoding
what it drafts depends on the tokens before it alone, so one recording serves every rule.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.engine.engine import Engine
from paceline.errors import InvalidParameterError
from paceline.records import Verdict
from paceline.request import Request, Speculation
from paceline.spec.ladder import Ladder
from paceline.spec.proposer import NO_DRAFT, Draft, Proposer, StopRule

# Tokens of a draft that are recorded, and drafted at most in a replay.
MAX_DRAFTED = 8
# A static horizon asks the draft model in every step; a dynamic one would give it up, for nothing comes of it.
IN_EVERY_STEP = Speculation("static", MAX_DRAFTED, drafters=("model",))
# Stands for a token that is not in the draft's vocabulary.
OUTSIDE = -1

# A draft, token by token: the token and how sure the draft model was of it.
RecordedDraft = Sequence[tuple[int, float]]


class _Confidences:
    """A rule that never ends a draft, and remembers what it was told."""

    def __init__(self) -> None:
        self.told: list[float] = []

    def keeps(self, confidence: float) -> bool:
        """See :class:`StopRule`."""
        self.told.append(confidence)
        return True

    def wants_more(self) -> bool:
        """See :class:`StopRule`."""
        return True


class DraftRecorder:
    """Asks a proposer in every step, keeps what it said, and drafts nothing: the target decodes token by token."""

    def __init__(self, proposer: Proposer) -> None:
        self.name = proposer.name
        self._proposer = proposer
        self._drafts: dict[int, RecordedDraft] = {}

    def take(self, num_tokens: int) -> list[RecordedDraft]:
        """The drafts behind the first 0, 1, ... tokens of an answer that has so many, which is forgotten then."""
        drafts = [self._drafts.get(before, ()) for before in range(num_tokens)]
        self._drafts = {}
        return drafts

    def prepare(self, requests: Sequence[Request]) -> None:
        """See :class:`Proposer`."""
        self._proposer.prepare(requests)

    def propose(
        self, requests: Sequence[Request], horizons: Sequence[int], rules: Sequence[StopRule | None] = ()
    ) -> list[Draft]:
        """See :class:`Proposer`."""
        confidences = [_Confidences() for _ in requests]
        drafts = self._proposer.propose(requests, horizons, confidences)
        for request, draft, each in zip(requests, drafts, confidences, strict=True):
            tokens = [*draft.token_ids, OUTSIDE]  # the last is told of only where a draft ends early
            self._drafts[request.num_output_tokens] = list(zip(tokens, each.told, strict=False))
        return [NO_DRAFT] * len(requests)

    def observe(self, request: Request, verdict: Verdict) -> None:
        """See :class:`Proposer`."""

    def release(self, request_id: str) -> None:
        """See :class:`Proposer`."""
        self._proposer.release(request_id)


def record_drafts(engine: Engine) -> DraftRecorder:
    """Let the engine ask its draft model in every step from now on, and record what it says.

    Raises:
        InvalidParameterError: the engine has no draft model.
    """
    proposer = engine.core.ladder.proposers.get("model")
    if proposer is None:
        raise InvalidParameterError("there is no draft model to record; name one with --draft")
    recorder = DraftRecorder(proposer)
    engine.core.ladder = Ladder([], [recorder])
    return recorder


class RecordedProposer:
    """Drafts what was recorded, as long as the rules say and the model would have; on a clock of its own.

    ``draft_ms`` is what a token takes.
    """

    name = "model"

    def __init__(self, draft_ms: float) -> None:
        self._draft_ms = draft_ms
        self._seconds = 0.0
        self.drafts: Sequence[RecordedDraft] = ()  # of the answer at hand

    def clock(self) -> float:
        """The seconds that drafting has taken so far."""
        return self._seconds

    def prepare(self, requests: Sequence[Request]) -> None:
        """It has read everything."""

    def propose(
        self, requests: Sequence[Request], horizons: Sequence[int], rules: Sequence[StopRule | None] = ()
    ) -> list[Draft]:
        """See :class:`Proposer`."""
        drafts = []
        for request, horizon, rule in zip(requests, horizons, rules or [None] * len(requests), strict=True):
            known = self.drafts[request.num_output_tokens] if request.num_output_tokens < len(self.drafts) else ()
            tokens: list[int] = []
            for token, confidence in known[:horizon]:
                if tokens and rule is not None and not rule.wants_more():
                    break
                self._seconds += self._draft_ms / 1e3
                if (rule is not None and not rule.keeps(confidence)) or token == OUTSIDE:
                    break
                tokens.append(token)
            drafts.append(Draft(tokens, self.name) if tokens else NO_DRAFT)
        return drafts

    def observe(self, request: Request, verdict: Verdict) -> None:
        """See :class:`Proposer`."""

    def release(self, request_id: str) -> None:
        """See :class:`Proposer`."""

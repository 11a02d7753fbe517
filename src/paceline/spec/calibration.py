"""How likely is the next draft token to be accepted? Counted, per source and kind of evidence, and never assumed.

A lookup's evidence is the length of its match; while its tokens come true the match grows, so the token i places into a
draft is judged like the first token of a match i longer. Bins of that length hold decayed counts, in two layers: the
engine's whole past, with a prior measured on the benchmark's traces, and the session at hand, for which the engine's
estimate is the prior. A miss is counted once; what was drafted behind it was never judged (censored).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

# Lower ends of the bins of match length.
_BINS = (0, 1, 2, 3, 4, 5, 6, 8, 11, 16, 23, 32)
# Lower ends of the bins of a drafter's own confidence, which take the places of those of match length.
_CONFIDENCES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98)
# What the newest observation leaves of the older ones.
_SESSION_MEMORY, _ENGINE_MEMORY = 0.98, 0.998
# Observations that the prior and the engine's estimate are worth.
_PRIOR_WEIGHT, _ENGINE_WEIGHT = 12.0, 12.0
# Sessions whose counts are kept.
_MAX_SESSIONS = 256
# Acceptance by bin for evidence that was never seen.
_UNKNOWN = 0.5

Key = tuple[str, str, int]


@dataclass(slots=True)
class _Count:
    """A decayed number of trials and of successes."""

    tried: float = 0.0
    accepted: float = 0.0

    def add(self, is_accepted: bool, memory: float) -> None:
        self.tried = memory * self.tried + 1.0
        self.accepted = memory * self.accepted + is_accepted

    def estimate(self, prior: float, weight: float) -> float:
        return (self.accepted + weight * prior) / (self.tried + weight)


def length_of(confidence: float) -> int:
    """The match length whose bin stands for a drafter's confidence, 0 to 1."""
    return _BINS[bisect_right(_CONFIDENCES, confidence) - 1]


class Calibration:
    """Acceptance by evidence, learnt online.

    ``priors`` maps (source, kind) to acceptance per bin of :data:`_BINS`.
    """

    def __init__(self, priors: dict[tuple[str, str], Sequence[float]] | None = None) -> None:
        self._priors = PRIORS if priors is None else priors
        self._engine: dict[Key, _Count] = {}
        self._sessions: OrderedDict[str, dict[Key, _Count]] = OrderedDict()

    def acceptances(self, session: str, source: str, kind: str, length: int, num_tokens: int) -> list[float]:
        """For each of ``num_tokens`` drafts behind a match of ``length``: acceptance given that all before it were."""
        counts = self._sessions.get(session, {})
        values: list[float] = []
        position = 0
        while position < num_tokens:
            bucket = bisect_right(_BINS, length + position) - 1
            end = _BINS[bucket + 1] - length if bucket + 1 < len(_BINS) else num_tokens
            end = min(max(end, position + 1), num_tokens)
            values += [self._estimate(counts, (source, kind, bucket))] * (end - position)
            position = end
        return values

    def observe(
        self, session: str, source: str, kind: str, length: int, num_accepted: int, *, ended_in_miss: bool
    ) -> None:
        """The first ``num_accepted`` drafts came true; the next one did not, or was never judged."""
        counts = self._sessions.get(session)
        if counts is None:
            counts = self._sessions[session] = {}
            if len(self._sessions) > _MAX_SESSIONS:
                self._sessions.popitem(last=False)
        else:
            self._sessions.move_to_end(session)
        for position in range(num_accepted + ended_in_miss):
            key = (source, kind, bisect_right(_BINS, length + position) - 1)
            is_accepted = position < num_accepted
            counts.setdefault(key, _Count()).add(is_accepted, _SESSION_MEMORY)
            self._engine.setdefault(key, _Count()).add(is_accepted, _ENGINE_MEMORY)

    def forget(self, session: str) -> None:
        """Drop a session's own counts; the engine keeps what it learnt."""
        self._sessions.pop(session, None)

    def table(self) -> dict[tuple[str, str], list[float]]:
        """The engine's estimate per bin, by (source, kind): what :data:`PRIORS` is made from."""
        kinds = dict.fromkeys((source, kind) for source, kind, _ in self._engine)
        return {
            (source, kind): [self._estimate({}, (source, kind, bucket)) for bucket in range(len(_BINS))]
            for source, kind in kinds
        }

    def _estimate(self, counts: dict[Key, _Count], key: Key) -> float:
        source, kind, bucket = key
        bins = self._priors.get((source, kind))
        prior = bins[bucket] if bins is not None else _UNKNOWN
        engine = self._engine.get(key)
        estimate = engine.estimate(prior, _PRIOR_WEIGHT) if engine is not None else prior
        own = counts.get(key)
        return own.estimate(estimate, _ENGINE_WEIGHT) if own is not None else estimate


# Acceptance by bin, measured with `python -m paceline.bench.score rank --calibration` on 30 tasks of the agent suite;
# bins nobody reached are filled from their neighbours. The hypotheses of a prediction that lost its place ("replaced",
# "put in") hold in renames and hardly ever in the suite's freer answers: their first bins are a compromise.
PRIORS: dict[tuple[str, str], Sequence[float]] = {
    ("suffix", "single"): (0.50, 0.60, 0.65, 0.75, 0.84, 0.87, 0.87, 0.89, 0.92, 0.93, 0.95, 0.95),
    ("suffix", "agreed"): (0.50, 0.60, 0.70, 0.90, 0.83, 0.83, 0.88, 0.90, 0.92, 0.96, 0.97, 0.98),
    ("suffix", "split"): (0.20, 0.30, 0.40, 0.47, 0.47, 0.60, 0.70, 0.80, 0.84, 0.92, 0.93, 0.97),
    ("corpus", "single"): (0.40, 0.45, 0.50, 0.57, 0.68, 0.68, 0.80, 0.80, 0.86, 0.90, 0.91, 0.93),
    ("corpus", "agreed"): (0.50, 0.60, 0.65, 0.72, 0.70, 0.72, 0.74, 0.78, 0.84, 0.88, 0.88, 0.91),
    ("corpus", "split"): (0.20, 0.25, 0.28, 0.30, 0.45, 0.50, 0.59, 0.63, 0.70, 0.72, 0.78, 0.90),
    ("prediction", "start"): (0.50, 0.60, 0.65, 0.70, 0.72, 0.74, 0.76, 0.80, 0.88, 0.92, 0.94, 0.97),
    ("prediction", "aligned"): (0.50, 0.60, 0.65, 0.68, 0.72, 0.74, 0.76, 0.82, 0.92, 0.94, 0.96, 0.98),
    ("prediction", "found"): (0.40, 0.45, 0.50, 0.54, 0.58, 0.62, 0.66, 0.70, 0.75, 0.80, 0.85, 0.90),
    ("prediction", "left out"): (0.40, 0.45, 0.60, 0.66, 0.70, 0.72, 0.74, 0.80, 0.85, 0.90, 0.92, 0.94),
    ("prediction", "put in"): (0.15, 0.55, 0.60, 0.66, 0.70, 0.72, 0.74, 0.80, 0.85, 0.90, 0.92, 0.94),
    ("prediction", "replaced"): (0.25, 0.65, 0.70, 0.75, 0.80, 0.82, 0.84, 0.88, 0.92, 0.94, 0.95, 0.96),
    # What a grammar forces is certain, but for the way it is cut into tokens.
    ("grammar", "forced"): (0.999,) * len(_BINS),
    # A draft model's own confidence, by its bins: the shipped head is right about itself where look-ups know nothing.
    ("model", "confidence"): (0.05, 0.14, 0.30, 0.37, 0.45, 0.56, 0.67, 0.75, 0.84, 0.91, 0.93, 0.98),
    # It is asked before anything is known of its draft: here the bins are places in the draft.
    ("model", "blind"): (0.48, 0.49, 0.56, 0.58, 0.55, 0.50, 0.50, 0.50, 0.50, 0.50, 0.50, 0.50),
}


class CalibrationError:
    """Expected calibration error: mean distance of predicted from observed acceptance over ten bins, by their size."""

    def __init__(self) -> None:
        self._bins = [[0, 0.0, 0] for _ in range(10)]  # trials, sum of predictions, accepted

    def add(self, predicted: Sequence[float], num_accepted: int) -> None:
        """Drafts with these predicted acceptances: the first ``num_accepted`` came true, the next, if any, did not."""
        for position, value in enumerate(predicted[: num_accepted + 1]):
            entry = self._bins[min(9, int(10 * value))]
            entry[0] += 1
            entry[1] += value
            entry[2] += position < num_accepted

    @property
    def value(self) -> float | None:
        """From 0 (calibrated) to 1; None where nothing was judged."""
        total = sum(int(trials) for trials, _, _ in self._bins)
        if total == 0:
            return None
        return sum(abs(predicted - accepted) for _, predicted, accepted in self._bins) / total

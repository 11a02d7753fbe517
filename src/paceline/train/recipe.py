"""What is trained, on what, and how: one frozen record, stored beside the weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, get_args

from paceline.errors import InvalidParameterError
from paceline.loader.draft import DraftKind
from paceline.model.config import ModelConfig

SYNTAX_FEATURES = ("windows", "completion", "continuation", "edits", "roles")
LOSSES = ("ce", "kl", "lk")
SOURCES = ("stdlib", "installed")
# Peaks of the learning rate that suit a kind: a model begins at random, a head at a solution of least squares.
LEARNING_RATES: dict[str, float] = {"model": 2e-3, "head": 8e-4}


@dataclass(frozen=True, slots=True)
class DraftShape:
    """Sizes of the draft.

    ``window`` is how many newest positions a token attends to: positions are relative, so a draft trained on short
    rows with a window works at any length, at a cost that does not grow with the context.
    """

    hidden_size: int = 256
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    intermediate_size: int = 704
    vocab_size: int = 8192
    window: int = 256

    def __post_init__(self) -> None:
        for item in fields(self):
            if getattr(self, item.name) < 1:
                raise InvalidParameterError(f"{item.name} of the draft must be 1 or more")
        if self.hidden_size % (2 * self.num_heads) or self.num_heads % self.num_kv_heads:
            raise InvalidParameterError(
                f"a draft of width {self.hidden_size} cannot have {self.num_heads} heads that share "
                f"{self.num_kv_heads} key/value heads; choose sizes that divide"
            )

    @classmethod
    def of_width(cls, hidden_size: int, num_layers: int, vocab_size: int, window: int) -> DraftShape:
        """The usual proportions: heads of 64, two to a key/value head, an MLP of 2.75 times the width."""
        num_heads = max(1, hidden_size // 64)
        return cls(
            hidden_size=hidden_size,
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_heads // 2 if num_heads % 2 == 0 else num_heads,
            intermediate_size=max(32, hidden_size * 11 // 4 // 32 * 32),
            vocab_size=vocab_size,
            window=window,
        )

    @classmethod
    def of_target(cls, target: ModelConfig, vocab_size: int, window: int) -> DraftShape:
        """A head's: one layer of the target."""
        return cls(
            hidden_size=target.hidden_size,
            num_layers=1,
            num_heads=target.num_heads,
            num_kv_heads=target.num_kv_heads,
            intermediate_size=target.intermediate_size,
            vocab_size=vocab_size,
            window=window,
        )


@dataclass(frozen=True, slots=True)
class Recipe:
    """One training run. Everything that the weights depend on is here, besides the target and the data themselves.

    Attributes:
        kind: ``model``, an independent one that sees tokens alone; ``head``, one layer that also reads the target's
            hidden states.
        data: which Python to read: the standard library, installed packages.
        syntax: the uses made of syntax trees, each an arm of an ablation: ``windows`` begin and end at nodes;
            ``completion`` of a node from what stands before it; ``continuation`` after an edit; ``edits`` in the
            shapes that agents emit; ``roles`` weigh the loss by what a token is.
        losses: one after the other: cross entropy on labels, divergence from the target's distribution, logarithm of
            the acceptance rate (LK). Where the target's probabilities are not known, cross entropy stays; for a head
            that is where an unlisted token follows, for the target's states tell the rest.
        num_answers: how many prompts the target is asked.
        corpus_tokens: how many tokens of source code are used at most, before the examples made of it.
        steps: how many optimiser steps; None: as many as ``minutes`` allow.
        row_tokens: length of a training row; ``batch_rows`` of them make a step.
        learning_rate: at its peak; it rises in the first 2 %, and for 40 steps at least, and decays in the last 20 %.
        unroll: how many tokens a head drafts in a row in training, so that it learns to read its own states.
    """

    kind: DraftKind = "model"
    shape: DraftShape = field(default_factory=DraftShape)
    data: Sequence[str] = SOURCES
    syntax: Sequence[str] = SYNTAX_FEATURES
    losses: Sequence[str] = LOSSES
    num_answers: int = 4000
    corpus_tokens: int = 4_000_000
    steps: int | None = None
    minutes: float | None = None
    row_tokens: int = 512
    batch_rows: int = 16
    learning_rate: float = 2e-3
    seed: int = 0
    unroll: int = 3

    def __post_init__(self) -> None:
        if self.kind not in get_args(DraftKind):
            raise InvalidParameterError(f"--kind knows {', '.join(get_args(DraftKind))}, got {self.kind!r}")
        _require_known("data", self.data, SOURCES)
        _require_known("syntax", self.syntax, SYNTAX_FEATURES)
        _require_known("losses", self.losses, LOSSES)
        if not self.losses:
            raise InvalidParameterError(f"losses must name at least one of {', '.join(LOSSES)}")
        if (self.steps is None) == (self.minutes is None):
            raise InvalidParameterError("give either --steps or --time-budget, and not both")
        if (self.steps is not None and self.steps < 1) or (self.minutes is not None and self.minutes <= 0):
            raise InvalidParameterError("--steps and --time-budget must be positive")
        for name in ("row_tokens", "batch_rows", "unroll"):
            if getattr(self, name) < 1:
                raise InvalidParameterError(f"{name} must be 1 or more, got {getattr(self, name)}")
        if self.num_answers < 0 or self.corpus_tokens < 0:
            raise InvalidParameterError("the numbers of answers and of corpus tokens must not be negative")
        if not self.learning_rate > 0:
            raise InvalidParameterError(f"the learning rate must be positive, got {self.learning_rate}")

    @property
    def num_unrolled(self) -> int:
        """Steps of the network that a position is trained in."""
        return self.unroll if self.kind == "head" else 1

    def to_json(self) -> dict[str, Any]:
        """Plain data; without what a model does not have."""
        settings = asdict(self)
        if self.kind == "model":
            del settings["unroll"]
        return settings


def _require_known(name: str, chosen: Sequence[str], known: Sequence[str]) -> None:
    for item in chosen:
        if item not in known:
            raise InvalidParameterError(f"--{name} knows {', '.join(known)}, got {item!r}")

"""What is minimised, per position. All take logits [num_rows, num_classes] and return [num_rows].

The classes are the tokens of the draft's vocabulary and, last, the escape: any token that is not listed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own idiom
from torch import Tensor

LOGIT_ROWS = 1024  # computed at once: logits must not leave the cache
_TINY = 1e-6


@dataclass(frozen=True, slots=True, eq=False)
class Targets:
    """What the target said at some positions.

    Attributes:
        labels: [num_rows], the class of the token that follows.
        classes: [num_rows, num_top], the classes of the target's likeliest tokens; unlisted tokens are the escape.
        probs: [num_rows, num_top], their probabilities; 0 fills up.
        is_known: [num_rows], whether the last two mean anything.
    """

    labels: Tensor
    classes: Tensor
    probs: Tensor
    is_known: Tensor

    def part(self, rows: slice) -> Targets:
        """Some of the positions."""
        return Targets(self.labels[rows], self.classes[rows], self.probs[rows], self.is_known[rows])

    def repeated(self, times: int) -> Targets:
        """All positions, ``times`` times over."""
        return Targets(
            self.labels.repeat(times), self.classes.repeat(times, 1), self.probs.repeat(times, 1),
            self.is_known.repeat(times),
        )  # fmt: skip


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """-log of the probability given to the label."""
    return F.cross_entropy(logits, labels, reduction="none")


def divergence(logits: Tensor, classes: Tensor, probs: Tensor) -> Tensor:
    """KL(target || draft) over the likeliest tokens, the escape, and one bucket for all the rest."""
    log_q = torch.log_softmax(logits, dim=-1)
    escape = logits.shape[-1] - 1
    is_listed = classes != escape
    listed_p = probs * is_listed
    log_q_top = log_q.gather(1, classes)
    outside_p = (probs * ~is_listed).sum(-1)
    rest_p = (1 - probs.sum(-1)).clamp_min(0)
    log_q_escape = log_q[:, -1]
    rest_q = (1 - (log_q_top.exp() * is_listed * (probs > 0)).sum(-1) - log_q_escape.exp()).clamp_min(_TINY)
    inside = (listed_p * (listed_p.clamp_min(_TINY).log() - log_q_top)).sum(-1)
    outside = outside_p * (outside_p.clamp_min(_TINY).log() - log_q_escape)
    rest = rest_p * (rest_p.clamp_min(_TINY).log() - rest_q.log())
    return inside + outside + rest


def acceptance(logits: Tensor, classes: Tensor, probs: Tensor) -> Tensor:
    """Probability that speculative sampling at temperature 1 accepts: the sum of min(target, draft) over tokens.

    The draft's distribution is the one it draws from, without the escape. Tokens beyond the target's likeliest are
    left out, so this is a lower bound.
    """
    q = torch.softmax(logits[:, :-1], dim=-1)
    is_listed = classes != logits.shape[-1] - 1
    q_top = q.gather(1, classes.clamp_max(q.shape[-1] - 1))
    return torch.minimum(probs * is_listed, q_top).sum(-1)


def position_losses(logits: Tensor, targets: Targets, stage: str) -> Tensor:
    """The loss of a stage: ``ce``, ``kl`` or ``lk`` (LK losses: -log of the acceptance rate).

    Positions where the target's probabilities are not known stay with cross entropy, and so does a fifth of the
    others, which keeps the likeliest token on top: with greedy decoding that alone counts. LK adds no divergence, but
    a small share of it for the escape, which acceptance does not see.
    """
    labels_loss = cross_entropy(logits, targets.labels)
    if stage == "ce" or not bool(targets.is_known.any()):
        return labels_loss
    kl = divergence(logits, targets.classes, targets.probs)
    if stage == "kl":
        taught = kl + 0.2 * labels_loss
    else:
        alpha = acceptance(logits, targets.classes, targets.probs)
        taught = -torch.log(alpha + _TINY) + 0.1 * kl + 0.2 * labels_loss
    return torch.where(targets.is_known, taught, labels_loss)

"""How much of the target's own answers a draft would have got right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.train.dataset import RowSet
from paceline.train.losses import acceptance
from paceline.train.network import DraftNetwork
from paceline.train.syntax import Role

HORIZONS = (4, 8)
_ROWS_AT_ONCE = 8
# How far into a draft a head is followed; later tokens are taken to be like the last of these.
_HEAD_DEPTHS = 4


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Agreement over the tokens the target wrote, each predicted from the true tokens before it.

    Under greedy decoding this is exactly what a run accepts, for a draft token counts only while all before it were
    right. (The engine rounds the draft's weights to 8 bits, which changes a little.)

    Attributes:
        num_tokens: how many tokens were predicted.
        greedy: share where the draft's likeliest token is the target's, each the first of a draft.
        sampled: mean of sum min(target, draft), the acceptance probability at temperature 1 (a lower bound).
        tokens_per_pass: tokens that a pass of the target yields if every draft has this many tokens.
        by_role: (number of tokens, greedy) for each role.
        by_depth: ``greedy`` for the first token of a draft, the second and so on. A head reads its own states from the
            second on; for a model all are alike, so there is one.
    """

    num_tokens: int
    greedy: float
    sampled: float
    tokens_per_pass: dict[int, float]
    by_role: dict[str, tuple[int, float]]
    by_depth: tuple[float, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


@torch.no_grad()
def evaluate(
    network: DraftNetwork,
    table: Tensor,
    rows: RowSet,
    *,
    window: int,
    device: torch.device,
    max_rows: int | None = None,
) -> Acceptance:
    """Score a draft on the positions of ``rows`` where the target's probabilities are known."""
    agrees: list[npt.NDArray[np.bool_]] = []  # for each answer [num_depths, num_tokens]
    sampled, roles = [], []
    num_rows = min(rows.num_rows, max_rows or rows.num_rows)
    for start in range(0, num_rows, _ROWS_AT_ONCE):
        batch = rows.batch(np.arange(start, min(start + _ROWS_AT_ONCE, num_rows)), device)
        hidden = network(
            table[batch.tokens].float(), batch.documents, window=window,
            states=batch.states.float() if batch.states is not None else None,
            num_steps=_HEAD_DEPTHS if batch.states is not None else 1,
        )  # fmt: skip
        known, targets = batch.targets.is_known, batch.targets
        logits = [network.logits(states[batch.asked]).float() for states in hidden]
        agreed = torch.stack([(scores[:, :-1].argmax(-1) == targets.labels) & known for scores in logits])
        sampled.append(acceptance(logits[0][known], targets.classes[known], targets.probs[known]).cpu().numpy())
        roles.append(batch.roles[known.cpu()].numpy())
        answers = (batch.documents + torch.arange(len(batch.documents), device=device)[:, None] * 2**16)[batch.asked]
        for answer in torch.unique(answers[known]):
            agrees.append(agreed[:, known & (answers == answer)].cpu().numpy())
    if not agrees:
        return Acceptance(0, 0.0, 0.0, dict.fromkeys(HORIZONS, 1.0), {})
    by_depth, all_roles = np.concatenate(agrees, axis=1), np.concatenate(roles)
    first = by_depth[0]
    return Acceptance(
        num_tokens=len(first),
        greedy=float(first.mean()),
        sampled=float(np.concatenate(sampled).mean()),
        tokens_per_pass={horizon: tokens_per_pass(agrees, horizon) for horizon in HORIZONS},
        by_role={
            role.name.lower(): (int((all_roles == role).sum()), float(first[all_roles == role].mean()))
            for role in Role
            if (all_roles == role).any()
        },
        by_depth=tuple(by_depth.mean(axis=1).tolist()),
    )


def tokens_per_pass(agrees: Sequence[npt.NDArray[np.bool_]], horizon: int) -> float:
    """Tokens by passes when ``horizon`` tokens are drafted each time: a pass yields the run of right ones, at most
    ``horizon``, and one token more.

    ``agrees`` has for each answer [num_depths, num_tokens] whether a token was predicted rightly as the first of a
    draft, the second and so on; what is deeper counts as the last.
    """
    tokens = passes = 0
    for agreed in agrees:
        deepest, size = len(agreed) - 1, agreed.shape[1]
        at = 0
        while at < size:
            run = 0
            while run < horizon and at + run < size and agreed[min(run, deepest), at + run]:
                run += 1
            at += run + 1
            passes += 1
        tokens += size
    return tokens / passes if passes else 1.0

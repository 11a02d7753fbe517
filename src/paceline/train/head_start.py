"""A head's first weights by least squares, which no number of training steps reaches as soon.

Before its final norm a head computes a sum: its two inputs, what attention adds, what the MLP adds. Each is linear in a
matrix, and what that multiplies is known: the target's states and embeddings, then what the target's last layer looks
at. So three ridge regressions, each on what those before left of the target's state, give the matrices that the
target's layer cannot lend.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own idiom
from torch import Tensor

from paceline.loader.draft import PROJECTION, STATE_PROJECTION
from paceline.train.dataset import Batch, RowSet, row_order
from paceline.train.network import ATTENTION_OUTPUT, MLP_OUTPUT, DraftNetwork, inverse, of_the_token_before, visible

_ROWS = 256
_ROWS_AT_ONCE = 8
_RIDGE = 1e-3  # of the mean square of the inputs
_SMALLEST_UNIT = 0.1
_LAYER = "model.layers.0."
_OUTPUTS = {"attention": f"{_LAYER}{ATTENTION_OUTPUT}", "mlp": f"{_LAYER}{MLP_OUTPUT}"}


@torch.no_grad()
def fit_to_states(network: DraftNetwork, table: Tensor, rows: RowSet, *, window: int, seed: int) -> None:
    """Solve for a head's projections and output matrices on some of ``rows``, which have the target's states.

    ``network`` comes from `initialise_from_target`; ``table`` is the target's embedding.
    """
    weights = network.named_tensors()
    chosen = row_order(rows.num_rows, min(_ROWS, rows.num_rows), 0, seed)
    for stage in ("input", "attention", "mlp"):
        squares, products, num_tokens = torch.zeros(()), torch.zeros(()), 0
        for start in range(0, len(chosen), _ROWS_AT_ONCE):
            batch = rows.batch(chosen[start : start + _ROWS_AT_ONCE], torch.device("cpu"))
            features, wanted = (
                values[batch.documents >= 0] for values in _equation(network, table, batch, window, stage)
            )
            squares = squares + (features.T @ features).double()
            products = products + (features.T @ wanted).double()
            num_tokens += len(features)
        if stage == "mlp":
            # Some units of a last layer are hundreds of times as large as others. As large as all others they do the
            # same, and a step of training does not tip over what hangs on them.
            sizes = (squares.diagonal() / num_tokens).sqrt().clamp_min(_SMALLEST_UNIT)
            squares, products = squares / (sizes[:, None] * sizes), products / sizes[:, None]
            weights[f"{_LAYER}mlp.up_proj.weight"].div_(sizes[:, None])
        ridge = torch.eye(len(squares)) * squares.diagonal().mean() * _RIDGE
        solution = torch.linalg.solve(squares + ridge, products).T
        if stage == "input":
            width = weights[STATE_PROJECTION].shape[1]
            weights[STATE_PROJECTION].copy_(solution[:, :width])
            weights[PROJECTION].copy_(solution[:, width:])
        else:
            weights[_OUTPUTS[stage]].copy_(solution)


def _equation(network: DraftNetwork, table: Tensor, batch: Batch, window: int, stage: str) -> tuple[Tensor, Tensor]:
    """What the matrix of a stage multiplies, and what should come out: [num_rows, row_tokens, width] each."""
    assert batch.states is not None
    weights = network.named_tensors()
    states = batch.states.float()
    wanted = states * inverse(weights["model.norm.weight"])
    before, embeddings = of_the_token_before(states, batch.documents), table[batch.tokens].float()
    if stage == "input":
        return torch.cat([before, embeddings], dim=-1), wanted
    x = F.linear(before, weights[STATE_PROJECTION]) + F.linear(embeddings, weights[PROJECTION])
    attended = network.attended(_LAYER, x, visible(batch.documents, window), [])
    if stage == "attention":
        return attended, wanted - x
    x = x + F.linear(attended, weights[_OUTPUTS["attention"]])
    return network.gated(_LAYER, x), wanted - x

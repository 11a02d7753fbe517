"""The closed forms of speculative decoding: how many drafts survive, and what a round is worth.

Source: Leviathan, Kalman and Matias, "Fast Inference from Transformers via Speculative Decoding", arXiv 2211.17192
(theorem 3.8 for a constant acceptance; corollary 3.9 and appendix for the best horizon). Two generalisations are
used here: acceptance may differ by position, and verifying gamma + 1 rows may cost more than verifying one
(``verify_cost``), which is what decides the horizon on a CPU.

In formulas gamma is the horizon, alpha the probability that a draft token is accepted given that all before it were,
r the cost of one draft token and v the cost of one verify pass, both in units of one plain decoding step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from paceline.errors import InvalidParameterError


def expected_accepted(alphas: Sequence[float]) -> float:
    """E[K]: the expected number of accepted drafts, sum over i of prod over j <= i of alpha_j.

    ``alphas[i]`` is the acceptance of draft i given that drafts 0 to i - 1 were accepted; empty means no drafting.

    Raises:
        InvalidParameterError: an alpha outside [0, 1].
    """
    total = 0.0
    survival = 1.0
    for alpha in alphas:
        _require_probability(alpha)
        survival *= alpha
        total += survival
    return total


def expected_accepted_constant(alpha: float, horizon: int) -> float:
    """E[K] for the same alpha at every position: alpha (1 - alpha^gamma) / (1 - alpha), and gamma at alpha = 1.

    Raises:
        InvalidParameterError: alpha outside [0, 1] or a negative horizon.
    """
    _require_probability(alpha)
    _require_horizon(horizon)
    if alpha == 1.0:
        return float(horizon)
    return alpha * (1.0 - alpha**horizon) / (1.0 - alpha)


def speedup(alphas: Sequence[float], cost_ratio: float, verify_cost: float = 1.0) -> float:
    """Tokens per cost against plain decoding: (E[K] + 1) / (gamma r + v), with gamma = len(alphas).

    Raises:
        InvalidParameterError: an alpha outside [0, 1], a negative cost ratio, a verify cost of 0 or less.
    """
    return _speedup(expected_accepted(alphas), len(alphas), cost_ratio, verify_cost)


def speedup_constant(alpha: float, horizon: int, cost_ratio: float, verify_cost: float = 1.0) -> float:
    """:func:`speedup` for the same alpha at every position.

    Raises:
        InvalidParameterError: see :func:`speedup`; a negative horizon.
    """
    return _speedup(expected_accepted_constant(alpha, horizon), horizon, cost_ratio, verify_cost)


def best_horizon(alpha: float, cost_ratio: float, max_horizon: int, verify_costs: Sequence[float] | None = None) -> int:
    """The horizon from 0 (no drafting) to ``max_horizon`` with the highest speedup; the shortest one on a tie.

    ``verify_costs[gamma]`` is the cost of a pass over gamma + 1 rows in units of a pass over one row; None means that
    rows are free (1 everywhere), as on an idle accelerator.

    Raises:
        InvalidParameterError: see :func:`speedup`; fewer than ``max_horizon + 1`` verify costs.
    """
    _require_horizon(max_horizon)
    if verify_costs is None:
        verify_costs = [1.0] * (max_horizon + 1)
    if len(verify_costs) <= max_horizon:
        raise InvalidParameterError(
            f"verify_costs needs an entry for each horizon from 0 to {max_horizon}, got {len(verify_costs)}"
        )
    speedups = [speedup_constant(alpha, h, cost_ratio, verify_costs[h]) for h in range(max_horizon + 1)]
    return max(range(max_horizon + 1), key=speedups.__getitem__)


def _speedup(num_accepted: float, horizon: int, cost_ratio: float, verify_cost: float) -> float:
    if not 0.0 <= cost_ratio < math.inf:
        raise InvalidParameterError(f"the cost ratio must be 0 or more, got {cost_ratio}")
    if not 0.0 < verify_cost < math.inf:
        raise InvalidParameterError(f"the verify cost must be above 0, got {verify_cost}")
    return (num_accepted + 1.0) / (horizon * cost_ratio + verify_cost)


def _require_probability(alpha: float) -> None:
    if not 0.0 <= alpha <= 1.0:
        raise InvalidParameterError(f"an acceptance rate must be in [0, 1], got {alpha}")


def _require_horizon(horizon: int) -> None:
    if horizon < 0:
        raise InvalidParameterError(f"a horizon must be 0 or more, got {horizon}")

"""``paceline theory``: what speculation can gain, by the textbook."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from paceline import theory as formulas
from paceline.errors import InvalidParameterError
from paceline.request import MAX_SPEC_TOKENS


def theory(
    alpha: Annotated[float, typer.Option(help="Acceptance rate of one draft token, 0 to 1.")] = 0.85,
    r: Annotated[float, typer.Option(help="Time of one draft token / time of one target pass.")] = 0.08,
    max_horizon: Annotated[int, typer.Option(help=f"Longest horizon shown, 1 to {MAX_SPEC_TOKENS}.")] = 10,
) -> None:
    """Print expected accepted tokens and speedup by horizon, and the best horizon.

    E[K] = sum over i of alpha^i, the expected number of accepted tokens; speedup = (E[K] + 1) / (gamma r + 1).
    """
    if not 1 <= max_horizon <= MAX_SPEC_TOKENS:
        raise InvalidParameterError(f"--max-horizon must be from 1 to {MAX_SPEC_TOKENS}, got {max_horizon}")
    best = formulas.best_horizon(alpha, r, max_horizon)
    table = Table(title=f"Speculation at alpha = {alpha:g}, r = {r:g}", caption=f"best horizon: {best}")
    for heading in ("horizon", "E[K]", "tokens per pass", "speedup"):
        table.add_column(heading, justify="right")
    for gamma in range(max_horizon + 1):
        alphas = [alpha] * gamma
        expected = formulas.expected_accepted(alphas)
        speedup = formulas.speedup(alphas, r)
        style = "bold" if gamma == best else None
        table.add_row(f"{gamma}", f"{expected:.2f}", f"{expected + 1:.2f}", f"{speedup:.2f}x", style=style)
    Console().print(table)

"""``paceline pull``: fetch a catalog model before it is needed."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from paceline.cli.options import DEFAULT_MODEL


def pull_model(name: Annotated[str, typer.Argument(help="Catalog name.")] = DEFAULT_MODEL) -> None:
    """Fetch a model of the catalog into PACELINE_HOME and check it; safe to repeat and to interrupt."""
    from paceline.loader.pull import pull

    path = pull(name, console=Console(stderr=True))
    print(path)

"""The ``paceline`` command: parse, call, print. Errors of the user become one line and exit status 2."""

from __future__ import annotations

import os
import sys
import warnings

import typer

from paceline.cli import bench, chat, env, pull, run, serve, theory, train_draft, verify
from paceline.errors import PacelineError

app = typer.Typer(
    name="paceline",
    help="Low-latency LLM inference for coding agents: the same text, sooner.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("run")(run.run)
app.command("chat")(chat.chat)
app.command("serve")(serve.serve)
app.command("bench")(bench.bench)
app.command("train-draft")(train_draft.train_draft)
app.command("pull")(pull.pull_model)
app.command("verify")(verify.verify)
app.command("theory")(theory.theory)
app.command("env")(env.show_env)


def main() -> None:
    """Entry point of the console script; interrupts and closed pipes are typer's to handle."""
    # torch is not imported yet. Its OpenMP threads spin while they wait, which on a machine that also runs tests or an
    # editor makes a pass many times slower (docs/decisions/0011).
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    warnings.formatwarning = lambda message, *_, **__: f"paceline: warning: {message}\n"
    try:
        app()
    except PacelineError as error:
        print(f"paceline: {error}", file=sys.stderr)
        sys.exit(2)

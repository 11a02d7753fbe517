"""Record what the target says on the benchmark's tasks, and rank drafting rules on it without running the target again.

python -m paceline.bench.score record TRACE --tasks 10 --draft auto
python -m paceline.bench.score rank TRACE --rules "dynamic:8 dynamic:16 dynamic:16:0.868 static:4"
python -m paceline.bench.score rank TRACE --rules dynamic:16 --positions --calibration
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from paceline.bench import measure
from paceline.bench.recorded import RecordedProposer, record_drafts
from paceline.bench.records import TurnRecord
from paceline.bench.replay import PassCost, make_ladder, replay_trace
from paceline.bench.trace import TraceTurn, read_trace, record_task, write_trace
from paceline.errors import InvalidParameterError, PacelineError
from paceline.loader.tokenizer import Tokenizer
from paceline.request import DRAFTERS, Speculation
from paceline.spec.calibration import Calibration, CalibrationError
from paceline.spec.costs import StepCosts

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False)

Model = Annotated[str, typer.Option("--model", "-m", help="As for every command.")]


@app.command()
def record(
    trace: Annotated[Path, typer.Argument(help="The file to write; tasks it already holds are skipped.")],
    tasks: Annotated[int, typer.Option("--tasks", help="A stratified choice of so many.")] = 10,
    suite: Annotated[str, typer.Option("--suite", help="agent or humaneval.")] = "agent",
    seed: Annotated[int, typer.Option("--seed", help="Which tasks are chosen.")] = 0,
    model: Model = "smollm2-135m",
    draft: Annotated[
        str, typer.Option("--draft", help="A draft model to record beside; auto, none or a path.")
    ] = "none",
) -> None:
    """Run tasks and write every token the target chose, with the likeliest alternatives."""
    from paceline.bench.suite import load_suite, stratified
    from paceline.engine.engine import Engine
    from paceline.loader.catalog import paceline_home

    done = {turn.task_id for turn in read_trace(trace)} if trace.exists() else set()
    console = Console()
    with Engine(model, draft=draft if draft != "none" else None) as engine:
        recorder = record_drafts(engine) if draft != "none" else None
        for task in stratified(load_suite(suite, home=paceline_home()), tasks, seed):
            if task.task_id not in done:
                turns = list(record_task(task, engine, recorder=recorder))
                write_trace(trace, turns)
                console.print(f"{task.task_id}: {sum(len(turn.token_ids) for turn in turns)} tokens")


@app.command()
def rank(
    trace: Annotated[Path, typer.Argument(help="What record wrote.")],
    rules: Annotated[
        str, typer.Option("--rules", help="MODE:MAX_TOKENS[:MIN_ACCEPTANCE[:DRAFTERS]], apart by blanks.")
    ] = "static:4 static:8 dynamic:8 dynamic:16 dynamic:32 dynamic:16:0.868",
    rows: Annotated[
        str, typer.Option("--rows", help="Measured milliseconds by rows, ROWS=MS,...; see paceline.bench.forward.")
    ] = "",
    overhead_ms: Annotated[float, typer.Option("--overhead", help="ms of a step beside the pass.")] = 0.3,
    draft_cost: Annotated[
        float, typer.Option("--draft-cost", help="A token of the recorded draft model, in passes of one row.")
    ] = 0.08,
    positions: Annotated[bool, typer.Option("--positions", help="Acceptance by position of the last rule.")] = False,
    calibration: Annotated[bool, typer.Option("--calibration", help="What the last rule learnt, by bin.")] = False,
    model: Model = "smollm2-135m",
) -> None:
    """Tokens per pass, acceptance and predicted speedup of each rule."""
    from paceline.loader.resolve import resolve_source

    turns, tokenizer = read_trace(trace), _tokenizer(resolve_source(model))
    cost = pass_cost(rows)
    table = Table("rule", "speedup", "acceptance", "tokens/pass", "mean horizon", "calibration error", "sources")
    console = Console(width=160)
    records: list[TurnRecord] = []
    has_drafts = any(turn.drafts for turn in turns)
    ladder = make_ladder(tokenizer)
    for rule in rules.split():
        recorded = RecordedProposer(draft_cost * cost(1, 0)) if has_drafts else None
        ladder = make_ladder(tokenizer, recorded)
        replayed = replay_trace(
            turns, parse_rule(rule), tokenizer, cost, overhead_ms=overhead_ms, ladder=ladder, recorded=recorded
        )
        records = list(replayed)
        table.add_row(rule, *_cells(records, turns, cost, overhead_ms))
    console.print(table)
    if positions:
        console.print(_positions(records))
    if calibration:
        console.print(_learnt(ladder.calibration))


def parse_rule(text: str) -> Speculation:
    """``dynamic:16:0.868:suffix,corpus`` and shorter.

    Raises:
        InvalidParameterError: it is not of that form, or a part is out of range.
    """
    mode, *rest = text.split(":")
    try:
        max_tokens = int(rest[0]) if rest else 8
        min_acceptance = float(rest[1]) if len(rest) > 1 else 0.0
    except ValueError:
        raise InvalidParameterError(f"a rule looks like dynamic:16:0.868, got {text!r}") from None
    drafters = tuple(rest[2].split(",")) if len(rest) > 2 else DRAFTERS
    return Speculation(mode, max_tokens, drafters, min_acceptance)  # type: ignore[arg-type]


def pass_cost(rows: str) -> PassCost:
    """A cost model from measured ``ROWS=MS`` pairs (at a short context); the engine's prior without any.

    Between row counts it is linear; the context adds the share it has in the engine's prior.

    Raises:
        InvalidParameterError: a pair is malformed, or one row is not among them.
    """
    prior = StepCosts()
    if not rows:
        return lambda num_rows, context: 6.5 * prior.verify_ms(num_rows, context)
    try:
        pairs = sorted((int(left), float(right)) for left, right in (part.split("=") for part in rows.split(",")))
    except ValueError:
        raise InvalidParameterError(f"--rows looks like 1=6.5,8=8.9,16=15.1, got {rows!r}") from None
    if len(pairs) < 2 or pairs[0][0] != 1:
        raise InvalidParameterError("--rows needs 1 row and at least one more count")

    def cost(num_rows: int, context: int) -> float:
        last = max(1, min(len(pairs) - 1, sum(count < num_rows for count, _ in pairs)))
        (low, low_ms), (high, high_ms) = pairs[last - 1], pairs[last]
        return (low_ms + (num_rows - low) / (high - low) * (high_ms - low_ms)) * prior.plain_ms(context)

    return cost


def _tokenizer(source: Path) -> Tokenizer:
    if source.is_dir():
        return Tokenizer.from_file(source)
    from paceline.loader.gguf_file import GgufFile

    return Tokenizer.from_gguf(GgufFile(source).metadata)


def _cells(records: Sequence[TurnRecord], turns: Sequence[TraceTurn], cost: PassCost, overhead_ms: float) -> list[str]:
    steps = [step for record in records for step in record.steps[1:]]
    plain_ms = sum(
        cost(1, len(turn.prompt_token_ids) + at) + overhead_ms for turn in turns for at in range(1, len(turn.token_ids))
    )
    error = CalibrationError()
    for step in steps:
        error.add(step.expected_acceptances, step.num_accepted)
    sources = {
        source: (sum(step.num_accepted for step in rounds), sum(step.num_drafted for step in rounds))
        for source, rounds in measure.rounds_by_source(records).items()
    }
    return [
        f"{plain_ms / sum(step.ms for step in steps):.3f}",
        f"{measure.acceptance_rate(steps):.1%}",
        f"{sum(step.num_tokens for step in steps) / len(steps):.2f}",
        f"{measure.mean_horizon(records):.2f}",
        f"{error.value:.3f}" if error.value is not None else "-",
        ", ".join(f"{source} {accepted}/{drafted}" for source, (accepted, drafted) in sources.items()),
    ]


def _positions(records: Sequence[TurnRecord]) -> Table:
    table = Table("position", "drafted", "conditional", "survival", title="acceptance by position")
    for each in measure.acceptance_by_position(records):
        conditional = f"{each.conditional:.1%}" if each.conditional is not None else "-"
        table.add_row(str(each.position), str(each.num_drafted), conditional, f"{each.survival:.1%}")
    return table


def _learnt(calibration: Calibration) -> Table:
    table = Table("source", "kind", "acceptance by bin of match length", title="learnt")
    for (source, kind), values in sorted(calibration.table().items()):
        table.add_row(source, kind, ", ".join(f"{value:.2f}" for value in values))
    return table


if __name__ == "__main__":
    try:
        app()
    except PacelineError as error:
        raise SystemExit(f"paceline: {error}") from None

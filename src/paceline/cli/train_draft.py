"""``paceline train-draft``: a compact draft for a target, trained here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from paceline.cli import options
from paceline.errors import BenchmarkError, InvalidParameterError

if TYPE_CHECKING:
    from paceline.engine.engine import Engine
    from paceline.train.evaluation import Acceptance
    from paceline.train.near_duplicates import HeldOutTexts
    from paceline.train.pipeline import TrainingRun

_NONE = "none"


def train_draft(
    out: Annotated[Path, typer.Argument(help="Folder for the trained draft; give it to --draft afterwards.")],
    kind: Annotated[
        str, typer.Option("--kind", help="model: a small one by itself. head: a layer fed by the target.")
    ] = "model",
    repo: Annotated[Path | None, typer.Option("--repo", help="Learn from this git repository's files too.")] = None,
    init: Annotated[
        Path | None,
        typer.Option("--init", help="Go on from this trained draft, or 'auto': the one that goes with the model."),
    ] = None,
    data: Annotated[
        str, typer.Option("--data", metavar="LIST", help="Public code to learn from: stdlib, installed, or none.")
    ] = "stdlib,installed",
    exclude: Annotated[
        list[str] | None, typer.Option("--exclude", metavar="PACKAGE", help="Leave a package out; repeatable.")
    ] = None,
    keep_out: Annotated[
        str, typer.Option("--keep-out", metavar="LIST", help="Benchmarks that must not occur in the data, or none.")
    ] = "agent,humaneval",
    answers: Annotated[int, typer.Option("--answers", metavar="N", help="Prompts that the target answers.")] = 4000,
    corpus_tokens: Annotated[
        int, typer.Option("--corpus-tokens", metavar="N", help="Source code to use, in tokens.")
    ] = 4_000_000,
    syntax: Annotated[
        str, typer.Option("--syntax", metavar="LIST", help="Uses of syntax trees, or none for plain text.")
    ] = "windows,completion,continuation,edits,roles",
    losses: Annotated[
        str, typer.Option("--losses", metavar="LIST", help="Stages of training: ce, kl, lk.")
    ] = "ce,kl,lk",
    steps: Annotated[int | None, typer.Option("--steps", metavar="N", help="Optimiser steps.")] = None,
    time_budget: Annotated[
        float | None, typer.Option("--time-budget", metavar="MINUTES", help="Train this long instead.")
    ] = None,
    hidden_size: Annotated[
        int | None,
        typer.Option("--hidden-size", metavar="N", help="Width of a model, 256 if not given.", rich_help_panel="Draft"),
    ] = None,
    layers: Annotated[
        int | None,
        typer.Option("--layers", metavar="N", help="Depth of a model, 4 if not given.", rich_help_panel="Draft"),
    ] = None,
    vocab_size: Annotated[
        int, typer.Option("--vocab-size", metavar="N", help="Tokens that it speaks.", rich_help_panel="Draft")
    ] = 8192,
    window: Annotated[
        int, typer.Option("--window", metavar="N", help="Newest tokens that it sees.", rich_help_panel="Draft")
    ] = 256,
    row_tokens: Annotated[
        int, typer.Option("--row-tokens", metavar="N", help="Length of a row.", rich_help_panel="Optimiser")
    ] = 512,
    batch_rows: Annotated[
        int, typer.Option("--batch-rows", metavar="N", help="Rows in a step.", rich_help_panel="Optimiser")
    ] = 16,
    learning_rate: Annotated[
        float | None,
        typer.Option(
            "--learning-rate",
            help="At its peak; 0.002 for a model and 0.0008 for a head if not given.",
            rich_help_panel="Optimiser",
        ),
    ] = None,
    unroll: Annotated[
        int,
        typer.Option(
            "--unroll", metavar="N", help="Tokens that a head drafts in a row in training.", rich_help_panel="Optimiser"
        ),
    ] = 3,
    seed: Annotated[
        int, typer.Option("--seed", help="Choice and order of everything.", rich_help_panel="Optimiser")
    ] = 0,
    work: Annotated[
        Path | None, typer.Option("--work", help="Folder of rows and checkpoint; OUT.work without it.")
    ] = None,
    model: options.Model = options.DEFAULT_MODEL,
    device: options.Device = "auto",
    dtype: options.DType = "auto",
    backend: options.Backend = "auto",
    threads: options.Threads = None,
) -> None:
    """Train a compact draft for a target, from the target's own answers and the structure of code.

    Interrupted, it goes on from its last checkpoint when it is started again with the same options.
    """
    from paceline.loader.catalog import paceline_home
    from paceline.loader.resolve import resolve_source
    from paceline.train.device import prepare_device
    from paceline.train.pipeline import Sources, TrainingRun
    from paceline.train.recipe import LEARNING_RATES, DraftShape, Recipe

    if kind == "head" and (hidden_size is not None or layers is not None):
        raise InvalidParameterError(
            "--hidden-size and --layers are a model's; a head is one layer of the target's width"
        )
    recipe = Recipe(
        kind=kind,  # type: ignore[arg-type]
        shape=DraftShape.of_width(
            hidden_size if hidden_size is not None else 256, layers if layers is not None else 4, vocab_size, window
        ),
        data=_names(data),
        syntax=_names(syntax),
        losses=_names(losses),
        num_answers=answers,
        corpus_tokens=corpus_tokens,
        steps=steps,
        minutes=time_budget,
        row_tokens=row_tokens,
        batch_rows=batch_rows,
        learning_rate=learning_rate if learning_rate is not None else LEARNING_RATES.get(kind, 0.0),
        unroll=unroll,
        seed=seed,
    )
    notes = Console(stderr=True)
    kept_out, packages = _benchmarks(_names(keep_out), notes)
    folder = work or out.with_name(f"{out.name}.work")
    folder.mkdir(parents=True, exist_ok=True)
    start = _shipped_draft(model) if init == Path("auto") else init
    sources = Sources(repository=repo, excluded=[*packages, *(exclude or [])], benchmarks=kept_out, start=start)
    training = TrainingRun(
        resolve_source(model),
        recipe,
        sources,
        work=folder,
        answers=paceline_home() / "train" / "answers",
        device=prepare_device(device, threads),
    )

    def make_engine() -> Engine:
        return options.make_engine(
            model,
            _NONE,
            device=device,
            dtype=dtype,
            backend=backend,
            threads=threads,
            max_model_len=None,
            block_size=16,
            kv_memory=None,
        )

    _prepare(training, make_engine, notes)
    _train(training, make_engine, notes)
    acceptance = training.export(out)
    _print_acceptance(acceptance)
    notes.print(f"wrote {out}; use it with: paceline run --draft {out}")


def _shipped_draft(model: str) -> Path:
    from paceline.loader.catalog import draft_of

    draft = draft_of(model)
    if draft is None:
        raise InvalidParameterError(f"no draft goes with {model}; give --init the folder of one")
    return draft


def _prepare(training: TrainingRun, make_engine: Callable[[], Engine], notes: Console) -> None:
    with notes.status("reading source files"):
        counts = training.read_files()
    notes.print("source files: " + ", ".join(f"{value} {name}" for name, value in counts.items()))
    with _bar(notes) as bar:
        task = bar.add_task("the target answers", total=training.num_questions)
        for done in training.ask_target(make_engine):
            bar.update(task, completed=done)
        bar.update(task, completed=training.num_questions)
    with notes.status("making training examples"):
        rows = training.build_rows()
    notes.print("training data: " + ", ".join(f"{value:,} {name.replace('_', ' ')}" for name, value in rows.items()))


def _train(training: TrainingRun, make_engine: Callable[[], Engine], notes: Console) -> None:
    columns = (
        TextColumn("training"),
        BarColumn(),
        TextColumn("step {task.fields[step]}  {task.fields[stage]} loss {task.fields[loss]:.3f}"),
        TextColumn("held-out acceptance {task.fields[acceptance]:.1%}  {task.fields[speed]:.0f} tokens/s"),
        TextColumn("{task.fields[left]} left"),
    )
    with Progress(*columns, console=notes) as bar:
        task = bar.add_task("", total=1.0, step=0, stage="", loss=0.0, acceptance=0.0, speed=0.0, left="?")
        for at in training.train(make_engine):
            bar.update(
                task,
                completed=at.share,
                step=at.step,
                stage=at.stage,
                loss=at.loss,
                acceptance=at.acceptance.greedy if at.acceptance is not None else 0.0,
                speed=at.tokens_per_s,
                left=_duration(at.seconds_left),
            )


def _bar(notes: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=notes)


def _benchmarks(names: Sequence[str], notes: Console) -> tuple[HeldOutTexts | None, list[str]]:
    """The texts of the named suites, and the packages they were made from."""
    from paceline.bench.suite.manifest import Manifest
    from paceline.bench.suite.suite import SUITES, load_suite
    from paceline.loader.catalog import paceline_home
    from paceline.train.near_duplicates import HeldOutTexts

    if not names:
        return None, []
    for name in names:
        if name not in SUITES:
            raise InvalidParameterError(f"--keep-out knows {', '.join(SUITES)}, or {_NONE}; got {name!r}")
    texts: list[str] = []
    for name in names:
        try:
            tasks = load_suite(name, home=paceline_home(), progress=lambda what, *_: notes.print(f"fetching {what}"))
        except BenchmarkError as error:
            raise BenchmarkError(f"{error}; or train with --keep-out {_NONE}") from error
        for task in tasks:
            for turn in task.turns:
                # Questions and answers; what stands before them is the same in every task.
                texts += [turn.gold, *(item["content"] for item in turn.messages if item["role"] != "system")]
    packages = [item.requirement.partition("==")[0] for item in Manifest.shipped().sources] if "agent" in names else []
    return HeldOutTexts(texts), packages


def _print_acceptance(acceptance: Acceptance) -> None:
    table = Table(title=f"acceptance on {acceptance.num_tokens:,} held-out tokens of the target")
    table.add_column("")
    table.add_column("tokens", justify="right")
    table.add_column("accepted", justify="right")
    table.add_row("all, greedy", f"{acceptance.num_tokens:,}", f"{acceptance.greedy:.1%}")
    table.add_row("all, temperature 1", f"{acceptance.num_tokens:,}", f"{acceptance.sampled:.1%}")
    for role, (count, share) in acceptance.by_role.items():
        table.add_row(role.replace("_", " "), f"{count:,}", f"{share:.1%}")
    for depth, share in enumerate(acceptance.by_depth[1:], start=2):
        table.add_row(f"token {depth} of a draft", f"{acceptance.num_tokens:,}", f"{share:.1%}")
    for horizon, tokens in acceptance.tokens_per_pass.items():
        table.add_row(f"tokens per pass, horizon {horizon}", "", f"{tokens:.2f}")
    Console(stderr=True).print(table)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip() and name.strip() != _NONE)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"

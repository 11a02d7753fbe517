"""``paceline bench``: agent coding tasks through several arms, and a report."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from paceline.bench.arms import DEFAULT_ARMS, QUICK_ARMS, Arm, parse_arms
from paceline.cli import options
from paceline.errors import InvalidParameterError

if TYPE_CHECKING:
    from paceline.bench.arms import CacheKind
    from paceline.bench.drive import Mode, Runner
    from paceline.bench.peers.runner import PeerRunner
    from paceline.bench.records import Task, TurnRecord
    from paceline.bench.results import RunInfo
    from paceline.engine.engine import Engine
    from paceline.errors import BenchmarkError

QUICK_TASKS = 5
# None: gold replay, which runs no target.
MODES: dict[str, Mode | None] = {"scripted": "scripted", "free": "free", "gold": None}


def bench(
    suite: Annotated[
        str, typer.Option("--suite", help="agent, humaneval, or a JSONL file of questions (MT-bench, Spec-Bench).")
    ] = "agent",
    git: Annotated[
        Path | None, typer.Option("--git", help="Build the tasks from this git repository's history instead.")
    ] = None,
    tasks: Annotated[
        int | None, typer.Option("--tasks", metavar="N", help="A stratified choice of N tasks; all without it.")
    ] = None,
    arms: Annotated[
        str | None, typer.Option("--arms", metavar="LIST", help="autoregressive, static-4, suffix, dynamic, ...")
    ] = None,
    peers: Annotated[
        str,
        typer.Option(
            "--peers", metavar="LIST", help="Other engines beside: llama-cpp, openvino, transformers, or single arms."
        ),
    ] = "",
    mode: Annotated[
        str, typer.Option("--mode", help="scripted: gold history; free: own answers; gold: proposers against gold.")
    ] = "scripted",
    quick: Annotated[bool, typer.Option("--quick", help=f"{QUICK_TASKS} tasks, three arms, a few minutes.")] = False,
    seed: Annotated[int, typer.Option("--seed", help="Order of tasks and arms, and which are chosen.")] = 0,
    out: Annotated[Path, typer.Option("--out", help="Folder of the log, the report and the summary.")] = Path("bench"),
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the summary to this file.")] = None,
    model: options.Model = options.DEFAULT_MODEL,
    draft: options.Draft = "auto",
    device: options.Device = "auto",
    dtype: options.DType = "auto",
    backend: options.Backend = "auto",
    threads: options.Threads = None,
    max_model_len: options.MaxModelLen = None,
    block_size: options.BlockSize = 16,
    kv_cache_dtype: options.KVCacheDType = "auto",
) -> None:
    """Measure how much sooner agent turns are done, arm by arm, on the same tokens.

    An interrupted run continues where it stopped when it is started again with the same folder.
    """
    from paceline.bench.peers.catalog import parse_peers
    from paceline.bench.report.write import write_report
    from paceline.bench.results import read_records, summarise

    chosen = parse_arms(arms or ",".join(QUICK_ARMS if quick else DEFAULT_ARMS))
    if mode not in MODES:
        raise InvalidParameterError(f"--mode must be one of {', '.join(MODES)}, got {mode!r}")
    rivals = parse_peers(peers)
    if rivals and mode != "scripted":
        raise InvalidParameterError("--peers needs --mode scripted, so that all engines answer the same prompts")
    notes = Console(stderr=True)
    workload = _load_tasks(suite, git, tasks or (QUICK_TASKS if quick else None), seed, notes)
    engines = _Engines(
        model,
        draft,
        {
            "device": device,
            "dtype": dtype,
            "backend": backend,
            "threads": threads,
            "kv_memory": None,
            "kv_cache_dtype": kv_cache_dtype,
        },
        max_model_len=max_model_len,
        block_size=block_size,
    )
    settings = {
        "suite": str(git or suite),
        "mode": mode,
        "seed": seed,
        "model": model,
        "draft": draft,
        "arms": [arm.name for arm in chosen],
        "peers": rivals,
        "tasks": [task.task_id for task in workload],
    }
    log = _open_log(out, settings)
    try:
        info = _run(workload, chosen, rivals, engines, MODES[mode], seed, log, notes)
    finally:
        engines.close()
    info = replace(info, suite=f"{git or suite}: {info.suite}")
    records = read_records(log)
    summary = summarise(records, info)
    paths = write_report(summary, records, out)
    if json_file is not None:
        json_file.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    Console().print((out / "report.md").read_text(encoding="utf-8"), markup=False, highlight=False, soft_wrap=True)
    notes.print(f"wrote {', '.join(str(path) for path in paths)}")


class _Engines:
    """One engine per kind of cache, made when an arm first needs it."""

    def __init__(
        self, model: str, draft: str, machine: dict[str, Any], *, max_model_len: int | None, block_size: int
    ) -> None:
        self.model, self._draft, self._machine = model, draft, machine
        self._max_model_len, self._block_size = max_model_len, block_size
        self._made: dict[CacheKind, Engine] = {}

    def get(self, kind: CacheKind) -> Engine:
        """The engine of this kind of cache."""
        if kind not in self._made:
            if kind == "paged":
                self._made[kind] = self._make(self._block_size, self._max_model_len)
            else:
                # One block as long as the context is one contiguous buffer per request.
                length = self.get("paged").info.max_model_len
                self._made[kind] = self._make(length, length, enable_prefix_cache=False)
        return self._made[kind]

    def close(self) -> None:
        """Close all that were made."""
        for engine in self._made.values():
            engine.close()

    def _make(self, block_size: int, max_model_len: int | None, **extra: Any) -> Engine:
        return options.make_engine(
            self.model, self._draft, block_size=block_size, max_model_len=max_model_len, **self._machine, **extra
        )


def _run(
    workload: Sequence[Task],
    arms: Sequence[Arm],
    peers: Sequence[str],
    engines: _Engines,
    mode: Mode | None,
    seed: int,
    log: Path,
    notes: Console,
) -> RunInfo:
    """Run what the log does not hold yet, append it task by task, and say what was run on; mode None is gold replay."""
    import torch

    from paceline.bench.machine import Machine
    from paceline.bench.measure import KVLayout
    from paceline.bench.results import RunInfo, append_records, read_records

    done = {(record.arm, record.task_id) for record in read_records(log)}
    not_run: dict[str, str] = {}
    with ExitStack() as stack:
        runners = _start_peers(peers, engines, notes, stack, not_run) if peers else {}
        everyone = [*arms, *(runner.arm for runner in runners.values())]
        if mode is None:
            batches = _replay(workload, arms, engines, done)
        else:
            batches = _serve(workload, everyone, runners, engines, mode, seed, done, notes, not_run)
        total = len(workload) * len(everyone)
        with Progress(*_COLUMNS, console=notes) as progress:
            bar = progress.add_task("tasks x arms", total=total, completed=min(len(done), total))
            for batch in batches:
                append_records(log, batch)
                progress.advance(bar)
    info = engines.get("paged").info
    bytes_per_slot = info.kv_bytes // (info.num_blocks * info.block_size)
    slots = {"paged": info.block_size, "contiguous": info.max_model_len}
    return RunInfo(
        machine=Machine.here(num_threads=torch.get_num_threads(), accelerator=None),
        model=info.model,
        draft=info.draft,
        suite=f"{len(workload)} tasks, {mode or 'gold replay'}",
        kv_budget_bytes=info.kv_bytes,
        layouts={arm.name: KVLayout(slots[arm.cache], bytes_per_slot) for arm in arms},
        not_run=not_run,
    )


_COLUMNS = (
    TextColumn("{task.description}"),
    BarColumn(),
    MofNCompleteColumn(),
    TimeElapsedColumn(),
    TextColumn("left"),
    TimeRemainingColumn(),
)


def _replay(
    workload: Sequence[Task], arms: Sequence[Arm], engines: _Engines, done: Collection[tuple[str, str]]
) -> Iterator[list[TurnRecord]]:
    """The drafters against the recorded answers."""
    from paceline.bench.replay import replay_task

    engine = engines.get("paged")
    for task in workload:
        for arm in arms:
            if (arm.name, task.task_id) not in done:
                yield list(replay_task(task, arm, engine.tokenizer, engine.chat_template))


def _serve(
    workload: Sequence[Task],
    arms: Sequence[Arm],
    peers: Mapping[str, Runner],
    engines: _Engines,
    mode: Mode,
    seed: int,
    done: Collection[tuple[str, str]],
    notes: Console,
    not_run: dict[str, str],
) -> Iterator[list[TurnRecord]]:
    """This engine's arms and the peers', side by side; an arm that fails on the way joins ``not_run``."""
    from paceline.bench.drive import EngineRunner, run_suite
    from paceline.bench.peers.runner import RunnerByArm

    def leave_out(arm: Arm, error: BenchmarkError) -> None:
        not_run[arm.name] = f"stopped during the run: {error}"
        notes.print(f"{arm.name} is left out: {error}", markup=False)

    own = EngineRunner({arm.cache: engines.get(arm.cache) for arm in arms if arm.name not in peers})
    own.warm_up()
    return run_suite(
        RunnerByArm(own, peers),
        workload,
        arms,
        mode=mode,
        seed=seed,
        done=done,
        on_dropped=leave_out,
    )


def _start_peers(
    names: Sequence[str], engines: _Engines, notes: Console, stack: ExitStack, not_run: dict[str, str]
) -> dict[str, PeerRunner]:
    """The runners of all peer arms that can run, by arm name; the others join ``not_run``."""
    import torch

    from paceline.bench.peers.make import make_peer_runners
    from paceline.loader.resolve import resolve_source

    length = engines.get("paged").info.max_model_len
    runners, reasons = make_peer_runners(
        names,
        model_path=resolve_source(engines.model),
        num_threads=torch.get_num_threads(),
        console=notes,
        context_length=length,
    )
    not_run.update(reasons)
    for runner in runners.values():
        stack.callback(runner.close)
    return runners


def _load_tasks(suite: str, git: Path | None, count: int | None, seed: int, notes: Console) -> list[Task]:
    from paceline.bench.suite import build_from_git, load_questions, load_suite, stratified
    from paceline.loader.catalog import paceline_home

    if git is not None:
        return build_from_git(git, count or 10, seed)
    path = Path(suite)
    if path.suffix in (".jsonl", ".json"):
        workload = load_questions(path)
    else:
        with notes.status(f"building the suite {suite} ...") as status:
            workload = load_suite(
                suite,
                home=paceline_home(),
                progress=lambda what, done, total: status.update(f"{what} ({done} of {total}) ..."),
            )
    return workload if count is None or count >= len(workload) else stratified(workload, count, seed)


def _open_log(out: Path, settings: dict[str, Any]) -> Path:
    """The log in ``out``; a log of other settings is refused, because its turns could not be compared.

    Raises:
        InvalidParameterError: the folder holds a run of other settings.
    """
    out.mkdir(parents=True, exist_ok=True)
    kept = out / "settings.json"
    text = json.dumps(settings, indent=2) + "\n"
    if kept.exists() and kept.read_text(encoding="utf-8") != text:
        raise InvalidParameterError(f"{out} holds a run with other settings; name another folder with --out")
    temporary = kept.with_suffix(".partial")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, kept)
    return out / "turns.jsonl"

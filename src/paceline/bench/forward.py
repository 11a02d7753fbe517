"""Milliseconds of one forward pass by rows and context, beside the time of reading the weights once.

python -m paceline.bench.forward --model smollm2-135m --dtype int8 --rows 1,8,16 --contexts 128,4096
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from paceline.backends.cpu import CpuBackend
from paceline.backends.kv_store import KVShape
from paceline.backends.select import select_backend
from paceline.config import RuntimeConfig
from paceline.errors import PacelineError
from paceline.loader.load import load_checkpoint
from paceline.loader.resolve import resolve_source
from paceline.model.native import NativeDecoder
from paceline.model.runner import ModelRunner, SequenceInput

_BLOCK_SIZE = 16
_REPEATS = 31
_PREFILL = 512
_PREFILL_REPEATS = 7


def main(
    model: Annotated[str, typer.Option("--model", "-m", help="As for every command.")] = "smollm2-135m",
    dtype: Annotated[str, typer.Option("--dtype", help="auto, bf16, int8 or int4.")] = "auto",
    threads: Annotated[int | None, typer.Option("--threads", "-t", help="CPU threads.")] = None,
    rows: Annotated[str, typer.Option("--rows", help="Rows of one pass, comma-separated.")] = "1,2,4,8,12,16",
    contexts: Annotated[str, typer.Option("--contexts", help="Tokens before them.")] = "128,1024,4096",
) -> None:
    """Time forward passes of the CPU backend; medians, all settings interleaved."""
    counts, lengths = _numbers(rows), _numbers(contexts)
    try:
        backend = select_backend(RuntimeConfig(backend="cpu", dtype=dtype, num_threads=threads))  # type: ignore[arg-type]
        checkpoint = load_checkpoint(resolve_source(model), dtype=backend.dtype, keep_quantized=True)
    except PacelineError as error:
        raise typer.BadParameter(str(error)) from None
    assert isinstance(backend, CpuBackend)
    shape = checkpoint.config
    num_slots = max(max(lengths) + max(counts), _PREFILL) + _BLOCK_SIZE
    decoder = NativeDecoder(shape, checkpoint.weights, backend, num_positions=num_slots)
    store = backend.make_kv_store(KVShape(num_slots, shape.num_layers, shape.num_kv_heads, shape.head_dim))
    runner = ModelRunner(decoder, store, block_size=_BLOCK_SIZE, device=backend.device)
    blocks = list(range(num_slots // _BLOCK_SIZE))
    token_ids = torch.randint(0, shape.vocab_size, (max(max(counts), _PREFILL),)).tolist()

    def forward(num_rows: int, start: int, num_logits: int) -> Callable[[], object]:
        return lambda: runner.run([SequenceInput(token_ids[:num_rows], start, blocks, num_logits)])

    for length in range(0, max(lengths), _PREFILL):  # real K/V, as a context would hold it
        runner.run([SequenceInput(token_ids[: min(_PREFILL, max(lengths) - length)], length, blocks, 1)])
    jobs: dict[str, Callable[[], object]] = {"read": decoder.read_weights}
    jobs |= {f"{count} rows at {length}": forward(count, length, count) for length in lengths for count in counts}
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(_REPEATS):
        for name, job in jobs.items():
            times[name].append(_milliseconds(job))
    prefill = [_milliseconds(forward(_PREFILL, 0, 1)) for _ in range(_PREFILL_REPEATS)]

    medians = {name: statistics.median(values) for name, values in times.items()}
    table = Table("context", *(f"{count} rows" for count in counts), title=_title(model, dtype, backend))
    for length in lengths:
        table.add_row(str(length), *(f"{medians[f'{count} rows at {length}']:.2f}" for count in counts))
    console = Console()
    console.print(table)
    megabytes = decoder.read_weights() / 1e6
    console.print(f"reading the weights once ({megabytes:.0f} MB): {medians['read']:.2f} ms")
    console.print(f"{_PREFILL} tokens of prompt: {statistics.median(prefill):.1f} ms")


def _milliseconds(job: Callable[[], object]) -> float:
    start = time.perf_counter()
    job()
    return (time.perf_counter() - start) * 1e3


def _title(model: str, dtype: str, backend: CpuBackend) -> str:
    return f"ms per forward pass: {model}, {dtype}, {backend.runtime.instruction_set}"


def _numbers(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise typer.BadParameter(f"a comma-separated list of whole numbers is needed, got {text!r}")
    return [int(part) for part in parts]


if __name__ == "__main__":
    typer.run(main)

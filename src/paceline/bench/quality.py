"""How far the formats of the CPU backend move a model from its fp32 self, over code and prose that Python brings along.

python -m paceline.bench.quality --model smollm2-135m --dtypes auto,int8,bf16
"""

from __future__ import annotations

import ast
import inspect
import math
import pydoc_data.topics
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from paceline.backends.base import Backend
from paceline.backends.cpu import CpuBackend
from paceline.backends.kv_store import KVShape
from paceline.backends.select import select_backend
from paceline.config import RuntimeConfig
from paceline.errors import PacelineError
from paceline.loader.load import load_checkpoint
from paceline.loader.resolve import resolve_source
from paceline.model.decoder import Decoder
from paceline.model.native import NativeDecoder
from paceline.model.runner import ModelRunner, SequenceInput

_WINDOW = 512  # tokens read at once, each window from an empty context
_WINDOWS = 4  # of code, and as many of prose
_BLOCK_SIZE = 16


def main(
    model: Annotated[str, typer.Option("--model", "-m", help="As for every command.")] = "smollm2-135m",
    dtypes: Annotated[str, typer.Option("--dtypes", help="Formats to judge, comma-separated.")] = "auto,int8,bf16",
    kv_cache_dtype: Annotated[str, typer.Option("--kv-cache-dtype", help="auto or int8.")] = "auto",
    logits: Annotated[
        list[Path] | None,
        typer.Option("--logits", help="Another engine's logits [windows, tokens, vocabulary] of them, saved by torch."),
    ] = None,
    save_tokens: Annotated[
        Path | None, typer.Option("--save-tokens", help="Write the windows' token ids here, for another engine.")
    ] = None,
) -> None:
    """KL divergence from fp32 with the same dequantised weights, perplexity against its, and equal first choices."""
    try:
        plain = select_backend(RuntimeConfig(backend="torch", dtype="fp32"))
        windows = held_out_windows(model)
        if save_tokens is not None:
            torch.save(torch.tensor(windows), save_tokens)
        expected = log_probs(model, plain, windows)
        table = Table("format", "mean KL", "perplexity ratio", "same first choice")
        for dtype in dtypes.split(","):
            backend = select_backend(RuntimeConfig(backend="cpu", dtype=dtype, kv_cache_dtype=kv_cache_dtype))  # type: ignore[arg-type]
            table.add_row(dtype, *_judge(expected, log_probs(model, backend, windows), windows))
    except PacelineError as error:
        raise typer.BadParameter(str(error)) from None
    for path in logits or []:
        rows = torch.load(path, weights_only=True).float()[..., : expected.shape[-1]]
        table.add_row(path.stem, *_judge(expected, rows.log_softmax(-1), windows))
    Console().print(table)


def held_out_windows(model: str) -> list[list[int]]:
    """Token ids [windows, tokens]: source of the standard library, then its language reference."""
    tokenizer = load_checkpoint(resolve_source(model), dtype=torch.bfloat16).tokenizer
    code = tokenizer.encode(inspect.getsource(ast))
    prose = tokenizer.encode("\n\n".join(text for _, text in sorted(pydoc_data.topics.topics.items())))
    return [ids[i * _WINDOW : (i + 1) * _WINDOW] for ids in (code, prose) for i in range(_WINDOWS)]


def log_probs(model: str, backend: Backend, windows: Sequence[Sequence[int]]) -> Tensor:
    """Log-probabilities [windows, tokens, vocabulary] of what follows each token."""
    checkpoint = load_checkpoint(resolve_source(model), dtype=backend.dtype, keep_quantized=backend.keeps_quantized)
    shape = checkpoint.config
    make = NativeDecoder if isinstance(backend, CpuBackend) else Decoder
    decoder = make(shape, checkpoint.weights, backend, num_positions=_WINDOW)  # type: ignore[arg-type]
    store = backend.make_kv_store(KVShape(_WINDOW, shape.num_layers, shape.num_kv_heads, shape.head_dim))
    runner = ModelRunner(decoder, store, block_size=_BLOCK_SIZE, device=backend.device)
    blocks = list(range(_WINDOW // _BLOCK_SIZE))
    return torch.stack(
        [runner.run([SequenceInput(list(ids), 0, blocks, _WINDOW)]).float().log_softmax(-1) for ids in windows]
    )


def _judge(expected: Tensor, got: Tensor, windows: Sequence[Sequence[int]]) -> tuple[str, str, str]:
    divergence = (expected.exp() * (expected - got)).sum(-1).mean().item()
    next_ids = torch.tensor([ids[1:] for ids in windows])[..., None]
    surprise, expected_surprise = (-rows[:, :-1].gather(-1, next_ids).mean().item() for rows in (got, expected))
    same = (got.argmax(-1) == expected.argmax(-1)).double().mean().item()
    return f"{divergence:.5f}", f"{math.exp(surprise - expected_surprise):.4f}", f"{same:.2%}"


if __name__ == "__main__":
    typer.run(main)

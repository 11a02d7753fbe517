"""Options that several commands share, and the engine made from them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.errors import InvalidParameterError
from paceline.request import DRAFTERS, Speculation

if TYPE_CHECKING:
    from paceline.engine.engine import Engine

DEFAULT_MODEL = "smollm2-135m"
DEFAULT_SPECULATION = Speculation()
DEFAULT_DRAFTERS = ",".join(DRAFTERS)

Model = Annotated[
    str,
    typer.Option(
        "--model", "-m", help="Catalog name, hub id, Hugging Face folder or .gguf file.", rich_help_panel="Model"
    ),
]
Draft = Annotated[
    str,
    typer.Option(
        "--draft",
        help="Draft model, named like --model; 'auto' takes the catalog's, 'none' uses none.",
        rich_help_panel="Speculation",
    ),
]
Spec = Annotated[
    str, typer.Option("--spec", help="Speculation: off, static or dynamic.", rich_help_panel="Speculation")
]
SpecTokens = Annotated[
    int,
    typer.Option("--spec-tokens", metavar="N", help="Longest horizon, 1 to 64.", rich_help_panel="Speculation"),
]
Drafters = Annotated[
    str,
    typer.Option(
        "--drafters",
        metavar="LIST",
        help="Who may draft; of equals the first named does.",
        rich_help_panel="Speculation",
    ),
]
MinAcceptance = Annotated[
    float,
    typer.Option(
        "--min-acceptance",
        metavar="SHARE",
        help="Share of drafted tokens that should be accepted; 0 asks for speed alone.",
        rich_help_panel="Speculation",
    ),
]
Corpus = Annotated[
    list[Path] | None,
    typer.Option(
        "--corpus",
        metavar="PATH",
        help="Look drafts up in this file or folder as well; repeatable.",
        rich_help_panel="Speculation",
    ),
]
Device = Annotated[
    str, typer.Option("--device", help="auto, or a torch device: cpu, cuda, cuda:1, ...", rich_help_panel="Machine")
]
DType = Annotated[
    str,
    typer.Option(
        "--dtype", help="Weights: auto (as the file holds them), fp32, bf16, int8 or int4.", rich_help_panel="Machine"
    ),
]
Backend = Annotated[str, typer.Option("--backend", help="auto, torch, cpu or cuda.", rich_help_panel="Machine")]
Threads = Annotated[
    int | None, typer.Option("--threads", "-t", metavar="N", help="CPU threads.", rich_help_panel="Machine")
]
MaxModelLen = Annotated[
    int | None,
    typer.Option("--max-model-len", "-c", metavar="N", help="Context: prompt plus answer.", rich_help_panel="Machine"),
]
BlockSize = Annotated[
    int, typer.Option("--block-size", metavar="N", help="Tokens per KV block.", rich_help_panel="Machine")
]
KVMemory = Annotated[
    int | None,
    typer.Option("--kv-memory", metavar="MIB", help="Budget of the KV cache in MiB.", rich_help_panel="Machine"),
]

KVCacheDType = Annotated[
    str,
    typer.Option(
        "--kv-cache-dtype", help="auto, or int8: half the memory for the KV cache.", rich_help_panel="Machine"
    ),
]


def make_speculation(
    mode: str, max_tokens: int, drafters: str, min_acceptance: float = DEFAULT_SPECULATION.min_acceptance
) -> Speculation:
    """Speculation settings from their flags.

    Raises:
        InvalidParameterError: an unknown mode or drafter, or a number out of range.
    """
    names = tuple(name.strip() for name in drafters.split(",") if name.strip())
    return Speculation(mode, max_tokens, names, min_acceptance)  # type: ignore[arg-type]


def make_engine(
    model: str,
    draft: str,
    *,
    device: str,
    dtype: str,
    backend: str,
    threads: int | None,
    max_model_len: int | None,
    block_size: int,
    kv_memory: int | None,
    kv_cache_dtype: str = "auto",
    **options: Any,
) -> Engine:
    """An engine from the flags of the panels Model and Machine."""
    from paceline.engine.engine import Engine

    return Engine(
        model,
        draft=None if draft == "none" else draft,
        device=device,
        dtype=dtype,
        backend=backend,
        num_threads=threads,
        max_model_len=max_model_len,
        block_size=block_size,
        kv_memory_bytes=None if kv_memory is None else kv_memory * 2**20,
        kv_cache_dtype=kv_cache_dtype,
        **options,
    )


def read_text(path: Path, flag: str) -> str:
    """The text of a file named on the command line.

    Raises:
        InvalidParameterError: it cannot be read, or is not UTF-8 text.
    """
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidParameterError(f"{flag} {path}: {error.strerror or error}; check the path") from None
    except UnicodeDecodeError:
        raise InvalidParameterError(f"{flag} {path}: not UTF-8 text; convert it first") from None

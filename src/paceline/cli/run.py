"""``paceline run``: one turn, streamed, with what speculation did to it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from paceline.cli import options
from paceline.cli.stream_view import LEGEND, StreamView
from paceline.errors import InvalidParameterError
from paceline.request import SamplingParams, Speculation

if TYPE_CHECKING:
    from paceline.engine.engine import Engine, Prompt
    from paceline.engine.output import Output


def run(
    prompt: Annotated[str | None, typer.Argument(help="What to ask. Use - to read it from standard input.")] = None,
    prompt_file: Annotated[Path | None, typer.Option("--prompt-file", help="Read the prompt from a file.")] = None,
    files: Annotated[
        list[Path] | None, typer.Option("--file", "-f", help="Add a file to the context; repeatable.")
    ] = None,
    system: Annotated[str | None, typer.Option("--system", help="System message.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Complete the prompt as plain text, no chat template.")] = False,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", "-n", metavar="N", help="Longest answer.")] = None,
    temperature: Annotated[float, typer.Option("--temperature", help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option("--top-p", help="Nucleus sampling.")] = 1.0,
    seed: Annotated[int | None, typer.Option("--seed", help="Same seed, same text, whatever is drafted.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on past the end token.")] = False,
    spec: options.Spec = "dynamic",
    spec_tokens: options.SpecTokens = options.DEFAULT_SPECULATION.max_tokens,
    drafters: options.Drafters = options.DEFAULT_DRAFTERS,
    min_acceptance: options.MinAcceptance = options.DEFAULT_SPECULATION.min_acceptance,
    corpus: options.Corpus = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Run the same turn without speculation first, and print both.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object on stdout, everything else on stderr.")
    ] = False,
    model: options.Model = options.DEFAULT_MODEL,
    draft: options.Draft = "auto",
    device: options.Device = "auto",
    dtype: options.DType = "auto",
    backend: options.Backend = "auto",
    threads: options.Threads = None,
    max_model_len: options.MaxModelLen = None,
    block_size: options.BlockSize = 16,
    kv_memory: options.KVMemory = None,
    kv_cache_dtype: options.KVCacheDType = "auto",
) -> None:
    """Answer one prompt, streaming; accepted draft tokens are coloured on a terminal."""
    text = _prompt_text(prompt, prompt_file)
    request = _messages(text, files or [], system) if not raw else _raw_prompt(text, files or [], system)
    params = SamplingParams(
        temperature=temperature, top_p=top_p, seed=seed, max_tokens=max_tokens, ignore_eos=ignore_eos
    )
    speculation = options.make_speculation(spec, spec_tokens, drafters, min_acceptance)
    if compare and speculation.mode == "off":
        raise InvalidParameterError("--compare needs speculation to compare with; leave out --spec off")
    with options.make_engine(
        model,
        draft,
        device=device,
        dtype=dtype,
        backend=backend,
        threads=threads,
        max_model_len=max_model_len,
        block_size=block_size,
        kv_memory=kv_memory,
        kv_cache_dtype=kv_cache_dtype,
        corpus=corpus or (),
    ) as engine:
        view = StreamView(Console(stderr=as_json, soft_wrap=True, highlight=False))
        baseline: Output | None = None
        if compare:
            _warm_up(engine)
            view.title("without speculation")
            baseline = _answer(engine, request, params, replace(speculation, mode="off"), view)
            engine.reset_prefix_cache()  # both turns start cold
            view.title("with speculation", LEGEND)
        output = _answer(engine, request, params, speculation, view)
    if as_json:
        print(json.dumps(_as_json(output, baseline)))
    else:
        _print_table(output, baseline)


def _answer(
    engine: Engine, prompt: Prompt, params: SamplingParams, speculation: Speculation, view: StreamView
) -> Output:
    for delta in engine.stream(prompt, params, speculation=speculation):
        view.show(delta)
        if delta.output is not None:
            view.end()
            return delta.output
    raise AssertionError("a stream ends with its output")


def _warm_up(engine: Engine) -> None:
    """The first passes are slower; neither side of a comparison should pay for it."""
    engine.generate("def main():\n", SamplingParams(max_tokens=4, ignore_eos=True))


def _prompt_text(prompt: str | None, prompt_file: Path | None) -> str:
    if (prompt is None) == (prompt_file is None):
        raise InvalidParameterError("give either a PROMPT or --prompt-file, not both and not neither")
    if prompt_file is not None:
        text = options.read_text(prompt_file, "--prompt-file")
    else:
        text = _read_standard_input() if prompt == "-" else str(prompt)
    if not text.strip():
        raise InvalidParameterError("the prompt is empty; say what the model should do")
    return text


def _read_standard_input() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError:
        raise InvalidParameterError("standard input is not UTF-8 text; convert it first") from None


def _messages(text: str, files: Sequence[Path], system: str | None) -> list[dict[str, str]]:
    content = "".join(_fenced(path) for path in files) + text
    messages = [{"role": "system", "content": system}] if system is not None else []
    return [*messages, {"role": "user", "content": content}]


def _raw_prompt(text: str, files: Sequence[Path], system: str | None) -> str:
    if system is not None:
        raise InvalidParameterError("--system needs a chat template; leave out --raw")
    return "".join(options.read_text(path, "--file") for path in files) + text


def _fenced(path: Path) -> str:
    language = path.suffix.removeprefix(".")
    language = {"py": "python", "js": "javascript", "ts": "typescript", "rs": "rust"}.get(language, language)
    return f"{path.name}:\n```{language}\n{options.read_text(path, '--file').rstrip()}\n```\n\n"


def _as_json(output: Output, baseline: Output | None) -> dict[str, Any]:
    data = output.to_dict()
    if baseline is not None:
        data["compare"] = {
            "decode_tokens_per_s": baseline.timing.decode_tokens_per_s,
            "identical": _is_identical(output, baseline),
            "speedup": _speedup(output, baseline),
        }
    return data


def _is_identical(output: Output, baseline: Output) -> bool:
    return list(output.token_ids) == list(baseline.token_ids)


def _speedup(output: Output, baseline: Output) -> float:
    before = baseline.timing.decode_tokens_per_s
    return output.timing.decode_tokens_per_s / before if before else 0.0


def _print_table(output: Output, baseline: Output | None) -> None:
    table = Table()
    table.add_column("")
    columns = [output] if baseline is None else [baseline, output]
    for heading in ("",) if baseline is None else ("without speculation", "with speculation"):
        table.add_column(heading, justify="right")
    rows: dict[str, Callable[[Output], str]] = {
        "time to first token": lambda o: f"{o.timing.ttft_ms:.0f} ms",
        "decode": lambda o: f"{o.timing.decode_tokens_per_s:.1f} tokens/s",
        "token latency P50 / P95": lambda o: f"{o.timing.p50_token_ms:.1f} / {o.timing.p95_token_ms:.1f} ms",
        "tokens": lambda o: f"{o.usage.prompt_tokens} + {o.usage.completion_tokens} ({o.finish_reason})",
        "drafts accepted": _accepted,
        "mean acceptance length": lambda o: f"{o.speculation.mean_acceptance_length:.2f}",
        "KV blocks used": lambda o: f"{o.kv.peak_blocks_used} of {o.kv.num_blocks} ({o.kv.waste:.1%} waste)",
    }
    for name, cell in rows.items():
        table.add_row(name, *(cell(column) for column in columns))
    if baseline is not None:
        table.add_row("decode speedup", "", f"{_speedup(output, baseline):.2f}x", style="bold")
        table.add_row("same tokens", "", "yes" if _is_identical(output, baseline) else "NO", style="bold")
    Console(stderr=True).print(table)


def _accepted(output: Output) -> str:
    report = output.speculation
    if report.num_draft_tokens == 0:
        return "-"
    sources = ", ".join(f"{name} {count}" for name, count in report.accepted_by_source.items())
    counts = f"{report.num_accepted_draft_tokens} of {report.num_draft_tokens}"
    return f"{report.draft_acceptance_rate:.1%}: {counts} ({sources})"

"""``paceline chat``: a conversation in the terminal; the history stays in the KV cache between turns."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from paceline.cli import options
from paceline.cli.stream_view import StreamView
from paceline.errors import InvalidParameterError, InvalidPromptError, ServerError
from paceline.request import SamplingParams, Speculation

if TYPE_CHECKING:
    from paceline.cli.remote_chat import RemoteChat
    from paceline.engine.session import Session

HELP = "/reset starts over, /exit (or Ctrl-D) leaves, Ctrl-C stops an answer"


def chat(
    system: Annotated[str | None, typer.Option("--system", help="System message.")] = None,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", "-n", metavar="N", help="Longest answer.")] = None,
    temperature: Annotated[float, typer.Option("--temperature", help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option("--top-p", help="Nucleus sampling.")] = 1.0,
    seed: Annotated[int | None, typer.Option("--seed", help="Same seed, same text.")] = None,
    spec: options.Spec = "dynamic",
    spec_tokens: options.SpecTokens = options.DEFAULT_SPECULATION.max_tokens,
    drafters: options.Drafters = options.DEFAULT_DRAFTERS,
    min_acceptance: options.MinAcceptance = options.DEFAULT_SPECULATION.min_acceptance,
    corpus: options.Corpus = None,
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
    url: Annotated[
        str | None, typer.Option("--url", help="Talk to a server instead of loading a model.", rich_help_panel="Server")
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option("--api-key", envvar="PACELINE_API_KEY", help="The server's key.", rich_help_panel="Server"),
    ] = None,
) -> None:
    """Talk to the model; accepted draft tokens are coloured."""
    params = SamplingParams(temperature=temperature, top_p=top_p, seed=seed, max_tokens=max_tokens)
    speculation = options.make_speculation(spec, spec_tokens, drafters, min_acceptance)
    opening = [{"role": "system", "content": system}] if system is not None else []
    console = Console(soft_wrap=True, highlight=False)
    notes = Console(stderr=True, highlight=False)
    if url is not None:
        from paceline.cli.remote_chat import RemoteChat

        _chat_with_server(RemoteChat(url, opening, api_key=api_key), params, speculation, console, notes)
        return
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
        speculation=speculation,
    ) as engine:
        notes.print(f"[bold]{engine.info.model}[/]  {HELP}", style="dim")
        session = engine.session(opening)
        while (line := _read_line(notes)) is not None:
            if line == "/exit":
                break
            if line == "/reset":
                session.close()
                session = engine.session(opening)
            elif line:
                try:
                    _answer(session, line, params, StreamView(console), notes)
                except InvalidPromptError as error:
                    notes.print(f"{error}", style="red", markup=False)
        session.close()


def _chat_with_server(
    chat: RemoteChat, params: SamplingParams, speculation: Speculation, console: Console, notes: Console
) -> None:
    opening = list(chat.messages)
    notes.print(f"[bold]{chat.model()}[/]  {HELP}", style="dim")
    while (line := _read_line(notes)) is not None:
        if line == "/exit":
            break
        if line == "/reset":
            chat.messages = list(opening)
        elif line:
            view = StreamView(console)
            try:
                with _interrupt_flag() as interrupt:
                    for delta in chat.stream(line, params, speculation, interrupt.is_set):
                        view.show(delta)
            except ServerError as error:
                notes.print(f"{error}", style="red", markup=False)
                continue
            finally:
                view.end()
            if interrupt.is_set():
                notes.print("stopped; this turn is not kept", style="dim")
            elif chat.usage:
                cached = (chat.usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
                notes.print(
                    f"{chat.usage['completion_tokens']} tokens, {chat.timings.get('predicted_per_second', 0.0):.1f}/s, "
                    f"{cached} of {chat.usage['prompt_tokens']} prompt tokens cached",
                    style="dim",
                )
    chat.close()


def _answer(session: Session, line: str, params: SamplingParams, view: StreamView, notes: Console) -> None:
    with _interrupt_flag() as interrupt:
        for delta in session.stream(line, params):
            view.show(delta)
            if delta.output is not None:
                view.end()
                usage, timing = delta.output.usage, delta.output.timing
                notes.print(
                    f"{usage.completion_tokens} tokens, {timing.decode_tokens_per_s:.1f}/s, "
                    f"{usage.cached_tokens} of {usage.prompt_tokens} prompt tokens cached",
                    style="dim",
                )
            elif interrupt.is_set():
                view.end()
                notes.print("stopped; this turn is not kept", style="dim")
                return


@contextmanager
def _interrupt_flag() -> Iterator[threading.Event]:
    """Ctrl-C sets a flag instead of raising: an exception in the middle of a step would leave it half done."""
    flag = threading.Event()
    previous = signal.signal(signal.SIGINT, lambda _signal, _frame: flag.set())
    try:
        yield flag
    finally:
        signal.signal(signal.SIGINT, previous)


def _read_line(notes: Console) -> str | None:
    """The next line, None at the end of input."""
    if sys.stdin.isatty():
        notes.print("[bold]>[/] ", end="")
    try:
        return input().strip()
    except (EOFError, KeyboardInterrupt):
        notes.print()
        return None
    except UnicodeDecodeError:
        raise InvalidParameterError("standard input is not UTF-8 text; convert it first") from None

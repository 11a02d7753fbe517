"""``paceline serve``: the HTTP server. Every flag can also be set in the environment and in a TOML file."""

from __future__ import annotations

import json
import os
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from paceline.cli import options
from paceline.errors import InvalidParameterError
from paceline.request import Speculation

if TYPE_CHECKING:
    from paceline.serve.service import Service


def _read_config(context: typer.Context, path: Path | None) -> Path | None:
    """Make a file's settings the defaults; flags and the environment go before it.

    Raises:
        InvalidParameterError: the file is not TOML, or names something that is no flag.
    """
    if path is None:
        return None
    try:
        settings = tomllib.loads(options.read_text(path, "--config"))
    except tomllib.TOMLDecodeError as error:
        raise InvalidParameterError(f"--config {path}: {error}") from None
    spellings = {
        spelling.lstrip("-").replace("-", "_"): parameter.name
        for parameter in context.command.params
        for spelling in (*parameter.opts, *parameter.secondary_opts)
    }
    defaults: dict[str, Any] = {}
    for key, value in settings.items():
        name = spellings.get(key.replace("-", "_"))
        if name is None:
            raise InvalidParameterError(f"--config {path}: {key!r} is not a flag of `paceline serve`")
        defaults[name] = value
    context.default_map = {**(context.default_map or {}), **defaults}
    return path


def _flag(*spellings: str, panel: str, **settings: Any) -> Any:
    """An option that PACELINE_<its first long spelling> sets as well."""
    longest = next(spelling for spelling in spellings if spelling.startswith("--")).split("/")[0]
    variable = "PACELINE_" + longest.removeprefix("--").replace("-", "_").upper()
    return typer.Option(*spellings, envvar=variable, rich_help_panel=panel, show_envvar=False, **settings)


def serve(
    model: Annotated[
        str | None, typer.Argument(help="Catalog name, hub id, Hugging Face folder or .gguf file.", metavar="MODEL")
    ] = None,
    model_option: Annotated[
        str | None, _flag("--model", "-m", "--model-path", panel="Model", help="The same as MODEL.")
    ] = None,
    served_model_name: Annotated[
        list[str] | None,
        _flag("--served-model-name", "--alias", "-a", panel="Model", help="Name for clients; repeatable."),
    ] = None,
    host: Annotated[str, _flag("--host", panel="Server", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, _flag("--port", panel="Server", help="Port; 0 takes a free one.")] = 8000,
    api_key: Annotated[
        list[str] | None, _flag("--api-key", panel="Server", help="Key that clients must give; repeatable.")
    ] = None,
    api_key_file: Annotated[
        Path | None, _flag("--api-key-file", panel="Server", help="File with one key a line.")
    ] = None,
    insecure: Annotated[
        bool, _flag("--insecure", panel="Server", help="Listen beyond this machine without a key.")
    ] = False,
    allowed_origins: Annotated[
        list[str] | None,
        _flag("--allowed-origins", "--cors-origins", panel="Server", help="Web origin that may call; repeatable."),
    ] = None,
    max_queue: Annotated[
        int, _flag("--max-queue", panel="Limits", metavar="N", help="Requests that may wait; more get 429.")
    ] = 64,
    max_body_mib: Annotated[
        float, _flag("--max-body-mib", panel="Limits", metavar="MIB", help="Largest request body.")
    ] = 16.0,
    max_tool_schema_kib: Annotated[
        float, _flag("--max-tool-schema-kib", panel="Limits", metavar="KIB", help="Largest description of tools.")
    ] = 1024.0,
    max_grammar_kib: Annotated[
        float, _flag("--max-grammar-kib", panel="Limits", metavar="KIB", help="Largest JSON schema, regex or grammar.")
    ] = 256.0,
    request_timeout: Annotated[
        float, _flag("--request-timeout", "--timeout", panel="Limits", metavar="S", help="Per request; 0 is no limit.")
    ] = 0.0,
    drain_timeout: Annotated[
        float, _flag("--drain-timeout", panel="Limits", metavar="S", help="For what runs when the server is stopped.")
    ] = 30.0,
    stall_timeout: Annotated[
        float, _flag("--stall-timeout", panel="Limits", metavar="S", help="/health fails after so long without a step.")
    ] = 120.0,
    session_ttl: Annotated[
        float, _flag("--session-ttl", panel="Limits", metavar="S", help="An idle session keeps its prefix so long.")
    ] = 900.0,
    max_sessions: Annotated[
        int, _flag("--max-sessions", panel="Limits", metavar="N", help="Sessions that keep a prefix.")
    ] = 64,
    draft: Annotated[
        str,
        _flag(
            "--draft-model",
            "--draft",
            "-md",
            "--spec-draft-model",
            panel="Speculation",
            help="Draft model; 'auto' takes the catalog's, 'none' uses none.",
        ),
    ] = "auto",
    spec: Annotated[str, _flag("--spec", panel="Speculation", help="off, static or dynamic.")] = "dynamic",
    no_spec: Annotated[bool, _flag("--no-spec", panel="Speculation", help="The same as --spec off.")] = False,
    spec_tokens: Annotated[
        int,
        _flag(
            "--spec-tokens",
            "--spec-max",
            "--spec-draft-n-max",
            panel="Speculation",
            metavar="N",
            help="Longest horizon, 1 to 64.",
        ),
    ] = options.DEFAULT_SPECULATION.max_tokens,
    drafters: Annotated[
        str,
        _flag("--drafters", panel="Speculation", metavar="LIST", help="Who may draft; of equals the first named does."),
    ] = options.DEFAULT_DRAFTERS,
    min_acceptance: Annotated[
        float,
        _flag(
            "--min-acceptance",
            panel="Speculation",
            metavar="SHARE",
            help="Share of drafted tokens that should be accepted; 0 asks for speed alone.",
        ),
    ] = options.DEFAULT_SPECULATION.min_acceptance,
    corpus: Annotated[
        list[Path] | None,
        _flag(
            "--corpus",
            panel="Speculation",
            metavar="PATH",
            help="Look drafts up in this file or folder as well; repeatable.",
        ),
    ] = None,
    speculative_config: Annotated[
        str | None,
        _flag(
            "--speculative-config",
            panel="Speculation",
            metavar="JSON",
            help="vLLM's: method (draft_model, suffix, ngram), model, num_speculative_tokens.",
        ),
    ] = None,
    max_model_len: Annotated[
        int | None,
        _flag("--max-model-len", "-c", "--ctx-size", "--context-length", panel="Machine", metavar="N", help="Context."),
    ] = None,
    max_num_seqs: Annotated[
        int, _flag("--max-num-seqs", "-np", "--parallel", panel="Machine", metavar="N", help="Requests at once.")
    ] = 16,
    max_num_batched_tokens: Annotated[
        int, _flag("--max-num-batched-tokens", panel="Machine", metavar="N", help="Token budget of a step.")
    ] = 512,
    max_num_prompt_tokens: Annotated[
        int,
        _flag(
            "--max-num-prompt-tokens",
            panel="Machine",
            metavar="N",
            help="Prompt tokens of a step in which others decode.",
        ),
    ] = 128,
    block_size: Annotated[int, _flag("--block-size", panel="Machine", metavar="N", help="Tokens per KV block.")] = 16,
    kv_memory: Annotated[
        int | None, _flag("--kv-memory", panel="Machine", metavar="MIB", help="Budget of the KV cache in MiB.")
    ] = None,
    kv_cache_dtype: Annotated[
        str, _flag("--kv-cache-dtype", panel="Machine", help="auto, or int8: half the memory for the KV cache.")
    ] = "auto",
    enable_prefix_caching: Annotated[
        bool,
        _flag(
            "--enable-prefix-caching/--no-enable-prefix-caching",
            panel="Machine",
            help="Share what was computed between requests.",
        ),
    ] = True,
    device: Annotated[str, _flag("--device", panel="Machine", help="auto, or a torch device.")] = "auto",
    dtype: Annotated[str, _flag("--dtype", panel="Machine", help="auto, fp32, bf16, int8 or int4.")] = "auto",
    backend: Annotated[str, _flag("--backend", panel="Machine", help="auto, torch, cpu or cuda.")] = "auto",
    threads: Annotated[int | None, _flag("--threads", "-t", panel="Machine", metavar="N", help="CPU threads.")] = None,
    log_level: Annotated[str, _flag("--log-level", panel="Log", help="debug, info, warning or error.")] = "info",
    log_format: Annotated[str, _flag("--log-format", panel="Log", help="text, or json: one object a line.")] = "text",
    log_prompts: Annotated[
        bool, _flag("--log-prompts", panel="Log", help="Write prompts and answers to the log.")
    ] = False,
    otlp_traces_endpoint: Annotated[
        str | None,
        _flag(
            "--otlp-traces-endpoint",
            panel="Log",
            metavar="URL",
            help="Send OpenTelemetry spans there over OTLP/HTTP; needs the extra 'otel'.",
        ),
    ] = None,
    config: Annotated[
        Path | None,
        _flag(
            "--config",
            panel="Server",
            help="TOML file of flags by their long names.",
            callback=_read_config,
            is_eager=True,
        ),
    ] = None,
) -> None:
    """Serve a model to agents and editors: OpenAI's and Anthropic's APIs, metrics, and a live view at /."""
    from paceline.engine.async_engine import AsyncEngine
    from paceline.serve.config import ServerConfig
    from paceline.serve.server import configure_logging, run_server

    if log_format not in ("text", "json"):
        raise InvalidParameterError(f"unknown log format {log_format!r}; choose text or json")
    configure_logging(log_level, as_json=log_format == "json")
    asked = _Speculative.parse(speculative_config) if speculative_config else _Speculative()
    speculation = (
        Speculation("off")
        if no_spec
        else options.make_speculation(
            asked.mode or spec, asked.max_tokens or spec_tokens, asked.drafters or drafters, min_acceptance
        )
    )
    settings = ServerConfig(
        host=host,
        port=port,
        api_keys=(*(api_key or ()), *_read_keys(api_key_file)),
        is_insecure=insecure,
        allowed_origins=tuple(allowed_origins or ()),
        served_model_names=tuple(served_model_name or ()),
        max_num_seqs=max_num_seqs,
        max_queue=max_queue,
        max_body_bytes=round(max_body_mib * 2**20),
        max_tool_schema_bytes=round(max_tool_schema_kib * 2**10),
        max_grammar_bytes=round(max_grammar_kib * 2**10),
        request_timeout=request_timeout,
        drain_timeout=drain_timeout,
        stall_timeout=stall_timeout,
        session_ttl=session_ttl,
        max_sessions=max_sessions,
        log_prompts=log_prompts,
        otlp_traces_endpoint=otlp_traces_endpoint,
    )
    drafting_model = asked.model or draft

    def load() -> AsyncEngine:
        return AsyncEngine(
            model or model_option or options.DEFAULT_MODEL,
            draft=None if drafting_model == "none" else drafting_model,
            device=device,
            dtype=dtype,
            backend=backend,
            num_threads=threads,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_prompt_tokens=max_num_prompt_tokens,
            block_size=block_size,
            kv_memory_bytes=None if kv_memory is None else kv_memory * 2**20,
            kv_cache_dtype=kv_cache_dtype,
            enable_prefix_cache=enable_prefix_caching,
            corpus=corpus or (),
            speculation=speculation,
        )

    run_server(load, settings, on_ready=_announce)


class _Speculative:
    """vLLM's --speculative-config in Paceline's words; None where it says nothing."""

    def __init__(
        self,
        mode: str | None = None,
        max_tokens: int | None = None,
        drafters: str | None = None,
        model: str | None = None,
    ) -> None:
        self.mode = mode
        self.max_tokens = max_tokens
        self.drafters = drafters
        self.model = model

    @classmethod
    def parse(cls, text: str) -> _Speculative:
        """Raises:
        InvalidParameterError: it is not a JSON object, or names a method that is not there.
        """
        try:
            fields = json.loads(text)
        except json.JSONDecodeError as error:
            raise InvalidParameterError(f"--speculative-config is not JSON: {error}") from None
        if not isinstance(fields, dict):
            raise InvalidParameterError("--speculative-config must be a JSON object")
        drafters = {None: None, "draft_model": "model", "suffix": "suffix", "ngram": "suffix"}
        method = fields.get("method")
        if method not in drafters:
            raise InvalidParameterError(
                f"--speculative-config: method {method!r} is not known; use draft_model, suffix or ngram"
            )
        return cls(
            max_tokens=fields.get("num_speculative_tokens"), drafters=drafters[method], model=fields.get("model")
        )


def _read_keys(path: Path | None) -> list[str]:
    if path is None:
        return []
    keys = [line.strip() for line in options.read_text(path, "--api-key-file").splitlines() if line.strip()]
    if not keys:
        raise InvalidParameterError(f"--api-key-file {path}: there is no key in it")
    return keys


def _announce(service: Service, address: str) -> None:
    """The address, the model, the drafters and the memory taken."""
    info, console = service.engine.info, Console(stderr=True, highlight=False, soft_wrap=True)
    drafters = ", ".join(info.drafters) if service.engine.speculation.mode != "off" else "off"
    draft = f", draft model {info.draft}" if info.draft else ""
    console.print(f"[bold]Paceline[/] serves [bold]{service.model_names[0]}[/] at [bold]{address}[/]")
    console.print(f"  drafters   {drafters}{draft}", markup=False)
    console.print(
        f"  memory     {info.kv_bytes / 2**20:.0f} MiB for {info.num_blocks * info.block_size} tokens of KV cache at "
        f"most; {_resident_bytes() / 2**20:.0f} MiB taken now",
        markup=False,
    )
    console.print(
        f"  compute    {info.backend} on {info.device}, {info.dtype}, context {info.max_model_len}", markup=False
    )
    console.print(f"  OpenAI     {address}/v1     Anthropic  {address}     live view  {address}/", markup=False)


def _resident_bytes() -> int:
    """Memory of this process; 0 where the system does not say."""
    try:
        fields = Path("/proc/self/statm").read_text(encoding="ascii").split()
    except OSError:
        return 0
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")

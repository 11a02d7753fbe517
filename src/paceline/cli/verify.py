"""``paceline verify``: promise 1 on the user's own model. Speculation must not change what comes out."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from paceline.cli import options
from paceline.errors import InvalidParameterError
from paceline.request import SamplingParams, Speculation

if TYPE_CHECKING:
    from paceline.engine.engine import Engine
    from paceline.engine.output import Output

PROMPTS = (
    "Write a Python function that merges two sorted lists.",
    "Explain what a race condition is, in three sentences.",
    "def fibonacci(n):\n    if n < 2:\n        return n\n\nAdd type hints and repeat the function.",
    "Rename the variable x to total:\n\nx = 0\nfor item in items:\n    x += item.price * item.count\nprint(x)",
    "Write a unit test for a function that parses ISO dates.",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\nAdd the methods push, pop and peek.",
    "Translate to JavaScript:\n\nfor i in range(10):\n    if i % 2 == 0:\n        print(i)",
    "List five common HTTP status codes and what they mean.",
)
# A greedy difference is excused when the two tokens were closer than rounding: see docs/decisions.
NEAR_TIE = 1e-4
SIGNIFICANCE = 1e-3


@dataclass(frozen=True, slots=True)
class _Check:
    """One row of the report."""

    name: str
    compared: str
    outcome: str
    is_passed: bool


def verify(
    prompts: Annotated[
        Path | None, typer.Option("--prompts", help="A text file, one prompt a line, instead of the built-in ones.")
    ] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", metavar="N", help="Tokens per prompt.")] = 48,
    draws: Annotated[int, typer.Option("--draws", help="Draws of the goodness-of-fit test.")] = 1000,
    horizons: Annotated[str, typer.Option("--horizons", help="Static horizons to compare.")] = "1,4,8",
    drafters: options.Drafters = options.DEFAULT_DRAFTERS,
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
    """Compare text with and without speculation, greedy and seeded, and test the sampler's distribution.

    Exit status 1 when anything differs.
    """
    texts = _read_prompts(prompts)
    modes = [options.make_speculation("static", horizon, drafters) for horizon in _read_horizons(horizons)]
    modes.append(options.make_speculation("dynamic", options.DEFAULT_SPECULATION.max_tokens, drafters))
    console = Console(stderr=True)
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
    ) as engine:
        checks = []
        with console.status("comparing ...") as status:
            token_ids = [_encode(engine, text) for text in texts]
            greedy = SamplingParams(max_tokens=max_tokens)
            for name, params in (("greedy", greedy), ("seeded", replace(greedy, temperature=0.8, seed=1234))):
                expected = [engine.generate(ids, params, speculation=Speculation("off")) for ids in token_ids]
                for mode in modes:
                    status.update(f"{name}, {_describe(mode)} ...")
                    checks.append(_compare(engine, name, token_ids, expected, params, mode))
            status.update("goodness of fit ...")
            fits = [Speculation("off"), Speculation("static", 4, ("prediction",))]
            if engine.info.draft is not None:
                fits.append(Speculation("static", 4, ("model",)))
            checks += [_fit(engine, token_ids[0], draws, mode) for mode in fits]
        info = engine.info
    _print_report(f"{info.model}, draft {info.draft or 'none'}, {info.dtype} on {info.device}", checks)
    if not all(check.is_passed for check in checks):
        sys.exit(1)


def _compare(
    engine: Engine,
    name: str,
    prompts: Sequence[list[int]],
    expected: Sequence[Output],
    params: SamplingParams,
    mode: Speculation,
) -> _Check:
    num_tokens = num_accepted = 0
    differences, near_ties = [], 0
    for ids, plain in zip(prompts, expected, strict=True):
        output = engine.generate(ids, params, speculation=mode)
        num_tokens += output.usage.completion_tokens
        num_accepted += output.speculation.num_accepted_draft_tokens
        if list(output.token_ids) != list(plain.token_ids):
            at, margin = _first_difference(engine, ids, plain, output)
            if params.is_greedy and margin < NEAR_TIE:
                near_ties += 1
            else:
                differences.append(f"token {at} (top-2 margin {margin:.2g})")
    if differences:
        outcome = f"{len(differences)} of {len(prompts)} prompts differ, first at {differences[0]}"
    else:
        outcome = "identical" + (f" ({near_ties} near ties within {NEAR_TIE:g})" if near_ties else "")
    compared = f"{len(prompts)} prompts, {num_tokens} tokens, {num_accepted} of them drafted"
    return _Check(f"{name}, {_describe(mode)}", compared, outcome, not differences)


def _first_difference(engine: Engine, ids: list[int], plain: Output, output: Output) -> tuple[int, float]:
    """Index of the first differing token, and how close the target's two best logits are there."""
    pairs = zip(plain.token_ids, output.token_ids, strict=False)
    shorter = min(len(plain.token_ids), len(output.token_ids))
    at = next((index for index, (one, other) in enumerate(pairs) if one != other), shorter)
    prefix = [*ids, *plain.token_ids[:at]]
    probe = engine.generate(
        prefix, SamplingParams(max_tokens=1, logprobs=2, ignore_eos=True), speculation=Speculation("off")
    )
    assert probe.logprobs is not None
    best, second = list(probe.logprobs[0].top.values())
    return at, best - second


def _fit(engine: Engine, prompt: list[int], draws: int, mode: Speculation) -> _Check:
    """Chi-square of sampled continuations against the target's own probabilities.

    The first two tokens after the prompt are drawn many times and their frequencies compared with the target's top-k
    distribution. The likeliest answer is offered as a prediction (or a draft model drafts), so that accepting,
    rejecting and recovering are all exercised at the second token.
    """
    from paceline.sampling.goodness import chi_square_p_value

    # Hot, so that many tokens have a chance; top-k 20, so that the reported log-probabilities cover them all.
    params = SamplingParams(temperature=2.0, top_k=20, max_tokens=3, ignore_eos=True)
    likeliest = engine.generate(prompt, SamplingParams(max_tokens=8, ignore_eos=True), speculation=Speculation("off"))
    outputs = _draw(engine, prompt, draws, params, mode, prediction=likeliest.text)
    firsts = Counter(output.token_ids[0] for output in outputs)
    first = likeliest.token_ids[0]
    seconds = Counter(output.token_ids[1] for output in outputs if output.token_ids[0] == first)
    p_values: list[float] = []
    for prefix, counts in ((prompt, firsts), ([*prompt, first], seconds)):
        probs = _next_probs(engine, prefix, params)
        is_impossible = any(token not in probs for token in counts)
        fit = chi_square_p_value([counts[token] for token in probs], list(probs.values()))
        p_values.append(0.0 if is_impossible else fit)
    drafted = sum(output.speculation.num_draft_tokens for output in outputs)
    accepted = sum(output.speculation.num_accepted_draft_tokens for output in outputs)
    compared = f"{draws} draws of 2 tokens, {accepted} of {drafted} drafts accepted"
    name = f"sampled, {_describe(mode)} ({', '.join(mode.drafters)})" if drafted else f"sampled, {_describe(mode)}"
    return _Check(name, compared, f"p = {min(p_values):.3g}", min(p_values) > SIGNIFICANCE)


def _draw(
    engine: Engine, prompt: list[int], draws: int, params: SamplingParams, mode: Speculation, *, prediction: str
) -> list[Output]:
    """The same request many times over, in batches as large as the engine makes them."""
    request_ids = [engine.submit(prompt, params, speculation=mode, prediction=prediction) for _ in range(draws)]
    while engine.step():
        pass
    outputs = [engine.take(request_id)[-1].output for request_id in request_ids]
    return [output for output in outputs if output is not None]


def _next_probs(engine: Engine, prefix: list[int], params: SamplingParams) -> dict[int, float]:
    """The target's distribution after ``prefix`` under ``params``, by token id, from its reported log-probabilities."""
    probe = engine.generate(
        prefix, SamplingParams(max_tokens=1, logprobs=params.top_k, ignore_eos=True), speculation=Speculation("off")
    )
    assert probe.logprobs is not None
    weights = {token: math.exp(logprob / params.temperature) for token, logprob in probe.logprobs[0].top.items()}
    total = sum(weights.values())
    return {token: weight / total for token, weight in weights.items()}


def _encode(engine: Engine, text: str) -> list[int]:
    if engine.tokenizer.chat_template is not None:
        text = engine.render([{"role": "user", "content": text}])
    return engine.tokenizer.encode(text)


def _describe(mode: Speculation) -> str:
    return {"off": "no speculation", "dynamic": "dynamic"}.get(mode.mode, f"static {mode.max_tokens}")


def _read_prompts(path: Path | None) -> list[str]:
    if path is None:
        return list(PROMPTS)
    texts = [line.strip() for line in options.read_text(path, "--prompts").splitlines() if line.strip()]
    if not texts:
        raise InvalidParameterError(f"--prompts {path}: no prompt in it; write one a line")
    return texts


def _read_horizons(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise InvalidParameterError(f"--horizons must be whole numbers like 1,4,8, got {text!r}") from None


def _print_report(title: str, checks: Sequence[_Check]) -> None:
    table = Table(title=title, title_justify="left")
    for heading in ("check", "compared", "outcome", ""):
        table.add_column(heading)
    for check in checks:
        mark = "[green]ok[/]" if check.is_passed else "[red]DIFFERENT[/]"
        table.add_row(check.name, check.compared, check.outcome, mark)
    Console().print(table)

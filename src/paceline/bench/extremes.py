"""Where drafting can help least and most on this machine: tokens/s with the dynamic horizon against plain decoding.

python -m paceline.bench.extremes

Four cases try to make the engine slower than it is without drafts: a drafter that is always wrong, at no cost and at
50 ms a call, one that is always right at 50 ms a call, and random prompts at temperature 1.5. The last case is a file
that comes back with one identifier renamed, the old file being the client's prediction. The answer is held to the
renamed file, so it needs no model that can rename.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

import paceline
from paceline.bench.statistics import Interval, bootstrap, ratio_of_sums
from paceline.engine.engine import Engine
from paceline.records import Verdict
from paceline.request import DRAFTERS, Request, SamplingParams, Speculation, StructuredOutput
from paceline.spec.ladder import Ladder
from paceline.spec.proposer import Draft, StopRule

_OFF, _DYNAMIC = Speculation("off"), Speculation("dynamic")
_LEARNING_TOKENS = 64  # not counted: "never slower" holds once the costs are known
_CALL_S = 0.05
# Modules of this package of 1,000 to 2,000 tokens, and in each a name that stands there often.
_RENAMES = (("spec/stopping.py", "confidence"), ("bench/statistics.py", "counts"), ("spec/costs.py", "num_rows"))


@dataclass(frozen=True, slots=True)
class Case:
    """One request, served without and with drafts."""

    prompt: str | Sequence[int]
    params: SamplingParams
    speculation: Speculation = _DYNAMIC
    prediction: str | None = None


@dataclass(frozen=True, slots=True)
class Timing:
    """An answer; how many of its tokens were timed, those behind the learning ones, and the seconds they took."""

    token_ids: Sequence[int]
    num_timed: int
    seconds: float
    predicted_share: float


class ScriptedProposer:
    """Drafts what it was told, always or never what the target says, after a delay."""

    name = "model"

    def __init__(self, *, is_right: bool, seconds: float) -> None:
        self._is_right, self._seconds = is_right, seconds
        self.answer: Sequence[int] = ()

    def prepare(self, requests: Sequence[Request]) -> None:
        """It reads nothing."""

    def propose(
        self, requests: Sequence[Request], horizons: Sequence[int], rules: Sequence[StopRule | None] = ()
    ) -> list[Draft]:
        """See :class:`paceline.spec.proposer.Proposer`."""
        time.sleep(self._seconds)
        drafts = []
        for request, horizon in zip(requests, horizons, strict=True):
            start = request.num_tokens - len(request.prompt_token_ids)
            token_ids = self.answer[start : start + horizon]
            flip = 0 if self._is_right else 1  # the neighbour of a token, within the vocabulary
            drafts.append(Draft([token_id ^ flip for token_id in token_ids], self.name))
        return drafts

    def observe(self, request: Request, verdict: Verdict) -> None:
        """It does not learn."""

    def release(self, request_id: str) -> None:
        """It keeps nothing."""


def main(
    model: Annotated[str, typer.Option("--model", "-m", help="As for every command.")] = "smollm2-135m",
    repeats: Annotated[int, typer.Option("--repeats", help="Times that each prompt is served both ways.")] = 3,
) -> None:
    """Measure all cases, without and with drafts in turn, and print their ratios, minutes in all."""
    console = Console()
    scripted = {
        "always wrong, no cost": ScriptedProposer(is_right=False, seconds=0.0),
        "always wrong, 50 ms": ScriptedProposer(is_right=False, seconds=_CALL_S),
        "always right, 50 ms": ScriptedProposer(is_right=True, seconds=_CALL_S),
    }
    for name, proposer in scripted.items():
        with Engine(model, draft=None, max_model_len=4096) as engine:
            engine.core.ladder = Ladder([], [proposer])
            console.print(f"{name}: {_measure(engine, _code_cases(), repeats, proposer)}")
    with Engine(model, max_model_len=8192) as engine:
        console.print(f"random prompts, temperature 1.5: {_measure(engine, _random_cases(engine), repeats)}")
        console.print(f"rename, with a prediction: {_measure(engine, _rename_cases(), repeats)}")


def _measure(engine: Engine, cases: Sequence[Case], repeats: int, proposer: ScriptedProposer | None = None) -> str:
    plain: list[list[Timing]] = [[] for _ in cases]
    drafted: list[list[Timing]] = [[] for _ in cases]
    for _ in range(repeats):
        for index, case in enumerate(cases):
            plain[index].append(_serve(engine, case, _OFF))
            if proposer is not None:
                proposer.answer = plain[index][-1].token_ids
            drafted[index].append(_serve(engine, case, case.speculation))
            assert drafted[index][-1].token_ids == plain[index][-1].token_ids, "drafts changed the text"
    rates = [[_rate(timings) for timings in group] for group in (plain, drafted)]
    ratio = bootstrap(ratio_of_sums(rates[1], rates[0]), len(cases))
    share = max(timing.predicted_share for timings in drafted for timing in timings)
    text = f"{sum(rates[0]) / len(cases):.1f} tokens/s without, {sum(rates[1]) / len(cases):.1f} with: "
    text += f"{ratio.estimate:.2f} x ({_interval(ratio)})"
    return f"{text}, {share:.0%} of the tokens from the prediction" if share else text


def _rate(timings: Sequence[Timing]) -> float:
    return sum(timing.num_timed for timing in timings) / sum(timing.seconds for timing in timings)


def _serve(engine: Engine, case: Case, speculation: Speculation) -> Timing:
    engine.core.ladder.forget_answers()  # the same prompt was answered before
    started, num_before, output = time.perf_counter(), 0, None
    num_tokens = 0
    for delta in engine.stream(case.prompt, case.params, speculation=speculation, prediction=case.prediction):
        num_tokens += len(delta.token_ids)
        if num_before == 0 and num_tokens >= _LEARNING_TOKENS:
            started, num_before = time.perf_counter(), num_tokens
        output = delta.output
    assert output is not None, "a stream ends with its output"
    from_prediction = output.speculation.accepted_by_source.get("prediction", 0)
    return Timing(
        list(output.token_ids),
        num_tokens - num_before,
        time.perf_counter() - started,
        from_prediction / num_tokens,
    )


def _code_cases() -> list[Case]:
    """Continuations of this package's own files."""
    params = SamplingParams(max_tokens=256, ignore_eos=True)
    return [Case(_source(path)[:3000], params) for path, _ in _RENAMES]


def _random_cases(engine: Engine) -> list[Case]:
    dice = random.Random(0)
    size = engine.tokenizer.vocab_size
    return [
        Case(
            [dice.randrange(size) for _ in range(512)],
            SamplingParams(max_tokens=256, temperature=1.5, seed=seed, ignore_eos=True),
        )
        for seed in range(3)
    ]


def _rename_cases() -> list[Case]:
    others = tuple(name for name in DRAFTERS if name != "grammar")  # which would know the whole answer
    cases = []
    for path, name in _RENAMES:
        old = _source(path)
        new = re.sub(rf"\b{name}\b", f"renamed_{name}", old)
        params = SamplingParams(max_tokens=3000, structured=StructuredOutput.choice([new]))
        prompt = f"{old}\n\n# The same file with {name} renamed to renamed_{name}:\n\n"
        cases.append(Case(prompt, params, Speculation("dynamic", drafters=others), prediction=old))
    return cases


def _source(path: str) -> str:
    return (Path(paceline.__file__).parent / path).read_text(encoding="utf-8")


def _interval(ratio: Interval) -> str:
    return "-" if ratio.low is None else f"{ratio.low:.2f} to {ratio.high:.2f}"


if __name__ == "__main__":
    typer.run(main)

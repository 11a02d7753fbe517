"""Traces: what the target really said, token by token, so that drafting rules can be ranked without running it.

One JSON line per turn: the prompt and the answer as token ids, the client's prediction, and for each answer token the
target's likeliest alternatives, and what the draft model would have drafted from there on. Greedy answers are the same
whatever drafts, so one trace serves every rule.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.bench.recorded import IN_EVERY_STEP, DraftRecorder, RecordedDraft
from paceline.bench.records import Message, Task, TextKind
from paceline.errors import BenchmarkError
from paceline.request import SamplingParams, Speculation

if TYPE_CHECKING:
    from paceline.engine.engine import Engine

# Alternatives kept per token; more would triple the file and say little.
NUM_TOP = 5


@dataclass(frozen=True, slots=True)
class TraceTurn:
    """One recorded turn.

    Attributes:
        top: per answer token, the target's likeliest tokens with their log-probabilities, most likely first.
        drafts: per answer token, what the draft model says in its place and behind it; empty without a draft model.
    """

    task_id: str
    part: str
    turn: int
    kind: TextKind
    prompt_token_ids: Sequence[int]
    prediction: str | None
    token_ids: Sequence[int]
    top: Sequence[Sequence[tuple[int, float]]]
    drafts: Sequence[RecordedDraft] = ()


def record_task(
    task: Task, engine: Engine, *, speculation: Speculation | None = None, recorder: DraftRecorder | None = None
) -> Iterator[TraceTurn]:
    """Run a task with gold history (as the scripted benchmark does) and greedy answers.

    ``recorder`` is what :func:`paceline.bench.recorded.record_drafts` put into the engine, if it did; ``speculation``
    is then :data:`paceline.bench.recorded.IN_EVERY_STEP`.
    """
    speculation = IN_EVERY_STEP if recorder is not None else speculation
    history: list[Message] = []
    for number, turn in enumerate(task.turns):
        history += turn.messages
        prompt = engine.tokenizer.encode(engine.render(history))
        params = SamplingParams(max_tokens=turn.max_tokens, logprobs=NUM_TOP)
        output = engine.generate(prompt, params, speculation=speculation, prediction=turn.prediction)
        assert output.logprobs is not None
        yield TraceTurn(
            task_id=task.task_id,
            part=task.part,
            turn=number,
            kind=turn.kind,
            prompt_token_ids=prompt,
            prediction=turn.prediction,
            token_ids=list(output.token_ids),
            top=[[(token, round(value, 4)) for token, value in each.top.items()] for each in output.logprobs],
            drafts=recorder.take(len(output.token_ids)) if recorder is not None else (),
        )
        history.append({"role": "assistant", "content": turn.gold})


def write_trace(path: Path, turns: Iterable[TraceTurn]) -> None:
    """Append turns to a trace file, a line each."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        for turn in turns:
            file.write(json.dumps(asdict(turn), separators=(",", ":")) + "\n")


def read_trace(path: Path) -> list[TraceTurn]:
    """The turns of a trace file.

    Raises:
        BenchmarkError: the file cannot be read, or a line is no turn.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise BenchmarkError(f"{path}: {error.strerror or error}; record a trace first") from None
    turns = []
    for number, line in enumerate(lines, 1):
        try:
            turns.append(TraceTurn(**json.loads(line)))
        except (ValueError, TypeError) as error:
            raise BenchmarkError(f"{path}, line {number} is not a recorded turn: {error!r}; record it anew") from None
    return turns

"""Runs tasks turn by turn through the arms, interleaved, and yields one record per turn."""

from __future__ import annotations

import random
import resource
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, Protocol

from paceline.bench.arms import Arm, CacheKind
from paceline.bench.records import Message, StepRecord, Task, Turn, TurnRecord
from paceline.errors import BenchmarkError
from paceline.request import SamplingParams

if TYPE_CHECKING:
    from paceline.engine.engine import Engine
    from paceline.engine.events import StepEvent

Mode = Literal["scripted", "free"]


class Runner(Protocol):
    """Serves the turns of one task in one arm."""

    def begin(self, arm: Arm) -> None:
        """Start a task from a cold cache."""

    def run(self, arm: Arm, task: Task, number: int, messages: Sequence[Message]) -> tuple[TurnRecord, str]:
        """Answer turn ``number`` of ``task`` with ``messages`` as the whole history; the record and the text."""


class EngineRunner:
    """Serves turns with this engine, one instance per kind of cache; the paged arms share theirs."""

    def __init__(self, engines: Mapping[CacheKind, Engine]) -> None:
        self._engines = engines
        self._steps: list[StepEvent] = []
        for engine in engines.values():
            engine.subscribe(self._steps.append)

    def warm_up(self) -> None:
        """The first passes through fresh memory are slower; no arm should pay for them."""
        for engine in self._engines.values():
            engine.generate("def main():\n", SamplingParams(max_tokens=8, ignore_eos=True))

    def begin(self, arm: Arm) -> None:
        """See :class:`Runner`."""
        self._engines[arm.cache].reset_prefix_cache()

    def run(self, arm: Arm, task: Task, number: int, messages: Sequence[Message]) -> tuple[TurnRecord, str]:
        """See :class:`Runner`."""
        engine, turn = self._engines[arm.cache], task.turns[number]
        token_ids = engine.tokenizer.encode(engine.render(messages))
        params = SamplingParams(max_tokens=turn.max_tokens)
        self._steps.clear()
        steps: list[StepRecord] = []
        started = last = time.perf_counter()
        output = None
        for delta in engine.stream(token_ids, params, speculation=arm.speculation, prediction=turn.prediction):
            now = time.perf_counter()
            event = self._steps[-1]
            steps.append(
                StepRecord(
                    ms=(now - last) * 1e3,
                    num_tokens=len(delta.token_ids),
                    num_drafted=event.num_drafted,
                    num_accepted=event.num_accepted,
                    horizon=event.horizon,
                    source=event.source,
                    filled_slots=event.num_computed_tokens,
                    reserved_slots=event.num_blocks * engine.info.block_size,
                    draft_ms=event.draft_ms,
                    forward_ms=event.forward_ms,
                    expected_acceptances=[round(value, 4) for value in event.expected_acceptances],
                )
            )
            last, output = now, delta.output
        assert output is not None, "a stream ends with its output"
        record = TurnRecord(
            arm=arm.name,
            task_id=task.task_id,
            part=task.part,
            turn=number,
            kind=turn.kind,
            is_cold=number == 0,
            num_prompt_tokens=len(token_ids),
            num_cached_tokens=output.usage.cached_tokens,
            token_ids=list(output.token_ids),
            turn_ms=(last - started) * 1e3,
            steps=steps,
            peak_rss_mib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        )
        return record, output.text


def run_suite(
    runner: Runner,
    tasks: Sequence[Task],
    arms: Sequence[Arm],
    *,
    mode: Mode,
    seed: int,
    done: Collection[tuple[str, str]] = (),
    on_dropped: Callable[[Arm, BenchmarkError], None] | None = None,
) -> Iterator[list[TurnRecord]]:
    """Yield the records of one task in one arm at a time, so that a run can be cut there and resumed.

    Tasks come in an order shuffled by ``seed``, and the arms of each task in an order of their own: a machine that
    gets slower or faster over an hour then favours no arm. Pairs (arm, task id) in ``done`` are skipped.
    With ``on_dropped`` an arm whose runner raises BenchmarkError (another engine died) is reported there and left out
    from then on; the task it failed in yields nothing.
    """
    dropped: set[str] = set()
    order = list(tasks)
    random.Random(seed).shuffle(order)
    for task in order:
        turn_of_arms = list(arms)
        random.Random(f"{seed}/{task.task_id}").shuffle(turn_of_arms)
        for arm in turn_of_arms:
            if arm.name in dropped or (arm.name, task.task_id) in done:
                continue
            try:
                records = run_task(runner, task, arm, mode=mode)
            except BenchmarkError as error:
                if on_dropped is None:
                    raise
                dropped.add(arm.name)
                on_dropped(arm, error)
            else:
                yield records


def run_task(runner: Runner, task: Task, arm: Arm, *, mode: Mode) -> list[TurnRecord]:
    """All turns of one task in one arm; what the model said joins the history only in the free-running mode."""
    runner.begin(arm)
    history: list[Message] = []
    records = []
    for number, turn in enumerate(task.turns):
        history += turn.messages
        record, text = runner.run(arm, task, number, history)
        records.append(record)
        history.append(_answer(turn, text, mode))
    return records


def _answer(turn: Turn, text: str, mode: Mode) -> Message:
    return {"role": "assistant", "content": turn.gold if mode == "scripted" else text}

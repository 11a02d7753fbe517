"""The order of a run, scripted and free histories, and that an interrupted run ends as an uninterrupted one."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest

from paceline.bench.arms import ARMS, Arm, parse_arms
from paceline.bench.drive import run_suite, run_task
from paceline.bench.machine import Machine
from paceline.bench.records import Message, StepRecord, Task, Turn, TurnRecord
from paceline.bench.results import RunInfo, append_records, read_records, summarise
from paceline.errors import InvalidParameterError

COSTS = {"autoregressive": 10.0, "static-4": 5.0, "dynamic": 4.0}


class FakeRunner:
    """Answers at once, at a fixed cost per token of each arm."""

    def __init__(self) -> None:
        self.histories: list[list[Message]] = []
        self.begun: list[str] = []

    def begin(self, arm: Arm) -> None:
        self.begun.append(arm.name)

    def run(self, arm: Arm, task: Task, number: int, messages: Sequence[Message]) -> tuple[TurnRecord, str]:
        self.histories.append(list(messages))
        cost = COSTS[arm.name]
        steps = [StepRecord(ms=50.0, num_tokens=1), *[StepRecord(ms=cost, num_tokens=1, reserved_slots=8)] * 9]
        record = TurnRecord(
            arm=arm.name,
            task_id=task.task_id,
            part=task.part,
            turn=number,
            kind=task.turns[number].kind,
            is_cold=number == 0,
            num_prompt_tokens=10,
            num_cached_tokens=0,
            token_ids=list(range(10)),
            turn_ms=50.0 + 9 * cost,
            steps=steps,
        )
        return record, f"said {number}"


def make_tasks(count: int) -> list[Task]:
    turns = [
        Turn([{"role": "user", "content": f"ask {i}"}], gold=f"gold {i}", kind="edit", max_tokens=10) for i in range(3)
    ]
    return [Task(f"task-{i}", "part", turns) for i in range(count)]


ARM_LIST = [ARMS[name] for name in COSTS]


def test_scripted_history_is_gold_and_free_history_is_what_was_said() -> None:
    for mode, expected in (("scripted", "gold 0"), ("free", "said 0")):
        runner = FakeRunner()
        run_task(runner, make_tasks(1)[0], ARMS["dynamic"], mode=mode)  # type: ignore[arg-type]
        assert [message["content"] for message in runner.histories[1]] == ["ask 0", expected, "ask 1"]
        assert runner.begun == ["dynamic"]


def test_arms_are_interleaved_and_shuffled_the_same_way_every_time() -> None:
    tasks = make_tasks(12)
    orders = []
    for _ in range(2):
        batches = list(run_suite(FakeRunner(), tasks, ARM_LIST, mode="scripted", seed=3))
        orders.append([(batch[0].task_id, batch[0].arm) for batch in batches])
    assert orders[0] == orders[1]
    by_task = [list(group) for _, group in itertools.groupby(orders[0], key=lambda pair: pair[0])]
    assert len(by_task) == 12, "all arms of a task run before the next task begins"
    assert len({tuple(arm for _, arm in group) for group in by_task}) > 1, "the arms' order varies"
    assert [group[0][0] for group in by_task] != [task.task_id for task in tasks], "so does the tasks'"


@pytest.mark.parametrize("num_before", [0, 1, 4, 17, 35])
def test_an_interrupted_run_ends_with_the_same_tables(tmp_path: Path, num_before: int) -> None:
    tasks = make_tasks(12)
    info = RunInfo(Machine.here(), "fake", None, "fake")

    def run(log: Path, limit: int | None) -> None:
        done = {(record.arm, record.task_id) for record in read_records(log)}
        batches = run_suite(FakeRunner(), tasks, ARM_LIST, mode="scripted", seed=3, done=done)
        for batch in itertools.islice(batches, limit):
            append_records(log, batch)

    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    run(whole, None)
    run(cut, num_before)
    with cut.open("a") as file:
        file.write('{"arm": "dynamic", "task')  # killed in the middle of a line
    run(cut, None)
    expected, got = (summarise(read_records(path), info) for path in (whole, cut))
    assert got["arms"] == expected["arms"]
    assert got["ratios"] == expected["ratios"]
    assert expected["arms"]["dynamic"]["decode_tokens_per_s"] == pytest.approx(250.0)


def test_parse_arms() -> None:
    assert [arm.name for arm in parse_arms("dynamic, autoregressive,dynamic")] == ["dynamic", "autoregressive"]
    assert parse_arms("autoregressive-contiguous")[0].cache == "contiguous"
    for text, problem in (("bogus", "unknown arm 'bogus'"), (" , ", "no arm to run")):
        with pytest.raises(InvalidParameterError, match=problem):
            parse_arms(text)

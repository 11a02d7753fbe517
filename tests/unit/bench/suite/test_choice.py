from __future__ import annotations

import pytest

from paceline.bench.records import Task
from paceline.bench.suite import stratified
from paceline.bench.suite.choice import pick, rank
from paceline.errors import BenchmarkError

TASKS = [Task(f"{part}-{i}", part, ()) for part, num in (("a", 60), ("b", 30), ("c", 10)) for i in range(num)]


def parts(tasks: list[Task]) -> list[int]:
    return [sum(task.part == part for task in tasks) for part in "abc"]


def test_every_part_is_represented_in_proportion() -> None:
    assert parts(stratified(TASKS, 10, seed=0)) == [6, 3, 1]
    assert parts(stratified(TASKS, 3, seed=0)) == [1, 1, 1]
    assert parts(stratified(TASKS, 2, seed=0)) == [1, 1, 0]
    assert parts(stratified(TASKS, 1000, seed=0)) == [60, 30, 10]


def test_the_seed_chooses_and_a_larger_choice_keeps_the_smaller() -> None:
    few, many = stratified(TASKS, 10, seed=0), stratified(TASKS, 50, seed=0)
    assert {task.task_id for task in few} <= {task.task_id for task in many}
    assert few == stratified(list(TASKS), 10, seed=0)
    assert few != stratified(TASKS, 10, seed=1)


def test_nothing_is_no_choice() -> None:
    with pytest.raises(BenchmarkError, match="positive"):
        stratified(TASKS, 0, seed=0)


def test_choices_do_not_depend_on_the_process() -> None:
    assert rank(1, "x") == 10908116639723479234
    assert pick("abc", 1, "x") == "abc"[10908116639723479234 % 3]

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.bench.suite.archives import fetch
from paceline.bench.suite.edit_task import Step, build_edit_task
from paceline.bench.suite.edits import edit_text
from paceline.bench.suite.facts import facts
from paceline.bench.suite.functions import changed_functions
from paceline.bench.suite.manifest import Manifest, StepSpec
from paceline.bench.suite.select_edits import applies, select
from paceline.bench.suite.suite import build, release_step, suite_sha256
from tests.unit.bench.suite.wheels import NEW, OLD, Index

STEP = Step("bank", {"bank/core.py": OLD}, {"bank/core.py": NEW}, "release 2.0")


def told(name: str) -> list[str]:
    change = next(c for c in changed_functions("bank/core.py", OLD, NEW) if c.name == name)
    found = facts(name, change.old.lines(OLD.split("\n")), change.new.lines(NEW.split("\n")))
    return [fact.text for fact in found]


def test_facts_say_what_changed() -> None:
    assert told("Account.deposit")[:2] == [
        "`Account.deposit` accepts a new parameter `note`, by default `None`.",
        '`Account.deposit` raises `ValueError("a deposit must be positive")` where it applies.',
    ]
    assert "Keep in mind: The fee is charged even when the account is empty afterwards." in told("Account.withdraw")


def test_a_reformatted_function_has_no_facts() -> None:
    assert facts("f", ["def f(a, b):", "    return (a +", "        b)"], ["def f(a, b):", "    return (a + b)"]) == []


@pytest.mark.parametrize("shape", ["blocks", "function"])
def test_an_edit_yields_the_new_function(shape: str) -> None:
    old, new = OLD.split("\n"), NEW.split("\n")
    for change in changed_functions("bank/core.py", OLD, NEW):
        assert applies(change, old, new, shape)
        assert edit_text(change, old, new, shape)


def test_a_task_reads_edits_fails_edits_and_sums_up() -> None:
    (spec,) = select(STEP, "release edit", "bank", 5, seed=1)
    task = build_edit_task(spec, STEP)
    texts = [turn.messages[-1]["content"] for turn in task.turns]
    assert [message["role"] for message in task.turns[0].messages] == ["system", "user"]
    assert all(message["role"] == "user" for turn in task.turns[1:] for message in turn.messages)
    assert [turn.kind for turn in task.turns].count("edit") == 2
    assert 4 <= len(task.turns) <= 8
    assert any("1 failed" in text for text in texts)
    assert "passed" in texts[-1]
    assert task.turns[-1].kind == "prose"
    assert all(64 <= turn.max_tokens <= 256 for turn in task.turns)
    assert all(turn.prediction for turn in task.turns if turn.kind == "edit")


def test_a_manifest_survives_json_and_rebuilds_the_same_tasks(tmp_path: Path) -> None:
    (tmp_path / "index").mkdir()
    index = Index(tmp_path / "index")
    archives = fetch(index.sources(), tmp_path / "bench", download=index.download)
    bare = StepSpec("bank", "bank==1.0", "bank==2.0", "release 2.0", "Prepare 2.0", ("v1.0 Release 1.0",), ())
    specs = tuple(select(release_step(bare, archives), "commit", "bank", 5, seed=1))
    step = StepSpec(bare.project, bare.old, bare.new, bare.aim, bare.title, bare.log, specs)
    manifest = Manifest(1, index.sources(), (), (), (), (), (step,), "")
    again = Manifest.from_json(manifest.to_json())
    assert again == manifest
    tasks = build(again, archives)
    assert "git log" in tasks[0].turns[0].gold
    assert suite_sha256(tasks) == suite_sha256(build(manifest, archives))
    assert "bank/core.py" in manifest.to_json()
    assert "balance" not in manifest.to_json()  # selections only, no content

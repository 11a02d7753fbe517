from __future__ import annotations

from pathlib import Path

from paceline.bench.suite.bug_task import BugSpec, build_bug_task
from paceline.bench.suite.functions import Span, function_spans
from paceline.bench.suite.making.mutate import mutations
from paceline.bench.suite.making.run_code import run_call
from paceline.bench.suite.mutation import KINDS, Mutation

SOURCE = '''def clamp(value, low, high):
    """The value within bounds."""
    if low > high:
        raise ValueError("no room")
    if value < low:
        return low
    return min(value, high)
'''


def test_every_mutation_changes_the_function_and_still_parses() -> None:
    found = mutations(SOURCE, Span(1, 7), seed=0)
    assert {mutation.kind for mutation in found} >= {"comparison", "guard", "name"}
    for mutation in found:
        broken = mutation.apply(SOURCE)
        assert broken != SOURCE
        assert mutation.kind in KINDS
        assert function_spans(broken)["clamp"] == Span(1, 7 - mutation.num_lines_lost)


def test_the_order_of_mutations_is_the_seeds() -> None:
    assert mutations(SOURCE, Span(1, 7), seed=0) == mutations(SOURCE, Span(1, 7), seed=0)
    assert mutations(SOURCE, Span(1, 7), seed=0) != mutations(SOURCE, Span(1, 7), seed=1)


def test_a_run_reports_values_and_frames_without_paths(tmp_path: Path) -> None:
    (tmp_path / "clamping.py").write_text(SOURCE)
    assert run_call(tmp_path, "clamping", "clamping.py", "m.clamp(5, 0, 3)") == {"value": "3"}
    assert run_call(tmp_path, "clamping", "clamping.py", "m.clamp(1, 3, 0)") == {
        "raises": ["ValueError", "no room"],
        "frames": [[4, "clamp"]],
    }


def test_a_call_that_hangs_is_none(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import time\n")
    assert run_call(tmp_path, "slow", "slow.py", "m.time.sleep(60)", timeout=1.0) is None


def test_a_task_shows_the_bug_and_its_gold_restores_the_original() -> None:
    guard = Mutation("guard", 3, 0, 5, 0, "")
    outcome = {"value": "3"}
    call = "m.clamp(1, 3, 0)"
    spec = BugSpec("bug-00", "clamping.py", "clamping", "clamp", Span(1, 7), guard, call, "1", outcome, "function", 0)
    task = build_bug_task(spec, {"clamping.py": SOURCE})
    window = task.turns[1].messages[-1]["content"]
    assert "no room" not in window
    assert "It gives 3 instead." in task.turns[0].messages[-1]["content"]
    edit = task.turns[2]
    assert edit.kind == "edit"
    assert SOURCE.rstrip() in edit.gold
    assert edit.prediction == guard.apply(SOURCE).rstrip()
    assert "assert m.clamp(1, 3, 0) == 1" in task.turns[3].gold

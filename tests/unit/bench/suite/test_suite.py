from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from paceline.bench.suite import load_suite, stratified, suite_sha256
from paceline.bench.suite.archives import fetch
from paceline.bench.suite.bug_task import PART as BUG_FIX
from paceline.bench.suite.edit_task import build_edit_task
from paceline.bench.suite.implement_task import PART as IMPLEMENT
from paceline.bench.suite.implement_task import ImplementSpec, build_implement_task, refactored
from paceline.bench.suite.manifest import Manifest
from paceline.bench.suite.suite import release_step
from paceline.bench.suite.tool_task import PART as TOOLS
from paceline.errors import BenchmarkError
from paceline.loader.catalog import paceline_home

PROBLEM = {
    "task_id": "Own/0",
    "entry_point": "double",
    "prompt": 'def double(l):\n    """ Return l with each number doubled.\n    >>> double([1])\n    [2]\n    """\n',
    "canonical_solution": "    result = [2 * e for e in l]\n    return result\n",
    "test": "def check(candidate):\n    assert candidate([1]) == [2]\n    assert candidate([]) == []\n",
}


def test_an_unknown_suite_is_an_error_that_lists_the_others(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkError, match="agent, humaneval"):
        load_suite("agents", home=tmp_path)


def test_the_shipped_manifest_has_150_tasks_pinned_sources_and_their_licences() -> None:
    manifest = Manifest.shipped()
    counts = [sum(len(step.tasks) for step in manifest.releases), len(manifest.problems), len(manifest.bugs)]
    counts += [len(manifest.scenarios), sum(len(step.tasks) for step in manifest.commits)]
    assert counts == [60, 30, 30, 20, 10]
    assert all("==" in source.requirement and len(source.sha256) == 64 for source in manifest.sources)
    assert all(source.licence for source in manifest.sources)
    assert Manifest.from_json(manifest.to_json()) == manifest


def test_a_refactoring_has_types_names_and_sections() -> None:
    text = refactored(PROBLEM, ["list[int]", "list[int]"], {"l": "numbers"})
    assert text.startswith("def double(numbers: list[int]) -> list[int]:\n")
    assert '"""Return numbers with each number doubled.' in text
    assert "Args:\n        numbers: whole numbers." in text
    assert "for e in numbers]" in text
    assert ">>>" not in text


def test_an_implementation_is_run_refactored_and_tested() -> None:
    spec = ImplementSpec("implement-00", 0, None, 0, "", ["list[int]", "list[int]"], {"l": "numbers"}, [2, 3], 1)
    task = build_implement_task(spec, PROBLEM)
    assert [turn.kind for turn in task.turns] == ["new code", "edit", "new code", "prose"]
    assert "assert double([1]) == [2]" in task.turns[2].gold


@pytest.mark.long
def test_the_suite_built_from_the_package_index_is_the_one_that_was_committed() -> None:
    tasks = load_suite("agent", home=paceline_home())
    manifest = Manifest.shipped()
    assert suite_sha256(tasks) == manifest.sha256
    parts = Counter(task.part for task in tasks)
    assert parts == {"release edit": 60, IMPLEMENT: 30, BUG_FIX: 30, TOOLS: 20, "commit": 10}
    assert len({task.task_id for task in tasks}) == 150
    assert {task.part for task in stratified(tasks, 5, seed=0)} == set(parts)
    for task in tasks:
        assert 4 <= len(task.turns) <= 8
        for turn in task.turns:
            assert 64 <= turn.max_tokens <= 256
            assert turn.gold.strip()
            assert all(message["content"].strip() for message in turn.messages)
    assert len({task.turns[0].messages[0]["content"] for task in tasks}) == 1  # one system prompt for all
    assert len(load_suite("humaneval", home=paceline_home())) == 164


@pytest.mark.long
def test_every_search_block_applies_to_the_file_as_it_is_then() -> None:
    manifest = Manifest.shipped()
    archives = fetch(manifest.sources, paceline_home() / "bench")
    num_blocks = 0
    for step in (*manifest.releases, *manifest.commits):
        sources = release_step(step, archives)
        for spec in step.tasks:
            files = dict(sources.old)
            edits = [turn for turn in build_edit_task(spec, sources).turns if turn.kind == "edit"]
            for change, shape, turn in zip(spec.changes, spec.shapes, edits, strict=True):
                new = "\n".join(change.new.lines(sources.new[change.path].split("\n")))
                if shape == "function":
                    assert turn.prediction is not None
                    assert new in turn.gold
                    assert files[change.path].count(turn.prediction) == 1
                    files[change.path] = files[change.path].replace(turn.prediction, new)
                    continue
                for block in turn.gold.split("<<<<<<< SEARCH\n")[1:]:
                    search, _, rest = block.partition("=======\n")
                    assert files[change.path].count(search) == 1
                    files[change.path] = files[change.path].replace(search, rest.partition(">>>>>>> REPLACE")[0])
                    num_blocks += 1
                assert new in files[change.path]
    assert num_blocks > 50

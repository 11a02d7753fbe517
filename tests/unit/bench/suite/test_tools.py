from __future__ import annotations

from typing import Any

import pytest

from paceline.bench.suite.folder_tools import FolderTools
from paceline.bench.suite.tool_task import Scenarios, ToolSpec, build_tool_task, parse_call, select_scenarios

TREE: dict[str, Any] = {
    "root": {
        "home": {
            "type": "directory",
            "contents": {
                "notes.txt": {"type": "file", "content": "b line\na line"},
                ".hidden": {"type": "file", "content": ""},
                "old": {"type": "directory", "contents": {}},
            },
        }
    }
}


@pytest.mark.parametrize(
    ("calls", "result"),
    [
        ("ls()", {"current_directory_content": ["notes.txt", "old"]}),
        ("ls(a=True)", {"current_directory_content": ["notes.txt", ".hidden", "old"]}),
        ("cd('old'); pwd()", {"current_working_directory": "/home/old"}),
        ("cd('..')", {"error": "Current directory is already the root. Cannot go back."}),
        ("sort('notes.txt')", {"sorted_content": "a line\nb line"}),
        ("grep('notes.txt', 'a l')", {"matching_lines": ["a line"]}),
        ("wc('notes.txt', mode='w')", {"count": 4, "type": "words"}),
        ("tail('notes.txt', 1)", {"last_lines": "a line"}),
        ("mv('notes.txt', 'old'); find(name='notes')", {"matches": ["./old/notes.txt"]}),
        ("cp('notes.txt', 'copy.txt'); diff('notes.txt', 'copy.txt')", {"diff_lines": ""}),
        ("mkdir('new'); touch('x'); echo('hi', 'x'); cat('x')", {"file_content": "hi"}),
        ("rm('old'); rmdir('old')", {"error": "rmdir: cannot remove 'old': No such file or directory"}),
        ("du()", {"disk_usage": "13 bytes"}),
        ("cat('gone')", {"error": "cat: 'gone': No such file or directory"}),
    ],
)
def test_the_folder_answers_like_a_shell(calls: str, result: dict[str, Any]) -> None:
    folder = FolderTools(TREE)
    answers = [folder.call(*parse_call(call)) for call in calls.split("; ")]
    assert answers[-1] == result


def test_a_task_has_calls_and_an_answer_for_each_request() -> None:
    scenarios = Scenarios(
        questions={
            "s1": {
                "initial_config": {"GorillaFileSystem": TREE},
                "question": [[{"role": "user", "content": "List it."}], [{"role": "user", "content": "Sort notes."}]],
            }
        },
        answers={"s1": [["ls()"], ["sort(file_name='notes.txt')"]]},
        documentation="ls(): list.",
    )
    assert [spec.num_requests for spec in select_scenarios(scenarios, 5, 0, lambda task: True)] == [2]
    task = build_tool_task(ToolSpec("tool-00", "s1", 2, 0), scenarios)
    assert len(task.turns) == 4
    assert '{"name": "ls", "arguments": {}}' in task.turns[0].gold
    assert task.turns[1].gold == "The folder holds `notes.txt`, `old`."
    assert "a line\nb line" in task.turns[3].gold
    assert "ls(): list." in task.turns[0].messages[-1]["content"]

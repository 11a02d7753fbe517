"""chat, theory, env, the help, and the module as a program."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from paceline import Engine, SamplingParams, __version__
from paceline.cli.stream_view import StreamView
from paceline.engine.output import Delta, TokenPiece
from tests.unit.cli.conftest import Result


@pytest.fixture
def chat(cli: Callable[..., Result], tiny_checkpoint: Path) -> Callable[..., Result]:
    def call(lines: str, *arguments: object) -> Result:
        return cli("chat", "--model", tiny_checkpoint, "--max-tokens", 8, *arguments, stdin=lines)

    return call


@pytest.fixture(scope="module")
def answers(tiny_checkpoint: Path) -> list[str]:
    with Engine(tiny_checkpoint, draft=None) as engine, engine.session() as session:
        return [session.send(content, SamplingParams(max_tokens=8)).text for content in ("hello", "Xyz")]


def test_chat_answers_line_by_line_and_remembers(chat: Callable[..., Result], answers: list[str]) -> None:
    result = chat("hello\n\n  \nXyz\n")
    assert result.status == 0
    assert result.out == "".join(f"{answer}\n" for answer in answers)
    assert result.err.count("8 tokens, ") == 2
    assert " prompt tokens cached" in result.err


def test_chat_reset_forgets_and_exit_leaves(chat: Callable[..., Result], answers: list[str]) -> None:
    result = chat("hello\n/reset\nhello\n/exit\nXyz\n")
    assert result.status == 0
    assert result.out == f"{answers[0]}\n{answers[0]}\n"


def test_chat_survives_a_line_that_is_too_long(chat: Callable[..., Result], answers: list[str]) -> None:
    result = chat(f"hello\n{'a' * 100}\nXyz\n", "--max-model-len", 60)
    assert result.status == 0
    assert result.out == "".join(f"{answer}\n" for answer in answers)
    assert "shorten the prompt" in result.err


def test_chat_with_nothing_to_say(chat: Callable[..., Result]) -> None:
    assert (chat("").status, chat("").out) == (0, "")
    assert chat("hello", "--system", "be brief").out.count("\n") == 1


def test_theory_prints_the_closed_forms(cli: Callable[..., Result]) -> None:
    result = cli("theory", "--alpha", 0.8, "--r", 0.1, "--max-horizon", 4)
    assert result.status == 0
    assert "best horizon: 4" in result.out
    # E[K] = .8 + .64 + .512 + .4096 and speedup = (E[K] + 1) / 1.4
    assert [line.strip("│ ") for line in result.out.splitlines() if "2.36" in line] == [
        "4 │ 2.36 │            3.36 │   2.40x"
    ]
    assert sum("x │" in line for line in result.out.splitlines()) == 5


def test_env_names_what_a_bug_report_needs(
    cli: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    result = cli("env")
    assert result.status == 0
    for word in (
        __version__,
        "torch",
        "tokenizers",
        "processor",
        "backend",
        str(tmp_path),
        "smollm2-135m",
        "not fetched",
    ):
        assert word in result.out


def test_help_names_every_command(cli: Callable[..., Result]) -> None:
    result = cli("--help")
    assert result.status == 0
    for command in ("run", "chat", "pull", "verify", "theory", "env"):
        assert f" {command} " in result.out


@pytest.mark.parametrize(
    "texts", [["a\tb", "\tc\n"], ["one\r\n", "two"], ["[bold]x[/]", ":smile:"], ["  ", "é漢😀\n\n"], ["x" * 300]]
)
def test_piped_text_is_passed_on_untouched(texts: list[str]) -> None:
    file = io.StringIO()
    view = StreamView(Console(file=file, soft_wrap=True, highlight=False, width=40))
    for text in texts:
        view.show(Delta(text, [TokenPiece(text, "suffix")], [1]))
    view.end()
    written = "".join(texts)
    assert file.getvalue() == written + ("" if written.endswith("\n") else "\n")


def test_accepted_drafts_are_coloured_on_a_terminal() -> None:
    file = io.StringIO()
    view = StreamView(Console(file=file, force_terminal=True, color_system="standard", soft_wrap=True, highlight=False))
    view.show(
        Delta("ab\tc", [TokenPiece("a", "bonus"), TokenPiece("b\t", "suffix"), TokenPiece("c", "model")], [1, 2, 3])
    )
    assert file.getvalue() == "a\x1b[32mb\t\x1b[0m\x1b[36mc\x1b[0m"


def test_the_module_is_a_program(tiny_checkpoint: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "paceline",
        "run",
        "abc",
        "--raw",
        "--max-tokens",
        "4",
        "--model",
        str(tiny_checkpoint),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0
    assert len(done.stdout) == 5
    assert "(length)" in done.stderr


def test_the_module_reports_errors_in_one_line() -> None:
    command = [sys.executable, "-m", "paceline", "theory", "--alpha", "7"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1

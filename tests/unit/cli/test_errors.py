"""What a user may get wrong: exit status 2, one line on stderr that says what to do, never a traceback."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import write_tiny_checkpoint, write_tokenizer
from tests.unit.cli.conftest import Result
from tests.unit.loader.tiny_checkpoints import random_weights, tiny_config, write_gguf


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Path) -> dict[str, Path]:
    """Good and bad things to point at."""
    root = tmp_path_factory.mktemp("places")
    config = tiny_config()
    whole = write_gguf(root / "whole.gguf", config, random_weights(config))
    truncated = root / "truncated.gguf"
    truncated.write_bytes(whole.read_bytes()[:-500])
    other = write_tiny_checkpoint(root / "other", "llama")
    write_tokenizer(other, "zyxwvutsrqponmlkjihgfedcba")
    (root / "binary.txt").write_bytes(b"\xff\xfe\x00")
    (root / "blank.txt").write_text(" \n")
    (root / "empty").mkdir()
    return {
        "MODEL": tiny_checkpoint,
        "MISSING": root / "missing.txt",
        "TRUNCATED": truncated,
        "OTHER": other,
        "BINARY": root / "binary.txt",
        "BLANK": root / "blank.txt",
        "EMPTY": root / "empty",
    }


def assert_refused(result: Result, message: str) -> None:
    assert result.status == 2
    assert result.out == ""
    assert "Traceback" not in result.err
    assert result.err.startswith("paceline: ")
    assert result.err.count("\n") == 1
    assert message in result.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "either a PROMPT or --prompt-file"),
        ("abc --prompt-file BLANK", "either a PROMPT or --prompt-file"),
        ("--prompt-file BLANK", "the prompt is empty"),
        ("--prompt-file MISSING", "No such file"),
        ("--prompt-file EMPTY", "Is a directory"),
        ("--prompt-file BINARY", "not UTF-8 text"),
        ("abc --file MISSING", "--file"),
        ("abc --file BINARY", "not UTF-8 text"),
        ("abc --raw --system brief", "--system needs a chat template"),
        ("abc --max-tokens 0", "max_tokens must be 1 or more"),
        ("abc --temperature -1", "temperature must be 0 or more"),
        ("abc --temperature nan", "temperature must be 0 or more"),
        ("abc --top-p 0", "top_p must be in (0, 1]"),
        ("abc --seed -1", "seed must be"),
        ("abc --spec bogus", "must be dynamic, static or off, got 'bogus'"),
        ("abc --spec-tokens 0", "must be from 1 to 64, got 0"),
        ("abc --spec-tokens 65", "must be from 1 to 64, got 65"),
        ("abc --drafters bogus", "unknown drafter 'bogus'"),
        ("abc --compare --spec off", "--compare needs speculation"),
        ("abc --device bogus", "device 'bogus' cannot be used"),
        ("abc --device cuda:99", "device 'cuda:99' cannot be used"),
        ("abc --dtype fp64", "dtype must be one of"),
        ("abc --backend bogus", "backend must be one of"),
        ("abc --threads 0", "num_threads must be 1 or more"),
        ("abc --block-size 0", "block_size must be"),
        ("abc --kv-memory 0", "kv_memory_bytes must be positive"),
        ("abc --max-model-len 513", "more than the model's context"),
        ("abc --max-model-len 1", "max_model_len must be 2 or more"),
        ("abcdefghij --max-model-len 4", "shorten the prompt"),
        ("abc --draft OTHER", "token 2 is 'z' there and 'a' in the target"),
        ("abc --draft MISSING", "no model"),
    ],
)
def test_bad_input_of_run(cli: Callable[..., Result], places: dict[str, Path], arguments: str, message: str) -> None:
    words = [str(places.get(word, word)) for word in arguments.split()]
    assert_refused(cli("run", *words, "--model", places["MODEL"]), message)


def test_an_empty_prompt(cli: Callable[..., Result], places: dict[str, Path]) -> None:
    for prompt in ("", "  \n", "-"):
        assert_refused(cli("run", prompt, "--model", places["MODEL"], stdin="\n"), "the prompt is empty")


def test_standard_input_that_is_not_text(cli: Callable[..., Result], places: dict[str, Path]) -> None:
    assert_refused(cli("run", "-", "--model", places["MODEL"], stdin=b"\xff\xfe\x00"), "not UTF-8 text")
    result = cli("chat", "--model", places["MODEL"], stdin=b"\xff\xfe\x00\n")
    assert result.status == 2
    assert result.err.splitlines()[-1] == "paceline: standard input is not UTF-8 text; convert it first"


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("smollm2-135", "did you mean smollm2-135m?"),
        ("MISSING", "no model"),
        ("TRUNCATED", "truncated"),
        ("BLANK", "not a .gguf file"),
        ("EMPTY", "holds no config.json"),
    ],
)
@pytest.mark.parametrize("command", [("run", "abc"), ("chat",), ("verify",)])
def test_bad_models(
    cli: Callable[..., Result], places: dict[str, Path], command: tuple[str, ...], model: str, message: str
) -> None:
    assert_refused(cli(*command, "--model", places.get(model, model)), message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--alpha 2", "acceptance rate"),
        ("--r -1", "cost ratio"),
        ("--max-horizon -1", "--max-horizon must be from 1 to 64"),
    ],
)
def test_bad_input_of_theory(cli: Callable[..., Result], arguments: str, message: str) -> None:
    assert_refused(cli("theory", *arguments.split()), message)


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [("PACELINE_BACKEND", "bogus", "backend 'bogus'"), ("PACELINE_NUM_THREADS", "many", "PACELINE_NUM_THREADS")],
)
def test_bad_environment(
    cli: Callable[..., Result],
    places: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    value: str,
    message: str,
) -> None:
    monkeypatch.setenv(variable, value)
    assert_refused(cli("run", "abc", "--model", places["MODEL"]), message)


@pytest.mark.parametrize(
    "arguments", ["run abc --bogus", "run abc --max-tokens many", "bogus", "run abc def", "theory --alpha x"]
)
def test_usage_errors_are_typers(cli: Callable[..., Result], arguments: str) -> None:
    result = cli(*arguments.split())
    assert result.status == 2
    assert result.out == ""
    assert "Usage:" in result.err
    assert "Traceback" not in result.err

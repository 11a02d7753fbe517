"""``paceline run``: the answer on stdout, exactly; one JSON object of the public contract; the rest on stderr."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline import Engine, SamplingParams, Speculation
from tests.unit.cli.conftest import Result

KEYS: dict[str, set[str] | None] = {
    "text": None,
    "token_ids": None,
    "finish_reason": None,
    "usage": {"prompt_tokens", "cached_tokens", "completion_tokens"},
    "timing": {"ttft_ms", "decode_ms", "decode_tokens_per_s", "p50_token_ms", "p95_token_ms"},
    "speculation": {
        "mode",
        "num_spec_steps",
        "num_draft_tokens",
        "num_accepted_draft_tokens",
        "draft_acceptance_rate",
        "mean_acceptance_length",
        "acceptance_histogram",
        "mean_horizon",
        "accepted_by_source",
        "drafted_by_source",
        "horizon_histogram",
        "calibration_error",
    },
    "kv": {"block_size", "num_blocks", "peak_blocks_used", "waste"},
}
COMPARE_KEYS = {"decode_tokens_per_s", "identical", "speedup"}


@pytest.fixture
def run(cli: Callable[..., Result], tiny_checkpoint: Path) -> Callable[..., Result]:
    def call(*arguments: object, **options: Any) -> Result:
        return cli("run", *arguments, "--model", tiny_checkpoint, "--max-tokens", 12, **options)

    return call


@pytest.fixture(scope="module")
def answer(tiny_checkpoint: Path) -> Callable[..., str]:
    engine = Engine(tiny_checkpoint, draft=None)

    def text(prompt: Any, **params: Any) -> str:
        options = {"max_tokens": 12, **params}
        return engine.generate(prompt, SamplingParams(**options), speculation=Speculation("off")).text

    return text


def user(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


def test_the_answer_goes_to_stdout_the_numbers_to_stderr(
    run: Callable[..., Result], answer: Callable[..., str]
) -> None:
    result = run("abc")
    assert result.status == 0
    assert result.out == answer(user("abc")) + "\n"
    for word in ("time to first token", "decode", "12 (length)", "mean acceptance length", "KV blocks used"):
        assert word in result.err


@pytest.mark.parametrize("spec", ["off", "static", "dynamic"])
def test_json_is_one_object_with_exactly_the_contracts_keys(
    run: Callable[..., Result], answer: Callable[..., str], spec: str
) -> None:
    result = run("abcabc", "--json", "--spec", spec, "--spec-tokens", 3, "--block-size", 8)
    assert result.status == 0
    assert result.out.count("\n") == 1
    data = json.loads(result.out)
    assert data.keys() == KEYS.keys()
    for key, inner in KEYS.items():
        assert inner is None or data[key].keys() == inner, key
    assert data["text"] == answer(user("abcabc"))
    assert data["finish_reason"] == "length"
    assert data["usage"]["completion_tokens"] == len(data["token_ids"]) == 12
    assert data["speculation"]["mode"] == spec
    assert sum(data["speculation"]["drafted_by_source"].values()) == data["speculation"]["num_draft_tokens"]
    assert data["speculation"]["num_draft_tokens"] == 0 or spec != "off"
    assert data["kv"]["block_size"] == 8
    assert data["text"] in result.err


def test_compare_adds_its_object(run: Callable[..., Result], tiny_checkpoint: Path) -> None:
    result = run("abc", "--json", "--compare", "--draft", tiny_checkpoint, "--spec", "static", "--drafters", "model")
    assert result.status == 0
    data = json.loads(result.out)
    assert data.keys() == {*KEYS, "compare"}
    assert data["compare"].keys() == COMPARE_KEYS
    assert data["compare"]["identical"] is True
    assert data["usage"]["cached_tokens"] == 0
    assert data["speculation"]["accepted_by_source"] == {"model": data["speculation"]["num_draft_tokens"]}
    assert result.err.count(data["text"]) == 2


def test_compare_for_people(run: Callable[..., Result], answer: Callable[..., str]) -> None:
    result = run("abc", "--compare")
    text = answer(user("abc"))
    assert result.out == f"--- without speculation\n{text}\n--- with speculation\n{text}\n"
    for word in ("without speculation", "with speculation", "decode speedup", "same tokens", "yes"):
        assert word in result.err


def test_where_the_prompt_comes_from(run: Callable[..., Result], answer: Callable[..., str], tmp_path: Path) -> None:
    path = tmp_path / "prompt.txt"
    path.write_text("Xyz")
    expected = answer(user("Xyz")) + "\n"
    assert run("Xyz").out == expected
    assert run("-", stdin="Xyz").out == expected
    assert run("--prompt-file", path).out == expected


def test_files_and_system_join_the_prompt(
    run: Callable[..., Result], answer: Callable[..., str], tmp_path: Path
) -> None:
    first, second = tmp_path / "a.py", tmp_path / "b.txt"
    first.write_text("x = 1\n\n")
    second.write_text("two")
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "a.py:\n```python\nx = 1\n```\n\nb.txt:\n```txt\ntwo\n```\n\nabc"},
    ]
    result = run("abc", "--file", first, "-f", second, "--system", "be brief", "--json")
    assert json.loads(result.out)["text"] == answer(messages)


def test_raw_completes_plain_text(run: Callable[..., Result], answer: Callable[..., str], tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text("abc")
    assert run("xyz", "--raw", "--file", path).out == answer("abcxyz") + "\n"


def test_sampling_options_reach_the_sampler(run: Callable[..., Result], answer: Callable[..., str]) -> None:
    expected = answer("abc", temperature=1.5, top_p=0.9, seed=7)
    assert expected != answer("abc")
    for spec in ("off", "static"):
        arguments = ("--raw", "--temperature", 1.5, "--top-p", 0.9, "--seed", 7, "--spec", spec)
        assert run("abc", *arguments).out == expected + "\n"


def test_ignore_eos_goes_on(cli: Callable[..., Result], tiny_checkpoint: Path) -> None:
    arguments = ("run", "hello", "--raw", "--model", tiny_checkpoint, "--max-tokens", 40, "--json")
    ended, went_on = cli(*arguments), cli(*arguments, "--ignore-eos")
    assert json.loads(ended.out)["finish_reason"] == "stop"
    assert json.loads(went_on.out)["finish_reason"] == "length"


def test_a_corpus_is_looked_up_and_kept(
    run: Callable[..., Result], answer: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    expected = answer(user("abc"))
    notes = tmp_path / "notes.txt"
    notes.write_text(expected * 3)
    arguments = ("abc", "--json", "--corpus", notes, "--drafters", "corpus", "--spec", "static", "--spec-tokens", 4)
    data = json.loads(run(*arguments).out)
    assert data["text"] == expected
    assert data["speculation"]["accepted_by_source"]["corpus"] > 0
    assert list((tmp_path / "home" / "corpus").glob("*.npz"))
    missing = run("abc", "--corpus", tmp_path / "missing")
    assert missing.status != 0
    assert "no such file or folder" in missing.err


@pytest.mark.parametrize("share", [-0.1, 1.0])
def test_an_acceptance_out_of_range_is_refused(run: Callable[..., Result], share: float) -> None:
    result = run("abc", "--min-acceptance", share)
    assert result.status != 0
    assert "min_acceptance" in result.err


def test_a_drafter_list_is_obeyed(run: Callable[..., Result], tiny_checkpoint: Path) -> None:
    arguments = ("abcabcabc", "--json", "--spec", "static", "--draft", tiny_checkpoint)
    by_model = json.loads(run(*arguments, "--drafters", "model, suffix").out)["speculation"]["accepted_by_source"]
    assert set(by_model) == {"model"}
    nobody = json.loads(run(*arguments, "--drafters", "").out)["speculation"]
    assert nobody["num_draft_tokens"] == 0

"""Clients that are not ours, each as its users install it, against a server that listens.

Where the words of the model matter they are written down (:mod:`tests.serve.scripted`); everything else is real.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from paceline import AsyncEngine
from tests.serve.client_env import node_client, python_client, run_client
from tests.serve.running import Running, running_server
from tests.serve.scripted import ScriptedEngine, make_tokenizer

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

SCRIPTS = Path(__file__).parent / "clients"
LITELLM = ("litellm==1.110.2",)
AI_SDK = ("ai@6.0.325", "@ai-sdk/openai-compatible@2.0.92", "zod@4.6.7")
MINI_SWE_AGENT = ("mini-swe-agent==2.4.6",)
AIDER = ("aider-chat==0.86.2",)
LM_EVAL = ("lm-eval[api]==0.4.13",)
AIPERF = ("aiperf==0.13.0",)

# A template that teaches tool calls as Qwen's and Hermes' do.
TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }}\n"
    'Write <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>\n{% endif %}'
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def call(name: str, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def weather(prompt: str) -> str:
    """An assistant that looks the weather up where it can, and says it."""
    if "rain in Bern" in prompt:
        return "It rains in Bern."
    return "Let me see.\n" + call("weather", city="Bern") if "Tools:" in prompt else "Sunny and warm: 😀."


def scripted(script: Callable[[str], str]) -> AbstractContextManager[Running]:
    engine: Any = ScriptedEngine(script, tokenizer=make_tokenizer(TEMPLATE))
    return running_server(engine)


def failures(server: Running) -> float:
    """Requests that ended without an answer."""
    families = text_string_to_metric_families(httpx.get(f"{server.url}/metrics").text)
    samples = {sample.name: sample.value for family in families for sample in family.samples}
    return samples["vllm:request_aborted_total"]


def test_litellm(tmp_path: Path) -> None:
    programs = python_client("litellm", *LITELLM)
    with scripted(weather) as server:
        out = run_client([programs / "python", SCRIPTS / "use_litellm.py", server.url], home=tmp_path, url=server.url)
        assert failures(server) == 0
    got = json.loads(out.strip().splitlines()[-1])
    text = "Sunny and warm: 😀."
    num_tokens = len(text.encode()) + 1
    assert {name: got[name] for name in ("whole", "streamed", "async", "async_streamed", "completed")} == {
        "whole": text,
        "streamed": text,
        "async": text,
        "async_streamed": text,
        "completed": text,
    }
    assert got["finish_reason"] == "stop"
    assert got["usage"]["completion_tokens"] == num_tokens
    assert got["usage"]["prompt_tokens_details"]["cached_tokens"] == 7
    assert got["stream_usage"][-1] == num_tokens
    for calls in (got["tools"], got["streamed_tools"]):
        assert [one[1:] for one in calls] == [["weather", {"city": "Bern"}]]
        assert calls[0][0].startswith("call_")
    assert got["tools_finish_reason"] == "tool_calls"


def test_ai_sdk(tmp_path: Path) -> None:
    if shutil.which("node") is None:
        pytest.skip("needs Node")
    folder = node_client("ai-sdk", *AI_SDK)
    script = folder / "use_ai_sdk.mjs"  # beside node_modules, where Node looks for packages
    script.write_bytes((SCRIPTS / script.name).read_bytes())
    with scripted(weather) as server:
        out = run_client([shutil.which("node") or "node", script, server.url], home=tmp_path, url=server.url)
        assert failures(server) == 0
    got = json.loads(out.strip().splitlines()[-1])
    text = "Sunny and warm: 😀."
    num_tokens = len(text.encode()) + 1
    assert (got["whole"], got["streamed"], got["completion"]) == (text, text, text)
    assert got["finishReason"] == "stop"
    assert got["pieces"] > 1
    assert got["usage"]["outputTokens"] == got["streamUsage"]["outputTokens"] == num_tokens
    for steps in (got["agent"], got["streamedAgent"]):
        assert [step["finishReason"] for step in steps] == ["tool-calls", "stop"]
        assert steps[0]["calls"] == [["weather", {"city": "Bern"}]]
        assert steps[0]["results"] == ["rain in Bern"]
        assert steps[1]["text"] == "It rains in Bern."


# ---- agents ------------------------------------------------------------------------------------------------

BROKEN = "def mean(values):\n    return sum(values) / (len(values) - 1)\n"
FIXED = BROKEN.replace("(len(values) - 1)", "len(values)")


def mini(programs: Path, server: Running, folder: Path, *settings: str) -> dict[str, Any]:
    """The trajectory of mini-swe-agent's run on a task."""
    home = folder / "home"
    home.mkdir()
    output = folder / "trajectory.json"
    command: list[str | Path] = [programs / "mini", "--yolo", "--exit-immediately", "--model", "openai/local"]
    command += ["--task", "mean([1, 2, 3]) in stats.py must be 2.", "--output", output, "--cost-limit", "0"]
    for setting in ("mini.yaml", *settings):
        command += ["--config", setting]
    quiet = {"MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors", "MSWEA_SILENT_STARTUP": "1"}
    run_client(
        command,
        home=home,
        url=server.url,
        cwd=folder,
        seconds=900,
        MSWEA_GLOBAL_CONFIG_DIR=str(home),
        MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT="1",
        **quiet,
    )
    trajectory: dict[str, Any] = json.loads(output.read_text())
    return trajectory


def test_mini_swe_agent_mends_a_file(tmp_path: Path) -> None:
    programs = python_client("mini-swe-agent", *MINI_SWE_AGENT)
    (tmp_path / "stats.py").write_text(BROKEN)
    commands = [
        "ls",
        "cat stats.py",
        'python3 -c "import stats; print(stats.mean([1, 2, 3]))"',
        "sed -i 's/(len(values) - 1)/len(values)/' stats.py",
        'python3 -c "import stats; print(stats.mean([1, 2, 3]))"',
        "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT",
    ]

    def script(prompt: str) -> str:
        turn = prompt.count("<|im_start|>assistant\n") - 1
        return f"Step {turn + 1}.\n" + call("bash", command=commands[turn])

    with scripted(script) as server:
        trajectory = mini(programs, server, tmp_path)
        assert failures(server) == 0
    assert trajectory["info"]["exit_status"] == "Submitted"
    assert trajectory["info"]["model_stats"]["api_calls"] == len(commands)
    assert (tmp_path / "stats.py").read_text() == FIXED
    seen = [message["extra"]["raw_output"] for message in trajectory["messages"] if message["role"] == "tool"]
    assert (seen[2], seen[4]) == ("3.0\n", "2.0\n")


@pytest.mark.embedded
def test_mini_swe_agent_talks_to_the_embedded_model(tmp_path: Path, embedded_model_path: Path) -> None:
    programs = python_client("mini-swe-agent", *MINI_SWE_AGENT)
    (tmp_path / "stats.py").write_text(BROKEN)
    settings = (
        "agent.step_limit=6",
        "agent.max_consecutive_format_errors=0",  # a model this small knows no better
        "model.model_kwargs.max_tokens=96",
        "model.model_kwargs.temperature=0",
    )
    with running_server(AsyncEngine(embedded_model_path, max_model_len=8192)) as server:
        trajectory = mini(programs, server, tmp_path, *settings)
        assert failures(server) == 0
        assert server.engine.load.num_used_blocks == 0
    assert trajectory["info"]["exit_status"] in ("LimitsExceeded", "Submitted")
    assert trajectory["info"]["model_stats"]["api_calls"] >= 5


def test_aider_applies_an_edit(tmp_path: Path) -> None:
    programs = python_client("aider", *AIDER)
    home, repository = tmp_path / "home", tmp_path / "repository"
    for folder in (home / ".aider/caches", repository):
        folder.mkdir(parents=True)
    (home / ".aider/caches/model_prices_and_context_window.json").write_text("{}")  # else it asks the network
    (repository / "stats.py").write_text(BROKEN)
    for command in (
        ["init", "--quiet"],
        ["config", "user.name", "A"],
        ["config", "user.email", "a@example.org"],
        ["add", "stats.py"],
        ["commit", "--quiet", "--message", "Start"],
    ):
        subprocess.run(["git", *command], cwd=repository, check=True, capture_output=True)
    block = f"stats.py\n```python\n<<<<<<< SEARCH\n{BROKEN}=======\n{FIXED}>>>>>>> REPLACE\n```\n"

    def script(prompt: str) -> str:
        return "fix: divide by the number of values" if "Git commit message" in prompt else "Here it is.\n\n" + block

    command = [programs / "aider", "--model", "openai/local", "--edit-format", "diff", "--yes-always"]
    command += ["--no-check-update", "--no-show-model-warnings", "--no-show-release-notes", "--analytics-disable"]
    command += ["--no-gitignore", "--no-pretty", "--map-tokens", "0", "--no-detect-urls"]
    command += ["--message", "mean divides by the wrong number", "stats.py"]
    with scripted(script) as server:
        out = run_client(command, home=home, url=server.url, cwd=repository)
        assert failures(server) == 0
    assert (repository / "stats.py").read_text() == FIXED, out
    log = subprocess.run(
        ["git", "log", "--format=%s"], cwd=repository, check=True, capture_output=True, text=True
    ).stdout
    assert log.splitlines() == ["fix: divide by the number of values", "Start"]


# ---- measurements ------------------------------------------------------------------------------------------


@pytest.fixture
def tiny_server(tiny_checkpoint: Path) -> Iterator[Running]:
    with running_server(AsyncEngine(tiny_checkpoint, draft=None, block_size=4)) as server:
        yield server


PAIRS = [
    {"question": "theQuickBrown", "choices": ["Fox", "Wolf", "Hen"], "label": 0},
    {"question": "abcabcabc", "choices": ["abc", "xyz"], "label": 1},
    {"question": "A", "choices": ["1", "22", "333"], "label": 2},
]


def test_lm_eval_gets_log_likelihoods(tmp_path: Path, tiny_server: Running) -> None:
    programs = python_client("lm-eval", *LM_EVAL)
    data = tmp_path / "pairs.jsonl"
    data.write_text("".join(json.dumps(pair) + "\n" for pair in PAIRS))
    (tmp_path / "pairs.yaml").write_text(
        json.dumps(  # which is YAML
            {
                "task": "pairs",
                "dataset_path": "json",
                "dataset_kwargs": {"data_files": {"test": str(data)}},
                "test_split": "test",
                "output_type": "multiple_choice",
                "doc_to_text": "{{question}}",
                "doc_to_choice": "{{choices}}",
                "doc_to_target": "label",
                "target_delimiter": "",
                "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
                "metadata": {"version": 1},
            }
        )
    )
    results = tmp_path / "results"
    # No tokenizer is given: it asks the server's.
    model = f"model=local,base_url={tiny_server.url}/v1/completions,tokenizer_backend=auto,max_length=500"
    command: list[str | Path] = [programs / "lm-eval", "run", "--model", "local-completions", "--model_args", model]
    command += ["--tasks", "pairs", "--include_path", tmp_path, "--output_path", results, "--log_samples"]
    run_client(command, home=tmp_path, url=tiny_server.url, HF_DATASETS_OFFLINE="1")

    tokenizer = tiny_server.engine.tokenizer

    def expected(question: str, choice: str) -> float:
        token_ids = tokenizer.encode(question + choice)
        scores = asyncio.run(tiny_server.engine.score(token_ids))
        return sum(one.logprob for one in scores[len(tokenizer.encode(question)) - 1 :])

    (samples,) = results.rglob("samples_pairs_*.jsonl")
    lines = [json.loads(line) for line in samples.read_text().splitlines()]
    assert len(lines) == len(PAIRS)
    num_right = 0
    for line in lines:
        document = line["doc"]
        wanted = [expected(document["question"], choice) for choice in document["choices"]]
        got = [float(response[0][0]) for response in line["resps"]]
        assert got == pytest.approx(wanted, abs=1e-3)
        num_right += wanted.index(max(wanted)) == document["label"]
    (summary,) = results.rglob("results_*.json")
    accuracy = json.loads(summary.read_text())["results"]["pairs"]["acc,none"]
    assert accuracy == pytest.approx(num_right / len(PAIRS))
    assert failures(tiny_server) == 0


@pytest.mark.parametrize("streaming", [True, False])
def test_aiperf_reports_speculation(tmp_path: Path, streaming: bool) -> None:
    programs = python_client("aiperf", *AIPERF)
    folder = tmp_path / "tokenizer"  # aiperf's own comes from the network
    folder.mkdir()
    make_tokenizer()._backend.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    command: list[str | Path] = [programs / "aiperf", "profile", "--model", "local", "--tokenizer", folder]
    command += ["--endpoint-type", "chat", "--concurrency", "2", "--request-count", "6", "--ui", "simple"]
    command += ["--synthetic-input-tokens-mean", "16", "--output-tokens-mean", "8", "--export-level", "records"]
    command += ["--artifact-dir", tmp_path / "artifacts", *(["--streaming"] if streaming else [])]
    with scripted(lambda _: "Sunny and warm.") as server:
        command += ["--url", server.url]
        # Told to be offline it looks for a tokenizer in the hub's cache alone, and not in a folder.
        out = run_client(command, home=tmp_path, url=server.url, HF_HUB_OFFLINE="")
        assert failures(server) == 0
    (path,) = (tmp_path / "artifacts").rglob("profile_export_aiperf.json")
    report = json.loads(path.read_text())
    assert report["request_count"]["avg"] == 6
    # Each scripted answer says it: two drafts of four tokens, of which two were accepted each.
    assert report["pooled_spec_decode_acceptance_histogram"] == {"2": 12}, out[-3000:]

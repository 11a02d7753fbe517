"""Other engines as arms: the protocol with well-behaved and broken workers, installation, weights."""

from __future__ import annotations

import ast
import dataclasses
import io
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from paceline.bench.arms import ARMS, Arm
from paceline.bench.drive import run_suite, run_task
from paceline.bench.peers import make, weights
from paceline.bench.peers.catalog import PEER_ARMS, PEERS, PeerSpec, parse_peers, plain_arm, select_arms
from paceline.bench.peers.install import ensure_peer
from paceline.bench.peers.process import WorkerProcess
from paceline.bench.peers.runner import PeerRunner, Prompting, RunnerByArm
from paceline.bench.peers.worker_protocol import Recorder
from paceline.bench.records import Message, Task, Turn, TurnRecord
from paceline.bench.report import write_report
from paceline.bench.results import decode, encode, summarise
from paceline.cli import bench
from paceline.errors import BenchmarkError, InvalidParameterError
from paceline.loader.chat import ChatTemplate
from paceline.loader.hf_config import read_model_config
from paceline.loader.load import load_checkpoint
from paceline.loader.tokenizer import Tokenizer
from paceline.model.config import RopeScaling
from tests.unit.bench.factory import run_info, step, turn

FAKE_WORKER = Path(__file__).with_name("fake_worker.py")
PEERS_FOLDER = Path(make.__file__).parent
TEMPLATE = "{% for m in messages %}{{ m.content }} {% endfor %}"
ARM = PEER_ARMS["openvino"].as_arm()
SILENT = Console(file=io.StringIO())


def make_task(task_id: str = "task", *, max_tokens: int = 10) -> Task:
    turns = [Turn([{"role": "user", "content": f"ask {i}"}], f"gold {i}", "edit", max_tokens) for i in range(2)]
    return Task(task_id, "part", turns)


@pytest.fixture
def prompting(tiny_checkpoint: Path) -> Prompting:
    return Prompting(Tokenizer.from_file(tiny_checkpoint), ChatTemplate(TEMPLATE), 512)


def start(behaviour: str, prompting: Prompting, *, turn_timeout_s: float = 30.0) -> PeerRunner:
    worker = WorkerProcess("fake", [sys.executable, "-I", str(FAKE_WORKER), behaviour])
    return PeerRunner(ARM, worker, prompting, options={"model": "m"}, turn_timeout_s=turn_timeout_s)


@pytest.mark.parametrize("behaviour", ["normal", "babbling"])
def test_a_worker_gives_records_whatever_else_it_prints(behaviour: str, prompting: Prompting) -> None:
    runner = start(behaviour, prompting)
    try:
        first, second = run_task(runner, make_task(), ARM, mode="scripted")
    finally:
        runner.close()
    assert list(first.token_ids) == [5, 6, 7, 8]
    assert [(step.ms, step.num_tokens) for step in first.steps] == [(10.0, 1), (4.0, 3)]
    assert (first.turn_ms, first.ttft_ms, first.decode_ms) == (14.0, 10.0, 4.0)
    assert (first.is_cold, first.num_cached_tokens) == (True, 0)
    assert not second.is_cold
    assert 0 < second.num_cached_tokens <= first.num_prompt_tokens
    assert first.extra == {"weights": "fake", "peer_version": "1.0"}
    assert all(step.num_drafted == 0 for step in first.steps)
    assert decode(encode(first)).arm == "openvino"


def test_an_answer_is_never_longer_than_the_context(prompting: Prompting) -> None:
    task = make_task()
    prompt = prompting.tokenizer.encode(prompting.template.render(task.turns[0].messages))
    narrow = Prompting(prompting.tokenizer, prompting.template, len(prompt) + 2)
    runner = start("normal", narrow)
    try:
        record, _ = runner.run(ARM, task, 0, task.turns[0].messages)
        assert len(record.token_ids) == 2
        with pytest.raises(BenchmarkError, match="leaves no room"):
            runner.run(ARM, task, 1, [*task.turns[0].messages, *task.turns[1].messages])
    finally:
        runner.close()


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        ("dying", "fake died during 'generate': exit status 3, IllegalInstruction: sorry"),
        ("hanging", "fake gave no answer to 'generate' within 1 s"),
        ("babbling without end", "fake gave no answer to 'generate' within 1 s"),
        ("miscounting", "do not add up"),
    ],
)
def test_a_broken_worker_is_one_line_and_is_ended(behaviour: str, message: str, prompting: Prompting) -> None:
    runner = start(behaviour, prompting, turn_timeout_s=1.0)
    with pytest.raises(BenchmarkError) as caught:
        run_task(runner, make_task(), ARM, mode="scripted")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(BenchmarkError, match="has ended already"):
        runner.begin(ARM)
    runner.close()


def test_a_worker_that_refuses_to_load_says_why(prompting: Prompting) -> None:
    with pytest.raises(BenchmarkError, match="fake failed: RuntimeError: no such model"):
        start("refusing", prompting)


def test_a_worker_that_cannot_be_started_is_a_benchmark_error(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkError, match="cannot be started"):
        WorkerProcess("fake", [str(tmp_path / "python")])


def test_a_request_larger_than_a_pipe_does_not_block(prompting: Prompting) -> None:
    worker = WorkerProcess("fake", [sys.executable, "-c", "import time; time.sleep(60)"])
    began = time.monotonic()
    with pytest.raises(BenchmarkError, match="gave no answer"):
        worker.request("generate", timeout_s=0.5, token_ids=[123456] * 200_000)
    assert time.monotonic() - began < 30


class Ours:
    """Paceline's own arms, as far as these tests need them."""

    def begin(self, arm: Arm) -> None:
        pass

    def run(self, arm: Arm, task: Task, number: int, messages: Sequence[Message]) -> tuple[TurnRecord, str]:
        return TurnRecord(arm.name, task.task_id, "part", number, "edit", True, 1, 0, [1], 1.0, []), ""


class FakeEngines:
    """Stands for the command's own engines: peers ask them for the model and the length of the context."""

    def __init__(self, model: Path) -> None:
        self.model = str(model)

    def get(self, kind: str) -> SimpleNamespace:
        return SimpleNamespace(info=SimpleNamespace(max_model_len=512))


def test_a_peer_that_dies_is_dropped_and_the_run_goes_on(prompting: Prompting) -> None:
    runner = start("dying", prompting)
    arms, tasks = [ARMS["dynamic"], ARM], [make_task(f"task-{i}") for i in range(3)]
    dropped: list[tuple[str, str]] = []
    batches = list(
        run_suite(
            RunnerByArm(Ours(), {ARM.name: runner}),
            tasks,
            arms,
            mode="scripted",
            seed=0,
            on_dropped=lambda arm, error: dropped.append((arm.name, str(error))),
        )
    )
    assert sorted(batch[0].task_id for batch in batches) == ["task-0", "task-1", "task-2"]
    assert {batch[0].arm for batch in batches} == {"dynamic"}
    assert [name for name, _ in dropped] == ["openvino"], "reported once"


# The worker's side


def test_the_recorder_cuts_at_the_end_token_and_at_the_limit() -> None:
    recorder = Recorder(10, [2], time.perf_counter())
    assert not recorder.add([5])
    assert not recorder.add([6], is_new_step=False)
    assert recorder.add([7, 2, 8])
    assert recorder.add([9])
    assert recorder.token_ids == [5, 6, 7, 2]
    assert [count for _, count in recorder.steps] == [2, 2]
    limited = Recorder(3, [], time.perf_counter())
    assert limited.add([1, 1, 1, 1])
    assert [count for _, count in limited.steps] == [3]


@pytest.mark.parametrize("path", sorted(PEERS_FOLDER.glob("worker_*.py")), ids=lambda path: path.stem)
def test_workers_import_the_standard_library_only(path: Path) -> None:
    imported = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(str(node.module).partition(".")[0])
    assert imported <= set(sys.stdlib_module_names), "what a peer needs is imported by name when it loads"


def test_a_worker_answers_failures_and_keeps_its_output_clean(tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(
        f"import sys; sys.path.append({str(PEERS_FOLDER)!r})\n"
        "from worker_protocol import serve\n"
        "class Backend:\n"
        "    def load(self, **options): print('hello'); return {'weights': 'w', 'version': 'v'}\n"
        "    def reset(self): raise ValueError('two\\nlines')\n"
        "    def generate(self, token_ids, recorder): recorder.add(token_ids); return 1\n"
        "serve(Backend())\n"
    )
    worker = WorkerProcess("fake", [sys.executable, "-I", str(script)])
    try:
        assert worker.request("load", timeout_s=60.0, model="m")["weights"] == "w"
        answer = worker.request("generate", timeout_s=60.0, token_ids=[4, 5], max_tokens=8, end_token_ids=[5])
        assert (answer["token_ids"], answer["num_cached_tokens"]) == ([4, 5], 1)
        with pytest.raises(BenchmarkError, match="ValueError: two lines"):
            worker.request("reset", timeout_s=60.0)
    finally:
        worker.close()


# Installation


class FakePip:
    """Stands for venv and pip: makes the environment's python, and fails or stops where it is told to."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.failure = failure
        self.commands: list[Sequence[str]] = []

    def __call__(self, command: Sequence[str], environment: Mapping[str, str]) -> Iterator[str]:
        self.commands.append(command)
        if "venv" in command:
            python = Path(command[-1]) / "bin" / "python"
            python.parent.mkdir(parents=True)
            python.touch()
            return
        yield "Collecting things"
        if self.failure is not None:
            yield "ERROR: No matching distribution found"
            raise self.failure


def test_a_peer_is_installed_once(tmp_path: Path) -> None:
    pip, spec = FakePip(), PEERS["openvino"]
    python = ensure_peer(spec, tmp_path, SILENT, run_lines=pip)
    assert python.exists()
    assert list(pip.commands[-1][-2:]) == list(spec.requirements)
    ensure_peer(spec, tmp_path, SILENT, run_lines=pip)
    assert len(pip.commands) == 2


def test_other_versions_are_installed_anew(tmp_path: Path) -> None:
    pip, spec = FakePip(), PEERS["openvino"]
    python = ensure_peer(spec, tmp_path, SILENT, run_lines=pip)
    (python.parent / "stale").touch()
    newer = PeerSpec(spec.name, ("openvino-genai==2027.*",), spec.worker, spec.arms, spec.notice)
    ensure_peer(newer, tmp_path, SILENT, run_lines=pip)
    assert not (python.parent / "stale").exists()


@pytest.mark.parametrize("failure", [BenchmarkError("exit status 1"), KeyboardInterrupt()])
def test_a_failed_or_interrupted_installation_starts_again_from_nothing(tmp_path: Path, failure: Exception) -> None:
    spec = PEERS["llama-cpp"]
    with pytest.raises(type(failure)):
        ensure_peer(spec, tmp_path, SILENT, run_lines=FakePip(failure))
    pip = FakePip()
    ensure_peer(spec, tmp_path, SILENT, run_lines=pip)
    assert len(pip.commands) == 2


def test_a_peer_that_cannot_be_installed_is_a_reason_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_checkpoint: Path
) -> None:
    def fail(spec: PeerSpec, home: Path, console: Console) -> Path:
        raise BenchmarkError("its installation failed: no compiler")

    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    monkeypatch.setattr(make, "ensure_peer", fail)
    monkeypatch.setattr(make, "_prompting", lambda *arguments: None)
    runners, reasons = make.make_peer_runners(
        ["llama-cpp", "openvino"], model_path=tiny_checkpoint, num_threads=1, console=SILENT
    )
    assert runners == {}
    reason = "its installation failed: no compiler"
    assert reasons == {"llama-cpp": reason, "openvino": reason}


@pytest.fixture
def broken_peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp cannot be installed; the workers of the others die at their first turn."""

    def install(spec: PeerSpec, home: Path, console: Console) -> Path:
        if spec.name == "llama-cpp":
            raise BenchmarkError("its installation failed: no compiler")
        return Path(sys.executable)

    def worker(spec: PeerSpec, name: str, python: Path, num_threads: int) -> WorkerProcess:
        return WorkerProcess(name, [str(python), "-I", str(FAKE_WORKER), "dying"])

    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(make, "ensure_peer", install)
    monkeypatch.setattr(make, "worker_process", worker)


@pytest.mark.usefixtures("broken_peers")
def test_every_way_not_to_run_is_in_the_summary_and_in_the_report(
    prompting: Prompting, tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(make, "_prompting", lambda *arguments: prompting)
    engines: Any = FakeEngines(tiny_checkpoint)
    not_run: dict[str, str] = {}
    with ExitStack() as stack:
        runners = bench._start_peers(list(PEERS), engines, SILENT, stack, not_run)
        arms = [runner.arm for runner in runners.values()]
        assert list(bench._serve([make_task()], arms, runners, engines, "scripted", 0, (), SILENT, not_run)) == []
    assert not_run.pop("llama-cpp") == "its installation failed: no compiler"
    for arm in PEERS["openvino"].arms:
        assert not_run.pop(arm.name).startswith("it reads GGUF files only")
    for name, reason in not_run.items():
        assert reason.startswith(f"stopped during the run: {name} died during 'generate': exit status 3")
    assert sorted(not_run) == ["transformers", "transformers-lookup"]

    not_run["hostile|<b>"] = "no | luck"
    summary = summarise([], run_info(not_run=not_run))
    write_report(summary, [], tmp_path / "report")
    assert json.loads((tmp_path / "report" / "summary.json").read_text())["not_run"] == not_run
    text = (tmp_path / "report" / "report.md").read_text()
    assert "## Not run\n" in text
    assert "| transformers | stopped during the run: transformers died" in text
    assert "| hostile\\|&lt;b> | no \\| luck |" in text
    page = (tmp_path / "report" / "report.html").read_text()
    assert "<h2>Not run</h2>" in page
    assert "hostile|&lt;b&gt;" in page


def test_a_report_of_a_run_without_failures_has_no_such_table(tmp_path: Path) -> None:
    summary = summarise([turn([step()])], run_info())
    assert (summary["not_run"], summary["peers"]) == ({}, {})
    write_report(summary, [], tmp_path)
    assert "Not run" not in (tmp_path / "report.md").read_text()


def test_the_report_says_where_a_peers_drafts_changed_its_own_tokens(tmp_path: Path) -> None:
    extra = {"weights": "m.gguf, computed in f32", "peer_version": "2026.4"}
    records = [
        turn([step(num_tokens=3)], arm=arm, turn=number, token_ids=token_ids, extra=extra)
        for arm, answers in (("openvino-f32", [(1, 2, 3), (4, 5, 6)]), ("openvino-f32-lookup", [(1, 2, 3), (4, 5, 7)]))
        for number, token_ids in enumerate(answers)
    ]
    summary = summarise([*records, turn([step()], arm="dynamic")], run_info())
    known = {"version": "2026.4", "weights": extra["weights"]}
    assert summary["peers"] == {
        "openvino-f32": {**known, "identical_to_plain": None},
        "openvino-f32-lookup": {**known, "identical_to_plain": {"count": 1, "total": 2}},
    }
    write_report(summary, records, tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "| openvino-f32-lookup | 2026.4 | m.gguf, computed in f32 | 1 of 2 |" in text
    assert {plain_arm(name) for name in PEER_ARMS} == {name for name, arm in PEER_ARMS.items() if not arm.lookup_tokens}


def test_peers_are_named_once_and_unknown_ones_refused() -> None:
    assert parse_peers(" openvino, llama-cpp,openvino") == ["openvino", "llama-cpp"]
    with pytest.raises(InvalidParameterError, match="choose from llama-cpp, openvino, transformers"):
        parse_peers("vllm")


def test_single_arms_of_a_peer_can_be_chosen() -> None:
    names = parse_peers("llama-cpp-q8_0-lookup,transformers,transformers-lookup")
    chosen = {peer: [arm.name for arm in arms] for peer, arms in select_arms(names).items()}
    assert chosen == {"llama-cpp": ["llama-cpp-q8_0-lookup"], "transformers": ["transformers", "transformers-lookup"]}


def test_no_arm_of_a_peer_is_called_like_one_of_ours() -> None:
    assert not set(PEER_ARMS) & set(ARMS)


# Weights


def test_a_folder_for_transformers_describes_the_same_model(tiny_checkpoint: Path) -> None:
    config = load_checkpoint(tiny_checkpoint, dtype=torch.float32).config
    again = json.loads(json.dumps(weights.hf_config(config)))
    assert read_model_config(again, "config.json") == config


def test_rotary_scaling_without_a_name_there_is_refused(tiny_checkpoint: Path) -> None:
    config = load_checkpoint(tiny_checkpoint, dtype=torch.float32).config
    stretched = dataclasses.replace(config, rope_scaling=RopeScaling("linear", factor=2.0))
    assert read_model_config(weights.hf_config(stretched), "config.json") == stretched
    with pytest.raises(BenchmarkError, match="not handed on"):
        weights.hf_config(dataclasses.replace(config, rope_scaling=RopeScaling("factors", factors=(1.0,))))


def test_only_gguf_files_are_made_into_other_formats(tiny_checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(BenchmarkError, match="GGUF files only"):
        weights.gguf_in_format(tiny_checkpoint, "Q8_0", tmp_path, lambda *arguments: None)


@pytest.mark.embedded
def test_a_format_is_made_once_and_never_half(embedded_model_path: Path, tmp_path: Path) -> None:
    made: list[str] = []

    def quantize(source: Path, target: Path, file_type: str) -> None:
        made.append(file_type)
        target.write_bytes(b"GGUF")
        if len(made) == 1:
            raise BenchmarkError("interrupted")

    assert weights.gguf_in_format(embedded_model_path, "Q4_1", tmp_path, quantize) == embedded_model_path
    with pytest.raises(BenchmarkError):
        weights.gguf_in_format(embedded_model_path, "Q8_0", tmp_path, quantize)
    assert not list(tmp_path.iterdir())
    path = weights.gguf_in_format(embedded_model_path, "Q8_0", tmp_path, quantize)
    assert path == weights.gguf_in_format(embedded_model_path, "Q8_0", tmp_path, quantize)
    assert made == ["Q8_0", "Q8_0"]

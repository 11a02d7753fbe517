"""From the names of peers to runners of their arms."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from paceline.bench.machine import Machine
from paceline.bench.peers.catalog import PEERS, PeerArm, PeerSpec, parse_peers, select_arms
from paceline.bench.peers.install import ensure_peer
from paceline.bench.peers.process import WorkerProcess
from paceline.bench.peers.runner import LOAD_TIMEOUT_S, PeerRunner, Prompting
from paceline.bench.peers.weights import gguf_in_format, require_gguf, safetensors_folder
from paceline.errors import PacelineError
from paceline.loader.catalog import paceline_home

_WORKERS = Path(__file__).parent


def make_peer_runners(
    names: Sequence[str],
    *,
    model_path: Path,
    num_threads: int,
    console: Console,
    context_length: int | None = None,
) -> tuple[dict[str, PeerRunner], dict[str, str]]:
    """Install what is missing, make the weights, start a worker per arm and let it load and warm up.

    ``names`` are peers, or single arms of them. Returns the runners by arm name, and why each peer, or arm of one, that
    cannot run cannot; that is printed as well. ``context_length`` shortens the model's own. Close the runners when
    done; workers also end with this process.

    Raises:
        InvalidParameterError: an unknown name.
        PacelineError: the model itself cannot be read.
    """
    chosen = select_arms(parse_peers(",".join(names)))
    prompting = _prompting(model_path, context_length)
    home = paceline_home() / "peers"
    runners: dict[str, PeerRunner] = {}
    reasons: dict[str, str] = {}

    def give_up(who: str, error: Exception) -> None:
        reasons[who] = " ".join(str(error).split())
        console.print(f"{who} is not run: {reasons[who]}", highlight=False, markup=False, soft_wrap=True)

    try:
        for name, arms in chosen.items():
            spec = PEERS[name]
            try:
                python = ensure_peer(spec, home, console)
            except PacelineError as error:
                give_up(spec.name, error)
                continue
            for arm in arms:
                try:
                    with console.status(f"Loading {arm.name}"):
                        runners[arm.name] = _start(spec, arm, python, model_path, num_threads, prompting, home)
                except (PacelineError, OSError) as error:
                    give_up(arm.name, error)
    except BaseException:
        for runner in runners.values():
            runner.close()
        raise
    return runners, reasons


def worker_process(spec: PeerSpec, name: str, python: Path, num_threads: int) -> WorkerProcess:
    """A worker of this peer with ``num_threads`` in its environment; it must still be told to load.

    Other settings of OpenMP are taken out: how threads wait is Paceline's choice for itself, and a peer runs with
    its own defaults. ``-I`` keeps the user's site-packages and PYTHONPATH away.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "KMP_", "GOMP_"))}
    environment |= {"OMP_NUM_THREADS": str(num_threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    return WorkerProcess(name, [str(python), "-I", str(_WORKERS / spec.worker)], environment=environment)


def _prompting(model_path: Path, context_length: int | None) -> Prompting:
    from paceline.loader.chat import ChatTemplate
    from paceline.loader.gguf import GgufCheckpoint
    from paceline.loader.safetensors import SafetensorsCheckpoint
    from paceline.loader.tokenizer import Tokenizer

    if model_path.is_dir():
        config, tokenizer = SafetensorsCheckpoint(model_path).config, Tokenizer.from_file(model_path)
    else:
        file = GgufCheckpoint(model_path)
        config, tokenizer = file.config, Tokenizer.from_gguf(file.metadata)
    template = ChatTemplate(tokenizer.chat_template, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token)
    return Prompting(tokenizer, template, min(context_length or config.context_length, config.context_length))


def _start(
    spec: PeerSpec, arm: PeerArm, python: Path, model: Path, num_threads: int, prompting: Prompting, home: Path
) -> PeerRunner:
    options = _options(spec, arm, python, model, num_threads, prompting, home / "weights")
    worker = worker_process(spec, arm.name, python, num_threads)
    try:
        return PeerRunner(arm.as_arm(), worker, prompting, options=options)
    except BaseException:
        worker.close()
        raise


def _options(
    spec: PeerSpec, arm: PeerArm, python: Path, model: Path, num_threads: int, prompting: Prompting, folder: Path
) -> dict[str, Any]:
    """What the worker's ``load`` takes."""
    options: dict[str, Any] = {"num_threads": num_threads, "lookup_tokens": arm.lookup_tokens}
    if arm.weights == "safetensors":
        path = safetensors_folder(model, folder)
        dtype = "bfloat16" if _has_fast_bfloat16() else "float32"
        weights = f"bfloat16 from {model.name}, computed in {dtype}" if path != model else f"{model.name} in {dtype}"
        return options | {"model": str(path), "dtype": dtype, "weights": weights}
    if arm.weights == "as is":
        require_gguf(model)
        computed = f"computed in {arm.precision}" if arm.precision else "computed as the engine chooses"
        return options | {"model": str(model), "weights": f"{model.name}, {computed}", "precision": arm.precision}

    def quantize(source: Path, target: Path, file_type: str) -> None:
        worker = worker_process(spec, f"{spec.name} quantisation", python, num_threads)
        try:
            worker.request(
                "quantize", timeout_s=LOAD_TIMEOUT_S, source=str(source), target=str(target), file_type=file_type
            )
        finally:
            worker.close()

    path = gguf_in_format(model, arm.weights, folder, quantize)
    weights = path.name if path == model else f"{arm.weights} made from {model.name}"
    return options | {"model": str(path), "weights": weights, "context_length": prompting.context_length}


def _has_fast_bfloat16() -> bool:
    """Without these instructions bfloat16 is emulated, and float32 is what transformers' users would choose."""
    return bool({"amx_bf16", "avx512_bf16"} & set(Machine.here(num_threads=1, accelerator=None).instructions))

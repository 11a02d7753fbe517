"""Native threads: callers that do not disturb each other, forks, threads that end, and workers that sleep."""

from __future__ import annotations

import gc
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from paceline.backends.cpu import CpuBackend
from paceline.backends.kv_store import KVShape
from paceline.loader.load import load_checkpoint
from paceline.model.decoder import Decoder
from paceline.model.runner import ModelRunner, SequenceInput

_kernels = pytest.importorskip("paceline.backends._kernels")
NativeDecoder = pytest.importorskip("paceline.model.native").NativeDecoder

CPU = torch.device("cpu")
TASKS = Path("/proc/self/task")
NUM_PASSES = 40
on_linux = pytest.mark.skipif(not TASKS.exists(), reason="native threads are counted in /proc")


def make_decoder(checkpoint_path: Path, backend: CpuBackend) -> Decoder:
    checkpoint = load_checkpoint(checkpoint_path, dtype=torch.float32)
    return NativeDecoder(checkpoint.config, checkpoint.weights, backend, num_positions=512)


def make_runner(decoder: Decoder, backend: CpuBackend) -> ModelRunner:
    config = decoder.config
    store = backend.make_kv_store(KVShape(512, config.num_layers, config.num_kv_heads, config.head_dim))
    return ModelRunner(decoder, store, block_size=16, device=CPU)


def generate(runner: ModelRunner, seed: int) -> Tensor:
    """Logits of a prefill of some length and of single tokens after it."""
    tokens = torch.randint(2, 64, (100 + NUM_PASSES,), generator=torch.Generator().manual_seed(seed)).tolist()
    table = range(20)
    parts = [runner.run([SequenceInput(tokens[:100], 0, table, 100)])]
    for position in range(100, 100 + NUM_PASSES):
        parts.append(runner.run([SequenceInput(tokens[position : position + 1], position, table, 1)]))
    return torch.cat(parts)


def at_once(first: Callable[[], Tensor], second: Callable[[], Tensor]) -> list[Tensor]:
    """Results of two calls made from two Python threads that start together."""
    results: dict[int, Tensor] = {}
    start = threading.Barrier(2)

    def call(index: int, body: Callable[[], Tensor]) -> None:
        start.wait()
        results[index] = body()

    threads = [threading.Thread(target=call, args=item) for item in enumerate((first, second))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[0], results[1]]


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_two_backends_driven_at_once_give_the_bits_of_each_alone(tiny_checkpoint: Path, num_threads: int) -> None:
    backends = [CpuBackend(num_threads, "int8"), CpuBackend(num_threads, "int4")]
    decoders = [make_decoder(tiny_checkpoint, backend) for backend in backends]
    pairs = list(zip(decoders, backends, strict=True))
    alone = [generate(make_runner(*pair), seed) for seed, pair in enumerate(pairs)]
    runners = [make_runner(*pair) for pair in pairs]
    together = at_once(lambda: generate(runners[0], 0), lambda: generate(runners[1], 1))
    assert all(map(torch.equal, together, alone))


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_one_decoder_driven_from_two_threads_gives_the_bits_of_one(tiny_checkpoint: Path, num_threads: int) -> None:
    backend = CpuBackend(num_threads, "int8")
    decoder = make_decoder(tiny_checkpoint, backend)
    alone = [generate(make_runner(decoder, backend), seed) for seed in (0, 1)]
    runners = [make_runner(decoder, backend) for _ in range(2)]  # a store each, as two requests' K/V must not mix
    together = at_once(lambda: generate(runners[0], 0), lambda: generate(runners[1], 1))
    assert all(map(torch.equal, together, alone))


@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_target_and_a_draft_share_one_backend(tiny_checkpoint: Path, num_threads: int) -> None:
    backend = CpuBackend(num_threads, "bf16")
    decoders = [make_decoder(tiny_checkpoint, backend) for _ in range(2)]
    alone = [generate(make_runner(decoder, backend), seed) for seed, decoder in enumerate(decoders)]
    runners = [make_runner(decoder, backend) for decoder in decoders]
    together = at_once(lambda: generate(runners[0], 0), lambda: generate(runners[1], 1))
    assert all(map(torch.equal, together, alone))


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_operations_of_one_backend_called_from_two_threads_give_the_bits_of_one(num_threads: int) -> None:
    backend = CpuBackend(num_threads)
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(100, 200, generator=generator), torch.randn(40, 200, generator=generator)
    linear = backend.prepare_linear(weight, None)
    expected = linear(x)

    def many() -> Tensor:
        return torch.stack([linear(x[i : i + 3]) for i in range(38)])

    for result in at_once(many, many):
        assert torch.equal(result, expected.unfold(0, 3, 1).transpose(1, 2))


def test_many_runtimes_at_once_all_finish() -> None:
    # More threads than cores: nobody may wait for a thread that is never given its turn.
    x, weight = torch.ones(9, 64), torch.ones(64, 64)
    backends = [CpuBackend(4) for _ in range(6)]
    linears = [backend.prepare_linear(weight, None) for backend in backends]
    results: list[Tensor] = []
    threads = [
        threading.Thread(target=lambda linear=linear: results.extend(linear(x) for _ in range(20)))
        for linear in linears
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 120
    assert all(torch.equal(result, torch.full((9, 64), 64.0)) for result in results)


FORK = """
import os, sys, torch
from pathlib import Path
from tests.unit.backends.test_cpu_threads import CpuBackend, generate, make_decoder, make_runner

torch.set_num_threads(1)
backend = CpuBackend(int(sys.argv[2]), "int8")
decoder = make_decoder(Path(sys.argv[1]), backend)
expected = generate(make_runner(decoder, backend), 0)
runner = make_runner(decoder, backend)
child = os.fork()
if child == 0:
    is_same = torch.equal(generate(runner, 0), expected)
    # Dropping what the parent made, and threads of its own.
    own = CpuBackend(2, "int8")
    own_decoder = make_decoder(Path(sys.argv[1]), own)
    is_same &= torch.equal(generate(make_runner(own_decoder, own), 0), expected)
    del runner, decoder, backend, own, own_decoder
    os._exit(0 if is_same else 1)
assert torch.equal(generate(runner, 0), expected)  # the parent goes on meanwhile
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
print("same bits")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_a_runtime_is_usable_in_a_forked_child(tiny_checkpoint: Path, num_threads: int) -> None:
    # In a process of its own, because pytest with all its threads is no place to fork.
    done = subprocess.run(
        [sys.executable, "-c", FORK, str(tiny_checkpoint), str(num_threads)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=Path(__file__).parents[3],
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "same bits\n"


def num_tasks(expected: int) -> int:
    """Threads of this process; one that ended may stay on the list for a moment."""
    for _ in range(100):
        if len(list(TASKS.iterdir())) <= expected:
            break
        time.sleep(0.01)
    return len(list(TASKS.iterdir()))


@on_linux
def test_dropped_runtimes_leave_no_threads() -> None:
    weight, x = torch.ones(32, 32), torch.ones(2, 32)
    CpuBackend(3).prepare_linear(weight, None)(x)
    gc.collect()
    before = len(list(TASKS.iterdir()))
    for index in range(50):
        backend = CpuBackend(3)
        assert num_tasks(before + 2) == before + 2
        if index % 2:  # some are dropped before they ever worked
            backend.prepare_linear(weight, None)(x)
        del backend
    gc.collect()
    assert num_tasks(before) == before


@on_linux
def test_a_dropped_engine_of_several_parts_leaves_no_threads(tiny_checkpoint: Path) -> None:
    gc.collect()
    before = len(list(TASKS.iterdir()))
    backend = CpuBackend(4, "int8")
    runner = make_runner(make_decoder(tiny_checkpoint, backend), backend)
    generate(runner, 0)
    del backend
    assert num_tasks(before + 3) == before + 3  # the decoder still needs them
    del runner
    gc.collect()
    assert num_tasks(before) == before


def test_idle_workers_burn_no_cpu(tiny_checkpoint: Path) -> None:
    backend = CpuBackend(3, "int8")
    runner = make_runner(make_decoder(tiny_checkpoint, backend), backend)
    generate(runner, 0)
    before = resource.getrusage(resource.RUSAGE_SELF)
    time.sleep(0.3)
    after = resource.getrusage(resource.RUSAGE_SELF)
    # A worker that spins instead of sleeping takes the 0.3 s whole.
    assert (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime) < 0.15

"""Law 6: on the CPU backend a row's bits depend on its tokens alone.

Not on the rows beside it, on how its prompt was cut, on the threads, on the blocks that hold its K/V or on who filled
them. Every comparison is bit for bit, for all families, weight formats and instruction sets of this machine.
"""

from __future__ import annotations

import inspect
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.backends.cpu import CpuBackend, KVFormat, WeightFormat
from paceline.backends.kv_store import KVShape
from paceline.loader.load import load_checkpoint
from paceline.model.decoder import Decoder
from paceline.model.runner import ModelRunner, SequenceInput
from tests.support import write_tiny_checkpoint

_kernels = pytest.importorskip("paceline.backends._kernels")
NativeDecoder = pytest.importorskip("paceline.model.native").NativeDecoder

CPU = torch.device("cpu")
PROMPT_LENGTH = 300  # longer than a chunk of 256 positions
NUM_SLOTS = 2048
FORMATS: tuple[WeightFormat, ...] = ("bf16", "int8", "int4")
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-biases-tied": (
        "llama",
        {"attention_bias": True, "mlp_bias": True, "head_dim": 16, "tie_word_embeddings": True},
    ),
    "mistral-window": ("mistral", {"sliding_window": 24, "head_dim": 16, "num_attention_heads": 6}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 270, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 16, "num_key_value_heads": 1}),
    "qwen3-narrow": ("qwen3", {"head_dim": 8, "sliding_window": None}),
}
# Every family in every format on the best instruction set; on the others one variant of each format. K/V is bf16 but in
# one case of each instruction set.
BEST, *OTHERS = _kernels.instruction_sets()
CASES: list[tuple[str, str, WeightFormat, KVFormat]] = [
    *((BEST, variant, weight_format, "bf16") for variant in VARIANTS for weight_format in FORMATS),
    *(
        (other, variant, weight_format, "bf16")
        for other in OTHERS
        for variant, weight_format in (("mistral-window", "int4"), ("qwen3", "int8"), ("llama-biases-tied", "bf16"))
    ),
    *((instruction_set, "mistral-window", "int8", "int8") for instruction_set in (BEST, *OTHERS)),
]


@dataclass(frozen=True, slots=True)
class Model:
    """A checkpoint on one instruction set in one format; ``runner`` gives it fresh K/V each time."""

    folder: Path
    instruction_set: str
    weight_format: WeightFormat
    kv_format: KVFormat
    decoder: Decoder
    prompt: list[int]
    expected: Tensor  # logits of the prompt, all rows in one pass

    def runner(self, *, block_size: int = 16, num_threads: int = 1, as_python: bool = False) -> ModelRunner:
        decoder = self.decoder
        if num_threads > 1:
            decoder = load(self.folder, self.instruction_set, self.weight_format, num_threads)
        return make_runner(StepByStep(decoder) if as_python else decoder, block_size, self.kv_format)


class StepByStep:
    """Runs a native decoder by the Python definition, one operation of its backend after the other."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self.config = decoder.config
        self.logits = decoder.logits

    def forward(self, *args: Any) -> Tensor:
        return Decoder.forward(self._decoder, *args)


def load(path: Path, instruction_set: str, weight_format: WeightFormat, num_threads: int) -> Decoder:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACELINE_ISA", instruction_set)
        backend = CpuBackend(num_threads, weight_format)
    checkpoint = load_checkpoint(path, dtype=torch.float32, keep_quantized=True)
    return NativeDecoder(checkpoint.config, checkpoint.weights, backend, num_positions=512)


def make_runner(decoder: Any, block_size: int, kv_format: KVFormat = "bf16") -> ModelRunner:
    config = decoder.config
    shape = KVShape(NUM_SLOTS, config.num_layers, config.num_kv_heads, config.head_dim)
    store = CpuBackend(1, kv_format=kv_format).make_kv_store(shape)
    return ModelRunner(decoder, store, block_size=block_size, device=CPU)


def random_tokens(count: int, seed: int) -> list[int]:
    return torch.randint(2, 64, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def blocks_for(num_tokens: int, block_size: int, *, first: int = 0) -> list[int]:
    return list(range(first, first + -(-num_tokens // block_size)))


def run_in_chunks(runner: ModelRunner, tokens: Sequence[int], table: Sequence[int], ends: Sequence[int]) -> Tensor:
    """Logits of all rows of a prompt that is computed up to each of ``ends`` in turn."""
    parts, start = [], 0
    for end in ends:
        parts.append(runner.run([SequenceInput(tokens[start:end], start, table, end - start)]))
        start = end
    return torch.cat(parts)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        name: write_tiny_checkpoint(root / name, family, **overrides) for name, (family, overrides) in VARIANTS.items()
    }


@pytest.fixture(scope="module", params=CASES, ids=["-".join(case) for case in CASES])
def model(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Model:
    instruction_set, variant, weight_format, kv_format = request.param
    folder = folders[variant]
    decoder = load(folder, instruction_set, weight_format, 1)
    prompt = random_tokens(PROMPT_LENGTH, 1)
    table = blocks_for(PROMPT_LENGTH, 16)
    expected = make_runner(decoder, 16, kv_format).run([SequenceInput(prompt, 0, table, PROMPT_LENGTH)])
    assert expected.isfinite().all()
    assert len(expected.argmax(-1).unique()) > 5  # a model that tells its inputs apart
    return Model(folder, instruction_set, weight_format, kv_format, decoder, prompt, expected)


# ---- the shape of a pass -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", [0, 250])
def test_up_to_sixteen_rows_at_once_equal_one_at_a_time(model: Model, start: int) -> None:
    table = blocks_for(PROMPT_LENGTH, 16)
    for num_rows in range(1, 17):
        runner = model.runner()
        if start:
            runner.run([SequenceInput(model.prompt[:start], 0, table, 1)])
        tokens = model.prompt[start : start + num_rows]
        logits = runner.run([SequenceInput(tokens, start, table, num_rows)])
        assert torch.equal(logits, model.expected[start : start + num_rows])
    # And the one-at-a-time side of it, over the same positions.
    ends = [*([start] if start else []), *range(start + 1, start + 17)]
    assert torch.equal(run_in_chunks(model.runner(), model.prompt, table, ends), model.expected[: start + 16])


def test_decoding_every_token_alone_equals_one_prefill(model: Model) -> None:
    table = blocks_for(PROMPT_LENGTH, 16)
    ends = range(1, PROMPT_LENGTH + 1)
    assert torch.equal(run_in_chunks(model.runner(), model.prompt, table, ends), model.expected)


@pytest.mark.parametrize("seed", range(4))
def test_a_prompt_in_random_chunks_equals_the_whole(model: Model, seed: int) -> None:
    rng = random.Random(seed)
    cuts = sorted(rng.sample(range(1, PROMPT_LENGTH), rng.choice((1, 2, 5, 12))))
    table = blocks_for(PROMPT_LENGTH, 16)
    logits = run_in_chunks(model.runner(), model.prompt, table, [*cuts, PROMPT_LENGTH])
    assert torch.equal(logits, model.expected)


@pytest.mark.parametrize("num_logits", [1, 2, 7, 40])
def test_a_row_of_logits_does_not_depend_on_how_many_are_asked_for(model: Model, num_logits: int) -> None:
    table = blocks_for(PROMPT_LENGTH, 16)
    logits = model.runner().run([SequenceInput(model.prompt, 0, table, num_logits)])
    assert torch.equal(logits, model.expected[-num_logits:])


@pytest.mark.parametrize("num_requests", range(1, 7))
def test_requests_beside_each_other_equal_each_alone(model: Model, num_requests: int) -> None:
    rng = random.Random(num_requests)
    block_size = rng.choice((4, 16, 32))
    together = model.runner(block_size=block_size)
    next_block, inputs, expected = 0, [], []
    for index in range(num_requests):
        # Prefill chunks, drafts to verify and decode rows, with short and long pasts.
        query_len = rng.choice((1, 1, 5, rng.randint(2, 60)))
        past = rng.choice((0, rng.randint(1, 30), rng.randint(240, 258), rng.randint(1, 200)))
        tokens = random_tokens(past + query_len, seed=100 * num_requests + index)
        table = blocks_for(past + query_len, block_size, first=next_block)
        next_block += len(table)
        alone = model.runner(block_size=block_size)
        if past:
            for runner in (alone, together):
                runner.run([SequenceInput(tokens[:past], 0, table, 1)])
        inputs.append(SequenceInput(tokens[past:], past, table, rng.randint(1, query_len)))
        expected.append(alone.run(inputs[-1:]))
    assert torch.equal(together.run(inputs), torch.cat(expected))


# ---- threads -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_threads", [2, 3])
def test_threads_change_no_bit(model: Model, num_threads: int) -> None:
    runner = model.runner(num_threads=num_threads)
    table = blocks_for(PROMPT_LENGTH, 16)
    # A long prefill, whose context stays whole, and short rows, whose context is split over the threads.
    logits = run_in_chunks(runner, model.prompt, table, [270, 280, *range(281, PROMPT_LENGTH + 1)])
    assert torch.equal(logits, model.expected)


# ---- where K/V lies ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [1, 4, 16, 32, 48])
def test_block_size_and_place_change_no_bit(model: Model, block_size: int) -> None:
    straight = blocks_for(PROMPT_LENGTH, block_size, first=1)
    scattered = random.Random(block_size).sample(range(NUM_SLOTS // block_size), len(straight))
    for table in (straight, scattered):
        runner = model.runner(block_size=block_size)
        logits = run_in_chunks(runner, model.prompt, table, [200, 263, 264, PROMPT_LENGTH])
        assert torch.equal(logits, model.expected)


@pytest.mark.parametrize("block_size", [4, 16])
def test_what_a_former_owner_left_in_the_blocks_changes_no_bit(model: Model, block_size: int) -> None:
    runner = model.runner(block_size=block_size)
    table = blocks_for(PROMPT_LENGTH, block_size)
    runner.run([SequenceInput(random_tokens(PROMPT_LENGTH, 9), 0, table, 1)])
    backwards = table[::-1]
    logits = run_in_chunks(runner, model.prompt, backwards, [3, 17, 250, 251, PROMPT_LENGTH])
    assert torch.equal(logits, model.expected)


@pytest.mark.parametrize("block_size", [4, 16])
def test_recomputing_a_preempted_sequence_elsewhere_gives_the_same_bits(model: Model, block_size: int) -> None:
    runner = model.runner(block_size=block_size)
    first = blocks_for(PROMPT_LENGTH, block_size)
    # Decoding had come to 290 when the blocks were taken away; somebody else now writes over them.
    before = run_in_chunks(runner, model.prompt, first, [280, *range(281, 291)])
    runner.run([SequenceInput(random_tokens(PROMPT_LENGTH, 5), 0, first, 1)])
    second = blocks_for(PROMPT_LENGTH, block_size, first=len(first))
    again = run_in_chunks(runner, model.prompt, second, [290, *range(291, PROMPT_LENGTH + 1)])
    assert torch.equal(before, model.expected[:290])
    assert torch.equal(again, model.expected)


@pytest.mark.parametrize("block_size", [4, 16, 32])
@pytest.mark.parametrize("shared_tokens", [96, 256])
def test_a_prefix_hit_gives_the_bits_of_a_miss(model: Model, block_size: int, shared_tokens: int) -> None:
    runner = model.runner(block_size=block_size)
    first = blocks_for(PROMPT_LENGTH, block_size)
    prompt = model.prompt[:shared_tokens] + random_tokens(40, 6)
    runner.run([SequenceInput(model.prompt, 0, first, 1)])
    shared = first[: shared_tokens // block_size]
    table = shared + blocks_for(40, block_size, first=len(first) + 3)
    hit = runner.run([SequenceInput(prompt[shared_tokens:], shared_tokens, table, 40)])
    miss = model.runner().run([SequenceInput(prompt, 0, blocks_for(len(prompt), 16), 40)])
    assert torch.equal(hit, miss)
    # Beside its donor, which decodes on, as well.
    both = [
        SequenceInput(model.prompt[-1:], PROMPT_LENGTH - 1, first, 1),
        SequenceInput(prompt[-1:], len(prompt) - 1, table, 1),
    ]
    assert torch.equal(runner.run(both), torch.stack((model.expected[-1], miss[-1])))


def test_rejected_drafts_leave_no_trace(model: Model) -> None:
    runner = model.runner()
    table = blocks_for(PROMPT_LENGTH, 16)
    position, rng = 250, random.Random(0)
    runner.run([SequenceInput(model.prompt[:position], 0, table, 1)])
    while position < PROMPT_LENGTH - 10:
        num_right = rng.randint(0, 4)
        right = model.prompt[position : position + 1 + num_right]
        wrong = [2 + (token + 1) % 60 for token in model.prompt[position + 1 + num_right : position + 6]]
        logits = runner.run([SequenceInput(right + wrong, position, table, len(right + wrong))])
        assert torch.equal(logits[: len(right)], model.expected[position : position + len(right)])
        position += len(right)


# ---- the definition ------------------------------------------------------------------------------------------------


def test_the_native_pass_equals_its_definition_in_python(model: Model) -> None:
    runner = model.runner(as_python=True)
    table = blocks_for(PROMPT_LENGTH, 16)
    assert torch.equal(run_in_chunks(runner, model.prompt, table, [270, 275, 276, PROMPT_LENGTH]), model.expected)


def test_the_native_pass_leaves_the_K_V_of_its_definition(model: Model) -> None:  # noqa: N802 - a term
    table = blocks_for(PROMPT_LENGTH, 16)
    native, in_python = make_pair(model)
    native.run([SequenceInput(model.prompt[:280], 0, table, 1)])
    # The definition continues on what the native pass wrote.
    logits = in_python.run([SequenceInput(model.prompt[280:], 280, table, PROMPT_LENGTH - 280)])
    assert torch.equal(logits, model.expected[280:])


def make_pair(model: Model) -> tuple[ModelRunner, ModelRunner]:
    """Two runners over one store: the native pass and its definition."""
    native = model.runner()
    step_by_step: Any = StepByStep(model.decoder)
    return native, ModelRunner(step_by_step, native._store, block_size=16, device=CPU)


# ---- long ----------------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("instruction_set", _kernels.instruction_sets())
@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_split_of_a_prompt_equals_the_whole(
    folders: dict[str, Path], variant: str, weight_format: WeightFormat, instruction_set: str
) -> None:
    decoder = load(folders[variant], instruction_set, weight_format, 1)
    prompt, table = random_tokens(PROMPT_LENGTH, 1), blocks_for(PROMPT_LENGTH, 16)
    runner = make_runner(decoder, 16)
    expected = runner.run([SequenceInput(prompt, 0, table, PROMPT_LENGTH)])
    for split in range(1, PROMPT_LENGTH):
        assert torch.equal(run_in_chunks(runner, prompt, table, [split, PROMPT_LENGTH]), expected), split


@pytest.mark.embedded
def test_the_embedded_model_gives_the_same_bits_however_it_is_run(embedded_model_path: Path) -> None:
    check_embedded(embedded_model_path, BEST, "auto", [128, 252, *range(253, 265)])


@pytest.mark.long
@pytest.mark.embedded
@pytest.mark.parametrize("instruction_set", _kernels.instruction_sets())
@pytest.mark.parametrize("weight_format", ["auto", *FORMATS])
def test_the_embedded_model_gives_the_same_bits_in_every_format(
    embedded_model_path: Path, weight_format: WeightFormat, instruction_set: str
) -> None:
    cuts = sorted(random.Random(0).sample(range(1, 264), 12))
    check_embedded(embedded_model_path, instruction_set, weight_format, [*cuts, 264])


def check_embedded(path: Path, instruction_set: str, weight_format: WeightFormat, ends: Sequence[int]) -> None:
    """The whole text on one thread against chunks on two, in scattered blocks beside a second request."""
    tokens = load_checkpoint(path, dtype=torch.bfloat16).tokenizer.encode(inspect.getsource(json.decoder))[: ends[-1]]
    alone = make_runner(load(path, instruction_set, weight_format, 1), 16)
    expected = alone.run([SequenceInput(tokens, 0, blocks_for(len(tokens), 16), len(tokens))])
    together = make_runner(load(path, instruction_set, weight_format, 2), 4)
    num_blocks = len(blocks_for(len(tokens), 4))
    ids = random.Random(1).sample(range(NUM_SLOTS // 4), 2 * num_blocks)
    table, other, start = ids[:num_blocks], ids[num_blocks:], 0
    for end in ends:
        pair = [
            SequenceInput(tokens[start:end], start, table, end - start),
            SequenceInput(tokens[:3], 0, other, 3),
        ]
        assert torch.equal(together.run(pair), torch.cat((expected[start:end], expected[:3])))
        start = end

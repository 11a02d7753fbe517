"""A head's native pass against its definition in Python and against plain torch, on every instruction set."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline import Engine, SamplingParams, Speculation
from paceline.backends.cpu import CpuBackend, WeightFormat
from paceline.backends.kv_store import KVShape
from paceline.backends.metadata import AttentionMetadata, SequenceSlice
from paceline.backends.quantized import Weight
from paceline.backends.torch_ref import TorchBackend
from paceline.model.config import ModelConfig, expected_weights
from paceline.model.decoder import Decoder
from paceline.model.runner import HeadRunner
from paceline.request import Request
from paceline.spec.draft_model import DraftModelProposer
from paceline.spec.proposer import Draft
from tests.unit.train.workshop import HEAD_PROMPTS

_kernels = pytest.importorskip("paceline.backends._kernels")
NativeDecoder = pytest.importorskip("paceline.model.native").NativeDecoder

CPU = torch.device("cpu")
NUM_TOKENS, BLOCK_SIZE = 40, 16
CONFIG = ModelConfig(
    architecture="mistral", vocab_size=64, hidden_size=48, intermediate_size=96, num_layers=1, num_heads=6,
    num_kv_heads=2, head_dim=8, context_length=64, rms_norm_eps=1e-5, rope_theta=1e4, sliding_windows=(24,),
    num_logits=41, state_size=48,
)  # fmt: skip


def make_weights() -> dict[str, Weight]:
    generator = torch.Generator().manual_seed(3)
    shapes = expected_weights(CONFIG)
    assert shapes["model.state_projection.weight"] == (48, 48)
    return {
        name: torch.randn(shape, generator=generator) * (0.2 if len(shape) == 2 else 0.1) + (len(shape) == 1)
        for name, shape in shapes.items()
    }


def run(
    decoder: Decoder,
    backend: CpuBackend | TorchBackend,
    cuts: list[int],
    *,
    as_python: bool = False,
    num_kv_only: int = 0,
) -> Tensor:
    """Hidden states of a text read in the pieces that end at ``cuts``, but of the first of them the K/V alone."""
    generator = torch.Generator().manual_seed(4)
    token_ids = torch.randint(0, 64, (NUM_TOKENS,), generator=generator)
    states = torch.randn(NUM_TOKENS, 48, generator=generator)
    store = backend.make_kv_store(KVShape(64, 1, 2, 8))
    kind = Decoder if as_python else type(decoder)
    pieces = []
    for number, (start, end) in enumerate(zip([0, *cuts], cuts, strict=False)):
        metadata = AttentionMetadata([SequenceSlice(0, end - start, end, [2, 0, 1])], BLOCK_SIZE, CPU)
        positions = torch.arange(start, end)
        inputs = (decoder, token_ids[start:end], positions, store, metadata, states[start:end])
        if number < num_kv_only:
            kind.write_kv(*inputs)
        else:
            pieces.append(kind.forward(*inputs))
    return torch.cat(pieces)


@pytest.mark.parametrize("instruction_set", _kernels.instruction_sets())
@pytest.mark.parametrize("weight_format", ["bf16", "int8", "int4"])
def test_the_native_pass_equals_its_definition(
    weight_format: WeightFormat, instruction_set: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_ISA", instruction_set)
    backend = CpuBackend(2, weight_format)
    decoder = NativeDecoder(CONFIG, make_weights(), backend, num_positions=64)
    whole = run(decoder, backend, [NUM_TOKENS])
    assert torch.equal(run(decoder, backend, [NUM_TOKENS], as_python=True), whole)
    assert torch.equal(run(decoder, backend, [1, 2, 19, 20, 24, NUM_TOKENS]), whole)
    for as_python in (False, True):
        last = run(decoder, backend, [19, 20, 24, NUM_TOKENS], as_python=as_python, num_kv_only=3)
        assert torch.equal(last, whole[24:])
    if weight_format == "bf16":
        plain = TorchBackend(CPU, torch.float32)
        expected = run(Decoder(CONFIG, make_weights(), plain, num_positions=64), plain, [NUM_TOKENS])
        assert (whole - expected).abs().max() < 0.05 * expected.std()


def test_states_of_another_shape_are_refused() -> None:
    backend = CpuBackend(1, "bf16")
    decoder = NativeDecoder(CONFIG, make_weights(), backend, num_positions=64)
    store = backend.make_kv_store(KVShape(64, 1, 2, 8))
    metadata = AttentionMetadata([SequenceSlice(0, 2, 2, [0])], BLOCK_SIZE, CPU)
    for states in (None, torch.zeros(2, 47), torch.zeros(1, 48)):
        with pytest.raises(ValueError, match="states must be"):
            decoder.forward(torch.tensor([1, 2]), torch.tensor([0, 1]), store, metadata, states)


# ---- drafting in one call ------------------------------------------------------------------------------------------


class Confidences:
    """A rule that ends a draft after ``num_tokens`` and remembers what it was told."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.told: list[float] = []

    def keeps(self, confidence: float) -> bool:
        self.told.append(confidence)
        return len(self.told) <= self.num_tokens

    def wants_more(self) -> bool:
        return True


@pytest.mark.parametrize("instruction_set", _kernels.instruction_sets())
@pytest.mark.parametrize("num_kept", [8, 2, 0])
def test_a_draft_in_one_call_is_one_token_by_token(
    sharp_target: Path, trained_head: Path, instruction_set: str, num_kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens and confidences, draft after draft of several answers."""
    monkeypatch.setenv("PACELINE_ISA", instruction_set)
    said: dict[bool, list[tuple[list[int], list[float]]]] = {True: [], False: []}
    for at_once in (True, False):
        with Engine(sharp_target, draft=trained_head, block_size=4, max_model_len=128) as engine:
            proposer = engine.core.ladder.proposers["model"]
            assert isinstance(proposer, DraftModelProposer)
            runner = proposer._runner
            assert isinstance(runner, HeadRunner)
            assert runner.drafts_at_once
            if not at_once:
                monkeypatch.setattr(runner, "_drafting", None)
            propose = proposer.propose

            def recorded(
                requests: Sequence[Request], horizons: Sequence[int], rules: object = (), at_once: bool = at_once,
                propose: Any = propose,
            ) -> list[Draft]:  # fmt: skip
                rule = Confidences(num_kept)
                drafts: list[Draft] = propose(requests, horizons, [rule])
                said[at_once].append((list(drafts[0].token_ids), rule.told))
                return drafts

            monkeypatch.setattr(proposer, "propose", recorded)
            for prompt in HEAD_PROMPTS[:3]:
                engine.generate(
                    prompt, SamplingParams(max_tokens=24, ignore_eos=True),
                    speculation=Speculation("static", 4, drafters=("model",)),
                )  # fmt: skip
    assert [tokens for tokens, _ in said[True]] == [tokens for tokens, _ in said[False]]
    assert any(tokens for tokens, _ in said[True]) == (num_kept > 0)
    for (_, fast), (_, slow) in zip(said[True], said[False], strict=True):
        assert fast == pytest.approx(slow, rel=1e-4)

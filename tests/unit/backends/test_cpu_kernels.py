"""Every native operation against its plain torch definition, for each instruction set of this machine."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from paceline.backends.base import Backend
from paceline.backends.cpu import CpuBackend, CpuEmbedding, CpuLinear, KVFormat, WeightFormat
from paceline.backends.kv_store import KV_GROUP, KVShape
from paceline.backends.metadata import AttentionMetadata, SequenceSlice
from paceline.backends.quantized import GROUP, QuantizedTensor, quantize
from paceline.backends.torch_ref import TorchBackend

_kernels = pytest.importorskip("paceline.backends._kernels")

CPU = torch.device("cpu")
ROUNDING = 2.0**-24  # of a float32 sum or product, relative
FORMATS: tuple[WeightFormat, ...] = ("int4", "int8", "bf16")
WIDTHS = (1, 17, 40, 576, 1000)  # inputs: none but 576 is a multiple of 16 or 32
HEIGHTS = (1, 17, 40, 576)  # outputs
HEAD_DIMS = (8, 40, 64, 80, 96, 128, 256)
MAX_ROWS = 17  # two full steps of the widest kernel and one row more


@pytest.fixture(params=_kernels.instruction_sets())
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> CpuBackend:
    return make_backend(request.param, monkeypatch)


def make_backend(
    instruction_set: str,
    monkeypatch: pytest.MonkeyPatch,
    weight_format: WeightFormat = "auto",
    num_threads: int = 1,
    kv_format: KVFormat = "bf16",
) -> CpuBackend:
    monkeypatch.setenv("PACELINE_ISA", instruction_set)
    backend = CpuBackend(num_threads, weight_format, kv_format)
    assert backend.runtime.instruction_set == instruction_set
    return backend


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rounded(weight: Tensor, weight_format: str) -> Tensor | QuantizedTensor:
    """The weight as the format keeps it."""
    return weight if weight_format == "bf16" else quantize(weight, 4 if weight_format == "int4" else 8)


def in_groups(x: Tensor) -> Tensor:
    """[rows, groups, 32], the last group filled up with zeros."""
    padding = -x.shape[1] % GROUP
    return torch.nn.functional.pad(x, (0, padding)).view(x.shape[0], -1, GROUP)


def in_signed_bytes(x: Tensor) -> Tensor:
    """The activations that int4 and int8 weights are multiplied with, in fp64: -127 to 127 times amax / 127."""
    groups = in_groups(x)
    largest = groups.abs().amax(dim=-1, keepdim=True)
    inverse = torch.where(largest > 0, 127 / largest, torch.zeros(()))
    codes = (groups * inverse).round()  # half to even
    return (codes.double() * (largest / 127)).flatten(1)[:, : x.shape[1]]


def exact_product(x: Tensor, weight: Tensor | QuantizedTensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """The product in fp64, and how far float32 sums may lie from it, both [rows, outputs]."""
    num_steps = x.shape[1] if isinstance(weight, Tensor) else 2 * -(-x.shape[1] // GROUP)
    if isinstance(weight, Tensor):
        plain = weight.bfloat16().double()
        operand, magnitude = x.double(), plain.abs()
    else:
        # A scale times its codes and the minimum are added up apart, so they may cancel.
        scales, mins = (
            values.double().repeat_interleave(GROUP, dim=1)[:, : weight.shape[1]]
            for values in (weight.scales, weight.mins)
        )
        plain, magnitude = scales * weight.codes + mins, scales * weight.codes + mins.abs()
        operand = in_signed_bytes(x)
    product, bound = operand @ plain.T, operand.abs() @ magnitude.T
    if bias is not None:
        product, bound = product + bias, bound + bias.abs()
    return product, (num_steps + 8) * ROUNDING * bound


# ---- linear --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("num_outputs", HEIGHTS)
@pytest.mark.parametrize("num_inputs", WIDTHS)
def test_linear_is_its_definition(
    backend: CpuBackend, num_inputs: int, num_outputs: int, weight_format: WeightFormat
) -> None:
    weight = rounded(randn(num_outputs, num_inputs), weight_format)
    x = randn(MAX_ROWS, num_inputs, seed=1) * torch.logspace(-3, 3, MAX_ROWS)[:, None]
    x[4] = 0.0
    for bias in (None, randn(num_outputs, seed=2)):
        linear = backend.prepare_linear(weight, bias)
        expected, bound = exact_product(x, weight, bias)
        for num_rows in range(1, MAX_ROWS + 1) if num_outputs < 576 else (1, 2, 8, MAX_ROWS):
            got = linear(x[:num_rows])
            assert got.shape == (num_rows, num_outputs)
            assert ((got - expected[:num_rows]).abs() <= bound[:num_rows]).all()
        assert torch.equal(linear(x)[4], torch.zeros(num_outputs) if bias is None else bias)


@pytest.mark.parametrize("weight_format", FORMATS)
def test_random_shapes_of_linear(backend: CpuBackend, weight_format: WeightFormat) -> None:
    rng = random.Random(7)
    for seed in range(30):
        num_rows, num_inputs, num_outputs = rng.randint(1, 40), rng.randint(1, 300), rng.randint(1, 100)
        weight = rounded(randn(num_outputs, num_inputs, seed=seed), weight_format)
        bias = randn(num_outputs, seed=seed + 1) if rng.random() < 0.5 else None
        x = randn(num_rows, num_inputs, seed=seed + 2)
        expected, bound = exact_product(x, weight, bias)
        assert ((backend.prepare_linear(weight, bias)(x) - expected).abs() <= bound).all()


@pytest.mark.parametrize(("weight_format", "tolerance"), [("int4", 0.15), ("int8", 0.012), ("bf16", 0.003)])
def test_the_formats_stay_near_the_unrounded_product(
    tolerance: float, weight_format: WeightFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Relative, in the root mean square: half a level of 15 or 255 over some four deviations, and of 127 for the rows.
    weight, x = randn(200, 1000), randn(9, 1000, seed=1)
    exact = x @ weight.T
    for instruction_set in _kernels.instruction_sets():
        backend = make_backend(instruction_set, monkeypatch, weight_format)
        error = backend.prepare_linear(weight, None)(x) - exact
        assert error.norm() / exact.norm() < tolerance


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_largest_codes_do_not_saturate(backend: CpuBackend, bits: int, sign: float) -> None:
    highest = 2**bits - 1
    codes = torch.full((20, 96), highest, dtype=torch.uint8)
    weight = QuantizedTensor(codes, torch.ones(20, 3), torch.zeros(20, 3), bits)
    got = backend.prepare_linear(weight, None)(torch.full((3, 96), 127 * sign))
    assert torch.equal(got, torch.full((3, 20), 96.0 * 127 * highest * sign))


@pytest.mark.parametrize("bits", [4, 8])
def test_activations_round_half_to_even(backend: CpuBackend, bits: int) -> None:
    weight = QuantizedTensor(torch.eye(32, dtype=torch.uint8), torch.ones(32, 1), torch.zeros(32, 1), bits)
    x = torch.arange(32) - 15.5  # all of them ties, once 127 fixes the scale at 1
    x[0] = 127.0
    assert torch.equal(backend.prepare_linear(weight, None)(x[None])[0], x.round())


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("size", [1e-42, 1e-37, 1e-30, 1e30])
def test_activations_of_any_size_are_multiplied(backend: CpuBackend, weight_format: WeightFormat, size: float) -> None:
    weight = rounded(randn(24, 64), weight_format)
    x = randn(2, 64, seed=1) * size
    got, expected = backend.prepare_linear(weight, None)(x), x.double() @ randn(24, 64).double().T
    # Below the smallest normal number nothing but the size is asked for.
    assert ((got - expected).abs() <= 0.2 * expected.norm() + 1e-35).all()


def test_linear_takes_rows_that_lie_apart(backend: CpuBackend) -> None:
    linear = backend.prepare_linear(randn(20, 40), None)
    wide = randn(5, 90)
    assert torch.equal(linear(wide[:, 10:50]), linear(wide[:, 10:50].contiguous()))
    assert torch.equal(linear(wide[:, :40].T.contiguous().T), linear(wide[:, :40].contiguous()))


def test_linear_of_no_rows_is_empty(backend: CpuBackend) -> None:
    assert backend.prepare_linear(randn(20, 40), None)(torch.empty(0, 40)).shape == (0, 20)


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("num_threads", [2, 3, 5])
def test_threads_change_no_bit_of_linear_or_attention(
    num_threads: int, weight_format: WeightFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, bias, x = randn(150, 200), randn(150, seed=1), randn(19, 200, seed=2)
    for instruction_set in _kernels.instruction_sets():
        alone = make_backend(instruction_set, monkeypatch, weight_format)
        together = make_backend(instruction_set, monkeypatch, weight_format, num_threads)
        assert torch.equal(alone.prepare_linear(weight, bias)(x), together.prepare_linear(weight, bias)(x))
        case = AttentionCase(random.Random(num_threads))
        assert torch.equal(case.run(alone), case.run(together))


@pytest.mark.parametrize("weight_format", FORMATS)
def test_linear_refuses_rows_of_another_width(backend: CpuBackend, weight_format: WeightFormat) -> None:
    linear = backend.prepare_linear(rounded(randn(20, 40), weight_format), None)
    for width in (39, 41, 64):
        with pytest.raises(ValueError, match="x and weight differ in width"):
            linear(randn(3, width))


# ---- formats -------------------------------------------------------------------------------------------------------


def test_the_format_decides_what_a_weight_becomes(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = randn(16, 32)
    four, eight = quantize(weight, 4), quantize(weight, 8)
    expected: list[tuple[WeightFormat, Tensor | QuantizedTensor, Tensor]] = [
        ("auto", weight, weight.bfloat16().float()),
        ("auto", four, four.dequantize()),
        ("auto", eight, eight.dequantize()),
        ("bf16", four, four.dequantize().bfloat16().float()),
        ("int8", weight, eight.dequantize()),
        ("int8", four, four.dequantize()),  # the same levels in wider codes
        ("int4", weight, four.dequantize()),
    ]
    ids = torch.arange(16)
    for weight_format, given, kept in expected:
        backend = make_backend(_kernels.instruction_sets()[0], monkeypatch, weight_format)
        assert torch.equal(backend.prepare_embedding(given, None)(ids), kept)


@pytest.mark.parametrize("num_inputs", WIDTHS)
@pytest.mark.parametrize("num_outputs", HEIGHTS)
def test_a_bf16_table_gives_its_rounded_rows(backend: CpuBackend, num_inputs: int, num_outputs: int) -> None:
    table = randn(num_outputs, num_inputs)
    ids = torch.randint(num_outputs, (25,), generator=torch.Generator().manual_seed(1))
    assert torch.equal(backend.prepare_embedding(table, None)(ids), table.bfloat16().float()[ids])


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("num_inputs", WIDTHS)
@pytest.mark.parametrize("num_outputs", HEIGHTS)
def test_packed_codes_come_back_exactly(backend: CpuBackend, num_inputs: int, num_outputs: int, bits: int) -> None:
    generator = torch.Generator().manual_seed(num_inputs)
    num_groups = -(-num_inputs // GROUP)
    # Scales and minima of all sizes, such as a GGUF file may hold, down to float16's subnormal numbers.
    sizes = 10.0 ** torch.randint(-7, 3, (2, num_outputs, num_groups), generator=generator)
    scales, mins = torch.randn((2, num_outputs, num_groups), generator=generator) * sizes
    codes = torch.randint(2**bits, (num_outputs, num_inputs), generator=generator, dtype=torch.uint8)
    expected = QuantizedTensor(codes, scales.half().float(), mins.half().float(), bits).dequantize()
    embedding = backend.prepare_embedding(QuantizedTensor(codes, scales, mins, bits), None)
    assert torch.equal(embedding(torch.arange(num_outputs)), expected)


def test_every_float16_is_a_scale(backend: CpuBackend) -> None:
    halves = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    halves = halves[halves.isfinite()].float()[:, None]
    zeros = torch.zeros(halves.shape[0], 1, dtype=torch.uint8)
    ids = torch.arange(halves.shape[0])
    as_minimum = QuantizedTensor(zeros, torch.zeros_like(halves), halves, 8)
    assert torch.equal(backend.prepare_embedding(as_minimum, None)(ids), halves)
    as_scale = QuantizedTensor(zeros + 1, halves, torch.zeros_like(halves), 8)
    assert torch.equal(backend.prepare_embedding(as_scale, None)(ids), halves)


@pytest.mark.parametrize("side", ["below", "between", "above"])
def test_scales_between_two_float16_are_rounded_once(side: str) -> None:
    halves = torch.arange(0x7C00, dtype=torch.int16).view(torch.float16).float()  # all from 0 to 65,504, in order
    middles = (halves[:-1] + halves[1:]) / 2
    if side != "between":  # next to a tie, where rounding twice would show
        middles = torch.nextafter(middles, halves[1:] if side == "above" else halves[:-1])
    for values in (middles[:, None], -middles[:, None]):
        codes = torch.zeros(values.shape[0], 1, dtype=torch.uint8)
        table = QuantizedTensor(codes, torch.zeros_like(values), values, 8)
        got = CpuBackend(1).prepare_embedding(table, None)(torch.arange(values.shape[0]))
        assert torch.equal(got, values.half().float())


def test_a_tied_head_and_its_embedding_share_one_weight(backend: CpuBackend) -> None:
    table = randn(20, 40)
    head = backend.prepare_linear(table, None)
    assert isinstance(head, CpuLinear)
    embedding = backend.prepare_embedding(table, head)
    assert isinstance(embedding, CpuEmbedding)
    assert embedding.table is head.weight
    assert torch.equal(embedding(torch.tensor([3, 19])), table.bfloat16().float()[[3, 19]])


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("token_id", [-1, 20, 31, 2**31, 2**32 + 1, -(2**40)])
def test_a_token_id_out_of_range_is_refused(backend: CpuBackend, weight_format: WeightFormat, token_id: int) -> None:
    embedding = backend.prepare_embedding(rounded(randn(20, 40), weight_format), None)
    with pytest.raises(ValueError, match="a token id is out of range"):
        embedding(torch.tensor([0, token_id]))


def test_scales_of_another_shape_are_refused(backend: CpuBackend) -> None:
    codes, scales = torch.zeros(4, 40, dtype=torch.uint8), torch.ones(4, 2)
    for wrong in (torch.ones(4, 1), torch.ones(4, 3), torch.ones(3, 2)):
        with pytest.raises(ValueError, match="scales and minima"):
            backend.runtime.pack_quantised(4, codes, wrong, scales)
        with pytest.raises(ValueError, match="scales and minima"):
            backend.runtime.pack_quantised(4, codes, scales, wrong)
    with pytest.raises(ValueError, match="bits must be 4 or 8"):
        backend.runtime.pack_quantised(5, codes, scales, scales)


def test_an_instruction_set_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="does not have that instruction set"):
        _kernels.Runtime(1, "mmx")


# ---- element-wise --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 7, 16, 17, 40, 576, 1000])
@pytest.mark.parametrize("size", [1e-15, 1e-3, 1.0, 1e15])
def test_rms_norm_is_its_definition(backend: CpuBackend, width: int, size: float) -> None:
    x, weight = randn(5, width) * size, randn(width, seed=1)
    exact = x.double()
    expected = exact / torch.sqrt((exact * exact).mean(dim=-1, keepdim=True) + 1e-5) * weight
    torch.testing.assert_close(backend.rms_norm(x, weight, 1e-5), expected.float(), rtol=2e-6, atol=0)


def test_rms_norm_takes_heads_and_zeros(backend: CpuBackend) -> None:
    heads, weight = randn(3, 6, 24), randn(24, seed=1)
    normed = backend.rms_norm(heads[:, 2:5], weight, 1e-6)  # as q and k are cut out of a wider row
    torch.testing.assert_close(normed, TorchBackend(CPU, torch.float32).rms_norm(heads[:, 2:5], weight, 1e-6))
    assert torch.equal(backend.rms_norm(torch.zeros(2, 24), weight, 1e-6), torch.zeros(2, 24) * weight)


def test_rms_norm_refuses_a_weight_of_another_width(backend: CpuBackend) -> None:
    with pytest.raises(ValueError, match="x and weight differ in width"):
        backend.rms_norm(randn(2, 24), randn(23), 1e-6)


@pytest.mark.parametrize("head_dim", [2, 6, *HEAD_DIMS])
def test_rope_is_its_definition(backend: CpuBackend, head_dim: int) -> None:
    angles = randn(7, head_dim // 2, seed=1) * 100
    cos = torch.cat((angles.cos(), angles.cos()), dim=-1)
    sin = torch.cat((-angles.sin(), angles.sin()), dim=-1)
    heads = randn(7, 5, head_dim)
    q = heads[:, 1:4]  # rows lie apart
    expected = TorchBackend(CPU, torch.float32).rope(q, cos, sin)
    torch.testing.assert_close(backend.rope(q, cos, sin), expected, rtol=0, atol=2e-6)
    assert torch.equal(heads, randn(7, 5, head_dim))  # not rotated in place


@pytest.mark.parametrize("width", [1, 5, 16, 17, 31, 48, 1000])
def test_silu_gate_is_its_definition(backend: CpuBackend, width: int) -> None:
    gate_up = randn(9, 2 * width) * torch.tensor([0.0, 1e-20, 1e-3, 1.0, 5.0, 20.0, 80.0, 200.0, 1e4])[:, None]
    gate, up = gate_up.double().chunk(2, dim=-1)
    expected = gate / (1 + torch.exp(-gate)) * up
    # Beyond e^88 the sigmoid stays at 6e-39 instead of vanishing.
    torch.testing.assert_close(backend.silu_gate(gate_up), expected.float(), rtol=1e-6, atol=1e-29)


def test_silu_gate_is_right_at_the_ends_of_the_exponential(backend: CpuBackend) -> None:
    ends = (0.0, -0.0, 1e-45, 0.5, 17.0, 87.3, 87.4, 88.0, 88.4, 88.7, 89.0, 103.0, 126.0, 1e5, 1e10, 1e30)
    gate = torch.tensor([*ends, *(-end for end in ends)])
    got = backend.silu_gate(torch.cat((gate, torch.ones_like(gate)))[None])[0]
    expected = gate.double() / (1 + torch.exp(-gate.double()))
    assert got.isfinite().all()
    torch.testing.assert_close(got, expected.float(), rtol=1e-6, atol=1e-8)
    assert torch.equal(got[gate == 0], torch.zeros(4))


def test_silu_gate_follows_a_dense_grid(backend: CpuBackend) -> None:
    gate = torch.linspace(-86, 86, 200_001)
    got = backend.silu_gate(torch.cat((gate, torch.ones_like(gate)))[None])[0]
    expected = gate.double() / (1 + torch.exp(-gate.double()))
    torch.testing.assert_close(got, expected.float(), rtol=1e-6, atol=1e-37)


# ---- attention -----------------------------------------------------------------------------------------------------


class AttentionCase:
    """A ragged batch over scattered blocks, drawn from ``rng``; named arguments fix what is not to be drawn."""

    def __init__(
        self,
        rng: random.Random,
        *,
        group: int | None = None,
        head_dim: int | None = None,
        block_size: int | None = None,
        window: int | None = -1,
        lengths: Sequence[tuple[int, int]] | None = None,  # (query_len, kv_len)
    ) -> None:
        group = group or rng.choice((1, 2, 3, 8))
        self.block_size = block_size or rng.choice((1, 4, 16, 32, 48))
        self.window = rng.choice((None, None, 1, 7, 100, 256, 300)) if window == -1 else window
        if lengths is None:
            lengths = []
            for _ in range(rng.randint(1, 4)):
                kv_len = rng.choice((rng.randint(1, 40), rng.randint(250, 262), rng.randint(41, 700)))
                lengths.append((rng.choice((1, rng.randint(1, min(40, kv_len)))), kv_len))
        num_kv_heads = rng.choice((1, 2, 3))
        head_dim = head_dim or rng.choice(HEAD_DIMS)
        counts = [-(-kv_len // self.block_size) for _, kv_len in lengths]
        blocks = rng.sample(range(sum(counts) + 3), sum(counts))
        self.shape = KVShape((sum(counts) + 3) * self.block_size, 2, num_kv_heads, head_dim)
        self.batch: list[SequenceSlice] = []
        self.pasts: list[SequenceSlice] = []
        num_rows = 0
        for (query_len, kv_len), count in zip(lengths, counts, strict=True):
            table, blocks = blocks[:count], blocks[count:]
            self.batch.append(SequenceSlice(num_rows, query_len, kv_len, table))
            if kv_len > query_len:
                self.pasts.append(SequenceSlice(0, kv_len - query_len, kv_len - query_len, table))
            num_rows += query_len
        seed = rng.randrange(2**31)
        # Wider than usual, so that some rows are led by one key and others are not.
        self.q_size = rng.choice((0.5, 1.0, 4.0))
        self.q = randn(num_rows, num_kv_heads * group, head_dim, seed=seed) * self.q_size
        self.k, self.v = (randn(num_rows, num_kv_heads, head_dim, seed=seed + i).bfloat16().float() for i in (1, 2))
        self.past_kv = [
            [randn(past.query_len, num_kv_heads, head_dim, seed=seed + 10 * i + j).bfloat16().float() for j in (3, 4)]
            for i, past in enumerate(self.pasts)
        ]

    def run(
        self,
        backend: CpuBackend | TorchBackend,
        *,
        keep: Callable[[Tensor], Tensor] = Tensor.clone,
        size_of_values: bool = False,
    ) -> Tensor:
        """The batch's attention over K/V as ``keep`` makes them; with ``size_of_values`` over values without signs."""
        store = backend.make_kv_store(self.shape)
        # What former owners of the blocks left behind must not be seen.
        everything = SequenceSlice(0, self.shape.num_slots, self.shape.num_slots, range(self.shape.num_slots))
        stale = torch.full((self.shape.num_slots, self.shape.num_kv_heads, self.shape.head_dim), 1e30)
        for layer in (0, 1):
            backend.write_kv(store, layer, stale, stale, AttentionMetadata([everything], 1, CPU))
        metadata = AttentionMetadata(self.batch, self.block_size, CPU)
        steps = [
            (AttentionMetadata([past], self.block_size, CPU), k, v)
            for past, (k, v) in zip(self.pasts, self.past_kv, strict=True)
        ]
        for step, k, v in [*steps, (metadata, self.k, self.v)]:
            backend.write_kv(store, 1, keep(k), keep(v.abs() if size_of_values else v), step)
        return backend.attention(self.q, store, 1, metadata, self.window)

    def check(self, backend: CpuBackend, *, keep: Callable[[Tensor], Tensor] = Tensor.clone) -> None:
        """Against torch, which gets K and V as the backend's store is expected to keep them."""
        oracle = TorchBackend(CPU, torch.float32)
        got = self.run(backend)
        # A score's rounding error grows with the score, and a probability changes by that much.
        bound = torch.full_like(got, 1e-5 * max(1.0, self.q_size))
        if backend.runtime.instruction_set in ("amx", "avx512bf16"):
            # They take scaled queries in bf16, and probabilities: each of them, and with them the sum that
            # they are divided by, is off by up to 2^-9 of itself.
            scale = 1 / torch.tensor(self.shape.head_dim, dtype=torch.float32).sqrt()
            self.q = (self.q * scale).bfloat16().float() / scale
            bound += 2.0**-8 * self.run(oracle, keep=keep, size_of_values=True)
        assert ((got - self.run(oracle, keep=keep)).abs() <= bound).all()


@pytest.mark.parametrize("group", [1, 2, 3, 8])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_attention_over_heads_of_any_size(backend: CpuBackend, head_dim: int, group: int) -> None:
    rng = random.Random(head_dim * 10 + group)
    AttentionCase(rng, group=group, head_dim=head_dim, lengths=[(3, 300), (1, 20), (40, 40), (33, 530)]).check(backend)
    AttentionCase(rng, group=group, head_dim=head_dim).check(backend)


@pytest.mark.parametrize("block_size", [1, 4, 16, 32, 48])
@pytest.mark.parametrize("window", [None, 1, 2, 15, 16, 17, 100, 255, 256, 257, 300, 1000])
def test_attention_over_windows_and_blocks(backend: CpuBackend, window: int | None, block_size: int) -> None:
    # Around the ends of a tile of 16 and of a chunk of 256 positions, and with more tokens than one task holds.
    lengths = [(1, 1), (1, 16), (2, 17), (1, 256), (1, 257), (5, 258), (40, 511), (17, 512), (1, 700), (40, 40)]
    rng = random.Random(block_size)
    AttentionCase(rng, head_dim=24, group=2, block_size=block_size, window=window, lengths=lengths).check(backend)


@pytest.mark.parametrize("seed", range(25))
def test_attention_over_random_batches(backend: CpuBackend, seed: int) -> None:
    AttentionCase(random.Random(seed)).check(backend)


@pytest.mark.parametrize("group", [5, 7, 16, 32])
def test_attention_of_many_heads_to_one(backend: CpuBackend, group: int) -> None:
    AttentionCase(random.Random(group), group=group, head_dim=64, lengths=[(1, 260), (9, 30)]).check(backend)


@pytest.mark.parametrize("query_len", [32, 33, 300, 600])
def test_attention_of_a_long_prompt(backend: CpuBackend, query_len: int) -> None:
    AttentionCase(random.Random(1), group=3, head_dim=16, lengths=[(query_len, 600), (1, 9)], window=None).check(
        backend
    )


def test_attention_weighs_values_of_any_size(backend: CpuBackend) -> None:
    # One key that outweighs all others in another chunk than the query's: the fold must scale the rest to nothing.
    case = AttentionCase(random.Random(3), group=1, head_dim=16, block_size=16, window=None, lengths=[(2, 600)])
    case.past_kv[0][0][10] = 50.0
    case.q.fill_(8.0)
    got = case.run(backend)
    expected = case.past_kv[0][1][10].flatten()
    torch.testing.assert_close(got, expected.expand_as(got), rtol=0, atol=1e-6)


def test_k_and_v_are_rounded_to_bf16(backend: CpuBackend) -> None:
    store = backend.make_kv_store(KVShape(16, 1, 2, 24))
    k, v = randn(1, 2, 24), randn(1, 2, 24, seed=1)
    metadata = AttentionMetadata([SequenceSlice(0, 1, 1, [0])], 16, CPU)
    backend.write_kv(store, 0, k, v, metadata)
    # A single position has all the weight, so its value comes out as it is kept.
    assert torch.equal(backend.attention(randn(1, 2, 24), store, 0, metadata, None), v.bfloat16().float().flatten(1))


def in_signed_heads(x: Tensor) -> Tensor:
    """K or V [tokens, heads, head_dim] as an int8 store keeps it: codes -127 to 127 times a head's largest / 127."""
    largest = x.abs().amax(dim=-1, keepdim=True)
    inverse = torch.where(largest > 0, torch.tensor(127.0) / largest, torch.zeros(()))
    return (x * inverse).round() * (largest / 127)  # half to even


@pytest.mark.parametrize("instruction_set", _kernels.instruction_sets())
@pytest.mark.parametrize("seed", range(12))
def test_attention_over_keys_and_values_in_int8(
    seed: int, instruction_set: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = make_backend(instruction_set, monkeypatch, kv_format="int8")
    AttentionCase(random.Random(seed)).check(backend, keep=in_signed_heads)


@pytest.mark.parametrize("instruction_set", _kernels.instruction_sets())
def test_an_int8_store_keeps_zeros_and_numbers_too_small_for_a_scale(
    instruction_set: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = make_backend(instruction_set, monkeypatch, kv_format="int8")
    store = backend.make_kv_store(KVShape(16, 1, 2, 24))
    metadata = AttentionMetadata([SequenceSlice(0, 1, 1, [0])], 16, CPU)
    for size in (0.0, 1e-40):
        v = torch.full((1, 2, 24), size)
        backend.write_kv(store, 0, v, v, metadata)
        assert torch.equal(backend.attention(randn(1, 2, 24), store, 0, metadata, None), torch.zeros(1, 48))


def test_write_kv_refuses_heads_of_another_shape(backend: CpuBackend) -> None:
    store = backend.make_kv_store(KVShape(16, 1, 2, 24))
    metadata = AttentionMetadata([SequenceSlice(0, 1, 1, [0])], 16, CPU)
    with pytest.raises(ValueError, match="k and v must be"):
        backend.write_kv(store, 0, randn(1, 2, 16), randn(1, 2, 16), metadata)


@pytest.mark.parametrize(("head_dim", "kept"), [(8, 32), (32, 32), (40, 64), (64, 64)])
def test_a_token_takes_bf16_heads_filled_up_to_32(backend: CpuBackend, head_dim: int, kept: int) -> None:
    assert backend.kv_bytes_per_token(KVShape(100, 3, 2, head_dim)) == 2 * 3 * 2 * kept * 2


def test_a_token_in_int8_takes_a_byte_a_number_and_a_scale_a_head(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = make_backend(_kernels.instruction_sets()[0], monkeypatch, kv_format="int8")
    assert backend.kv_bytes_per_token(KVShape(100, 3, 2, 64)) == 2 * 3 * 2 * (64 + 4)


@pytest.mark.parametrize("instruction_set", [*_kernels.instruction_sets(), "torch"])
def test_groups_below_the_window_are_not_read(instruction_set: str, monkeypatch: pytest.MonkeyPatch) -> None:
    num_tokens, window = KV_GROUP + 40, 20
    backend: Backend = TorchBackend(CPU, torch.float32)
    if instruction_set != "torch":
        backend = make_backend(instruction_set, monkeypatch)
    store = backend.make_kv_store(KVShape(KV_GROUP + 64, 1, 2, 16))
    blocks = list(range(KV_GROUP // 16 + 4))
    stale = torch.full((KV_GROUP, 2, 16), math.nan)
    backend.write_kv(store, 0, stale, stale, AttentionMetadata([SequenceSlice(0, KV_GROUP, KV_GROUP, blocks)], 16, CPU))
    value = torch.ones(40, 2, 16)
    backend.write_kv(store, 0, value, value, AttentionMetadata([SequenceSlice(0, 40, num_tokens, blocks)], 16, CPU))
    newest = AttentionMetadata([SequenceSlice(0, 20, num_tokens, blocks)], 16, CPU)
    got = backend.attention(value[:20], store, 0, newest, window)
    torch.testing.assert_close(got, torch.ones(20, 32), rtol=2.0**-9, atol=0)


@pytest.mark.parametrize("instruction_set", _kernels.instruction_sets())
@pytest.mark.parametrize("kv_format", ["bf16", "int8"])
@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_what_a_broken_request_left_in_a_block_does_not_reach_its_next_owner(
    broken: float, kv_format: KVFormat, instruction_set: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = make_backend(instruction_set, monkeypatch, kv_format=kv_format)
    store = backend.make_kv_store(KVShape(16, 1, 2, 16))
    stale = torch.full((16, 2, 16), broken)
    backend.write_kv(store, 0, stale, stale, AttentionMetadata([SequenceSlice(0, 16, 16, [0])], 16, CPU))
    value, first = torch.ones(1, 2, 16), AttentionMetadata([SequenceSlice(0, 1, 1, [0])], 16, CPU)
    backend.write_kv(store, 0, value, value, first)
    got = backend.attention(value, store, 0, first, None)
    # A probability times the scale of a value is rounded to bf16 in the tile unit.
    torch.testing.assert_close(got, torch.ones(1, 32), rtol=0 if kv_format == "bf16" else 2.0**-9, atol=0)

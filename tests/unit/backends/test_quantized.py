"""Rounding to codes, selecting rows and stacking, each against the float weights they stand for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline.backends import quantized
from paceline.backends.quantized import GROUP, QuantizedTensor, quantize, stack_rows
from paceline.errors import ModelFormatError


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def by_definition(weight: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and minima one group at a time."""
    highest = 2**bits - 1
    codes, scales, mins = torch.zeros(weight.shape, dtype=torch.uint8), [], []
    for n, row in enumerate(weight):
        for start in range(0, weight.shape[1], GROUP):
            group = row[start : start + GROUP]
            scale = ((group.max() - group.min()) / highest).half().float()
            least = group.min().half().float()
            if scale > 0:
                codes[n, start : start + GROUP] = ((group - least) / scale).round().clamp(0, highest).to(torch.uint8)
            scales.append(scale)
            mins.append(least)
    return codes, torch.stack(scales).view(weight.shape[0], -1), torch.stack(mins).view(weight.shape[0], -1)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("num_columns", [1, 31, 32, 33, 96, 100])
def test_quantize_is_its_definition(bits: int, num_columns: int) -> None:
    weight = randn(9, num_columns)
    result = quantize(weight, bits)
    codes, scales, mins = by_definition(weight, bits)
    assert result.bits == bits
    assert result.shape == (9, num_columns)
    assert torch.equal(result.scales, scales)
    assert torch.equal(result.mins, mins)
    assert torch.equal(result.codes, codes)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_weights_come_back_within_half_a_scale(bits: int, dtype: torch.dtype) -> None:
    weight = randn(50, 80).to(dtype)
    result = quantize(weight, bits)
    assert result.dequantize().dtype == torch.float32
    error = (result.dequantize() - weight.float()).abs()
    rounding = 2.0**-11 * weight.float().abs().amax() * 3  # of the minimum, and of the scale times the highest code
    assert (error <= result.scales.repeat_interleave(GROUP, dim=1)[:, :80] / 2 + rounding).all()


@pytest.mark.parametrize("bits", [4, 8])
def test_quantising_again_changes_nothing(bits: int) -> None:
    once = quantize(randn(8, 64), bits)
    again = quantize(once.dequantize(), bits)
    assert torch.equal(again.codes, once.codes)
    assert torch.equal(again.scales, once.scales)
    assert torch.equal(again.mins, once.mins)


def test_groups_of_equal_weights_come_back_exactly() -> None:
    weight = torch.tensor([0.0, -1.75, 3.0, 65504.0])[:, None].repeat(1, 40)
    result = quantize(weight, 4)
    assert torch.equal(result.dequantize(), weight)
    assert not result.codes.any()
    assert not result.scales.any()


def test_a_range_too_small_for_float16_is_one_level() -> None:
    result = quantize(torch.linspace(0, 1e-8, 32)[None], 8)
    assert torch.equal(result.dequantize(), torch.zeros(1, 32))


def test_slabs_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = randn(23, 70)
    at_once = quantize(weight, 4)
    monkeypatch.setattr(quantized, "_SLAB_ELEMENTS", 5 * 70)
    in_slabs = quantize(weight, 4)
    assert torch.equal(at_once.codes, in_slabs.codes)
    assert torch.equal(at_once.dequantize(), in_slabs.dequantize())


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("column", [5, 33])
def test_weights_that_are_not_finite_are_refused(value: float, column: int) -> None:
    weight = randn(3, 40)
    weight[2, column] = value
    with pytest.raises(ModelFormatError, match="an infinity or a NaN"):
        quantize(weight, 8)


@pytest.mark.parametrize("ends", [(-1e5, 0.0), (0.0, 1e7), (-3e38, 3e38)])
def test_weights_beyond_float16_are_refused_with_advice(ends: tuple[float, float]) -> None:
    weight = torch.tensor([ends * 16])
    with pytest.raises(ModelFormatError, match="use --dtype bf16 or fp32"):
        quantize(weight, 4)


def test_rows_selects_and_permutes() -> None:
    tensor = quantize(randn(6, 40), 4)
    index = torch.tensor([5, 0, 0, 3])
    selected = tensor.rows(index)
    assert selected.bits == 4
    assert torch.equal(selected.dequantize(), tensor.dequantize()[index])


def test_a_single_part_is_returned_as_it_is() -> None:
    weight, tensor = randn(2, 32), quantize(randn(2, 32), 4)
    assert stack_rows([weight]) is weight
    assert stack_rows([tensor]) is tensor


@pytest.mark.parametrize(("bits", "expected"), [((4, 4), 4), ((8, 8), 8), ((4, 8), 8), ((8, 4, 4), 8)])
def test_stacked_codes_stay_codes(bits: tuple[int, ...], expected: int) -> None:
    parts = [quantize(randn(3 + seed, 48, seed=seed), width) for seed, width in enumerate(bits)]
    stacked = stack_rows(parts)
    assert isinstance(stacked, QuantizedTensor)
    assert stacked.bits == expected
    assert torch.equal(stacked.dequantize(), torch.cat([part.dequantize() for part in parts]))


def test_stacked_floats_are_concatenated() -> None:
    parts = [randn(2, 5), randn(3, 5, seed=1)]
    assert torch.equal(stack_rows(parts), torch.cat(parts))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_beside_float_parts_codes_become_floats(dtype: torch.dtype) -> None:
    tensor, weight = quantize(randn(2, 32), 4), randn(3, 32, seed=1).to(dtype)
    stacked = stack_rows([tensor, weight])
    assert isinstance(stacked, Tensor)
    assert stacked.dtype == dtype
    assert torch.equal(stacked, torch.cat([tensor.dequantize().to(dtype), weight]))

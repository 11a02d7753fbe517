"""Masks on rows of logits."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.sampling.masking import apply_masks, ceilings, is_forbidden

VOCAB_SIZE = 19


def mask_of(*token_ids: int) -> bytes:
    bits = np.zeros(24, dtype=np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little").tobytes()


@given(st.lists(st.sets(st.integers(0, VOCAB_SIZE - 1)), min_size=1, max_size=4))
def test_a_mask_has_one_bit_per_token(rows: list[set[int]]) -> None:
    values = ceilings([mask_of(*allowed) for allowed in rows], VOCAB_SIZE)
    assert values.shape == (len(rows), VOCAB_SIZE)
    assert [set(np.flatnonzero(row == np.inf)) for row in values] == rows
    assert np.isinf(values).all()


def test_ids_beyond_the_mask_are_not_allowed() -> None:
    assert set(np.flatnonzero(ceilings([mask_of(0, 23)], 40)[0] == np.inf)) == {0, 23}
    assert set(np.flatnonzero(ceilings([mask_of(0, 23)], 10)[0] == np.inf)) == {0}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_what_is_allowed_keeps_its_logit(dtype: torch.dtype) -> None:
    logits = torch.randn(3, VOCAB_SIZE, generator=torch.Generator().manual_seed(0)).to(dtype)
    before = logits.clone()
    masked = apply_masks(logits, [mask_of(2, 5), mask_of(18)], logits)
    assert torch.equal(logits, before)
    assert masked[0, [2, 5]].equal(logits[0, [2, 5]].float())
    assert masked[1, 18] == logits[1, 18].float()
    assert torch.isfinite(masked).sum(dim=-1).tolist() == [2, 1, VOCAB_SIZE]
    assert masked[2].equal(logits[2].float())  # no mask: nothing is known, nothing is forbidden


def test_without_masks_nothing_is_copied() -> None:
    logits = torch.zeros(2, VOCAB_SIZE)
    assert apply_masks(logits, [], logits) is logits


def test_a_ban_gives_way_where_it_leaves_nothing() -> None:
    logits = torch.arange(VOCAB_SIZE).float().repeat(2, 1)
    banned = logits.clone()
    banned[:, 4] = -math.inf
    masked = apply_masks(banned, [mask_of(4), mask_of(4, 6)], logits)
    assert masked[0, 4] == 4.0
    assert not torch.isfinite(masked[0]).sum() > 1
    assert masked[1, 4] == -math.inf  # here it leaves something
    assert masked[1, 6] == 6.0


def test_a_row_in_which_nothing_is_left() -> None:
    logits = torch.zeros(1, VOCAB_SIZE)
    assert is_forbidden(apply_masks(logits, [mask_of()], logits))
    assert not is_forbidden(apply_masks(logits, [mask_of(3)], logits))


def test_what_a_model_or_a_bias_made_infinite_stays_so_where_it_is_allowed() -> None:
    logits = torch.tensor([[math.inf, math.inf, -math.inf, 1.0]])
    assert apply_masks(logits, [mask_of(0, 2, 3)], logits).tolist() == [[math.inf, -math.inf, -math.inf, 1.0]]

"""The losses against their definitions over a whole small vocabulary."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.train.losses import Targets, acceptance, divergence, position_losses

NUM_LISTED, ESCAPE = 6, 6


def distributions(seed: int) -> tuple[Tensor, Tensor]:
    """Logits of the draft [3, 7] and probabilities of the target over listed tokens and escape [3, 7]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, 7, generator=generator), torch.randn(3, 7, generator=generator).softmax(-1)


@settings(max_examples=25)
@given(st.integers(0, 10_000))
def test_divergence_over_everything_is_the_whole_one(seed: int) -> None:
    logits, target = distributions(seed)
    classes = torch.arange(7).expand(3, 7)
    exact = (target * (target.log() - logits.log_softmax(-1))).sum(-1)
    torch.testing.assert_close(divergence(logits, classes, target), exact, atol=1e-4, rtol=1e-3)


def test_divergence_of_the_likeliest_is_a_lower_bound_and_zero_for_equals() -> None:
    logits, target = distributions(1)
    top = target[:, :ESCAPE].topk(2)
    exact = (target * (target.log() - logits.log_softmax(-1))).sum(-1)
    assert (divergence(logits, top.indices, top.values) <= exact + 1e-5).all()
    listed = torch.cat([target[:, :ESCAPE], torch.full((3, 1), 1e-9)], dim=1)
    listed /= listed.sum(-1, keepdim=True)
    top = listed.topk(2)
    same = divergence(listed.log(), top.indices, top.values)
    torch.testing.assert_close(same, torch.zeros(3), atol=1e-4, rtol=0)


def test_tokens_that_are_not_listed_count_together() -> None:
    logits, target = distributions(2)
    split = torch.cat([target[:, :ESCAPE], target[:, ESCAPE:] / 2, target[:, ESCAPE:] / 2], dim=1)
    classes = torch.tensor([[*range(NUM_LISTED), ESCAPE, ESCAPE]]).expand(3, 8)
    whole = divergence(logits, torch.arange(7).expand(3, 7), target)
    torch.testing.assert_close(divergence(logits, classes, split), whole, atol=1e-5, rtol=1e-4)


@settings(max_examples=25)
@given(st.integers(0, 10_000))
def test_acceptance_is_the_overlap_with_what_is_drawn_from(seed: int) -> None:
    logits, target = distributions(seed)
    drawn_from = logits[:, :NUM_LISTED].softmax(-1)
    exact = torch.minimum(drawn_from, target[:, :NUM_LISTED]).sum(-1)
    torch.testing.assert_close(acceptance(logits, torch.arange(7).expand(3, 7), target), exact)


@pytest.mark.parametrize("stage", ["ce", "kl", "lk"])
def test_each_stage_leads_to_the_target(stage: str) -> None:
    logits, target = distributions(5)
    logits.requires_grad_()
    classes = torch.arange(7).expand(3, 7)
    targets = Targets(target.argmax(-1), classes, target, torch.tensor([True, True, False]))
    before = acceptance(logits, classes, target).detach()
    for _ in range(60):
        (gradient,) = torch.autograd.grad(position_losses(logits, targets, stage).sum(), logits)
        logits = (logits - 0.3 * gradient).detach().requires_grad_()
    assert (logits.argmax(-1) == targets.labels).all()
    if stage != "ce":
        assert (acceptance(logits, classes, target)[:2] > torch.maximum(before[:2], torch.tensor(0.6))).all()


def test_labels_alone_where_the_target_is_not_known() -> None:
    logits, target = distributions(6)
    targets = Targets(target.argmax(-1), torch.zeros(3, 1, dtype=torch.int64), torch.zeros(3, 1), torch.zeros(3).bool())
    one, other = (position_losses(logits, targets, stage) for stage in ("ce", "lk"))
    assert torch.equal(one, other)

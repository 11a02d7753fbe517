import pytest
import torch

from paceline.sampling.rejection import verify_greedy, verify_sampled


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def probs(*rows):
    return torch.tensor(rows, dtype=torch.float32)


@pytest.mark.parametrize(
    ("argmax_ids", "drafts", "token_ids", "num_accepted"),
    [
        ([5], [], (5,), 0),
        ([5, 6], [5], (5, 6), 1),
        ([5, 6], [4], (5,), 0),
        ([5, 6, 7], [5, 9], (5, 6), 1),
        ([5, 6, 7], [9, 6], (5,), 0),  # an agreement after the first rejection counts for nothing
        ([5, 6, 7], [5, 6], (5, 6, 7), 2),
    ],
)
def test_greedy_keeps_the_agreeing_prefix_and_adds_one(argmax_ids, drafts, token_ids, num_accepted):
    verdict = verify_greedy(argmax_ids, drafts)
    assert verdict.token_ids == token_ids
    assert (verdict.num_drafted, verdict.num_accepted) == (len(drafts), num_accepted)
    assert verdict.final_token == ("bonus" if num_accepted == len(drafts) else "recovered")


@pytest.mark.parametrize("seed", range(20))
def test_a_draft_equal_to_the_target_is_always_accepted(seed):
    rows = torch.rand(4, 6, generator=generator(seed)).softmax(-1)
    drafts = [torch.multinomial(row, 1, generator=generator(seed)).item() for row in rows[:3]]
    verdict = verify_sampled(rows, drafts, rows[:3], generator(seed))
    assert verdict.num_accepted == 3
    assert list(verdict.token_ids[:3]) == drafts
    assert len(verdict.token_ids) == 4


@pytest.mark.parametrize("seed", range(20))
def test_a_draft_the_target_rules_out_is_never_accepted(seed):
    target, draft = probs([0.0, 0.3, 0.7], [1, 0, 0]), probs([1.0, 0.0, 0.0])
    for draft_probs in (draft, None):
        verdict = verify_sampled(target, [0], draft_probs, generator(seed))
        assert verdict.num_accepted == 0
        assert len(verdict.token_ids) == 1
        assert verdict.token_ids[0] in (1, 2)


@pytest.mark.parametrize("seed", range(20))
def test_the_recovered_token_is_what_the_draft_had_too_little_of(seed):
    target, draft = probs([0.1, 0.4, 0.5], [1, 0, 0]), probs([0.8, 0.1, 0.1])
    verdict = verify_sampled(target, [0], draft, generator(seed))
    if verdict.num_accepted == 0:
        assert verdict.token_ids[0] in (1, 2)  # token 0 has no residual left


def test_an_empty_draft_draws_from_the_only_row():
    for draft_probs in (None, torch.empty(0, 3)):
        verdict = verify_sampled(probs([0, 1, 0]), [], draft_probs, generator())
        assert verdict.token_ids == (1,)
        assert (verdict.num_drafted, verdict.num_accepted) == (0, 0)


@pytest.mark.parametrize("draft_probs", [None, probs([0.9, 0.1, 0.0], [0.1, 0.9, 0.0])], ids=["one-hot", "probs"])
def test_the_callers_rows_are_never_modified(draft_probs):
    target = probs([0.1, 0.2, 0.7], [0.3, 0.3, 0.4], [0.2, 0.2, 0.6])
    before = target.clone()
    for seed in range(30):
        verify_sampled(target, [0, 1], draft_probs, generator(seed))
    assert torch.equal(target, before)


@pytest.mark.parametrize("draft_probs", [None, probs([0.5, 0.1, 0.4])], ids=["one-hot", "probs"])
def test_a_draft_beyond_the_targets_vocabulary_is_rejected(draft_probs):
    verdict = verify_sampled(probs([0.5, 0.5], [1, 0]), [2], draft_probs, generator())
    assert verdict.num_accepted == 0
    assert verdict.token_ids[0] in (0, 1)


def test_a_residual_of_nothing_falls_back_to_the_target():
    # The draft claims at least the target's probability everywhere, which rounding can do.
    target = probs([0.25, 0.25, 0.5 - 1e-6], [1, 0, 0])
    token_ids = set()
    for seed in range(200):
        verdict = verify_sampled(target, [2], probs([0.25, 0.25, 5.0]), generator(seed))
        if verdict.num_accepted == 0:
            token_ids.add(verdict.token_ids[0])
    assert token_ids == {0, 1, 2}
    # One-hot target, rejected by a coin above its rounded probability: the only token there is comes back.
    assert verify_sampled(probs([1.0, 0.0], [0, 1]), [0], None, generator()).token_ids == (0, 1)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_draft_row_that_is_not_finite_is_rejected_whole(bad):
    draft = probs([bad, 0.5, 0.5])
    seen = {verify_sampled(probs([0.2, 0.3, 0.5], [1, 0, 0]), [1], draft, generator(s)).token_ids for s in range(60)}
    assert seen == {(0,), (1,), (2,)}


def test_a_draft_that_reports_zero_for_its_own_token_is_an_engine_error():
    with pytest.raises(AssertionError, match="distribution it drew from"):
        verify_sampled(probs([0.5, 0.5], [1, 0]), [0], probs([0.0, 1.0]), generator())
    with pytest.raises(AssertionError, match="distribution it drew from"):
        verify_sampled(probs([0.3, 0.3, 0.4], [1, 0, 0]), [2], probs([0.5, 0.5]), generator())


def test_shapes_must_agree():
    with pytest.raises(AssertionError):
        verify_sampled(probs([0.5, 0.5]), [0], None, generator())
    with pytest.raises(AssertionError):
        verify_sampled(probs([0.5, 0.5], [0.5, 0.5]), [0], probs([0.5, 0.5], [0.5, 0.5]), generator())
    with pytest.raises(AssertionError):
        verify_greedy([1, 2], [])

import math

import pytest
import torch

from paceline.errors import ModelFormatError
from paceline.request import SamplingParams
from paceline.sampling.coupled import sample_coupled
from paceline.sampling.distribution import logprobs_of, to_probs
from paceline.sampling.penalties import TokenHistory
from paceline.spec.proposer import NO_DRAFT, Draft
from paceline.spec.verifier import Verifier, VerifyItem

VOCAB_SIZE = 16
GREEDY = SamplingParams()
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95)
SEEDED = SamplingParams(temperature=0.8, seed=3)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def random_logits(num_rows, seed=0):
    return torch.randn(num_rows, VOCAB_SIZE, generator=generator(seed)) * 2


def item(params, drafts=(), start=0, *, draft_probs=None, **values):
    draft = Draft(tuple(drafts), "test", draft_probs) if drafts else NO_DRAFT
    values = {"history": TokenHistory([1, 2]), "generator": generator(5), **values}
    return VerifyItem(params, draft, slice(start, start + len(drafts) + 1), first_position=2, **values)


@pytest.mark.parametrize("num_drafts", range(5))
def test_greedy_commits_the_lowest_of_tied_tokens(num_drafts):
    logits = torch.zeros(num_drafts + 1, VOCAB_SIZE)
    logits[:, [4, 9]] = 1.0
    (verdict,) = Verifier().verify([item(GREEDY, [4] * num_drafts)], logits)
    assert verdict.token_ids == (4,) * (num_drafts + 1)
    (verdict,) = Verifier().verify([item(GREEDY, [9] * num_drafts)], logits)
    assert verdict.token_ids == (4,)
    assert verdict.num_accepted == 0


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, SEEDED], ids=["greedy", "sampled", "seeded"])
def test_a_verdict_holds_the_accepted_tokens_and_one_more(params):
    for seed in range(30):
        logits = random_logits(4, seed)
        drafts = logits[:3].argmax(-1).tolist()
        (verdict,) = Verifier().verify([item(params, drafts)], logits)
        assert len(verdict.token_ids) == verdict.num_accepted + 1
        assert list(verdict.token_ids[: verdict.num_accepted]) == drafts[: verdict.num_accepted]
        assert verdict.num_drafted == 3
        assert all(isinstance(token_id, int) for token_id in verdict.token_ids)


def test_a_batch_gives_each_request_what_it_gets_alone():
    penalised = SamplingParams(frequency_penalty=0.5, repetition_penalty=1.2)

    def batch():
        return [
            item(GREEDY, [1, 2], 0),
            item(SEEDED, [3], 3),
            item(SAMPLED, [4, 5], 5),
            item(penalised, [6], 8),
            item(GREEDY, [], 10),
            item(SAMPLED, [], 11),
        ]

    logits = random_logits(12)
    together = Verifier().verify(batch(), logits)
    alone = [Verifier().verify([each], logits)[0] for each in batch()]
    assert together == alone


def test_only_greedy_rows_and_all_rows_greedy_agree():
    logits = random_logits(5)
    items = [item(GREEDY, [1, 2], 0), item(GREEDY, [3], 3)]
    assert Verifier().verify(items, logits) == [Verifier().verify([each], logits)[0] for each in items]
    assert Verifier().verify(items[::-1], logits) == Verifier().verify(items, logits)[::-1]


def test_seeded_requests_take_the_targets_coupled_sample_at_its_position():
    logits = random_logits(2)
    probs = to_probs(logits, SEEDED)
    own = [sample_coupled(probs[0], 3, 2), sample_coupled(probs[1], 3, 3)]
    (verdict,) = Verifier().verify([item(SEEDED, own[:1], generator=None)], logits)
    assert list(verdict.token_ids) == own


def test_seeded_requests_ignore_what_the_draft_reports():
    logits = random_logits(2)
    for draft_probs in (None, torch.zeros(1, VOCAB_SIZE), torch.full((1, VOCAB_SIZE), math.nan)):
        (verdict,) = Verifier().verify([item(SEEDED, [3], draft_probs=draft_probs)], logits)
        assert verdict == Verifier().verify([item(SEEDED, [3])], logits)[0]


def test_penalties_follow_the_accepted_prefix_of_the_row():
    # Token 4 leads by 0.3; one more occurrence of it costs 0.5, so plain decoding alternates 4, 5, ...
    logits = torch.zeros(3, VOCAB_SIZE)
    logits[:, 4], logits[:, 5] = 2.3, 2.0
    params = SamplingParams(frequency_penalty=0.5)
    (verdict,) = Verifier().verify([item(params, [4, 4])], logits)
    assert (verdict.token_ids, verdict.num_accepted) == ((4, 5), 1)
    (verdict,) = Verifier().verify([item(params, [4, 5])], logits)
    assert (verdict.token_ids, verdict.num_accepted) == ((4, 5, 4), 2)


def test_min_tokens_rejects_a_drafted_end():
    logits = torch.zeros(3, VOCAB_SIZE)
    logits[:, 0], logits[:, 6] = 5.0, 4.0
    params = SamplingParams(min_tokens=2)
    (verdict,) = Verifier().verify([item(params, [0, 0], end_token_ids=(0,))], logits)
    assert verdict.token_ids == (6,)
    (verdict,) = Verifier().verify([item(params, [6, 6], end_token_ids=(0,))], logits)
    assert verdict.token_ids == (6, 6, 0)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, SEEDED, SamplingParams(presence_penalty=1.0)], ids=repr)
def test_padded_ids_are_never_emitted(params):
    logits = random_logits(2)
    logits[:, 12:] = 50.0
    (verdict,) = Verifier(vocab_limit=12).verify([item(params, [13])], logits)
    assert verdict.num_accepted == 0
    assert verdict.token_ids[0] < 12


def test_logprobs_are_of_the_raw_logits():
    logits = random_logits(3)
    params = SamplingParams(temperature=0.3, seed=1, presence_penalty=2.0, logprobs=2)
    (verdict,) = Verifier(vocab_limit=12).verify([item(params, [1, 2])], logits)
    num_tokens = len(verdict.token_ids)
    assert verdict.logprobs == logprobs_of(logits[:num_tokens, :12], verdict.token_ids, 2)
    assert len(verdict.logprobs) == num_tokens
    (verdict,) = Verifier().verify([item(SamplingParams(logprobs=0))], logits[:1])
    assert verdict.logprobs[0].top == {}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_logits_of_any_dtype_are_left_alone(dtype):
    logits = random_logits(9).to(dtype)
    before = logits.clone()
    penalised = SamplingParams(temperature=1.0, presence_penalty=1.0, logit_bias={3: 1.0})
    items = [item(GREEDY, [1], 0), item(SAMPLED, [1], 2), item(SEEDED, [1], 4), item(penalised, [1, 2], 6)]
    assert len(Verifier().verify(items, logits)) == 4
    assert torch.equal(logits, before)


def test_nan_is_reported():
    for params in (GREEDY, SAMPLED, SEEDED):
        with pytest.raises(ModelFormatError):
            Verifier().verify([item(params)], torch.full((1, VOCAB_SIZE), math.nan))


def test_no_items_no_verdicts():
    assert Verifier().verify([], torch.empty(0, VOCAB_SIZE)) == []


def test_rows_must_match_the_draft():
    short = VerifyItem(SAMPLED, Draft((1, 2), "test"), slice(0, 2), first_position=0, generator=generator())
    with pytest.raises(AssertionError):
        Verifier().verify([short], random_logits(2))
    with pytest.raises(AssertionError):
        Verifier().verify([item(SAMPLED, generator=None)], random_logits(1))
    with pytest.raises(AssertionError):
        Verifier().verify([item(SamplingParams(presence_penalty=1.0), history=None)], random_logits(1))

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import InvalidParameterError
from paceline.request import SamplingParams
from paceline.sampling.penalties import TokenHistory, apply_penalties, require_valid_bias

INF = math.inf
VOCAB_SIZE = 12
ALL_KINDS = {
    "repetition_penalty": 1.3,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.25,
    "logit_bias": {3: 2.0, 5: -1.5},
    "min_tokens": 4,
    "stop_token_ids": (7,),
}
END_IDS = (2,)
tokens = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=12)


def random_logits(num_rows, seed=0):
    return torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 3


def expected_row(logits, params, prompt, output, end_ids):
    """The definition, one token at a time."""
    row = logits.tolist()
    for token_id in range(len(row)):
        row[token_id] += params.logit_bias.get(token_id, 0.0)
        if token_id in prompt or token_id in output:
            penalty = params.repetition_penalty
            row[token_id] = row[token_id] / penalty if row[token_id] > 0 else row[token_id] * penalty
        row[token_id] -= params.frequency_penalty * output.count(token_id)
        row[token_id] -= params.presence_penalty * (token_id in output)
        if len(output) < params.min_tokens and token_id in (*end_ids, *params.stop_token_ids):
            row[token_id] = -INF
    return torch.tensor(row)


@settings(max_examples=150, deadline=None)
@given(tokens, tokens, tokens, st.sets(st.sampled_from(sorted(ALL_KINDS))))
def test_each_row_is_penalised_for_exactly_what_precedes_it(prompt, output, drafts, kinds):
    params = SamplingParams(**{kind: ALL_KINDS[kind] for kind in kinds})
    logits = random_logits(len(drafts) + 1)
    adjusted = apply_penalties(logits, params, TokenHistory(prompt, output), drafts, END_IDS)
    for i, row in enumerate(adjusted):
        expected = expected_row(logits[i], params, prompt, output + drafts[:i], END_IDS)
        torch.testing.assert_close(row, expected, atol=1e-5, rtol=1e-5)


@settings(max_examples=100, deadline=None)
@given(tokens, tokens, tokens)
def test_a_row_is_bitwise_the_one_plain_decoding_would_see(prompt, output, drafts):
    params = SamplingParams(**ALL_KINDS)
    logits = random_logits(len(drafts) + 1)
    speculated = apply_penalties(logits, params, TokenHistory(prompt, output), drafts, END_IDS)
    history = TokenHistory(prompt)
    history.append(output)
    for i, row in enumerate(speculated):
        plain = apply_penalties(logits[i : i + 1], params, history, (), END_IDS)
        assert torch.equal(row, plain[0])
        history.append(drafts[i : i + 1])


@pytest.mark.parametrize("num_drafts", [0, 1, 3])
def test_a_draft_model_adjusts_only_its_last_row(num_drafts):
    params, drafts, history = SamplingParams(**ALL_KINDS), [3, 3, 1][:num_drafts], TokenHistory([1, 4], [3])
    logits = random_logits(num_drafts + 1)
    every = apply_penalties(logits, params, history, drafts, END_IDS)
    last = apply_penalties(logits[-1:], params, history, drafts, END_IDS, only_last_row=True)
    assert torch.equal(last, every[-1:])


def test_the_callers_logits_are_never_modified():
    logits = random_logits(3)
    before = logits.clone()
    apply_penalties(logits, SamplingParams(**ALL_KINDS), TokenHistory([1], [2]), [3, 3], END_IDS)
    assert torch.equal(logits, before)


def test_nothing_to_do_costs_no_copy():
    logits = random_logits(2)
    assert apply_penalties(logits, SamplingParams(), TokenHistory([1]), [3]) is logits
    late = SamplingParams(min_tokens=2)
    assert apply_penalties(logits, late, TokenHistory([1], [4, 5]), [3], END_IDS) is logits


def test_min_tokens_opens_the_end_at_the_right_row():
    params = SamplingParams(min_tokens=3, stop_token_ids=(7,))
    adjusted = apply_penalties(random_logits(4), params, TokenHistory([1], [5]), [5, 6, 8], END_IDS)
    is_banned = adjusted == -INF
    assert is_banned[:, 2].tolist() == [True, True, False, False]
    assert is_banned[:, 7].tolist() == [True, True, False, False]
    assert is_banned.sum() == 4


def test_half_precision_logits_are_adjusted_in_float32():
    logits = random_logits(1).bfloat16()
    params = SamplingParams(presence_penalty=0.001)
    adjusted = apply_penalties(logits, params, TokenHistory([], [3]))
    assert adjusted.dtype == torch.float32
    assert adjusted[0, 3].item() == pytest.approx(logits[0, 3].item() - 0.001, abs=1e-6)


def test_forbidden_tokens_stay_forbidden():
    logits = torch.full((1, VOCAB_SIZE), -INF)
    adjusted = apply_penalties(logits, SamplingParams(**ALL_KINDS), TokenHistory([1, 2], [3, 3]), (), END_IDS)
    assert (adjusted == -INF).all()


def test_ids_outside_the_vocabulary_have_no_effect():
    params = SamplingParams(**{**ALL_KINDS, "logit_bias": {3: 2.0, 99: 5.0}})
    history = TokenHistory([1, 50], [60])
    adjusted = apply_penalties(random_logits(3), params, history, [70, 4], (2, 80))
    expected = apply_penalties(
        random_logits(3),
        SamplingParams(**{**ALL_KINDS, "logit_bias": {3: 2.0}}),
        TokenHistory([1], [11]),
        [11, 4],
        (2,),
    )
    assert torch.equal(adjusted[:, :11], expected[:, :11])


def test_vocabularies_of_different_width_share_a_history():
    params = SamplingParams(repetition_penalty=1.3, frequency_penalty=0.25)
    history = TokenHistory([1, 11], [9])
    wide = random_logits(1)
    narrow = apply_penalties(wide[:, :4], params, history)
    history.append([2, 9])
    after = apply_penalties(wide, params, history)
    wider = apply_penalties(torch.cat([wide, wide], dim=-1), params, history)
    assert torch.equal(narrow[0], expected_row(wide[0, :4], params, [1, 11], [9], ()))
    torch.testing.assert_close(after[0], expected_row(wide[0], params, [1, 11], [9, 2, 9], ()))
    assert torch.equal(wider[:, :VOCAB_SIZE], after)


def test_appending_costs_the_same_however_long_the_context_is():
    history = TokenHistory(list(range(VOCAB_SIZE)) * 1000)
    before = history.tables(VOCAB_SIZE)[1]
    history.append([5])
    after = history.tables(VOCAB_SIZE)[1]
    assert after.base is before.base  # updated in place, not rebuilt
    assert after[5] == 1
    assert history.num_output_tokens == 1


def test_bias_is_checked_at_admission():
    require_valid_bias(SamplingParams(logit_bias={0: -INF, 11: 100.0}), VOCAB_SIZE)
    for bias in ({12: 1.0}, {-1: 1.0}, {3: math.nan}):
        with pytest.raises(InvalidParameterError, match="logit_bias"):
            require_valid_bias(SamplingParams(logit_bias=bias), VOCAB_SIZE)

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import ModelFormatError
from paceline.request import SamplingParams
from paceline.sampling.distribution import argmax_lowest, logprobs_of, to_probs, to_probs_by_sorting

INF = float("inf")


def params(**values):
    return SamplingParams(**{"temperature": 1.0, **values})


def support(probs):
    return [row.nonzero().flatten().tolist() for row in probs]


def random_logits(num_rows, vocab_size, *, spread=2.0, seed=0):
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * spread


FILTERS = [
    {"top_p": 0.5},
    {"top_p": 0.95},
    {"top_p": 0.999},
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": 2000},
    {"top_k": 40, "top_p": 0.8},
    {"min_p": 0.1},
    {"top_k": 100, "top_p": 0.95, "min_p": 0.02},
    {"temperature": 0.6, "top_p": 0.9},
    {"temperature": 1.7, "top_k": 3000, "top_p": 0.99},
]


@pytest.mark.parametrize("values", FILTERS, ids=str)
@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 4.0], ids="spread={}".format)
def test_the_fast_path_equals_the_full_sort(values, spread):
    logits = random_logits(3, 5000, spread=spread)
    fast, slow = to_probs(logits, params(**values)), to_probs_by_sorting(logits, params(**values))
    assert support(fast) == support(slow)
    torch.testing.assert_close(fast, slow, atol=1e-7, rtol=1e-6)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(-3, 3), min_size=1, max_size=24),
    st.integers(0, 26),
    st.floats(0.01, 1.0),
    st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    st.sampled_from([0.3, 1.0, 2.5]),
)
def test_the_fast_path_equals_the_full_sort_where_many_tokens_tie(levels, top_k, top_p, min_p, temperature):
    logits = torch.tensor([levels], dtype=torch.float32)
    values = params(top_k=top_k, top_p=top_p, min_p=min_p, temperature=temperature)
    fast, slow = to_probs(logits, values), to_probs_by_sorting(logits, values)
    assert support(fast) == support(slow)
    torch.testing.assert_close(fast, slow, atol=1e-7, rtol=1e-6)
    assert fast.sum().item() == pytest.approx(1.0, abs=1e-5)


def test_plain_sampling_is_a_softmax():
    logits = random_logits(2, 50)
    torch.testing.assert_close(to_probs(logits, params()), logits.softmax(-1))
    torch.testing.assert_close(to_probs(logits, params(temperature=0.5)), (logits * 2).softmax(-1))


def test_top_p_is_the_smallest_set_that_reaches_the_mass():
    logits = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log()
    assert support(to_probs(logits, params(top_p=0.65))) == [[1, 3]]
    assert support(to_probs(logits, params(top_p=0.71))) == [[1, 2, 3]]
    torch.testing.assert_close(to_probs(logits, params(top_p=0.65)), torch.tensor([[0, 4 / 7, 0, 3 / 7]]))


def test_top_p_counts_mass_among_what_top_k_left():
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    # Of the first two, 0.4 / 0.7 = 0.571 of the mass is the first token's.
    assert support(to_probs(logits, params(top_k=2, top_p=0.57))) == [[0]]
    assert support(to_probs(logits, params(top_k=2, top_p=0.58))) == [[0, 1]]


def test_top_p_of_each_row_is_its_own():
    logits = torch.stack([torch.tensor([0.9, 0.05, 0.05]), torch.tensor([0.3, 0.3, 0.4])]).log()
    assert support(to_probs(logits, params(top_p=0.8))) == [[0], [0, 1, 2]]


def test_ties_go_to_the_lower_id():
    logits = torch.tensor([[0.0, 1.0, 1.0, 1.0, 0.0]])
    assert support(to_probs(logits, params(top_k=2))) == [[1, 2]]
    assert support(to_probs(logits, params(top_k=4))) == [[0, 1, 2, 3]]
    assert support(to_probs(torch.zeros(1, 4), params(top_p=0.5))) == [[0, 1]]


def test_min_p_is_relative_to_the_likeliest():
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    assert support(to_probs(logits, params(min_p=0.5))) == [[0, 1]]
    assert support(to_probs(logits, params(min_p=1.0))) == [[0]]


def test_temperature_zero_is_one_hot_at_the_lowest_maximum():
    probs = to_probs(torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0]]), SamplingParams())
    assert probs.tolist() == [[0, 1, 0], [1, 0, 0]]


@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e-5, 1.0, 1e5, 1e30, 1e300])
def test_any_temperature_gives_a_distribution(temperature):
    logits = torch.tensor([[80.0, -70.0, 79.0, -INF]])
    probs = to_probs(logits, params(temperature=temperature))
    assert probs.sum().item() == pytest.approx(1.0)
    assert probs[0, 3] == 0
    assert probs[0, 0] == probs.max()


@pytest.mark.parametrize("values", [{}, {"temperature": 0.7}, {"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.2}], ids=str)
def test_forbidden_tokens_get_nothing(values):
    logits = torch.tensor([[-INF, 1.0, -INF, 0.5], [-INF, -INF, -INF, -3.0]])
    probs = to_probs(logits, params(**values))
    assert (probs[logits == -INF] == 0).all()
    torch.testing.assert_close(probs.sum(-1), torch.ones(2))


@pytest.mark.parametrize("values", [{}, {"temperature": 0.7}, {"top_p": 0.9}, {"temperature": 0.0}], ids=str)
def test_a_row_without_any_allowed_token_is_one_hot_at_zero(values):
    logits = torch.tensor([[-INF, -INF, -INF], [0.0, -INF, -INF]])
    assert to_probs(logits, params(**values)).tolist() == [[1, 0, 0], [1, 0, 0]]
    assert logits[0, 0] == -INF  # the caller's row is as it was


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_a_forced_token_takes_all(temperature):
    assert to_probs(torch.tensor([[3.0, INF, 2.0]]), params(temperature=temperature)).tolist() == [[0, 1, 0]]


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
def test_nan_is_an_error_that_says_so(temperature):
    logits = torch.zeros(3, 5)
    logits[1, 3] = float("nan")
    with pytest.raises(ModelFormatError, match="NaN"):
        to_probs(logits, params(temperature=temperature))


@pytest.mark.parametrize("values", [{}, {"temperature": 0.0}, {"temperature": 0.8, "top_k": 20, "top_p": 0.9}], ids=str)
def test_logits_are_left_alone(values):
    logits = random_logits(3, 100)
    before = logits.clone()
    probs = to_probs(logits, params(**values))
    probs.zero_()
    assert torch.equal(logits, before)


@pytest.mark.parametrize("values", [{}, {"temperature": 0.7}, *FILTERS], ids=str)
def test_a_row_does_not_depend_on_the_rows_beside_it(values):
    logits = random_logits(9, 49_157)  # odd, and above the size from which torch splits one row among threads
    together = to_probs(logits, params(**values))
    for i in (0, 4, 8):
        assert torch.equal(to_probs(logits[i : i + 1], params(**values))[0], together[i])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_are_computed_in_float32(dtype):
    logits = random_logits(2, 300).to(dtype)
    for values in (params(), params(top_p=0.9), SamplingParams()):
        assert torch.equal(to_probs(logits, values), to_probs(logits.float(), values))


@pytest.mark.parametrize("vocab_size", [1, 2, 15, 16, 17, 1000, 49_157])
def test_argmax_takes_the_lowest_of_equal_maxima(vocab_size):
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randint(0, 3, (7, vocab_size), generator=generator).float()
    expected = [row.index(max(row)) for row in logits.tolist()]
    assert argmax_lowest(logits).tolist() == expected
    assert argmax_lowest(logits.bfloat16()).tolist() == expected
    assert argmax_lowest(torch.zeros(2, vocab_size)).tolist() == [0, 0]


def test_argmax_of_a_slice_of_wider_rows():
    logits = torch.tensor([[1.0, 2.0, 9.0], [4.0, 3.0, 9.0]])
    assert argmax_lowest(logits[:, :2]).tolist() == [1, 0]


def test_works_under_inference_mode():
    with torch.inference_mode():
        logits = torch.nn.Linear(4, 10)(torch.ones(2, 4))
        assert to_probs(logits, params(top_p=0.9)).shape == (2, 10)
        assert argmax_lowest(logits).shape == (2,)
        assert len(logprobs_of(logits, [1, 2], 3)) == 2


def test_logprobs_name_the_token_and_the_likeliest():
    logits = random_logits(2, 30)
    expected = logits.log_softmax(-1)
    first, second = logprobs_of(logits, [7, 29], 4)
    assert first.token_id == 7
    assert first.logprob == pytest.approx(expected[0, 7].item())
    assert second.logprob == pytest.approx(expected[1, 29].item())
    values, token_ids = expected.topk(4)
    assert list(first.top) == token_ids[0].tolist()
    assert list(second.top.values()) == pytest.approx(values[1].tolist())


def test_logprobs_break_ties_towards_the_lower_id():
    (entry,) = logprobs_of(torch.tensor([[0.0, 2.0, 2.0, 2.0, 5.0]]), [0], 3)
    assert list(entry.top) == [4, 1, 2]


def test_logprobs_without_alternatives_or_with_more_than_there_are():
    assert logprobs_of(torch.zeros(1, 3), [1], 0)[0].top == {}
    assert list(logprobs_of(torch.zeros(1, 3), [1], 20)[0].top) == [0, 1, 2]
    assert logprobs_of(torch.zeros(0, 3), [], 2) == []

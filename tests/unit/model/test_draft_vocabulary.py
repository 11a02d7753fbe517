"""A reduced vocabulary: exact in target ids, silent where it cannot speak."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ModelFormatError
from paceline.model.draft_vocabulary import DraftVocabulary
from paceline.request import SamplingParams
from paceline.sampling.distribution import argmax_lowest, to_probs


@given(st.sets(st.integers(0, 49), min_size=1), st.integers(0, 1000), st.sampled_from([0.3, 1.0, 2.0]))
def test_what_is_drawn_from_is_the_softmax_of_the_listed_and_nothing_else(
    token_ids: set[int], seed: int, temperature: float
) -> None:
    vocabulary = DraftVocabulary(sorted(token_ids), has_escape=True)
    logits = torch.randn(1, vocabulary.num_logits, generator=torch.Generator().manual_seed(seed))
    probs = to_probs(vocabulary.scatter(logits, 50), SamplingParams(temperature=temperature))[0]
    listed = sorted(token_ids)
    torch.testing.assert_close(probs[listed], (logits[0, :-1] / temperature).softmax(-1))
    assert float(probs.sum()) == pytest.approx(1)
    assert all(float(probs[i]) == 0.0 for i in range(50) if i not in token_ids)


def test_the_lowest_id_wins_a_tie() -> None:
    vocabulary = DraftVocabulary([4, 9, 30], has_escape=False)
    assert int(argmax_lowest(vocabulary.scatter(torch.tensor([[1.0, 2.0, 2.0]]), 40))[0]) == 9


def test_it_stops_where_an_unlisted_token_is_more_likely_than_not() -> None:
    vocabulary = DraftVocabulary([4, 9], has_escape=True)
    assert vocabulary.expects_outside(torch.tensor([0.0, 0.0, 1.0]))
    assert not vocabulary.expects_outside(torch.tensor([0.0, 0.0, 0.5]))
    assert not DraftVocabulary([4, 9], has_escape=False).expects_outside(torch.tensor([0.0, 9.0]))


@given(st.integers(0, 10_000), st.floats(-3, 6))
def test_stopping_and_the_likeliest_are_what_the_whole_distribution_says(seed: int, escape: float) -> None:
    vocabulary = DraftVocabulary([3, 4, 9, 17], has_escape=True)
    row = torch.randn(5, generator=torch.Generator().manual_seed(seed)).round(decimals=1)
    row[-1] = escape
    outside = float(row.double().softmax(-1)[-1])
    if abs(outside - 0.5) > 1e-6:
        assert vocabulary.expects_outside(row) == (outside > 0.5)
    assert vocabulary.likeliest(row) == int(argmax_lowest(vocabulary.scatter(row[None], 20))[0])


@pytest.mark.parametrize("token_ids", [[], [3, 3], [5, 4], [-1, 2]])
def test_ids_must_ascend(token_ids: list[int]) -> None:
    with pytest.raises(ModelFormatError, match="ascend"):
        DraftVocabulary(token_ids, has_escape=True)

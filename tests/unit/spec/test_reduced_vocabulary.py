"""A draft model that speaks part of the vocabulary: what it reports is what it drew from, and the law holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from paceline.cache.manager import KVCacheManager
from paceline.model.draft_vocabulary import DraftVocabulary
from paceline.model.runner import SequenceInput
from paceline.request import Request, SamplingParams, Speculation
from paceline.spec.draft_model import DraftModelProposer
from paceline.spec.verifier import Verifier, VerifyItem

VOCAB_SIZE = 12
LISTED = [1, 4, 5, 9]


class TableRunner:
    """Logits of the draft from a table [VOCAB_SIZE, len(LISTED) + 1] by the last token fed."""

    def __init__(self, table: Tensor) -> None:
        self.table = table

    def run(self, inputs: Sequence[SequenceInput]) -> Tensor:
        return torch.stack([self.table[item.token_ids[-1]] for item in inputs if item.num_logits])


class Desk:
    def __init__(self, table: Tensor) -> None:
        self.cache = KVCacheManager(64, 4)
        self.proposer = DraftModelProposer(
            TableRunner(table),  # type: ignore[arg-type]
            self.cache,
            context_length=100,
            vocab_limit=VOCAB_SIZE,
            end_token_ids=(0,),
            vocabulary=DraftVocabulary(LISTED, has_escape=True),
        )
        self.number = 0

    def begin(self, params: SamplingParams) -> Request:
        self.number += 1
        request = Request(f"r{self.number}", [2, 3], params, Speculation(), max_total_tokens=50)
        self.cache.begin(request.request_id, request.token_ids)
        self.cache.reserve(request.request_id, 20)
        return request

    def end(self, request: Request) -> None:
        self.proposer.release(request.request_id)
        self.cache.release(request.request_id)


def make_table(seed: int, escape: float = -2.0) -> Tensor:
    table = torch.randn(VOCAB_SIZE, len(LISTED) + 1, generator=torch.Generator().manual_seed(seed))
    table[:, -1] = escape
    return table


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_what_is_reported_is_the_softmax_over_the_listed(temperature: float) -> None:
    table = make_table(0)
    desk = Desk(table)
    request = desk.begin(SamplingParams(temperature=temperature))
    [draft] = desk.proposer.propose([request], [3])
    assert draft.draft_probs is not None
    assert draft.draft_probs.shape == (3, VOCAB_SIZE)
    last = 3
    for token_id, probs in zip(draft.token_ids, draft.draft_probs, strict=True):
        assert token_id in LISTED
        torch.testing.assert_close(probs[LISTED], (table[last, :-1] / temperature).softmax(-1))
        assert float(probs.sum()) == pytest.approx(1, abs=1e-6)
        assert set(probs.nonzero().flatten().tolist()) <= set(LISTED)
        last = token_id


def test_penalties_apply_to_the_tokens_they_name() -> None:
    desk = Desk(torch.zeros(VOCAB_SIZE, len(LISTED) + 1))
    request = desk.begin(SamplingParams(logit_bias={1: -5.0, 4: 2.0, 7: 90.0}))
    [draft] = desk.proposer.propose([request], [2])
    assert draft.token_ids == [4, 4]  # 7 is not listed, whatever its bias


def test_the_draft_ends_before_a_token_it_cannot_name() -> None:
    table = make_table(1)
    table[:, 2] = 9.0  # 5 follows everything,
    table[5, -1] = 30.0  # and after it something else
    desk = Desk(table)
    for params in (SamplingParams(), SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, seed=1)):
        request = desk.begin(params)
        [draft] = desk.proposer.propose([request], [4])
        assert list(draft.token_ids) == [5]
        request.token_ids.append(5)
        request.num_draft_computed_tokens = 2
        [draft] = desk.proposer.propose([request], [4])
        assert list(draft.token_ids) == []


@pytest.mark.parametrize("escape", [-2.0, 1.5])
def test_two_tokens_are_distributed_as_the_targets(escape: float) -> None:
    generator = torch.Generator().manual_seed(7)
    target = torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=generator) * 1.5
    table = make_table(3, escape)
    table[4, -1] = 9.0  # sometimes the draft ends early
    desk, verifier, params = Desk(table), Verifier(), SamplingParams(temperature=1.0)
    num_trials = 1500
    counts: Counter[tuple[int, int]] = Counter()
    for _ in range(num_trials):
        request = desk.begin(params)
        committed: list[int] = []
        while len(committed) < 2:
            request.num_draft_computed_tokens = min(request.num_draft_computed_tokens, request.num_tokens - 1)
            [draft] = desk.proposer.propose([request], [2])
            rows = [target[token_id] for token_id in [request.token_ids[-1], *draft.token_ids]]
            item = VerifyItem(
                params, draft, slice(0, len(rows)), first_position=request.num_tokens, generator=generator
            )
            [verdict] = verifier.verify([item], torch.stack(rows))
            committed += verdict.token_ids
            request.token_ids += verdict.token_ids
        counts[committed[0], committed[1]] += 1
        desk.end(request)
    first = target[3].softmax(-1)
    expected = (first[:, None] * target.softmax(-1)).flatten().double()
    observed = torch.tensor([counts[i // VOCAB_SIZE, i % VOCAB_SIZE] for i in range(VOCAB_SIZE**2)]).double()
    likely = expected * num_trials >= 5
    found = torch.cat([observed[likely], observed[~likely].sum()[None]])
    wanted = torch.cat([expected[likely], expected[~likely].sum()[None]]) * num_trials
    assert chisquare(found, wanted * found.sum() / wanted.sum()).pvalue > 1e-4

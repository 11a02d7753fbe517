"""Laws 4 and 5: whatever was drafted, the output is distributed as if drawn from the target alone; with a seed it is
the same text.

The "model" is a table of next-token logits by the previous token, so the exact distribution of two tokens in a row is
known. Every generator is seeded, so that these tests give the same verdict each time; the planted errors at the end
show that 10,000 draws are enough for the test to notice a wrong sampler.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.records import Verdict
from paceline.request import SamplingParams
from paceline.sampling.coupled import sample_coupled, verify_coupled
from paceline.sampling.distribution import to_probs
from paceline.sampling.goodness import chi_square_p_value
from paceline.sampling.penalties import TokenHistory
from paceline.sampling.rejection import verify_sampled
from paceline.sampling.sampler import sample_rows
from paceline.spec.proposer import NO_DRAFT, Draft
from paceline.spec.verifier import Verifier, VerifyItem

VOCAB_SIZE = 9
START = 0
NUM_DRAWS = 10_000
PLAIN = SamplingParams(temperature=1.0)

Verify = Callable[[Tensor, Sequence[int], Tensor | None, torch.Generator], Verdict]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def table(seed: int, width: int = VOCAB_SIZE) -> Tensor:
    """Next-token logits by previous token, [VOCAB_SIZE, width]."""
    return torch.randn(VOCAB_SIZE, width, generator=generator(seed)) * 1.2


TARGET = table(1)
DRAFT = 0.7 * TARGET + 0.7 * table(2)  # a draft that is right about many things


def rows_after(probs: Tensor, previous: Tensor) -> Tensor:
    # A draft may name tokens that the target does not have; no row after one is ever used.
    return probs[previous.clamp(max=VOCAB_SIZE - 1)]


@dataclass(frozen=True)
class Drafter:
    """Proposes from its own table: ``probs`` [VOCAB_SIZE, draft_vocab_size] of the token after each token."""

    probs: Tensor
    is_deterministic: bool = False

    def propose(self, previous: Tensor, horizon: int, coins: torch.Generator) -> tuple[Tensor, Tensor | None]:
        """[num_trials, horizon] and [num_trials, horizon, draft_vocab_size]."""
        token_ids, draft_probs = [], []
        for _ in range(horizon):
            rows = rows_after(self.probs, previous)
            previous = rows.argmax(-1) if self.is_deterministic else sample_rows(rows, coins)
            token_ids.append(previous)
            draft_probs.append(rows)
        return torch.stack(token_ids, dim=1), None if self.is_deterministic else torch.stack(draft_probs, dim=1)


@dataclass(frozen=True)
class Outcome:
    """What many texts of two tokens looked like."""

    pairs: Tensor  # [VOCAB_SIZE, VOCAB_SIZE] counts
    num_first_drafts_accepted: int  # in the first round


def generate_pairs(
    target_probs: Tensor, drafter: Drafter, horizon: int, seed: int, verify: Verify = verify_sampled
) -> Outcome:
    """The first two tokens after START of NUM_DRAWS texts, generated in rounds as an engine would."""
    coins = generator(seed)
    texts: list[list[int]] = [[] for _ in range(NUM_DRAWS)]
    num_accepted = 0
    while pending := [text for text in texts if len(text) < 2]:
        previous = torch.tensor([text[-1] if text else START for text in pending])
        drafts, draft_probs = drafter.propose(previous, horizon, coins)
        rows = rows_after(target_probs, torch.cat([previous[:, None], drafts], dim=1))
        for i, (text, draft) in enumerate(zip(pending, drafts.tolist(), strict=True)):
            verdict = verify(rows[i], draft, None if draft_probs is None else draft_probs[i], coins)
            num_accepted += not text and verdict.num_accepted > 0
            text.extend(verdict.token_ids)
    first, second = torch.tensor([text[:2] for text in texts]).T
    pairs = torch.bincount(first * VOCAB_SIZE + second, minlength=VOCAB_SIZE**2)
    return Outcome(pairs.view(VOCAB_SIZE, VOCAB_SIZE), num_accepted)


def pair_probs(target_probs: Tensor) -> Tensor:
    return target_probs[START][:, None] * target_probs


def assert_is_target(outcome: Outcome, target_probs: Tensor) -> None:
    assert outcome.pairs.sum() == NUM_DRAWS
    assert chi_square_p_value(outcome.pairs.sum(1), target_probs[START]) > 1e-3
    assert chi_square_p_value(outcome.pairs, pair_probs(target_probs)) > 1e-3


def assert_rate(num_hits: int, rate: float) -> None:
    assert abs(num_hits / NUM_DRAWS - rate) <= 4.0 * math.sqrt(max(rate * (1.0 - rate), 1e-9) / NUM_DRAWS)


def overlap(target_row: Tensor, draft_row: Tensor) -> float:
    """The best acceptance there is: 1 - total variation."""
    width = min(target_row.numel(), draft_row.numel())
    return float(torch.minimum(target_row[:width], draft_row[:width]).sum())


DRAFTERS = {
    "its own model": Drafter(to_probs(DRAFT, PLAIN)),
    "hotter": Drafter(to_probs(DRAFT, SamplingParams(temperature=1.8))),
    "colder, top-k only on the draft": Drafter(to_probs(DRAFT, SamplingParams(temperature=0.5, top_k=3))),
    "unrelated": Drafter(to_probs(table(3), PLAIN)),
    "deterministic": Drafter(to_probs(DRAFT, PLAIN), is_deterministic=True),
    "smaller vocabulary": Drafter(to_probs(DRAFT[:, : VOCAB_SIZE - 3], PLAIN)),
    "padded vocabulary": Drafter(to_probs(table(4, VOCAB_SIZE + 4), PLAIN)),
}


@pytest.mark.parametrize(
    ("name", "horizon"),
    [*((name, 2) for name in DRAFTERS), ("its own model", 1), ("deterministic", 1), ("smaller vocabulary", 1)],
)
def test_two_tokens_are_distributed_as_the_targets(name, horizon):
    drafter, target_probs = DRAFTERS[name], to_probs(TARGET, PLAIN)
    outcome = generate_pairs(target_probs, drafter, horizon, seed=10 + horizon)
    assert_is_target(outcome, target_probs)
    if not drafter.is_deterministic:
        assert_rate(outcome.num_first_drafts_accepted, overlap(target_probs[START], drafter.probs[START]))


@pytest.mark.parametrize(
    "values",
    [{"temperature": 0.6}, {"top_k": 4}, {"top_p": 0.8}, {"temperature": 1.4, "top_k": 6, "top_p": 0.9, "min_p": 0.05}],
    ids=str,
)
def test_filters_change_the_distribution_but_not_the_law(values):
    params = SamplingParams(**{"temperature": 1.0, **values})
    target_probs = to_probs(TARGET, params)
    for drafter in (Drafter(to_probs(DRAFT, params)), DRAFTERS["deterministic"]):
        outcome = generate_pairs(target_probs, drafter, 2, seed=20)
        assert_is_target(outcome, target_probs)
        assert outcome.pairs[:, target_probs.sum(0) == 0].sum() == 0


@pytest.mark.parametrize("is_deterministic", [False, True])
def test_a_draft_that_is_always_wrong_costs_nothing_but_itself(is_deterministic):
    logits = TARGET.clone()
    logits[:, 5] = -math.inf
    target_probs = to_probs(logits, PLAIN)
    always_five = Drafter(torch.eye(VOCAB_SIZE)[torch.full((VOCAB_SIZE,), 5)], is_deterministic)
    outcome = generate_pairs(target_probs, always_five, 2, seed=30)
    assert outcome.num_first_drafts_accepted == 0
    assert_is_target(outcome, target_probs)


def test_a_draft_that_is_the_target_is_always_accepted():
    target_probs = to_probs(TARGET, PLAIN)
    outcome = generate_pairs(target_probs, Drafter(target_probs), 2, seed=31)
    assert outcome.num_first_drafts_accepted == NUM_DRAWS
    assert_is_target(outcome, target_probs)


# Penalties: the verifier on whole batches, against probabilities computed from the definition.

PENALISED = SamplingParams(
    temperature=0.9,
    repetition_penalty=1.4,
    presence_penalty=0.6,
    frequency_penalty=0.5,
    logit_bias={4: 0.8},
    min_tokens=2,
)
PROMPT, END_ID = (6, START), 7


def penalised_row(previous: int, output: Sequence[int]) -> Tensor:
    row = TARGET[previous].tolist()
    for token_id in range(VOCAB_SIZE):
        row[token_id] += PENALISED.logit_bias.get(token_id, 0.0)
        if token_id in (*PROMPT, *output):
            row[token_id] *= 1 / PENALISED.repetition_penalty if row[token_id] > 0 else PENALISED.repetition_penalty
        if token_id in output:
            row[token_id] -= PENALISED.presence_penalty + PENALISED.frequency_penalty * output.count(token_id)
    if len(output) < PENALISED.min_tokens:
        row[END_ID] = -math.inf
    return to_probs(torch.tensor([row]), PENALISED)[0]


@pytest.mark.parametrize("name", ["its own model", "the same token twice"])
def test_penalties_follow_each_rows_accepted_prefix(name):
    same = Drafter(torch.eye(VOCAB_SIZE)[torch.full((VOCAB_SIZE,), 4)], is_deterministic=True)
    drafter = DRAFTERS.get(name, same)
    coins = generator(40)
    histories: dict[tuple[int, ...], TokenHistory] = {}  # one per distinct text: verifying must not change it

    def verify_batch(texts: list[list[int]]) -> list[Verdict]:
        previous = torch.tensor([text[-1] if text else START for text in texts])
        drafts, draft_probs = drafter.propose(previous, 2, coins)
        logits = rows_after(TARGET, torch.cat([previous[:, None], drafts], dim=1)).flatten(0, 1)
        items = [
            VerifyItem(
                PENALISED,
                Draft(draft, "test", None if draft_probs is None else draft_probs[i]),
                slice(3 * i, 3 * i + 3),
                first_position=len(PROMPT) + len(text),
                history=histories.setdefault(tuple(text), TokenHistory(PROMPT, text)),
                generator=coins,
                end_token_ids=(END_ID,),
            )
            for i, (text, draft) in enumerate(zip(texts, drafts.tolist(), strict=True))
        ]
        return Verifier().verify(items, logits)

    texts: list[list[int]] = [[] for _ in range(NUM_DRAWS)]
    while pending := [text for text in texts if len(text) < 2]:
        for text, verdict in zip(pending, verify_batch(pending), strict=True):
            text.extend(verdict.token_ids)
    first, second = torch.tensor([text[:2] for text in texts]).T
    counts = torch.bincount(first * VOCAB_SIZE + second, minlength=VOCAB_SIZE**2)
    expected = torch.stack([penalised_row(token_id, [token_id]) for token_id in range(VOCAB_SIZE)])
    expected *= penalised_row(START, [])[:, None]
    assert chi_square_p_value(counts, expected) > 1e-3


# Seeded sampling.


class CoupledDrafter:
    """Drafts by running the same race with its own probabilities, or by always proposing one token."""

    def __init__(self, probs: Tensor | None = None, constant: int | None = None) -> None:
        self._probs, self._constant = probs, constant

    def propose(self, previous: int, seed: int, position: int, horizon: int) -> list[int]:
        token_ids: list[int] = []
        for i in range(horizon):
            if self._probs is None:
                previous = self._constant
            else:
                previous = sample_coupled(self._probs[min(previous, VOCAB_SIZE - 1)], seed, position + i)
            token_ids.append(previous)
        return token_ids


NO_COUPLED_DRAFT = CoupledDrafter(constant=0)


def seeded_text(params: SamplingParams, drafter: CoupledDrafter, horizons: Sequence[int], num_tokens: int) -> list[int]:
    """A text by rounds through the verifier, the horizons taken in turn."""
    text, num_rounds, verifier = [START], 0, Verifier()
    while len(text) <= num_tokens:
        horizon = horizons[num_rounds % len(horizons)]
        num_rounds += 1
        drafts = drafter.propose(text[-1], params.seed, len(text), horizon)
        logits = rows_after(TARGET, torch.tensor([text[-1], *drafts]))
        draft = Draft(drafts, "test") if drafts else NO_DRAFT
        history = TokenHistory([START], text[1:])
        item = VerifyItem(params, draft, slice(0, horizon + 1), first_position=len(text), history=history)
        text.extend(verifier.verify([item], logits)[0].token_ids)
    return text[1 : num_tokens + 1]


@pytest.mark.parametrize(
    "values", [{}, {"temperature": 0.7, "top_p": 0.9}, {"frequency_penalty": 0.3, "repetition_penalty": 1.1}], ids=str
)
def test_a_seed_gives_the_same_text_whatever_was_drafted(values):
    drafters = {
        "coupled": (CoupledDrafter(to_probs(DRAFT, PLAIN)), [3]),
        "perfect": (CoupledDrafter(to_probs(TARGET, PLAIN)), [5, 1, 2]),
        "smaller vocabulary": (CoupledDrafter(to_probs(DRAFT[:, :5], PLAIN)), [2, 0]),
        "padded vocabulary": (CoupledDrafter(to_probs(table(4, VOCAB_SIZE + 4), PLAIN)), [4]),
        "useless": (CoupledDrafter(constant=3), [1, 7]),
    }
    texts = set()
    for seed in range(25):
        params = SamplingParams(**{"temperature": 1.0, "seed": seed, **values})
        plain = seeded_text(params, NO_COUPLED_DRAFT, [0], 20)
        texts.add(tuple(plain))
        for name, (drafter, horizons) in drafters.items():
            assert seeded_text(params, drafter, horizons, 20) == plain, f"seed {seed}, drafter {name}"
    assert len(texts) == 25


def test_seeds_sample_the_target_and_agree_as_often_as_the_coupling_promises():
    target_probs, draft_probs = to_probs(TARGET, PLAIN), to_probs(DRAFT, PLAIN)
    drafter = CoupledDrafter(draft_probs)
    pairs = np.zeros((VOCAB_SIZE, VOCAB_SIZE), dtype=np.int64)
    num_accepted = 0
    for seed in range(NUM_DRAWS):
        drafts = drafter.propose(START, seed, 1, 1)
        verdict = verify_coupled(rows_after(target_probs, torch.tensor([START, *drafts])), drafts, seed, 1)
        first = verdict.token_ids[0]
        num_accepted += verdict.num_accepted
        second = verdict.token_ids[1] if verdict.num_accepted else sample_coupled(target_probs[first], seed, 2)
        pairs[first, second] += 1
    assert chi_square_p_value(pairs, pair_probs(target_probs)) > 1e-3

    target_row, draft_row = target_probs[START].double(), draft_probs[START].double()
    total_variation = 1.0 - overlap(target_row, draft_row)
    assert num_accepted / NUM_DRAWS >= (1.0 - total_variation) / (1.0 + total_variation)
    # The race's exact rate: token x wins both when it precedes every y at the larger of y's two relative speeds.
    relative = torch.maximum(
        target_row[None, :] / target_row[:, None], draft_row[None, :] / draft_row[:, None]
    )  # [VOCAB_SIZE, VOCAB_SIZE], by x and y
    assert_rate(num_accepted, float((1.0 / relative.sum(1)).sum()))


@pytest.mark.parametrize("horizon", range(4))
def test_greedy_ties_commit_the_lowest_id_and_always_a_token(horizon):
    logits = TARGET.round()  # plenty of ties
    params = SamplingParams()
    for drafter in (DRAFTERS["unrelated"], DRAFTERS["deterministic"]):
        text = [START]
        while len(text) < 20:
            drafts = (
                drafter.propose(torch.tensor([text[-1]]), horizon, generator(len(text)))[0][0].tolist()
                if horizon
                else []
            )
            rows = rows_after(logits, torch.tensor([text[-1], *drafts]))
            item = VerifyItem(params, Draft(drafts, "test"), slice(0, horizon + 1), first_position=len(text))
            (verdict,) = Verifier().verify([item], rows)
            assert len(verdict.token_ids) >= 1
            text.extend(verdict.token_ids)
        for previous, token_id in itertools.pairwise(text):
            row = logits[previous].tolist()
            assert token_id == row.index(max(row))


# Planted errors: each is one that some engine has shipped, and the same test must reject it beyond doubt.


def assert_is_caught(outcome: Outcome, target_probs: Tensor) -> None:
    assert chi_square_p_value(outcome.pairs, pair_probs(target_probs)) < 1e-6


def test_catches_a_draft_that_reports_another_temperature_than_it_drew_with():
    target_probs = to_probs(TARGET, PLAIN)
    reported = to_probs(DRAFT, PLAIN)

    class Misreporting(Drafter):
        def propose(self, previous, horizon, coins):
            token_ids, draft_probs = super().propose(previous, horizon, coins)
            chain = torch.cat([previous[:, None], token_ids[:, :-1]], dim=1)
            assert draft_probs.shape == rows_after(reported, chain).shape
            return token_ids, rows_after(reported, chain)

    liar = Misreporting(to_probs(DRAFT, SamplingParams(temperature=2.0)))
    assert_is_caught(generate_pairs(target_probs, liar, 2, seed=50), target_probs)


def test_catches_a_mask_that_leaks_into_later_rows():
    def leaking(target_probs, draft_token_ids, draft_probs, coins):
        target_probs = target_probs.clone()
        target_probs[1:, draft_token_ids[0]] = 0.0  # the first draft's mask, written in place for every row
        return verify_sampled(target_probs, draft_token_ids, draft_probs, coins)

    target_probs = to_probs(TARGET, PLAIN)
    outcome = generate_pairs(target_probs, DRAFTERS["deterministic"], 2, seed=51, verify=leaking)
    assert_is_caught(outcome, target_probs)


def test_catches_a_recovered_token_drawn_from_the_whole_target():
    def without_residual(target_probs, draft_token_ids, draft_probs, coins):
        verdict = verify_sampled(target_probs, draft_token_ids, draft_probs, coins)
        if verdict.num_accepted == verdict.num_drafted:
            return verdict
        row = target_probs[verdict.num_accepted : verdict.num_accepted + 1]
        token_ids = (*verdict.token_ids[:-1], int(sample_rows(row, coins)))
        return Verdict(token_ids, verdict.num_drafted, verdict.num_accepted)

    target_probs = to_probs(TARGET, PLAIN)
    outcome = generate_pairs(target_probs, DRAFTERS["its own model"], 1, seed=52, verify=without_residual)
    assert_is_caught(outcome, target_probs)


def dropping_unlikely(target_probs, draft_token_ids, draft_probs, coins, *, reports_probs):
    """Drops the draft from its first token of less than 0.2 on: a choice that looked at the sampled tokens."""
    is_kept = [row[token_id] >= 0.2 for row, token_id in zip(draft_probs.numpy(), draft_token_ids, strict=True)]
    num_kept = is_kept.index(False) if False in is_kept else len(is_kept)
    kept_probs = draft_probs[:num_kept] if reports_probs else None
    return verify_sampled(target_probs[: num_kept + 1], draft_token_ids[:num_kept], kept_probs, coins)


def test_catches_a_draft_that_is_dropped_for_its_own_low_probability():
    target_probs = to_probs(TARGET, PLAIN)

    def biased(*arguments):
        return dropping_unlikely(*arguments, reports_probs=True)

    outcome = generate_pairs(target_probs, DRAFTERS["its own model"], 2, seed=53, verify=biased)
    assert_is_caught(outcome, target_probs)


def test_dropping_by_what_was_sampled_is_exact_when_no_probabilities_are_reported():
    target_probs = to_probs(TARGET, PLAIN)

    def safe(*arguments):
        return dropping_unlikely(*arguments, reports_probs=False)

    outcome = generate_pairs(target_probs, DRAFTERS["its own model"], 2, seed=53, verify=safe)
    assert_is_target(outcome, target_probs)


def test_stopping_for_the_drafts_own_confidence_is_exact():
    """Like `ConfidenceRule`: whether a token is drawn depends on the distribution that it would be drawn from."""

    def stopping(target_probs, draft_token_ids, draft_probs, coins):
        is_sure = [bool(row.max() >= 0.35) for row in draft_probs]
        num_kept = is_sure.index(False) if False in is_sure else len(is_sure)
        num_kept_of.append(num_kept)
        return verify_sampled(target_probs[: num_kept + 1], draft_token_ids[:num_kept], draft_probs[:num_kept], coins)

    num_kept_of: list[int] = []
    target_probs = to_probs(TARGET, PLAIN)
    outcome = generate_pairs(target_probs, DRAFTERS["its own model"], 2, seed=54, verify=stopping)
    assert_is_target(outcome, target_probs)
    assert {1, 2} & set(num_kept_of)
    assert len(set(num_kept_of)) > 1  # some drafts end early, by what was drawn before

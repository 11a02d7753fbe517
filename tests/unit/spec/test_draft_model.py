"""The draft model as a drafter: its counters, its context, its vocabulary, what it reports."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from paceline import DraftMismatchError, Engine, SamplingParams, Speculation
from paceline.cache.manager import KVCacheManager
from paceline.model.runner import SequenceInput
from paceline.request import Request
from paceline.sampling.coupled import sample_coupled
from paceline.sampling.distribution import to_probs
from paceline.spec.draft_model import DraftModelProposer
from paceline.spec.proposer import NO_DRAFT
from tests.fakes import FakeModel, FakeRunner, RuledConstraint, next_token
from tests.support import write_tiny_checkpoint, write_tokenizer

BLOCK_SIZE = 4
PROMPT = [5, 6, 7, 8, 9]
MODEL_ONLY = ("model",)


class Desk:
    """A proposer over a fake model, and the bookkeeping the scheduler would do for it."""

    def __init__(self, *, context_length: int = 4000, vocab_limit: int = 64, reach: int | None = None) -> None:
        self.cache = KVCacheManager(1024, BLOCK_SIZE)
        self.runner = FakeRunner(FakeModel(block_size=BLOCK_SIZE, reach=reach))
        self.proposer = DraftModelProposer(
            self.runner,  # type: ignore[arg-type]
            self.cache,
            context_length=context_length,
            vocab_limit=vocab_limit,
            end_token_ids=(1,),
            reach=reach,
        )

    def admit(self, prompt: Sequence[int], params: SamplingParams | None = None, name: str = "r") -> Request:
        request = Request(name, prompt, params or SamplingParams(), Speculation(), max_total_tokens=400)
        self.cache.begin(name, prompt)
        self.cache.reserve(name, len(prompt) + 100)
        request.num_computed_tokens = len(prompt) - 1
        return request

    def propose(self, request: Request, horizon: int) -> list[int]:
        self.runner.inputs.clear()
        return list(self.proposer.propose([request], [horizon])[0].token_ids)

    def commit(self, request: Request, token_ids: Sequence[int]) -> None:
        request.token_ids += token_ids
        request.num_computed_tokens = request.num_tokens - 1
        request.num_draft_computed_tokens = min(request.num_draft_computed_tokens, request.num_computed_tokens)

    @property
    def fed(self) -> list[tuple[int, int]]:
        """(start, number of tokens) of each pass since the last proposal began."""
        return [(item.start, len(item.token_ids)) for item in self.runner.inputs]


def continuation(prefix: Sequence[int], num_tokens: int) -> list[int]:
    tokens = list(prefix)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens, 64))
    return tokens[len(prefix) :]


@pytest.mark.parametrize("horizon", [1, 2, 3, 5])
def test_first_round_feeds_the_prompt_then_token_by_token(horizon: int) -> None:
    desk = Desk()
    request = desk.admit(PROMPT)
    assert desk.propose(request, horizon) == continuation(PROMPT, horizon)
    assert desk.fed == [(0, 5)] + [(5 + i, 1) for i in range(horizon - 1)]
    assert request.num_draft_computed_tokens == 5 + horizon - 1


@pytest.mark.parametrize(("horizon", "accepted"), [(k, a) for k in (1, 2, 3, 5) for a in range(k + 1)])
def test_counters_after_each_number_of_accepted_drafts(horizon: int, accepted: int) -> None:
    desk = Desk()
    request = desk.admit(PROMPT)
    drafts = desk.propose(request, horizon)
    is_full = accepted == horizon
    final = 60 if is_full else drafts[accepted] ^ 1  # a bonus token, or one recovered from a rejection
    desk.commit(request, [*drafts[:accepted], final])
    # All accepted: the last draft's own K/V are missing, one less than the target has.
    assert request.num_draft_computed_tokens == request.num_computed_tokens - is_full
    again = desk.propose(request, 2)
    assert again == continuation(request.token_ids, 2)
    first_start, first_length = desk.fed[0]
    assert first_start == 5 + accepted - is_full
    assert first_length == (2 if is_full else 1)


@pytest.mark.parametrize(("num_rounds", "fed"), [(1, [(5, 1)]), (5, [(5, 5)]), (7, [(5, 6), (11, 1)])])
def test_rounds_without_drafts_are_caught_up(num_rounds: int, fed: list[tuple[int, int]]) -> None:
    """Few tokens together with the newest, more in a pass that makes their K/V and nothing else."""
    desk = Desk()
    request = desk.admit(PROMPT)
    desk.propose(request, 3)
    for i in range(num_rounds):  # another drafter's rounds, or a horizon of 0
        desk.commit(request, [40 + i])
    assert desk.propose(request, 0) == []
    assert desk.fed == []
    assert desk.propose(request, 2) == continuation(request.token_ids, 2)
    assert desk.fed[:-1] == fed
    assert [item.num_logits for item in desk.runner.inputs[-2:]] == [1, 1]


def test_a_long_prompt_is_fed_in_chunks() -> None:
    desk = Desk()
    prompt = [2 + i % 60 for i in range(1300)]
    request = desk.admit(prompt)
    assert desk.propose(request, 2) == continuation(prompt, 2)
    assert desk.fed == [(0, 512), (512, 512), (1024, 275), (1299, 1), (1300, 1)]
    assert [item.num_logits for item in desk.runner.inputs] == [0, 0, 0, 1, 1]


def test_tokens_out_of_reach_are_not_read() -> None:
    """But for those that a backend reads together with the first one that is seen."""
    desk = Desk(reach=20)
    request = desk.admit([2 + i % 60 for i in range(1480)])
    first = next_token(request.token_ids[-20:], 64)
    assert desk.propose(request, 2) == [first, next_token([*request.token_ids[-19:], first], 64)]
    assert desk.fed == [(1280, 199), (1479, 1), (1480, 1)]
    assert (request.draft_start, request.num_draft_computed_tokens) == (1280, 1481)
    desk.commit(request, [7] * 5)
    desk.propose(request, 1)
    assert desk.fed == [(1481, 4)], "read on from where it was"
    for _ in range(80):
        desk.commit(request, [8])
    desk.propose(request, 1)
    assert desk.fed == [(1536, 28), (1564, 1)], "a pause longer than the reach is jumped over"
    assert request.draft_start == 1536


@pytest.mark.parametrize(("num_tokens", "horizon"), [(6, 4), (7, 4), (8, 3), (9, 2), (10, 1), (11, 0), (12, 0)])
def test_the_draft_stops_at_its_own_context(num_tokens: int, horizon: int) -> None:
    desk = Desk(context_length=10)
    request = desk.admit([5] * num_tokens)
    assert desk.propose(request, 4) == continuation([5] * num_tokens, horizon)
    assert all(start + length <= 10 for start, length in desk.fed)
    assert request.num_draft_computed_tokens <= 10


def test_nothing_to_say_is_no_draft() -> None:
    desk = Desk()
    assert desk.proposer.propose([], []) == []
    assert desk.proposer.propose([desk.admit(PROMPT)], [0]) == [NO_DRAFT]


def test_requests_are_drafted_side_by_side() -> None:
    desk = Desk()
    requests = [desk.admit(PROMPT[:n], name=f"r{n}") for n in (2, 3, 4, 5)]
    drafts = desk.proposer.propose(requests, [3, 0, 1, 2])
    for request, draft, horizon in zip(requests, drafts, [3, 0, 1, 2], strict=True):
        assert list(draft.token_ids) == continuation(request.token_ids, horizon)
    assert [len(item.token_ids) for item in desk.runner.inputs] == [2, 4, 5, 1, 1, 1]


@pytest.mark.parametrize(
    ("params", "has_probs"),
    [
        (SamplingParams(), False),
        (SamplingParams(temperature=0.7), True),
        (SamplingParams(temperature=0.7, seed=3), False),
    ],
    ids=["greedy", "sampled", "seeded"],
)
def test_draft_probs_are_what_the_tokens_were_drawn_from(params: SamplingParams, has_probs: bool) -> None:
    desk = Desk(vocab_limit=60)
    request = desk.admit(PROMPT, params)
    draft = desk.proposer.propose([request], [3])[0]
    assert (draft.draft_probs is not None) == has_probs
    tokens = list(PROMPT)
    for i, token_id in enumerate(draft.token_ids):
        logits = torch.zeros(1, 64)
        logits[0, next_token(tokens, 64)] = 10.0
        expected = to_probs(logits[:, :60], params)
        if draft.draft_probs is not None:
            torch.testing.assert_close(draft.draft_probs[i], expected[0])
            assert draft.draft_probs[i][token_id] > 0
        if params.seed is not None:
            assert token_id == sample_coupled(expected[0], params.seed, len(tokens))
        tokens.append(token_id)


def test_penalties_follow_the_committed_tokens_and_the_draft() -> None:
    desk = Desk()
    params = SamplingParams(frequency_penalty=2.0, logit_bias={50: 9.0})
    request = desk.admit(PROMPT, params)
    seen: dict[int, int] = {}
    for _ in range(4):
        drafts = desk.propose(request, 3)
        counts, tokens = dict(seen), list(request.token_ids)
        for token_id in drafts:
            scores = {next_token(tokens, 64): 10.0}
            scores[50] = scores.get(50, 0.0) + 9.0
            scores = {token: score - 2.0 * counts.get(token, 0) for token, score in scores.items()}
            assert token_id == max(scores, key=scores.__getitem__)
            counts[token_id] = counts.get(token_id, 0) + 1
            tokens.append(token_id)
        desk.commit(request, drafts[:2])
        for token_id in drafts[:2]:
            seen[token_id] = seen.get(token_id, 0) + 1
    desk.proposer.release("r")
    assert not desk.proposer._histories


# ---- in an engine --------------------------------------------------------------------------------------------------


class CountingRunner:
    """Counts the tokens that pass through a real runner."""

    def __init__(self, engine: Engine) -> None:
        proposer = engine.core.ladder._proposers["model"]  # type: ignore[attr-defined]
        self._runner = proposer._runner
        self.num_fed = 0
        proposer._runner = self

    def run(self, inputs: Sequence[SequenceInput]) -> torch.Tensor:
        self.num_fed += sum(len(item.token_ids) for item in inputs)
        return self._runner.run(inputs)

    def write_kv(self, inputs: Sequence[SequenceInput]) -> None:
        self.num_fed += sum(len(item.token_ids) for item in inputs)
        self._runner.write_kv(inputs)


@pytest.fixture(scope="module")
def make_engine(tiny_checkpoint: Path) -> Callable[..., Engine]:
    def make(draft: Path, **options: object) -> Engine:
        return Engine(tiny_checkpoint, draft=draft, block_size=BLOCK_SIZE, **options)

    return make


@pytest.mark.parametrize("prompt_length", [37, 40, 41])
def test_a_repeated_prompt_is_prefilled_once_by_the_draft_too(
    tiny_checkpoint: Path, make_engine: Callable[..., Engine], prompt_length: int
) -> None:
    engine = make_engine(tiny_checkpoint)
    prompt = ("abcdefghij" * 5)[:prompt_length]
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    counter = CountingRunner(engine)
    costs = []
    for _ in range(3):
        counter.num_fed = 0
        output = engine.generate(prompt, params, speculation=Speculation("static", 4, MODEL_ONLY))
        costs.append(counter.num_fed)
        assert output.speculation.draft_acceptance_rate == 1.0
    assert costs[0] >= prompt_length
    assert costs[1] <= costs[0] - prompt_length + BLOCK_SIZE
    assert costs[2] <= costs[1]


def test_many_sessions_draft_as_well_as_the_first(tiny_checkpoint: Path, make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(tiny_checkpoint, max_model_len=64)
    for number in range(30):
        prompt = f"{number:02}" * (1 + number % 9)
        output = engine.generate(
            prompt, SamplingParams(max_tokens=12, ignore_eos=True), speculation=Speculation("static", 4, MODEL_ONLY)
        )
        assert output.speculation.draft_acceptance_rate == 1.0
        assert output.speculation.num_draft_tokens >= 8
    assert engine.core.cache.num_used_blocks == 0


def test_a_draft_with_a_shorter_context_stops_drafting_there(
    make_engine: Callable[..., Engine], tmp_path: Path
) -> None:
    draft = write_tiny_checkpoint(tmp_path / "draft", "llama", max_position_embeddings=32)
    engine = make_engine(draft)
    params = SamplingParams(max_tokens=80, ignore_eos=True)
    static = Speculation("static", 4, MODEL_ONLY)
    output = engine.generate("abcabc", params, speculation=static)
    assert output.token_ids == engine.generate("abcabc", params, speculation=Speculation("off")).token_ids
    report = output.speculation
    # Same weights: all is accepted while it drafts, and it drafts while its context of 32 lasts.
    assert report.draft_acceptance_rate == 1.0
    assert 18 <= report.num_draft_tokens <= 26
    too_long = engine.generate("abc" * 15, params, speculation=static)
    assert too_long.speculation.num_draft_tokens == 0
    assert too_long.usage.completion_tokens == 80


def test_rows_of_padding_make_no_difference(make_engine: Callable[..., Engine], tmp_path: Path) -> None:
    draft = write_tiny_checkpoint(tmp_path / "draft", "llama", seed=5, vocab_size=72)
    engine = make_engine(draft)
    for params in (
        SamplingParams(max_tokens=60, ignore_eos=True),
        SamplingParams(max_tokens=60, ignore_eos=True, temperature=1.5),
        SamplingParams(max_tokens=60, ignore_eos=True, temperature=1.5, seed=2, presence_penalty=0.5),
    ):
        output = engine.generate("abcabc", params, speculation=Speculation("static", 4, MODEL_ONLY))
        assert output.usage.completion_tokens == 60
        assert output.speculation.num_draft_tokens > 50
        assert max(output.token_ids) < 64


@pytest.mark.parametrize(("characters", "at", "theirs"), [("abcXefghijklmnopqrstuvwxyz", 5, "X"), ("Q", 2, "Q")])
def test_another_vocabulary_is_refused(
    make_engine: Callable[..., Engine], tmp_path: Path, characters: str, at: int, theirs: str
) -> None:
    draft = write_tiny_checkpoint(tmp_path / "other", "llama")
    write_tokenizer(draft, characters)
    ours = "abcdefghij"[at - 2]
    with pytest.raises(DraftMismatchError, match=f"draft other .*token {at} is '{theirs}' there and '{ours}'"):
        make_engine(draft)


def test_a_draft_without_rows_for_all_tokens_is_refused(make_engine: Callable[..., Engine], tmp_path: Path) -> None:
    draft = write_tiny_checkpoint(tmp_path / "short", "llama", vocab_size=60)
    write_tokenizer(draft, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ012345")
    with pytest.raises(DraftMismatchError, match="draft short knows only the first 60 of the target's 64 tokens"):
        make_engine(draft)


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=1.0), SamplingParams(seed=3)], ids=str)
def test_drafts_keep_to_the_structure(params: SamplingParams) -> None:
    desk = Desk()
    request = desk.admit(PROMPT, params)
    request.constraint = RuledConstraint(lambda output: (20 + len(output), 40 + len(output)) if len(output) < 3 else ())
    (draft,) = desk.proposer.propose([request], [8])
    assert [token_id % 20 for token_id in draft.token_ids] == [0, 1, 2]  # and then there is nothing to say
    if draft.draft_probs is not None:
        assert draft.draft_probs.shape[0] == 3
        assert all((row > 0).sum() == 2 for row in draft.draft_probs)


def test_a_draft_that_may_not_begin_is_none() -> None:
    desk = Desk(vocab_limit=30)
    request = desk.admit(PROMPT)
    request.constraint = RuledConstraint(lambda output: (40,))  # a token the draft does not have
    assert desk.proposer.propose([request], [4]) == [NO_DRAFT]


class ScriptedRule:
    """Keeps ``num_kept`` tokens and wants ``num_wanted``; notes what it was asked."""

    def __init__(self, num_kept: int, num_wanted: int) -> None:
        self.num_kept, self.num_wanted = num_kept, num_wanted
        self.confidences: list[float] = []

    def keeps(self, confidence: float) -> bool:
        self.confidences.append(confidence)
        return len(self.confidences) <= self.num_kept

    def wants_more(self) -> bool:
        return len(self.confidences) < self.num_wanted


@pytest.mark.parametrize(
    ("num_kept", "num_wanted", "num_drafted", "num_asked"), [(9, 9, 4, 4), (2, 9, 2, 3), (9, 3, 3, 3), (0, 9, 0, 1)]
)
def test_a_rule_ends_a_draft(num_kept: int, num_wanted: int, num_drafted: int, num_asked: int) -> None:
    desk = Desk()
    request, rule = desk.admit(PROMPT), ScriptedRule(num_kept, num_wanted)
    other = desk.admit(PROMPT, name="without a rule")
    drafts = desk.proposer.propose([request, other], [4, 4], [rule, None])
    assert list(drafts[0].token_ids) == continuation(PROMPT, 4)[:num_drafted]
    assert list(drafts[1].token_ids) == continuation(PROMPT, 4)
    assert len(rule.confidences) == num_asked
    assert all(0.0 < confidence <= 1.0 for confidence in rule.confidences)

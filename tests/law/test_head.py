"""A draft head: what it reads are the target's states, what it drafts follows from committed tokens alone, and what
comes out is the target's, after rollbacks, prefix hits, preemption and in batches.

The oracle is the network that training uses: one pass over committed and drafted tokens, unrolled as far as drafted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from paceline import CacheCapacityError, ContextLengthError, Engine, Output, SamplingParams, Speculation
from paceline.backends.quantized import as_tensor
from paceline.engine.hidden import hidden_states
from paceline.loader.draft import EMBEDDING
from paceline.loader.load import load_checkpoint
from paceline.request import Request
from paceline.sampling.distribution import to_probs
from paceline.sampling.goodness import chi_square_p_value
from paceline.spec.proposer import Draft
from tests.law.test_losslessness import GREEDY, OFF, SEEDED, assert_same, check_grid, run_batch
from tests.unit.train.workshop import HEAD_PROMPTS, HEAD_VOCABULARY, HEAD_WINDOW, make_head

HEAD_ONLY = ("model",)
SAMPLED = SamplingParams(max_tokens=24, ignore_eos=True, temperature=1.0)
SHARED = [2 + (5 * j) % 60 for j in range(30)]


@dataclass(frozen=True)
class Proposal:
    """What was drafted after which tokens."""

    token_ids: list[int]
    params: SamplingParams
    draft: Draft


@contextmanager
def witness(engine: Engine) -> Iterator[list[Proposal]]:
    """Every draft of the head while the block runs."""
    proposer: Any = engine.core.ladder._proposers["model"]
    proposals: list[Proposal] = []
    propose = proposer.propose

    def watched(requests: Sequence[Request], horizons: Sequence[int], rules: Sequence[Any] = ()) -> list[Draft]:
        drafts: list[Draft] = propose(requests, horizons, rules)
        for request, draft in zip(requests, drafts, strict=True):
            proposals.append(Proposal(list(request.token_ids), request.params, draft))
            assert request.num_draft_computed_tokens <= request.num_tokens, "drafted tokens are not computed ones"
        return drafts

    proposer.propose = watched
    yield proposals
    proposer.propose = propose


def states_of_running(engine: Engine) -> list[tuple[list[int], Tensor]]:
    """(computed tokens, their states as kept) of every running request."""
    core: Any = engine.core
    store, size = core._runner._states, core._block_size
    found = []
    for request in core.scheduler._running:
        table = core.cache.block_ids(request.request_id)
        slots = [table[i // size] * size + i % size for i in range(request.num_computed_tokens)]
        found.append((request.token_ids[: len(slots)], store.read(torch.tensor(slots), torch.float32)))
    return found


def run_checked(engine: Engine, plain: Engine, prompts: Sequence[list[int]], params: SamplingParams) -> list[Output]:
    """All prompts in one batch, drafting; after every step the states kept are those that ``plain`` computes."""
    ids = [engine.submit(prompt, params, speculation=Speculation("static", 3, HEAD_ONLY)) for prompt in prompts]
    outputs: dict[str, Output] = {}
    num_checked = 0
    while engine.step():
        for token_ids, kept in states_of_running(engine):
            if token_ids:
                [expected] = plain.hidden_states([token_ids])
                assert torch.equal(kept, expected.half().float())
                num_checked += 1
        for request_id in ids:
            for delta in engine.take(request_id):
                if delta.output is not None:
                    outputs[request_id] = delta.output
        engine.core.cache.check_integrity()
    assert num_checked > len(prompts)
    return [outputs[request_id] for request_id in ids]


@pytest.fixture(scope="module")
def plain(sharp_target: Path) -> Iterator[Engine]:
    with Engine(sharp_target, draft=None, enable_prefix_cache=False) as engine:
        yield engine


def make_engine(target: Path, head: Path, **options: Any) -> Engine:
    return Engine(target, draft=head, **{"block_size": 4, "max_model_len": 128, **options})


@contextmanager
def crowded_engine(target: Path, head: Path, **options: Any) -> Iterator[tuple[Engine, list[list[int]]]]:
    """An engine with 24 blocks, and prompts of which it cannot run all to the end at once."""
    with make_engine(target, head, **options) as engine:
        bytes_per_block = engine.info.kv_bytes // engine.info.num_blocks
    options = {**options, "kv_memory_bytes": 24 * bytes_per_block, "max_model_len": 72}
    with make_engine(target, head, **options) as engine:
        preempted: list[str] = []
        schedule = engine.core.scheduler.schedule

        def watched(choose: Any) -> Any:
            plan = schedule(choose)
            preempted.extend(request.request_id for request in plan.preempted)
            return plan

        engine.core.scheduler.schedule = watched  # type: ignore[method-assign]
        yield engine, [[2 + (i + 3 * j) % 60 for j in range(20)] for i in range(5)]
        assert preempted


# ---- the states ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [GREEDY, SEEDED, SAMPLED], ids=["greedy", "seeded", "sampled"])
def test_after_rollbacks_the_states_are_the_targets(
    sharp_target: Path, trained_head: Path, plain: Engine, params: SamplingParams
) -> None:
    with make_engine(sharp_target, trained_head) as engine:
        outputs = run_checked(engine, plain, [*HEAD_PROMPTS[:3], SHARED, SHARED[5:12]], params)
    reports = [output.speculation for output in outputs]
    assert sum(report.num_accepted_draft_tokens for report in reports) > 0
    assert any(report.draft_acceptance_rate < 1 for report in reports)


def test_after_prefix_hits_the_states_are_the_targets(sharp_target: Path, trained_head: Path, plain: Engine) -> None:
    prompts = [[*SHARED, *rest] for rest in ([3], [4, 5], [3, 9, 9])]
    with make_engine(sharp_target, trained_head) as engine:
        outputs = [run_checked(engine, plain, [prompt], GREEDY)[0] for prompt in [*prompts, *prompts]]
    assert [output.usage.cached_tokens for output in outputs[1:3]] == [28, 28]


def test_after_preemption_the_states_are_the_targets(sharp_target: Path, trained_head: Path, plain: Engine) -> None:
    with crowded_engine(sharp_target, trained_head) as (engine, prompts):
        run_checked(engine, plain, prompts, GREEDY)


def test_states_of_texts_are_computed_apart_and_leave_nothing(plain: Engine) -> None:
    texts = [[2 + (i * j) % 60 for j in range(1 + 97 * i)] for i in range(5)] * 5  # more than one pass takes
    states = plain.hidden_states(texts)
    assert [len(item) for item in states] == [len(text) for text in texts]
    for text, item in zip(texts[:5], states[20:], strict=True):
        assert torch.equal(plain.hidden_states([text])[0], item)
    with pytest.raises(ContextLengthError, match="exceed the context"):
        plain.hidden_states([[5] * 513])
    room = plain.core.cache.num_free_blocks * 16
    with pytest.raises(CacheCapacityError, match="no room"):
        hidden_states(plain.core._runner, plain.core.cache, [[5] * (room + 1)])
    assert plain.core.cache.num_used_blocks == 0
    plain.core.cache.check_integrity()


# ---- the drafts ----------------------------------------------------------------------------------------------------


class Oracle:
    """What a head must draft after some tokens."""

    def __init__(self, target: Path, head: Path) -> None:
        self._plain = Engine(target, draft=None, backend="torch", dtype="fp32")
        self._network = make_head(target, num_positions=400)
        self._network.load_tensors({name: item.float() for name, item in load_file(head / "model.safetensors").items()})
        self._table = as_tensor(load_checkpoint(target, dtype=torch.float32).weights[EMBEDDING], torch.float32)

    @torch.no_grad()
    def rows(self, token_ids: Sequence[int], drafted: Sequence[int]) -> Tensor:
        """Logits in target ids that each token of ``drafted`` is drawn from: [num_drafted, 64]."""
        known = [*token_ids, *drafted[:-1]]
        [states] = self._plain.hidden_states([known])
        steps = self._network(
            self._table[known][None],
            torch.zeros(1, len(known), dtype=torch.int64),
            window=HEAD_WINDOW,
            states=states.half().float()[None],
            num_steps=len(drafted),
        )
        last = len(token_ids) - 1
        hidden = torch.stack([step[0, last + depth] for depth, step in enumerate(steps)])
        return HEAD_VOCABULARY.scatter(self._network.logits(hidden), 64)

    def check(self, proposals: Sequence[Proposal]) -> int:
        """Compare proposals with what they must be; how many tokens were compared."""
        num_tokens = 0
        for proposal in proposals:
            drafted = list(proposal.draft.token_ids)
            if not drafted:
                continue
            rows = self.rows(proposal.token_ids, drafted)
            if proposal.draft.draft_probs is not None:
                torch.testing.assert_close(
                    proposal.draft.draft_probs, to_probs(rows, proposal.params), atol=2e-3, rtol=0.02
                )
            else:
                margins = rows.max(1).values - rows.gather(1, torch.tensor(drafted)[:, None])[:, 0]
                assert margins.max() < 0.05, "the head drafts what its states and its K/V do not say"
            num_tokens += len(drafted)
        return num_tokens


@pytest.fixture(scope="module")
def oracle(sharp_target: Path, trained_head: Path) -> Oracle:
    return Oracle(sharp_target, trained_head)


PLAIN_BACKEND = {"backend": "torch", "dtype": "fp32"}


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_drafts_follow_from_the_committed_tokens_alone(
    sharp_target: Path, trained_head: Path, oracle: Oracle, params: SamplingParams
) -> None:
    """Long prompts, rollbacks, batches of other requests, horizons in turn with other drafters, prefix hits."""
    prompts = [*HEAD_PROMPTS[:4], SHARED, [*SHARED, 4, 5], SHARED[:29]]
    with make_engine(sharp_target, trained_head, **PLAIN_BACKEND) as engine, witness(engine) as proposals:
        for mode in (Speculation("static", 4, HEAD_ONLY), Speculation("static", 2), Speculation("dynamic", 6)):
            run_batch(engine, prompts, params, mode)
        assert oracle.check(proposals) > 150


def test_drafts_do_not_miss_what_was_not_read(sharp_target: Path, trained_head: Path, oracle: Oracle) -> None:
    """Of long prompts a head reads what it reaches; others that share them find nothing missing."""
    long = [2 + (7 * j * j) % 60 for j in range(300)]
    prompts = [long, [*long[:270], 9, 8, 7], long[:262], [*long, 5], long[:290]]
    options = {**PLAIN_BACKEND, "max_model_len": 384}
    with make_engine(sharp_target, trained_head, **options) as engine, witness(engine) as proposals:
        for prompt in prompts:
            engine.generate(prompt, GREEDY, speculation=Speculation("static", 3, HEAD_ONLY))
        assert oracle.check(proposals) > 100
        assert engine.core.cache.num_used_blocks == 0
        engine.core.cache.check_integrity()


def test_drafts_after_preemption_are_no_others(sharp_target: Path, trained_head: Path, oracle: Oracle) -> None:
    with (
        crowded_engine(sharp_target, trained_head, **PLAIN_BACKEND) as (engine, prompts),
        witness(engine) as proposals,
    ):
        run_batch(engine, prompts, GREEDY, Speculation("static", 4, HEAD_ONLY))
        assert oracle.check(proposals) > 100


def test_the_head_is_right_about_what_it_learnt(sharp_target: Path, trained_head: Path) -> None:
    with make_engine(sharp_target, trained_head) as engine:
        params = SamplingParams(max_tokens=40, ignore_eos=True)
        reports = [
            engine.generate(prompt, params, speculation=Speculation("static", 3, HEAD_ONLY)).speculation
            for prompt in HEAD_PROMPTS
        ]
    drafted = sum(report.num_draft_tokens for report in reports)
    accepted = sum(report.num_accepted_draft_tokens for report in reports)
    assert drafted > 300
    assert accepted / drafted > 0.9


def test_scrambled_states_hurt(sharp_target: Path, trained_head: Path) -> None:
    """The head reads the states: without them it knows less."""
    with make_engine(sharp_target, trained_head) as engine:
        params = SamplingParams(max_tokens=40, ignore_eos=True)
        mode = Speculation("static", 1, HEAD_ONLY)
        before = engine.generate(HEAD_PROMPTS[4], params, speculation=mode).speculation.draft_acceptance_rate
        engine.reset_prefix_cache()
        store: Any = engine.core._runner._states  # type: ignore[attr-defined]
        read = store.read
        store.read = lambda slots, dtype: read(slots, dtype).roll(7, dims=1)
        after = engine.generate(HEAD_PROMPTS[4], params, speculation=mode).speculation.draft_acceptance_rate
    assert before > after + 0.3


# ---- the law -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_a_head_changes_no_token(
    sharp_target: Path, trained_head: Path, params: SamplingParams, block_size: int
) -> None:
    prompts = [*HEAD_PROMPTS[:4], *([3 + (i * j) % 7 for j in range(6 + 3 * i)] for i in range(4))]
    with make_engine(sharp_target, trained_head, block_size=block_size, max_model_len=64) as engine:
        expected = [engine.generate(prompt, params, speculation=OFF) for prompt in prompts]
        assert check_grid(engine, prompts, expected, params) > 0
        for mode in (Speculation("dynamic", 8, HEAD_ONLY), Speculation("static", 3, HEAD_ONLY)):
            assert_same(engine, prompts, expected, run_batch(engine, prompts, params, mode))


def test_sampled_tokens_are_distributed_as_the_targets(sharp_target: Path, trained_head: Path, plain: Engine) -> None:
    """The second and the third token after a prompt, drafted by the head."""
    prompt, num_draws = HEAD_PROMPTS[2], 1200
    params = SamplingParams(max_tokens=3, ignore_eos=True, temperature=1.5)
    first = next_probs(plain, prompt, params)
    second = torch.zeros(64)
    for token_id in range(64):
        if first[token_id] > 1e-6:
            second += first[token_id] * next_probs(plain, [*prompt, token_id], params)
    with make_engine(sharp_target, trained_head, max_num_seqs=64) as engine:
        mode = Speculation("static", 2, HEAD_ONLY)
        outputs = [output for _ in range(num_draws // 60) for output in run_batch(engine, [prompt] * 60, params, mode)]
    assert sum(output.speculation.num_accepted_draft_tokens for output in outputs) > 100
    for position, expected in ((0, first), (1, second)):
        counts = torch.bincount(torch.tensor([output.token_ids[position] for output in outputs]), minlength=64)
        assert chi_square_p_value(counts, expected) > 1e-4


def next_probs(plain: Engine, token_ids: Sequence[int], params: SamplingParams) -> Tensor:
    """The target's distribution of the next token, [64]."""
    [states] = plain.hidden_states([token_ids])
    runner: Any = plain.core._runner
    return to_probs(runner.decoder.logits(states[-1:].contiguous()), params)[0]

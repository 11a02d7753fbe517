"""Structured output under speculation: always what was asked for, the same bytes as without, the same distribution."""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import torch

from paceline import AsyncEngine, Engine, GrammarError, Output, SamplingParams, Speculation, StructuredOutput
from paceline.records import Verdict
from paceline.request import Request
from paceline.sampling.distribution import to_probs
from paceline.sampling.goodness import chi_square_p_value
from paceline.spec.proposer import NO_DRAFT, Draft, StopRule
from paceline.spec.verifier import Verifier, VerifyItem
from tests.fakes import RuledConstraint
from tests.law.test_distribution import DRAFTERS, START, TARGET, VOCAB_SIZE, generator, rows_after
from tests.support import write_byte_checkpoint

OFF = Speculation("off")
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "is_true": {"type": "boolean"},
        "numbers": {"type": "array", "items": {"type": "integer", "minimum": -99, "maximum": 99}, "maxItems": 3},
        "kind": {"enum": ["name", "true", "able", "abler"]},
    },
    "required": ["name", "is_true", "numbers", "kind"],
    "additionalProperties": False,
}
JSON = StructuredOutput.json_schema(SCHEMA)
GREEDY = SamplingParams(max_tokens=250, structured=JSON)
SEEDED = replace(GREEDY, temperature=1.0, seed=11)
SAMPLED = replace(GREEDY, temperature=1.0)
PROMPTS = ['{"name": "a", "is_true": true}', "able and abler", "x" * 40, '"kind": "name"']


class Scripted:
    """A drafter under the name of the draft model that proposes what a function says."""

    name = "model"

    def __init__(self, says: Any) -> None:
        self._says = says

    def prepare(self, requests: Sequence[Request]) -> None:
        pass

    def propose(
        self, requests: Sequence[Request], horizons: Sequence[int], rules: Sequence[StopRule | None] = ()
    ) -> list[Draft]:
        drafts = []
        for request, horizon in zip(requests, horizons, strict=True):
            token_ids = self._says(request)[:horizon]
            drafts.append(Draft(token_ids, self.name) if token_ids else NO_DRAFT)
        return drafts

    def observe(self, request: Request, verdict: Verdict) -> None:
        pass

    def release(self, request_id: str) -> None:
        pass


def junk(request: Request) -> list[int]:
    chance = random.Random(request.num_tokens)
    return [chance.randrange(273) for _ in range(8)]


def end_then_junk(request: Request) -> list[int]:
    return [1, *junk(request)]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("structured")
    target = write_byte_checkpoint(folder / "target", scale=2.0)
    draft = write_byte_checkpoint(folder / "draft", scale=2.0, noise=0.02)
    with Engine(target, draft=draft, block_size=4, max_model_len=400) as engine:
        yield engine


@pytest.fixture
def scripted(engine: Engine) -> Iterator[Any]:
    """Puts a scripted drafter in the draft model's place for one test."""
    ladder = engine.core.ladder
    model = ladder._proposers["model"]

    def use(says: Any) -> None:
        ladder._proposers["model"] = Scripted(says)

    yield use
    ladder._proposers["model"] = model


@pytest.fixture(scope="module")
def plain(engine: Engine) -> dict[int | None, list[Output]]:
    """The answers without speculation, one request at a time, by seed."""
    return {params.seed: run(engine, params, OFF) for params in (GREEDY, SEEDED)}


def run(engine: Engine, params: SamplingParams, speculation: Speculation, together: bool = False) -> list[Output]:
    """All prompts, one after the other or in one batch."""
    if not together:
        return [engine.generate(prompt, params, speculation=speculation) for prompt in PROMPTS]
    return finish(engine, [engine.submit(prompt, params, speculation=speculation) for prompt in PROMPTS])


def finish(engine: Engine, ids: Sequence[str]) -> list[Output]:
    """Step until all of these requests have ended."""
    while engine.step():
        engine.core.cache.check_integrity()
    outputs = [engine.take(request_id)[-1].output for request_id in ids]
    return [output for output in outputs if output is not None]


def assert_lawful(outputs: Sequence[Output]) -> None:
    for output in outputs:
        assert output.finish_reason == "stop", output.text
        assert jsonschema_rs.is_valid(SCHEMA, json.loads(output.text)), output.text


SPECULATIONS = {
    "grammar": Speculation("static", 8, ("grammar",)),
    "suffix": Speculation("static", 5, ("suffix",)),
    "model": Speculation("static", 4, ("model",)),
    "all": Speculation("static", 6),
    "dynamic": Speculation("dynamic", 8, min_acceptance=0.0),
}


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("speculation", SPECULATIONS.values(), ids=SPECULATIONS)
def test_speculation_changes_no_byte(
    engine: Engine, plain: Any, params: SamplingParams, speculation: Speculation, caplog: pytest.LogCaptureFixture
) -> None:
    expected = plain[params.seed]
    assert_lawful(expected)
    for together in (False, True):
        got = run(engine, params, speculation, together)
        assert [output.token_ids for output in got] == [output.token_ids for output in expected]
        assert [output.text for output in got] == [output.text for output in expected]
        if speculation.mode == "static":
            assert sum(output.speculation.num_accepted_draft_tokens for output in got) > 0
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("says", [junk, end_then_junk])
def test_unlawful_drafts_change_no_byte(
    engine: Engine, plain: Any, scripted: Any, params: SamplingParams, says: Any, caplog: pytest.LogCaptureFixture
) -> None:
    expected = plain[params.seed]
    scripted(says)
    for speculation in (Speculation("static", 6, ("model",)), Speculation("static", 6, ("model", "grammar"))):
        got = run(engine, params, speculation, together=True)
        assert_lawful(got)
        assert [output.token_ids for output in got] == [output.token_ids for output in expected]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("speculation", [OFF, *SPECULATIONS.values()], ids=["off", *SPECULATIONS])
def test_sampled_answers_are_lawful(engine: Engine, speculation: Speculation) -> None:
    assert_lawful(run(engine, SAMPLED, speculation, together=True))


@pytest.mark.parametrize("says", [junk, end_then_junk])
def test_sampled_answers_are_lawful_whatever_is_drafted(engine: Engine, scripted: Any, says: Any) -> None:
    scripted(says)
    assert_lawful(run(engine, SAMPLED, Speculation("static", 6, ("model",))))


def test_what_the_grammar_forces_is_drafted_and_accepted(engine: Engine) -> None:
    sources: Counter[str] = Counter()
    drafted: Counter[str] = Counter()
    for output in run(engine, GREEDY, SPECULATIONS["grammar"]):
        sources.update(output.speculation.accepted_by_source)
        drafted.update(output.speculation.drafted_by_source)
    assert drafted["grammar"] >= 10 * len(PROMPTS)
    assert sources["grammar"] == drafted["grammar"]


def test_penalties_apply_under_the_structure(engine: Engine) -> None:
    params = replace(
        GREEDY,
        repetition_penalty=1.3,
        frequency_penalty=0.5,
        logit_bias=dict.fromkeys([*range(3, 60), *engine.tokenizer.encode("\n\t\r")], -50.0),
        min_tokens=30,
    )
    expected = run(engine, params, OFF)
    assert_lawful(expected)
    got = run(engine, params, SPECULATIONS["all"], together=True)
    assert [output.token_ids for output in got] == [output.token_ids for output in expected]


def test_a_bias_that_forbids_everything_allowed_is_passed_over(engine: Engine) -> None:
    params = replace(GREEDY, logit_bias=dict.fromkeys(range(273), float("-inf")))
    assert_lawful(run(engine, params, SPECULATIONS["all"]))


def test_preempted_requests_keep_their_place(tmp_path: Path) -> None:
    target = write_byte_checkpoint(tmp_path / "target", scale=2.0)
    with Engine(target, draft=target, block_size=4, max_model_len=400) as engine:
        expected = run(engine, SEEDED, OFF)
        bytes_per_block = engine.info.kv_bytes // engine.info.num_blocks
    longest = max(output.usage.prompt_tokens + len(output.token_ids) for output in expected)
    with Engine(
        target,
        draft=target,
        block_size=4,
        max_model_len=longest + 40,
        kv_memory_bytes=(longest // 4 + 24) * bytes_per_block,
    ) as engine:
        requests: list[Request] = []
        add = engine.core.add
        engine.core.add = lambda state: (requests.append(state.request), add(state))[1]  # type: ignore[method-assign]
        got = run(engine, replace(SEEDED, max_tokens=None), Speculation("static", 4), together=True)
        assert sum(request.num_preemptions for request in requests) > 0
    assert [output.token_ids for output in got] == [output.token_ids for output in expected]


# ---- how an answer ends --------------------------------------------------------------------------------------


@pytest.mark.parametrize("speculation", [OFF, Speculation("static", 4)], ids=["off", "static"])
@pytest.mark.parametrize(
    "values",
    [{}, {"ignore_eos": True}, {"min_tokens": 200}, {"stop": ("zzzzzz",)}],
    ids=["plain", "ignore", "min", "stop"],
)
def test_an_answer_ends_when_nothing_can_follow(
    engine: Engine, speculation: Speculation, values: dict[str, Any]
) -> None:
    params = SamplingParams(max_tokens=200, structured=StructuredOutput.choice(["name", "true", "able"]), **values)
    output = engine.generate("x", params, speculation=speculation)
    assert output.text in ("name", "true", "able")
    assert output.finish_reason == "stop"
    assert 1 not in output.token_ids


@pytest.mark.parametrize("speculation", [OFF, Speculation("static", 4)], ids=["off", "static"])
def test_an_answer_that_may_end_ends_with_the_end_token(engine: Engine, speculation: Speculation) -> None:
    params = SamplingParams(max_tokens=60, structured=StructuredOutput.regex("[a-z]+"), logit_bias={1: 100.0})
    output = engine.generate("x", params, speculation=speculation)
    assert len(output.token_ids) == 2  # as early as it is allowed
    assert output.token_ids[-1] == 1
    later = engine.generate("x", replace(params, min_tokens=9), speculation=speculation)
    assert len(later.token_ids) == 10
    never = engine.generate("x", replace(params, ignore_eos=True), speculation=speculation)
    assert (never.finish_reason, len(never.token_ids)) == ("length", 60)
    assert 1 not in never.token_ids


def test_a_stop_string_and_the_length_go_first(engine: Engine) -> None:
    whole = engine.generate("x", GREEDY, speculation=OFF)
    for speculation in (OFF, SPECULATIONS["all"]):
        cut = engine.generate("x", replace(GREEDY, max_tokens=7), speculation=speculation)
        assert cut.finish_reason == "length"
        assert cut.token_ids == whole.token_ids[:7]
        stopped = engine.generate("x", replace(GREEDY, stop=('"is_true"',)), speculation=speculation)
        assert stopped.text == whole.text.split('"is_true"')[0]
        assert stopped.stop_reason == '"is_true"'


def test_a_prompt_is_read_in_chunks_before_the_first_mask(engine: Engine) -> None:
    prompt = "name " * 60
    output = engine.generate(prompt, replace(GREEDY, max_tokens=90), speculation=SPECULATIONS["all"])
    assert output.text.startswith("{")


def test_free_text_beside_a_structure(engine: Engine) -> None:
    """A batch holds both kinds, and neither sees the other."""
    free = SamplingParams(max_tokens=60, ignore_eos=True)
    alone = engine.generate("abc", free, speculation=OFF)
    ids = [engine.submit("abc", params, speculation=SPECULATIONS["all"]) for params in (free, GREEDY, free, SEEDED)]
    first, second, third, fourth = finish(engine, ids)
    assert first.token_ids == third.token_ids == alone.token_ids
    assert_lawful([second, fourth])


def test_a_session_goes_on_behind_an_answer_without_an_end_token(engine: Engine) -> None:
    with engine.session() as session:
        first = session.send("hi", GREEDY)
        second = session.send("and", GREEDY)
    assert_lawful([first, second])
    history = first.usage.prompt_tokens + first.usage.completion_tokens
    assert second.usage.cached_tokens >= history - 4


def test_what_cannot_be_compiled_ends_nothing_else(tmp_path: Path) -> None:
    target = write_byte_checkpoint(tmp_path / "target", scale=2.0)
    bad = replace(GREEDY, structured=StructuredOutput.regex("("))

    async def main() -> None:
        async with AsyncEngine(target, draft=None, max_model_len=400) as engine:
            running = asyncio.create_task(engine.generate("numbers", GREEDY))
            with pytest.raises(GrammarError, match="regular expression"):
                await engine.generate("x", bad)
            assert_lawful([await running])
            with pytest.raises(GrammarError):
                engine.engine.submit("x", bad)
            assert not engine.engine.core.scheduler.has_work

    asyncio.run(main())


# ---- distribution --------------------------------------------------------------------------------------------


def follows(text: Sequence[int]) -> list[int]:
    """The first token is even, the second larger than the first, except that 0 follows 8."""
    if not text:
        return [0, 2, 4, 6, 8]
    return [token_id for token_id in range(VOCAB_SIZE) if token_id > text[-1]] or [0]


def renormalised(previous: int, text: Sequence[int], params: SamplingParams) -> torch.Tensor:
    row = torch.full((VOCAB_SIZE,), -torch.inf)
    row[follows(text)] = TARGET[previous][follows(text)]
    return to_probs(row[None], params)[0]


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("its own model", {}),
        ("deterministic", {}),
        ("padded vocabulary", {}),
        ("smaller vocabulary", {"top_p": 0.8, "temperature": 1.3}),
    ],
)
def test_masked_sampling_is_the_renormalised_target(name: str, values: dict[str, float]) -> None:
    params = SamplingParams(**{"temperature": 1.0, **values})  # type: ignore[arg-type]
    drafter, coins = DRAFTERS[name], generator(60)
    texts: list[list[int]] = [[] for _ in range(3000)]
    while pending := [text for text in texts if len(text) < 2]:
        previous = torch.tensor([text[-1] if text else START for text in pending])
        drafts, draft_probs = drafter.propose(previous, 2, coins)
        logits = rows_after(TARGET, torch.cat([previous[:, None], drafts], dim=1)).flatten(0, 1)
        items = [
            VerifyItem(
                params,
                Draft(draft, "test", None if draft_probs is None else draft_probs[i]),
                slice(3 * i, 3 * i + 3),
                first_position=1 + len(text),
                generator=coins,
                constraint=RuledConstraint(follows, text),
            )
            for i, (text, draft) in enumerate(zip(pending, drafts.tolist(), strict=True))
        ]
        for text, verdict in zip(pending, Verifier().verify(items, logits), strict=True):
            text.extend(verdict.token_ids)
    first, second = torch.tensor([text[:2] for text in texts]).T
    counts = torch.bincount(first * VOCAB_SIZE + second, minlength=VOCAB_SIZE**2)
    expected = torch.stack([renormalised(token_id, [token_id], params) for token_id in range(VOCAB_SIZE)])
    expected *= renormalised(START, [], params)[:, None]
    assert chi_square_p_value(counts.view(VOCAB_SIZE, VOCAB_SIZE), expected) > 1e-3

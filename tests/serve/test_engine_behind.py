"""The real engine, on the tiny checkpoint, behind the app; and what the server asks of an engine."""

from __future__ import annotations

import asyncio
import json
import math
import random
import re
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import transformers
from prometheus_client.parser import text_string_to_metric_families

from paceline import AsyncEngine, Engine, SamplingParams, Speculation
from paceline.errors import CacheCapacityError, ContextLengthError, InvalidPromptError
from paceline.serve.service import Service
from tests.serve.conftest import opened
from tests.serve.test_server import call_and_leave

OPTIONS: dict[str, Any] = {"block_size": 4}


def run(
    checkpoint: Path, body: Callable[[httpx.AsyncClient, AsyncEngine, Any], Awaitable[None]], **settings: Any
) -> None:
    """With an app over the tiny engine; afterwards no block may be held."""

    async def main() -> None:
        engine = AsyncEngine(checkpoint, draft=checkpoint, **OPTIONS)
        async with opened(engine, **settings) as (app, client):
            await body(client, engine, app)
            for one in app.state.service.sessions.list():
                await app.state.service.sessions.release(one.key)
            while engine.load.num_running:
                await asyncio.sleep(0.001)
            assert engine.load.num_used_blocks == 0
            engine.engine.core.cache.check_integrity()

    asyncio.run(main())


def completion(prompt: str, **fields: Any) -> dict[str, Any]:
    return {"prompt": prompt, "temperature": 0, "max_tokens": 20, **fields}


SPECULATIONS = (False, {"mode": "static", "max_tokens": 5, "drafters": ["model"]}, True)
FIELDS: list[dict[str, Any]] = [
    {"logprobs": 3},
    {"presence_penalty": 1.5, "frequency_penalty": 1.0, "repetition_penalty": 1.3},
    {"min_tokens": 10, "logit_bias": {"1": 50}},
    {"stop": ["a", "Zq"]},
    {"n": 3, "seed": 7, "temperature": 1.0, "top_p": 0.9},
    {"ignore_eos": True, "max_tokens": 60},
    {"n": 2, "seed": 7, "temperature": 1.0, "logprobs": 2, "presence_penalty": 1.0, "min_tokens": 5, "stop": ["q"]},
]


@pytest.mark.parametrize("fields", FIELDS)
def test_speculation_changes_no_answer(tiny_checkpoint: Path, fields: dict[str, Any]) -> None:
    async def body(client: httpx.AsyncClient, _engine: AsyncEngine, _app: Any) -> None:
        answers = []
        for speculative in SPECULATIONS:
            request = completion("hello", **fields, speculative=speculative)
            response = await client.post("/v1/completions", json=request)
            assert response.status_code == 200, response.text
            choices = response.json()["choices"]
            for choice in choices:
                logprobs = choice["logprobs"]
                if logprobs is not None:  # bits of a float may depend on how many rows a pass has
                    logprobs["token_logprobs"] = [round(value, 3) for value in logprobs["token_logprobs"]]
                    logprobs["top_logprobs"] = [list(top) for top in logprobs["top_logprobs"]]
            answers.append(choices)
        assert answers[0] == answers[1] == answers[2]

    run(tiny_checkpoint, body)


@pytest.mark.parametrize("fields", FIELDS)
def test_speculation_changes_no_chat_and_no_stream_of_it(tiny_checkpoint: Path, fields: dict[str, Any]) -> None:
    num_top = fields.get("logprobs")
    asked = {**fields, "logprobs": num_top is not None, "top_logprobs": num_top}
    request = {"messages": [{"role": "user", "content": "hello"}], "temperature": 0, "max_tokens": 20, **asked}

    def entries(logprobs: Any) -> list[tuple[str, float]]:
        return [(entry["token"], round(entry["logprob"], 3)) for entry in (logprobs or {}).get("content") or ()]

    async def body(client: httpx.AsyncClient, _engine: AsyncEngine, _app: Any) -> None:
        answers = []
        for speculative in SPECULATIONS:
            whole = await client.post("/v1/chat/completions", json={**request, "speculative": speculative})
            choices = whole.json()["choices"]
            answers.append(
                [(one["message"]["content"], one["finish_reason"], entries(one["logprobs"])) for one in choices]
            )
            stream = await client.post(
                "/v1/chat/completions", json={**request, "speculative": speculative, "stream": True}
            )
            texts, reasons = [""] * len(choices), [""] * len(choices)
            tokens: list[list[tuple[str, float]]] = [[] for _ in choices]
            for event in (json.loads(line[6:]) for line in stream.text.split("\n\n") if line.startswith("data: {")):
                for choice in event["choices"]:
                    texts[choice["index"]] += choice["delta"].get("content", "")
                    reasons[choice["index"]] = choice["finish_reason"] or ""
                    tokens[choice["index"]] += entries(choice["logprobs"])
            answers.append(list(zip(texts, reasons, tokens, strict=True)))
        assert all(answer == answers[0] for answer in answers)

    run(tiny_checkpoint, body)


@pytest.mark.parametrize("speculative", SPECULATIONS)
def test_what_is_said_of_speculation_adds_up(tiny_checkpoint: Path, speculative: Any) -> None:
    async def body(client: httpx.AsyncClient, _engine: AsyncEngine, _app: Any) -> None:
        for prompt, limit in (("abcabcabc", 100), ("hello", 7), ("q", 1)):
            request = completion(prompt, max_tokens=limit, speculative=speculative)
            response = await client.post("/v1/completions", json=request)
            said = response.json()["metrics"]["speculative_decoding"]
            histogram, num_steps = said["acceptance_histogram"], said["num_spec_steps"]
            assert len(histogram) == said["num_spec_tokens"] + 1
            assert sum(histogram) == num_steps
            assert sum(length * count for length, count in enumerate(histogram)) == said["num_accepted_draft_tokens"]
            assert said["num_accepted_draft_tokens"] <= said["num_draft_tokens"]
            mean = 1 + said["num_accepted_draft_tokens"] / num_steps if num_steps else 1
            assert said["mean_acceptance_length"] == pytest.approx(mean)

    run(tiny_checkpoint, body)


def test_the_same_text_as_the_library(tiny_checkpoint: Path) -> None:
    with Engine(tiny_checkpoint, draft=None, **OPTIONS) as engine:
        expected = engine.generate("hello", SamplingParams(max_tokens=20), speculation=Speculation("off"))

    async def body(client: httpx.AsyncClient, _engine: AsyncEngine, _app: Any) -> None:
        response = await client.post("/v1/completions", json=completion("hello"))
        assert response.json()["choices"][0]["text"] == expected.text
        stream = await client.post("/v1/completions", json=completion("hello", stream=True))
        events = [json.loads(line[6:]) for line in stream.text.split("\n\n") if line.startswith("data: {")]
        assert "".join(event["choices"][0]["text"] for event in events) == expected.text
        assert events[-1]["usage"]["completion_tokens"] == len(expected.token_ids)

    run(tiny_checkpoint, body)


@pytest.fixture
def fim_checkpoint(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    """The tiny model with three of its characters turned into fill-in-the-middle tokens."""
    folder = tmp_path / "fim"
    shutil.copytree(tiny_checkpoint, folder)
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    for character, token in zip("789", ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"), strict=True):
        token_id = content["model"]["vocab"].pop(character)
        content["model"]["vocab"][token] = token_id
        content["added_tokens"].append({"id": token_id, "content": token, "special": True, **flags})
    path.write_text(json.dumps(content))
    return folder


def test_filling_the_cache_ahead_pays(fim_checkpoint: Path) -> None:
    async def body(client: httpx.AsyncClient, _engine: AsyncEngine, _app: Any) -> None:
        request = {"input_extra": [{"text": "abcdefghij" * 12}], "input_prefix": "klm", "input_suffix": "nop"}
        await client.post("/infill", json={**request, "input_prefix": "", "input_suffix": "", "n_predict": 0})
        answers = []
        for speculative in (True, False):
            asked = {**request, "n_predict": 12, "speculative": speculative}
            answers.append((await client.post("/infill", json=asked)).json())
        assert answers[0]["tokens_cached"] >= 116
        assert answers[0]["content"] == answers[1]["content"]
        assert answers[0]["tokens_predicted"] <= 12
        held = (await client.post("/infill", json={**request, "grammar": 'root ::= "xyz" [0-6]'})).json()
        assert re.fullmatch("xyz[0-6]", held["content"])
        wrong = await client.post("/infill", json={**request, "grammar": "root ::= ("})
        assert (wrong.status_code, wrong.json()["error"]["code"]) == (400, "invalid_grammar")

    run(fim_checkpoint, body)


def test_a_session_reads_its_history_from_the_cache(tiny_checkpoint: Path) -> None:
    async def body(client: httpx.AsyncClient, engine: AsyncEngine, _app: Any) -> None:
        messages = [{"role": "user", "content": "q" * 60}]
        request: dict[str, Any] = {"temperature": 0, "max_tokens": 16, "ignore_eos": True, "session_id": "s"}
        first = (await client.post("/v1/chat/completions", json={**request, "messages": messages})).json()
        assert engine.load.num_used_blocks > 0  # pinned between the turns
        messages += [first["choices"][0]["message"], {"role": "user", "content": "zz"}]
        second = (await client.post("/v1/chat/completions", json={**request, "messages": messages})).json()
        history = first["usage"]["total_tokens"]
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= 0.9 * history
        assert (await client.delete("/v1/sessions/s")).status_code == 200
        assert engine.load.num_used_blocks == 0

    run(tiny_checkpoint, body)


def test_fifty_clients_leave_and_their_requests_end_before_the_next_step(tiny_checkpoint: Path) -> None:
    async def body(client: httpx.AsyncClient, engine: AsyncEngine, app: Any) -> None:
        service: Service = app.state.service
        generator = random.Random(7)
        core = engine.engine.core
        last_step: dict[str, int] = {}  # that worked for a request
        left_at: dict[str, int] = {}  # the step after which its client was gone

        def find(name: str) -> str | None:
            known = core._states.items()
            return next((key for key, one in known if name in engine.tokenizer.decode(one.request.token_ids)), None)

        async def leave(number: int) -> None:
            await asyncio.sleep(generator.uniform(0, 0.3))
            name = f"client{number}x"
            request = {
                "messages": [{"role": "user", "content": name + "hello" * generator.randint(1, 20)}],
                "ignore_eos": True,
                "temperature": generator.choice((0, 1)),
                "stream": bool(number % 2),
                "speculative": generator.choice((True, False, {"mode": "static", "max_tokens": 4})),
            }
            await call_and_leave(app, request, after=generator.uniform(0, 0.1))
            # Between two steps: whom nobody waits for is dropped before the next one.
            request_id, step = await engine.between_steps(lambda: (find(name), core._num_steps))
            if request_id is not None:
                left_at[request_id] = step

        engine.subscribe(lambda event: last_step.update({event.request_id: event.step}))
        staying = client.post("/v1/completions", json=completion("hello", max_tokens=400, ignore_eos=True))
        answer, *_ = await asyncio.gather(staying, *(leave(number) for number in range(50)))
        assert answer.json()["usage"]["completion_tokens"] == 400
        assert service.num_in_flight == 0
        assert not service.generations
        assert len(left_at) >= 10
        assert all(last_step.get(request_id, 0) <= step for request_id, step in left_at.items())
        assert core._num_steps > max(left_at.values())
        page = (await client.get("/metrics")).text
        samples = {
            sample.name: sample.value for family in text_string_to_metric_families(page) for sample in family.samples
        }
        assert samples["vllm:kv_cache_usage_perc"] == samples["vllm:num_requests_running"] == 0
        assert samples["vllm:num_requests_waiting"] == 0
        assert samples["vllm:request_aborted_total"] >= 40  # a few may have had their answer

    run(tiny_checkpoint, body, max_queue=50)


def test_prompts_beyond_the_context_are_refused(tiny_checkpoint: Path) -> None:
    async def body(client: httpx.AsyncClient, _engine: AsyncEngine, _app: Any) -> None:
        for stream in (False, True):
            response = await client.post("/v1/completions", json=completion("a" * 600, stream=stream))
            assert response.status_code == 400
            assert response.json()["error"]["code"] == "context_length_exceeded"
        bad = await client.post("/v1/completions", json=completion("abc", logit_bias={"9999": 1}))
        assert bad.status_code == 400

    run(tiny_checkpoint, body)


def test_scores_are_what_transformers_computes(tiny_checkpoint: Path) -> None:
    token_ids = list(range(2, 60)) * 6
    reference = transformers.AutoModelForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.float32)
    with torch.inference_mode():
        logprobs = torch.log_softmax(reference(torch.tensor([token_ids])).logits[0], dim=-1)
    with Engine(tiny_checkpoint, draft=None, dtype="fp32", backend="torch", **OPTIONS) as engine:
        scores = engine.score(token_ids, num_top=2)
        assert [one.token_id for one in scores] == token_ids[1:]
        for position, one in enumerate(scores):
            assert math.isclose(one.logprob, float(logprobs[position, one.token_id]), abs_tol=2e-3)
            assert next(iter(one.top.values())) == pytest.approx(float(logprobs[position].max()), abs=2e-3)
        assert engine.core.cache.num_used_blocks == 0
        engine.core.cache.check_integrity()
        output = engine.generate(token_ids, SamplingParams(max_tokens=2))
        assert output.usage.cached_tokens >= len(token_ids) - 4  # scoring filled the cache
        for bad, error in (([], InvalidPromptError), ([999], InvalidPromptError), ([2] * 600, ContextLengthError)):
            with pytest.raises(error):
                engine.score(bad)


def test_scoring_needs_room(tiny_checkpoint: Path) -> None:
    with Engine(tiny_checkpoint, draft=None, **OPTIONS) as engine:
        cache = engine.core.cache
        cache.begin("somebody", ())
        cache.reserve("somebody", (cache.num_blocks - 2) * cache.block_size)
        with pytest.raises(CacheCapacityError, match="try again"):
            engine.score([2] * 60)
        assert cache.num_free_blocks == 2
        cache.check_integrity()
        assert len(engine.score([2] * 8)) == 7


def test_a_snapshot_adds_up(tiny_checkpoint: Path) -> None:
    with Engine(tiny_checkpoint, draft=None, **OPTIONS) as engine:
        request_id = engine.submit("abcdefghij", SamplingParams(max_tokens=30, ignore_eos=True))
        for _ in range(3):
            engine.step()
            snapshot, cache = engine.snapshot(), engine.core.cache
            assert len(snapshot.states) == cache.num_blocks
            assert sum(state >= 2 for state in snapshot.states) == cache.num_used_blocks
            assert sum(state == 1 for state in snapshot.states) == cache.num_cached_blocks
            (owner,) = snapshot.owners
            assert owner.num_blocks == cache.num_used_blocks
            assert sum(state == 3 for state in snapshot.states) == owner.num_draft_blocks
        engine.cancel(request_id)
        assert not engine.snapshot().owners


def test_work_between_steps_and_its_errors(tiny_checkpoint: Path) -> None:
    def fail() -> None:
        raise ValueError("no")

    async def main() -> None:
        async with AsyncEngine(tiny_checkpoint, draft=None) as engine:
            assert engine.load.seconds_without_progress == 0.0
            running = asyncio.create_task(engine.generate("abc", SamplingParams(max_tokens=200, ignore_eos=True)))
            assert await engine.between_steps(lambda: 5) == 5
            with pytest.raises(ValueError, match="no"):
                await engine.between_steps(fail)
            assert (await running).usage.completion_tokens == 200
            assert await engine.score([2, 3, 4])
        with pytest.raises(RuntimeError, match="closed"):
            await engine.snapshot()

    asyncio.run(main())


def test_what_stopped_a_request(tiny_checkpoint: Path) -> None:
    with Engine(tiny_checkpoint, draft=None) as engine:
        free = engine.generate("abc", SamplingParams(max_tokens=12, ignore_eos=True, logprobs=0))
        assert free.stop_reason is None
        stop_id = free.token_ids[5]
        by_id = engine.generate("abc", SamplingParams(max_tokens=12, ignore_eos=True, stop_token_ids=(stop_id,)))
        assert by_id.stop_reason == stop_id
        by_text = engine.generate("abc", SamplingParams(max_tokens=12, ignore_eos=True, stop=(free.text[2:4],)))
        assert by_text.stop_reason == free.text[2:4]
        deltas = list(engine.stream("abc", SamplingParams(max_tokens=12, ignore_eos=True, logprobs=1)))
        streamed = [entry.token_id for delta in deltas for entry in delta.logprobs]
        assert streamed == list(free.token_ids)

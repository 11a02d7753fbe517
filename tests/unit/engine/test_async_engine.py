"""The engine for asyncio: the same text for many callers at once, and no caller left waiting."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from paceline import AsyncEngine, Engine, InvalidPromptError, SamplingParams, Speculation
from paceline.engine.events import StepEvent
from paceline.engine.output import Delta

pytestmark = pytest.mark.timeout(60)

PROMPTS = ["abc", "hello", "q" * 21, "zZ", "Hfqab" * 4, "a", "abcabc", "Xyz"]
ENDLESS = SamplingParams(ignore_eos=True)
OFF = Speculation("off")
MANY_STEPS = 400  # less than an endless request would take to fill its context one by one


@pytest.fixture
def with_engine(tiny_checkpoint: Path) -> Callable[[Callable[[AsyncEngine], Awaitable[None]]], None]:
    """Run a coroutine function with an AsyncEngine; afterwards nothing may be held."""

    @asynccontextmanager
    async def opened() -> AsyncIterator[AsyncEngine]:
        async with AsyncEngine(tiny_checkpoint, draft=tiny_checkpoint, block_size=4) as engine:
            yield engine
            await settled(engine)

    def run(body: Callable[[AsyncEngine], Awaitable[None]]) -> None:
        async def main() -> None:
            async with opened() as engine:
                await body(engine)

        asyncio.run(main())

    return run


async def settled(engine: AsyncEngine) -> None:
    """Wait until the stepping thread has nothing to do; the books must balance then."""
    while engine.engine.core.scheduler.has_work:
        await asyncio.sleep(0.001)
    assert engine.engine.core.cache.num_used_blocks == 0
    engine.engine.core.cache.check_integrity()


def count_steps(engine: AsyncEngine) -> list[StepEvent]:
    events: list[StepEvent] = []
    engine.engine.subscribe(events.append)
    return events


async def collect(engine: AsyncEngine, prompt: Any, params: SamplingParams, **options: Any) -> list[Delta]:
    return [delta async for delta in engine.stream(prompt, params, **options)]


@pytest.mark.parametrize(
    "params", [SamplingParams(max_tokens=20), SamplingParams(max_tokens=20, temperature=1, seed=3)]
)
def test_concurrent_streams_give_what_each_alone_gives(
    with_engine: Callable[..., None], plain_engine: Engine, params: SamplingParams
) -> None:
    expected = [plain_engine.generate(prompt, params, speculation=Speculation("off")) for prompt in PROMPTS]

    async def body(engine: AsyncEngine) -> None:
        streams = await asyncio.gather(*(collect(engine, prompt, params) for prompt in PROMPTS))
        outputs = await asyncio.gather(*(engine.generate(prompt, params) for prompt in PROMPTS))
        for deltas, output, alone in zip(streams, outputs, expected, strict=True):
            assert output.token_ids == alone.token_ids
            assert deltas[-1].output is not None
            assert deltas[-1].output.token_ids == alone.token_ids
            assert "".join(delta.text for delta in deltas) == alone.text

    with_engine(body)


def test_requests_share_steps(with_engine: Callable[..., None]) -> None:
    async def body(engine: AsyncEngine) -> None:
        steps: dict[int, int] = {}
        engine.engine.subscribe(lambda event: steps.update({event.step: steps.get(event.step, 0) + 1}))
        await asyncio.gather(*(engine.generate(prompt, SamplingParams(max_tokens=20)) for prompt in PROMPTS))
        assert max(steps.values()) > 1

    with_engine(body)


def test_leaving_a_stream_frees_its_blocks(with_engine: Callable[..., None]) -> None:
    async def body(engine: AsyncEngine) -> None:
        async with aclosing(engine.stream("abc", ENDLESS, speculation=OFF)) as stream:
            events = count_steps(engine)
            async for _ in stream:
                break
        await settled(engine)
        assert len(events) < MANY_STEPS

    with_engine(body)


@pytest.mark.parametrize("num_deltas", [0, 1, 5])
def test_cancelling_a_task_frees_its_blocks_and_leaves_the_others_alone(
    with_engine: Callable[..., None], plain_engine: Engine, num_deltas: int
) -> None:
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    expected = plain_engine.generate("hello", params).token_ids

    async def body(engine: AsyncEngine) -> None:
        reached = asyncio.Event()

        async def endless() -> None:
            seen = 0
            if num_deltas == 0:
                reached.set()
            async for _ in engine.stream("abc", ENDLESS, speculation=OFF):
                seen += 1
                if seen == num_deltas:
                    reached.set()

        events = count_steps(engine)
        task, other = asyncio.create_task(endless()), asyncio.create_task(engine.generate("hello", params))
        await reached.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await other).token_ids == expected
        await settled(engine)
        assert len(events) < MANY_STEPS

    with_engine(body)


def test_many_cancellations_leak_nothing(with_engine: Callable[..., None]) -> None:
    async def body(engine: AsyncEngine) -> None:
        for number in range(40):
            task = asyncio.create_task(engine.generate(PROMPTS[number % len(PROMPTS)], ENDLESS))
            await asyncio.sleep(0.001 * (number % 5))
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await settled(engine)
        assert not engine.engine._inboxes

    with_engine(body)


def test_bad_requests_fail_alone(with_engine: Callable[..., None]) -> None:
    async def body(engine: AsyncEngine) -> None:
        good = asyncio.create_task(engine.generate("abc", SamplingParams(max_tokens=20)))
        for prompt in ("", [999], ["x"]):
            with pytest.raises(InvalidPromptError):
                await engine.generate(prompt)
        assert (await good).usage.completion_tokens == 20

    with_engine(body)


def test_an_error_inside_a_step_reaches_every_caller(
    with_engine: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(engine: AsyncEngine) -> None:
        runner = engine.engine.core._runner
        is_broken = asyncio.Event()

        class BreakingRunner:
            def run(self, inputs: Any) -> Any:
                if is_broken.is_set():
                    raise MemoryError("no room for the activations")
                return runner.run(inputs)

        monkeypatch.setattr(engine.engine.core, "_runner", BreakingRunner())
        tasks = [asyncio.create_task(engine.generate(prompt, ENDLESS)) for prompt in PROMPTS[:4]]
        await asyncio.sleep(0.02)
        is_broken.set()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, MemoryError)
        await settled(engine)
        # The next request finds a working engine.
        is_broken.clear()
        assert (await engine.generate("abc", SamplingParams(max_tokens=5))).usage.completion_tokens == 5

    with_engine(body)


def test_closing_ends_what_runs_and_refuses_what_comes(tiny_checkpoint: Path) -> None:
    async def main() -> None:
        engine = AsyncEngine(tiny_checkpoint, draft=None)
        running = [asyncio.create_task(engine.generate(prompt, ENDLESS)) for prompt in PROMPTS[:3]]
        stream = engine.stream("abc", ENDLESS)
        first = await anext(stream)
        assert first.output is None
        while engine.load.num_running < len(running) + 1:
            await asyncio.sleep(0.001)  # the stream was asked first, and may be answered before the others are taken in
        await engine.aclose()
        await engine.aclose()
        assert [(await task).finish_reason for task in running] == ["cancelled"] * 3
        rest = [delta async for delta in stream]
        assert rest[-1].output is not None
        assert rest[-1].output.finish_reason == "cancelled"
        assert engine.engine.core.cache.num_used_blocks == 0
        with pytest.raises(RuntimeError, match="closed"):
            await engine.generate("abc")
        assert not engine._thread.is_alive()

    asyncio.run(main())


def test_sessions_work_here_too(with_engine: Callable[..., None]) -> None:
    async def body(engine: AsyncEngine) -> None:
        session = engine.engine.session()
        params = SamplingParams(max_tokens=8, ignore_eos=True)
        first = await engine.generate("abcdefgh", params, session=session)
        held = engine.engine.core.cache.num_used_blocks
        assert held == (8 + 8 - 1) // 4
        longer = engine.engine.tokenizer.encode("abcdefgh") + list(first.token_ids)
        assert (await engine.generate(longer, params, session=session)).usage.cached_tokens == held * 4
        session.close()

    with_engine(body)

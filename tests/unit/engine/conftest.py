"""The tiny engine with and without a draft, and the ways to speculate that must all give the same text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from paceline import Engine, Output, SamplingParams, Speculation

HORIZON = 4
ARMS = {
    "off": (False, Speculation("off")),
    "static": (False, Speculation("static", HORIZON)),
    "dynamic": (False, Speculation("dynamic")),
    "static-self-draft": (True, Speculation("static", HORIZON, ("model",))),
    "dynamic-self-draft": (True, Speculation("dynamic", 8, ("model",))),
    "static-all": (True, Speculation("static", HORIZON)),
}


@dataclass(frozen=True)
class Arm:
    """One way to speculate; ``plain`` knows what must come out."""

    name: str
    engine: Engine
    speculation: Speculation
    plain: Callable[[str, int], list[int]]

    def generate(self, prompt: str | Sequence[int], params: SamplingParams, **options: Any) -> Output:
        output = self.engine.generate(prompt, params, speculation=self.speculation, **options)
        assert_idle(self.engine)
        return output


def assert_idle(engine: Engine) -> None:
    """Nothing runs, nothing is held, the books balance."""
    assert not engine.core.scheduler.has_work
    assert engine.core.cache.num_used_blocks == 0
    engine.core.cache.check_integrity()


@pytest.fixture(scope="session")
def make_engine(tiny_checkpoint: Path) -> Iterator[Callable[..., Engine]]:
    """Engines on the tiny checkpoint, by default without a draft; ``draft="self"`` drafts with the same model."""
    with ExitStack() as stack:

        def make(*, draft: str | Path | None = None, **options: Any) -> Engine:
            drafter = tiny_checkpoint if draft == "self" else draft
            return stack.enter_context(Engine(tiny_checkpoint, draft=drafter, **options))

        yield make


@pytest.fixture(scope="session")
def plain_engine(make_engine: Callable[..., Engine]) -> Engine:
    return make_engine(block_size=4)


@pytest.fixture(scope="session")
def draft_engine(make_engine: Callable[..., Engine]) -> Engine:
    return make_engine(block_size=4, draft="self")


@pytest.fixture(scope="session")
def plain_tokens(make_engine: Callable[..., Engine]) -> Callable[[str, int], list[int]]:
    """Greedy tokens past any end token, by an engine that never drafts and never caches."""
    engine = make_engine(enable_prefix_cache=False)

    @cache
    def long_answer(prompt: str) -> Sequence[int]:
        params = SamplingParams(max_tokens=100, ignore_eos=True)
        return engine.generate(prompt, params, speculation=Speculation("off")).token_ids

    def tokens(prompt: str, num_tokens: int) -> list[int]:
        return list(long_answer(prompt)[:num_tokens])

    return tokens


@pytest.fixture(params=ARMS)
def arm(
    request: pytest.FixtureRequest,
    plain_engine: Engine,
    draft_engine: Engine,
    plain_tokens: Callable[[str, int], list[int]],
) -> Arm:
    has_draft, speculation = ARMS[request.param]
    engine = draft_engine if has_draft else plain_engine
    engine.reset_prefix_cache()
    return Arm(request.param, engine, speculation, plain_tokens)

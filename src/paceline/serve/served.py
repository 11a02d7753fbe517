"""What the server needs of an engine; :class:`paceline.AsyncEngine` is one."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Protocol

from paceline.engine.async_engine import EngineLoad
from paceline.engine.build import EngineInfo
from paceline.engine.events import Listener
from paceline.engine.output import Delta
from paceline.engine.session import Session
from paceline.engine.snapshot import CacheSnapshot
from paceline.loader.tokenizer import Tokenizer
from paceline.records import TokenLogprob
from paceline.request import SamplingParams, Speculation, StructuredOutput


class ServedEngine(Protocol):
    """See the same names of :class:`paceline.AsyncEngine`."""

    @property
    def info(self) -> EngineInfo:
        """What the engine runs."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""

    @property
    def load(self) -> EngineLoad:
        """How busy it is."""

    @property
    def speculation(self) -> Speculation:
        """What requests get unless they name their own."""

    def render(self, messages: Sequence[Mapping[str, Any]], **template_options: Any) -> str:
        """The chat template applied to messages."""

    def stream(
        self,
        prompt: Sequence[int],
        params: SamplingParams | None = None,
        *,
        speculation: Speculation | None = None,
        prediction: str | None = None,
        session: Session | None = None,
    ) -> AsyncGenerator[Delta, None]:
        """Generate piece by piece; leaving the iterator cancels."""

    async def compile_grammar(self, structured: StructuredOutput) -> None:
        """Compile what an answer must look like, or say why it cannot be."""

    async def score(self, token_ids: Sequence[int], num_top: int = 0) -> list[TokenLogprob]:
        """Log-probabilities of a given text."""

    def session(self, session_id: str) -> Session:
        """A name under which a prefix stays referenced."""

    async def release_session(self, session_id: str) -> None:
        """Let go of it."""

    async def snapshot(self) -> CacheSnapshot:
        """Who holds which block."""

    def subscribe(self, listener: Listener) -> None:
        """Have a listener called for each step, on the engine's thread."""

    async def aclose(self) -> None:
        """Stop; what runs ends as cancelled."""

"""Conversations by the name their client gives them; each keeps its verified prefix in the cache for a while."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from paceline.engine.output import Output
from paceline.engine.session import Session
from paceline.engine.transcript import Transcript
from paceline.serve.served import ServedEngine

log = logging.getLogger("paceline.serve")


@dataclass(slots=True, eq=False)
class Conversation:
    """One session as the server remembers it; ``token_ids`` is everything its last turn held, answer included."""

    key: str
    session: Session
    transcript: Transcript
    last_used: float
    token_ids: Sequence[int] = ()
    num_turns: int = 0
    num_in_flight: int = field(default=0)

    def log_divergence(self, token_ids: Sequence[int]) -> None:
        """Say where a new prompt leaves the history: from there on nothing can come from the cache."""
        if not self.token_ids:
            return
        pairs = zip(self.token_ids, token_ids, strict=False)
        first = next((index for index, (old, new) in enumerate(pairs) if old != new), None)
        if first is not None:
            log.info(
                "session %r: prompt leaves its history at token %d of %d (was %d, is %d)",
                self.key,
                first,
                len(self.token_ids),
                self.token_ids[first],
                token_ids[first],
            )

    def remember(self, text: str | None, prompt_token_ids: Sequence[int], output: Output) -> None:
        """Take over a finished turn."""
        self.num_turns += 1
        if text is not None:
            self.transcript.remember(text, prompt_token_ids, output)
        self.token_ids = [*prompt_token_ids, *output.token_ids]


class Sessions:
    """Opens, finds and releases conversations."""

    def __init__(
        self, engine: ServedEngine, *, ttl: float, limit: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._engine = engine
        self._ttl = ttl
        self._limit = limit
        self._clock = clock
        self._by_key: OrderedDict[str, Conversation] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._by_key)

    def open(self, key: str) -> Conversation:
        """The conversation of that name, a new one if there is none; it becomes the most recently used."""
        conversation = self._by_key.get(key)
        if conversation is None:
            session = self._engine.session(key)
            conversation = Conversation(key, session, Transcript(self._engine.tokenizer), self._clock())
            self._by_key[key] = conversation
        conversation.last_used = self._clock()
        self._by_key.move_to_end(key)
        return conversation

    def list(self) -> list[Conversation]:
        """All of them, least recently used first."""
        return list(self._by_key.values())

    async def release(self, key: str) -> bool:
        """Let the cache reuse a conversation's blocks; False for one that is unknown."""
        if self._by_key.pop(key, None) is None:
            return False
        await self._engine.release_session(key)
        return True

    async def release_expired(self) -> None:
        """Release what is idle for longer than the time to live, and the oldest beyond the limit."""
        now = self._clock()
        idle = [one for one in self._by_key.values() if one.num_in_flight == 0]
        expired = [one for one in idle if now - one.last_used > self._ttl]
        expired += [one for one in idle if one not in expired][: max(0, len(self._by_key) - len(expired) - self._limit)]
        for conversation in expired:
            await self.release(conversation.key)

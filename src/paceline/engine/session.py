"""A conversation whose verified prefix stays referenced between its turns."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from paceline.engine.output import Delta, Output
from paceline.engine.transcript import Transcript
from paceline.request import SamplingParams, Speculation

if TYPE_CHECKING:
    from paceline.engine.engine import Engine


class Session:
    """Multi-turn chat. Close it (or leave its ``with``) to let the cache reuse its blocks.

    A turn's prompt continues the *token ids* of the turn before (:class:`~paceline.engine.transcript.Transcript`).
    ``session_id`` names it in the cache; by default a new name.
    """

    def __init__(
        self, engine: Engine, messages: Sequence[Mapping[str, Any]] = (), *, session_id: str | None = None
    ) -> None:
        self.messages: list[Mapping[str, Any]] = list(messages)
        self.session_id = session_id or uuid.uuid4().hex
        self._engine = engine
        self._transcript = Transcript(engine.tokenizer)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def send(
        self,
        content: str,
        params: SamplingParams | None = None,
        *,
        speculation: Speculation | None = None,
        prediction: str | None = None,
    ) -> Output:
        """One turn: the user's message in, the assistant's answer out; both join ``messages``."""
        output: Output | None = None
        for delta in self.stream(content, params, speculation=speculation, prediction=prediction):
            output = delta.output
        assert output is not None, "a stream ends with its output"
        return output

    def stream(
        self,
        content: str,
        params: SamplingParams | None = None,
        *,
        speculation: Speculation | None = None,
        prediction: str | None = None,
    ) -> Iterator[Delta]:
        """Like :meth:`send`, piece by piece. A turn that is abandoned or fails leaves the history as it was."""
        messages = [*self.messages, {"role": "user", "content": content}]
        text = self._engine.render(messages)
        token_ids = self._transcript.encode(text)
        deltas = self._engine.stream(token_ids, params, speculation=speculation, prediction=prediction, session=self)
        return self._follow(deltas, messages, text, token_ids)

    def fork(self) -> Session:
        """A second conversation with the same history; the prefix is shared, not copied."""
        other = Session(self._engine, self.messages)
        other._transcript = self._transcript.copy()
        self._engine.fork_session(self.session_id, other.session_id)
        return other

    def close(self) -> None:
        """Stop keeping the prefix referenced."""
        self._engine.release_session(self.session_id)

    def _follow(
        self,
        deltas: Iterator[Delta],
        messages: list[Mapping[str, Any]],
        text: str,
        token_ids: list[int],
    ) -> Iterator[Delta]:
        for delta in deltas:
            if delta.output is not None and delta.output.finish_reason != "cancelled":
                self.messages = [*messages, {"role": "assistant", "content": delta.output.text}]
                self._transcript.remember(text, token_ids, delta.output)
            yield delta

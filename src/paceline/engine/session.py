"""A conversation whose verified prefix stays referenced between its turns."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from paceline.engine.output import Delta, Output
from paceline.request import SamplingParams, Speculation

if TYPE_CHECKING:
    from paceline.engine.engine import Engine


class Session:
    """Multi-turn chat. Close it (or leave its ``with``) to let the cache reuse its blocks.

    A turn's prompt continues the *token ids* of the turn before wherever the chat template continues its text, so that
    an answer is not tokenised a second time, differently, and the whole history is found in the cache.
    """

    def __init__(self, engine: Engine, messages: Sequence[Mapping[str, Any]] = ()) -> None:
        self.messages: list[Mapping[str, Any]] = list(messages)
        self.session_id = uuid.uuid4().hex
        self._engine = engine
        self._text = ""
        self._token_ids: list[int] = []

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
        text, token_ids = self._prompt(messages)
        deltas = self._engine.stream(token_ids, params, speculation=speculation, prediction=prediction, session=self)
        return self._follow(deltas, messages, text, token_ids)

    def fork(self) -> Session:
        """A second conversation with the same history; the prefix is shared, not copied."""
        other = Session(self._engine, self.messages)
        other._text, other._token_ids = self._text, list(self._token_ids)
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
                self._remember(text, token_ids, delta.output)
            yield delta

    def _remember(self, text: str, token_ids: list[int], output: Output) -> None:
        tokenizer = self._engine.tokenizer
        answer_ids = list(output.token_ids)
        if answer_ids and answer_ids[-1] in tokenizer.eos_token_ids:
            answer_ids.pop()  # the template writes the end of a turn itself
        if tokenizer.decode(answer_ids) == output.text:
            self._text, self._token_ids = text + output.text, token_ids + answer_ids
        else:
            self._text, self._token_ids = "", []  # cut at a stop string: the ids say more than the text

    def _prompt(self, messages: Sequence[Mapping[str, Any]]) -> tuple[str, list[int]]:
        text = self._engine.render(messages)
        if self._text and text.startswith(self._text):
            return text, self._token_ids + self._engine.tokenizer.encode(text[len(self._text) :])
        return text, self._engine.tokenizer.encode(text)

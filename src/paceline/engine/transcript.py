"""Token ids of a conversation that grows: what was generated is never tokenised a second time, differently."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.engine.output import Output
from paceline.loader.tokenizer import Tokenizer


class Transcript:
    """Text and token ids of the last turn, as the cache holds them.

    The next prompt continues these ids wherever its text continues this text, so that the whole history is found in
    the cache.
    """

    def __init__(self, tokenizer: Tokenizer, text: str = "", token_ids: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self.text = text
        self.token_ids = list(token_ids)

    def encode(self, prompt: str) -> list[int]:
        """Token ids of a prompt's text."""
        if self.text and prompt.startswith(self.text):
            return self.token_ids + self._tokenizer.encode(prompt[len(self.text) :])
        return self._tokenizer.encode(prompt)

    def remember(self, prompt: str, prompt_token_ids: Sequence[int], output: Output) -> None:
        """Take over a finished turn; forgets everything where its ids say more than its text."""
        answer_ids = list(output.token_ids)
        if answer_ids and answer_ids[-1] in self._tokenizer.eos_token_ids:
            answer_ids.pop()  # the template writes the end of a turn itself
        if self._tokenizer.decode(answer_ids) == output.text:
            self.text, self.token_ids = prompt + output.text, [*prompt_token_ids, *answer_ids]
        else:
            self.text, self.token_ids = "", []  # cut at a stop string

    def copy(self) -> Transcript:
        """One that goes on separately."""
        return Transcript(self._tokenizer, self.text, self.token_ids)

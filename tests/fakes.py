"""Stand-ins without weights."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Sequence

import torch

from paceline.model.runner import SequenceInput
from paceline.request import FinishReason


def next_token(prefix: Sequence[int], vocab_size: int) -> int:
    """What the fake model answers to ``prefix``: any change of it, however far back, changes the answer."""
    return 2 + zlib.crc32(bytes(token_id % 256 for token_id in prefix)) % (vocab_size - 2)


class FakeModel:
    """Remembers tokens by slot, as a K/V store does, and answers from the prefix it finds there.

    So an answer is right only if every slot of the prefix was written, by nobody else since, and is read through the
    right table. With a ``reach`` an answer depends on so many newest tokens, and those before them may be missing.
    """

    def __init__(self, *, block_size: int, vocab_size: int = 64, reach: int | None = None) -> None:
        self.reach = reach
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.num_fed = 0
        self._slots: dict[int, int] = {}

    def feed(self, token_ids: Sequence[int], start: int, block_ids: Sequence[int]) -> list[int]:
        """Write ``token_ids`` at positions from ``start``; the answer after each of them."""
        assert token_ids, "a pass over nothing"
        self.num_fed += len(token_ids)
        slots = [block_id * self.block_size + i for block_id in block_ids for i in range(self.block_size)]
        self._slots |= zip(slots[start : start + len(token_ids)], token_ids, strict=True)
        prefix = [
            self._slots.get(slot, 0) if self.reach else self._slots[slot] for slot in slots[: start + len(token_ids)]
        ]
        ends = range(start + 1, len(prefix) + 1)
        return [next_token(prefix[max(0, end - (self.reach or end)) : end], self.vocab_size) for end in ends]


class FakeRunner:
    """A :class:`FakeModel` where a ModelRunner is expected; keeps what it was asked."""

    def __init__(self, model: FakeModel) -> None:
        self.model = model
        self.inputs: list[SequenceInput] = []

    def run(self, inputs: Sequence[SequenceInput]) -> torch.Tensor:
        """One-hot logits, as far as asked for."""
        rows: list[int] = []
        for item in inputs:
            self.inputs.append(item)
            answers = self.model.feed(item.token_ids, item.start, item.block_ids)
            rows += answers[len(answers) - item.num_logits :]
        logits = torch.zeros(len(rows), self.model.vocab_size)
        if rows:
            logits[range(len(rows)), rows] = 10.0
        return logits

    def write_kv(self, inputs: Sequence[SequenceInput]) -> None:
        """The same without logits."""
        assert self.run(inputs).numel() == 0


class RuledConstraint:
    """A constraint by hand: ``allows`` names what may follow an output; the answer ends where that is nothing."""

    failure: str | None = None

    def __init__(self, allows: Callable[[Sequence[int]], Collection[int]], output: Sequence[int] = ()) -> None:
        self._allows = allows
        self._output = list(output)

    def masks(self, token_ids: Sequence[int]) -> list[bytes]:
        masks = []
        for position in range(len(token_ids) + 1):
            allowed = self._allows([*self._output, *token_ids[:position]])
            masks.append(sum(1 << token_id for token_id in allowed).to_bytes(32, "little"))
            if position < len(token_ids) and token_ids[position] not in allowed:
                break
        return masks

    def count_allowed(self, token_ids: Sequence[int]) -> int:
        for position, token_id in enumerate(token_ids):
            if token_id not in self._allows([*self._output, *token_ids[:position]]):
                return position
        return len(token_ids)

    def forced(self, num_tokens: int) -> list[int]:
        forced: list[int] = []
        while len(forced) < num_tokens and len(allowed := self._allows([*self._output, *forced])) == 1:
            forced += allowed
        return forced

    def advance(self, token_id: int) -> FinishReason | None:
        self._output.append(token_id)
        return None if self._allows(self._output) else "stop"

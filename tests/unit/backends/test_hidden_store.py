"""Hidden states by slot, and the slots in which a head finds those of the tokens before its own."""

from __future__ import annotations

import pytest
import torch

from paceline.backends.kv_store import HiddenStore
from paceline.backends.metadata import AttentionMetadata, SequenceSlice

CPU = torch.device("cpu")


def test_states_are_found_where_they_were_left() -> None:
    store = HiddenStore(32, 8, device=CPU)
    states = torch.randn(5, 8)
    slots = torch.tensor([31, 0, 7, 8, 20])
    store.write(slots, states)
    store.write(torch.tensor([7]), states[:1])  # overwritten: as if it had never been anything else
    expected = states.half().float()
    expected[2] = expected[0]
    assert torch.equal(store.read(slots, torch.float32), expected)


def test_before_the_first_token_there_is_nothing() -> None:
    store = HiddenStore(4, 8, device=CPU)
    store.write(torch.arange(4), torch.ones(4, 8))
    assert torch.equal(store.read(torch.tensor([-1, 3, -1]), torch.float32).sum(1), torch.tensor([0.0, 8.0, 0.0]))


@pytest.mark.parametrize("block_size", [1, 3, 4])
def test_previous_slots_are_those_of_one_token_less(block_size: int) -> None:
    tables = [list(range(9, -1, -1)), [12, 11, 17, 13, 14, 16, 18, 19, 20, 15]]
    sequences = [SequenceSlice(0, 5, 5, tables[0]), SequenceSlice(5, 3, 9, tables[1]), SequenceSlice(8, 1, 1, [30])]
    metadata = AttentionMetadata(sequences, block_size, CPU)

    def slot(table: list[int], position: int) -> int:
        return table[position // block_size] * block_size + position % block_size

    expected = [-1, *(slot(tables[0], p) for p in range(4)), *(slot(tables[1], p) for p in (5, 6, 7)), -1]
    assert metadata.previous_slots.tolist() == expected
    assert metadata.slot_mapping.tolist()[:5] == [slot(tables[0], p) for p in range(5)]

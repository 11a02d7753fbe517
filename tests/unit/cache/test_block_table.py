from __future__ import annotations

import pytest

from paceline.cache.hash import root_hash
from paceline.cache.table import BlockTable


@pytest.mark.parametrize(("num_tokens", "num_full_blocks"), [(0, 0), (1, 0), (3, 0), (4, 1), (7, 1), (8, 2), (12, 3)])
def test_only_wholly_committed_blocks_are_full(num_tokens: int, num_full_blocks: int):
    table = BlockTable(4, root_hash(), True, True, block_ids=[5, 0, 9], num_tokens=num_tokens)
    assert table.num_slots == 12
    assert table.num_full_blocks == num_full_blocks


def test_tables_are_compared_by_identity():
    assert BlockTable(4, root_hash(), True, True) != BlockTable(4, root_hash(), True, True)

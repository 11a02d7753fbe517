from __future__ import annotations

import subprocess
import sys

import pytest

from paceline.cache.hash import DIGEST_BYTES, hash_block, root_hash


def test_equal_content_behind_equal_prefix_is_equal():
    assert hash_block(root_hash(), (1, 2)) == hash_block(root_hash(), [1, 2])
    assert len(root_hash()) == len(hash_block(root_hash(), (1, 2))) == DIGEST_BYTES


def test_the_prefix_is_part_of_the_key():
    first, other = hash_block(root_hash(), (1, 2)), hash_block(root_hash(), (2, 1))
    assert first != other
    assert hash_block(first, (5, 6)) != hash_block(other, (5, 6))


def test_salts_separate_roots():
    assert len({root_hash(), root_hash(b"tenant a"), root_hash(b"tenant b")}) == 3


def test_token_ids_are_not_confused_with_their_bytes():
    assert hash_block(root_hash(), (1, 0)) != hash_block(root_hash(), (1,))
    assert hash_block(root_hash(), (256,)) != hash_block(root_hash(), (1,))


def test_other_processes_agree():
    """Replicas may compare digests, which Python's salted ``hash`` would not allow."""
    code = (
        "from paceline.cache.hash import *; "
        "print(hash_block(hash_block(root_hash(b's'), (1, 2)), (3, 2**32 - 1)).hex())"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == hash_block(hash_block(root_hash(b"s"), (1, 2)), (3, 2**32 - 1)).hex()


@pytest.mark.parametrize("token_id", [-1, 2**32])
def test_ids_outside_32_bits_are_refused(token_id: int):
    import struct

    with pytest.raises(struct.error):
        hash_block(root_hash(), (token_id,))

"""Content keys of full blocks: a chain, so that one digest stands for a block and everything before it.

A block's K/V depend on every token up to its end, never on its own tokens alone. Two blocks may therefore share
K/V exactly when their chained digests agree: equal tokens behind equal prefixes.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b
from typing import NewType

BlockHash = NewType("BlockHash", bytes)

DIGEST_BYTES = 16


def root_hash(salt: bytes = b"") -> BlockHash:
    """The parent of every first block. Different salts (tenants, adapters) can never hit each other's blocks."""
    return BlockHash(blake2b(salt, digest_size=DIGEST_BYTES, person=b"paceline root").digest())


def hash_block(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    """The digest of one full block, given the digest of the block before it (or of ``root_hash``).

    The result does not depend on the process or the machine, unlike Python's ``hash``: replicas agree on it.

    Raises:
        struct.error: a token id is outside [0, 2**32).
    """
    packed = struct.pack(f"<{len(token_ids)}I", *token_ids)
    return BlockHash(blake2b(parent + packed, digest_size=DIGEST_BYTES, person=b"paceline block").digest())

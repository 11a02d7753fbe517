"""The block table of one owner: which block holds which positions, and how much of it is committed."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.cache.hash import BlockHash


@dataclass(slots=True, eq=False)
class BlockTable:
    """Position ``p`` of the owner lives in slot ``p % block_size`` of block ``block_ids[p // block_size]``.

        block_ids: | full: committed, maybe shared | partial: private | look-ahead: private |
        tokens:    |<----------------- num_tokens ------>|<- drafts, rolled back for free ->|

    The list only grows at its end and shrinks from its end. Everything the owner may still write lies at
    ``num_tokens`` or later, hence in blocks that nobody else references.

    Attributes:
        root: parent hash of the first block.
        is_cacheable: full blocks are hashed. All full blocks of a cacheable table are; none of any other table.
        is_request: the owner writes (False: a session, which only keeps blocks alive).
        num_tokens: committed tokens whose target K/V are in the blocks.
        num_draft_tokens: committed tokens whose draft-model K/V are there too; at most ``num_tokens``.
    """

    block_size: int
    root: BlockHash
    is_cacheable: bool
    is_request: bool
    block_ids: list[int] = field(default_factory=list)
    num_tokens: int = 0
    num_draft_tokens: int = 0

    @property
    def num_slots(self) -> int:
        """Positions the table has room for."""
        return len(self.block_ids) * self.block_size

    @property
    def num_full_blocks(self) -> int:
        """Blocks, from the start, whose every slot is committed."""
        return self.num_tokens // self.block_size

"""Which block holds what: reservation, sharing, eviction and the prefix cache. Bookkeeping only, no tensors."""

from paceline.cache.manager import KVCacheManager, PrefixMatch
from paceline.cache.pool import OutOfBlocksError

__all__ = ["KVCacheManager", "OutOfBlocksError", "PrefixMatch"]

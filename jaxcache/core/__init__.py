"""Host side: what may be reused, and who holds what. Needs no model and no accelerator."""

from jaxcache.core import pool
from jaxcache.core.cache_manager import KVCacheBlocks, KVCacheManager
from jaxcache.core.config import CacheConfig, SchedulerConfig
from jaxcache.core.hashing import get_request_block_hasher, hash_block_tokens
from jaxcache.core.request import Request, RequestStatus
from jaxcache.core.scheduler import Scheduler
from jaxcache.core.specs import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheGroup,
    KVCacheSpec,
    SlidingWindowSpec,
)
from jaxcache.core.stats import CachingMetrics, PrefixCacheStats

__all__ = [
    "CacheConfig",
    "CachingMetrics",
    "ChunkedLocalAttentionSpec",
    "FullAttentionSpec",
    "KVCacheBlocks",
    "KVCacheGroup",
    "KVCacheManager",
    "KVCacheSpec",
    "PrefixCacheStats",
    "Request",
    "RequestStatus",
    "Scheduler",
    "SchedulerConfig",
    "SlidingWindowSpec",
    "get_request_block_hasher",
    "hash_block_tokens",
    "pool",
]

"""A trace replayed on `KVCacheManager`, the code that serves requests in the engine."""

import time
from dataclasses import asdict, dataclass
from typing import Any

from tqdm import tqdm

from jaxcache.core.cache_manager import KVCacheManager
from jaxcache.core.hashing import get_request_block_hasher
from jaxcache.core.request import Request
from jaxcache.core.specs import FullAttentionSpec, KVCacheGroup
from jaxcache.replay.trace import TOKENS_PER_UNIT, Trace, check_block_size, stand_in_tokens, unit_size


@dataclass(frozen=True)
class ReplayResult:
    """What a pool of `num_blocks` blocks would have saved."""

    trace: str
    policy: str
    block_size: int
    """Tokens."""
    num_blocks: int
    """The null block included."""
    num_requests: int
    num_refused: int
    """Prompts that do not fit into the pool; they count as misses."""
    prompt_tokens: int
    hit_tokens: int
    evicted_blocks: int
    seconds: float

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / self.prompt_tokens

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"hit_rate": self.hit_rate}


def replay(
    trace: Trace, *, block_size: int, num_blocks: int, policy: str = "lru", progress: bool = False
) -> ReplayResult:
    """One request after the other in the trace's order, each finished before the next comes; no output tokens."""
    check_block_size(block_size)
    _, small_size = stand_in_tokens(trace.requests[0], block_size)
    longest = max(request.input_length for request in trace.requests)
    manager = KVCacheManager(
        [KVCacheGroup(FullAttentionSpec(small_size))],
        num_blocks,
        TOKENS_PER_UNIT * (longest // unit_size(block_size) + 1),
        eviction_policy=policy,
    )
    hasher = get_request_block_hasher(small_size, "xxhash", hash_seed="replay")
    hits = refused = 0
    began = time.perf_counter()
    label = f"{trace.name} {policy} {num_blocks:,} blocks"
    for nth, entry in enumerate(tqdm(trace.requests, desc=label, unit="req", disable=not progress)):
        tokens, _ = stand_in_tokens(entry, block_size)
        request = Request(str(nth), tokens, block_hasher=hasher)
        blocks, hit = manager.get_computed_blocks(request)
        if manager.allocate_slots(request, request.num_tokens - hit, hit, blocks) is None:
            refused += 1
            continue
        hits += hit // small_size * block_size
        manager.free(request)
    return ReplayResult(
        trace.name,
        policy,
        block_size,
        num_blocks,
        len(trace.requests),
        refused,
        trace.num_tokens,
        hits,
        manager.num_evicted_blocks,
        time.perf_counter() - began,
    )

"""What a pool could hit if it knew the future: the block that is needed last goes first."""

import heapq
from bisect import bisect_right
from collections import defaultdict

from jaxcache.replay.trace import Trace, chains

_NEVER = 1 << 60


def clairvoyant_hits(trace: Trace, *, block_size: int, num_blocks: int) -> int:
    """Hit tokens with eviction by farthest next use (Belady, IBM Systems Journal 5:2, 1966).

    Every prompt's blocks enter the pool, as they do in the real one. Of one chain the parents are never needed
    later than their children, so it stays whole.
    """
    prompts = chains(trace, block_size)
    uses: dict[int, list[int]] = defaultdict(list)
    for now, chain in enumerate(prompts):
        for block in chain:
            uses[block].append(now)

    def next_use(block: int, now: int) -> int:
        at = bisect_right(uses[block], now)
        return uses[block][at] if at < len(uses[block]) else _NEVER

    resident: dict[int, int] = {}
    heap: list[tuple[int, int, int]] = []
    hits = 0
    for now, (request, chain) in enumerate(zip(trace.requests, prompts)):
        limit = min(len(chain), (request.input_length - 1) // block_size)
        hit = 0
        while hit < limit and chain[hit] in resident:
            hit += 1
        need = -(-request.input_length // block_size)
        if need > num_blocks - 1:
            continue
        hits += hit
        for block in chain:
            resident[block] = now
        evict = len(resident) + need - len(chain) - (num_blocks - 1)
        while evict > 0:
            negative_use, _, block = heapq.heappop(heap)
            if resident.get(block) == -negative_use:
                del resident[block]
                evict -= 1
        for depth, block in enumerate(chain):
            resident[block] = next_use(block, now)
            heapq.heappush(heap, (-resident[block], -depth, block))
    return hits * block_size

"""What happens inside the cache, for those who watch it: how long blocks live, and why tokens missed."""

import random
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

_NAMELESS = 0
"""The fingerprint of a block without a name."""

MISS_REASONS = ("new", "evicted", "tail")
"""Not cached before, as far as is remembered; evicted since; past the last block that a hit could cover."""


@dataclass
class BlockTimes:
    """Seconds, one entry per sampled block that was evicted (per access, for the gaps)."""

    lifetimes: list[float] = field(default_factory=list)
    """From allocation to eviction."""
    idle: list[float] = field(default_factory=list)
    """From the last use to eviction."""
    reuse_gaps: list[float] = field(default_factory=list)
    """Between uses, the last few of each block."""


class CacheObserver:
    """To be set as `KVCacheManager.observer`. Samples blocks, remembers as many evicted ones as the pool has."""

    def __init__(
        self,
        num_blocks: int,
        sample: float = 0.01,
        *,
        clock: Callable[[], float] = time.monotonic,
        seed: int | None = None,
    ) -> None:
        """`sample`: the share of allocated blocks whose times are taken, 0 to 1."""
        if not 0.0 <= sample <= 1.0:
            raise ValueError(f"sample must lie in [0, 1], got {sample}")
        self.missed_tokens: dict[str, int] = dict.fromkeys(MISS_REASONS, 0)
        """Tokens that were not found, by `MISS_REASONS`, each admission once."""
        self._sample = sample
        self._clock = clock
        self._random = random.Random(seed)
        self._uses: dict[int, deque[float]] = {}
        self._born: dict[int, float] = {}
        self._times = BlockTimes()
        self._evicted: OrderedDict[int, None] = OrderedDict()
        self._max_evicted = num_blocks

    def take_times(self) -> BlockTimes:
        """What was sampled since this was last called."""
        times, self._times = self._times, BlockTimes()
        return times

    def allocated(self, hits: np.ndarray, ids: np.ndarray, fingerprints: Sequence[int]) -> None:
        """`hits` were used; `ids` were taken for other content, `fingerprints` being what they held before."""
        now = self._clock()
        for block in hits.tolist():
            if block in self._uses:
                self._uses[block].append(now)
        for block, fingerprint in zip(ids.tolist(), fingerprints):
            born, uses = self._born.pop(block, None), self._uses.pop(block, ())
            if fingerprint != _NAMELESS:
                self._remember(int(fingerprint))
                if born is not None:
                    self._observe(born, list(uses), now)
            if self._sample and self._random.random() < self._sample:
                self._born[block] = now
                self._uses[block] = deque([now], maxlen=5)

    def admitted(self, num_tokens: int, num_hits: int, num_findable: int, first_missing: int | None) -> None:
        """A request of `num_tokens` tokens hit `num_hits` of the `num_findable` that a hit could have covered.

        `first_missing`: the fingerprint of the first block that was not there, if any was missing.
        """
        self.missed_tokens["tail"] += num_tokens - max(num_findable, num_hits)
        if num_findable > num_hits:
            known = first_missing in self._evicted
            self.missed_tokens["evicted" if known else "new"] += num_findable - num_hits

    def _remember(self, fingerprint: int) -> None:
        self._evicted.pop(fingerprint, None)
        self._evicted[fingerprint] = None
        if len(self._evicted) > self._max_evicted:
            self._evicted.popitem(last=False)

    def _observe(self, born: float, uses: list[float], now: float) -> None:
        self._times.lifetimes.append(now - born)
        self._times.idle.append(now - uses[-1])
        self._times.reuse_gaps += [after - before for before, after in pairwise(uses)]

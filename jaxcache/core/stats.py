"""Counters of what the cache was asked and what it gave, in tokens."""

from collections import deque
from dataclasses import dataclass, fields


@dataclass
class PrefixCacheStats:
    """One record per look-up, preempted requests apart. Counters only grow; `0 <= hits <= queries`."""

    reset: bool = False
    """The cache was emptied since the last record was taken."""
    requests: int = 0
    queries: int = 0
    hits: int = 0
    preempted_requests: int = 0
    preempted_queries: int = 0
    preempted_hits: int = 0

    def record(self, num_tokens: int, num_hits: int, preempted: bool) -> None:
        """Count a look-up for `num_tokens` tokens of which `num_hits` were there."""
        if preempted:
            self.preempted_requests += 1
            self.preempted_queries += num_tokens
            self.preempted_hits += num_hits
        else:
            self.requests += 1
            self.queries += num_tokens
            self.hits += num_hits

    def add(self, other: "PrefixCacheStats") -> None:
        """Add `other`'s counts to these."""
        for field in fields(self):
            if field.name != "reset":
                setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))


class CachingMetrics:
    """The hit rate over the most recent `max_recent_requests` requests."""

    def __init__(self, max_recent_requests: int = 1000) -> None:
        self._max = max_recent_requests
        self._recent: deque[tuple[int, int, int]] = deque()
        self._requests = self._queries = self._hits = 0

    def observe(self, stats: PrefixCacheStats) -> None:
        """Take one step's record in; a reset forgets all before it, and the oldest records leave the window."""
        if stats.reset:
            self._recent.clear()
            self._requests = self._queries = self._hits = 0
        if stats.requests == 0:
            return
        self._recent.append((stats.requests, stats.queries, stats.hits))
        self._count(self._recent[-1], 1)
        while len(self._recent) > 1 and self._requests > self._max:
            self._count(self._recent.popleft(), -1)

    @property
    def hit_rate(self) -> float:
        """Hits over queries, 0 to 1; 0 where nothing was asked."""
        return self._hits / self._queries if self._queries else 0.0

    def _count(self, record: tuple[int, int, int], sign: int) -> None:
        self._requests += sign * record[0]
        self._queries += sign * record[1]
        self._hits += sign * record[2]

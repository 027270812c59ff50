"""From content to blocks: which resident blocks hold exactly the tokens that a request starts with.

`RadixIndex` is what the cache manager uses. `HashIndex` is the reference's way, block by block; the tests drive
both side by side.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np

from jaxcache.core.events import EventLog
from jaxcache.core.request import Request

NO_IDS = np.zeros(0, np.int32)


class PrefixIndex(Protocol):
    """What the cache asks of an index. A hit is exact: equal fingerprints are never enough."""

    num_rejected: int
    """Blocks whose fingerprint matched but whose content did not."""

    def __len__(self) -> int:
        """Distinct contents that can be found; `HashIndex` takes those of one fingerprint for one."""
        ...

    def resident(self, request: Request, group_ids: Sequence[int], num_blocks: int) -> np.ndarray:
        """The block that each group holds of each of the request's first blocks: int32 `[groups, n]`, 0 for none.

        The groups have one block size, and the request that many full blocks. `n` is at most `num_blocks`; past
        it no group holds anything. Of several blocks with one content the one that was named first counts.
        """
        ...

    def insert(
        self, request: Request, group_id: int, start: int, block_ids: np.ndarray, previous: int
    ) -> np.ndarray:
        """Name the blocks of positions `start`, `start + 1`, ... after what `request` holds there.

        Null blocks are skipped, and so is a block that has the name already. Returns the ids that are new here.
        `previous`: the block before them in the request's table.
        """
        ...

    def evict(self, block_ids: np.ndarray) -> np.ndarray:
        """Take the names of `block_ids` away. Returns those that had one."""
        ...

    def clear(self) -> None:
        """Take all names away."""
        ...

    def is_named(self, block_id: int) -> bool: ...

    def keys(self) -> Iterable[bytes]:
        """Of all contents that are there: fingerprint and group."""
        ...

    def fingerprints(self, block_ids: np.ndarray) -> np.ndarray:
        """32 bits that tell each block's content apart, uint32; 0 for a block without a name."""
        ...

    def fingerprint_at(self, request: Request, group_id: int, position: int) -> int:
        """The fingerprint that a block would have that holds what `request` has at `position`."""
        ...

    def check_invariants(self) -> None:
        """Raise `RuntimeError` if blocks and names contradict each other."""
        ...


IndexFactory = Callable[[int, Sequence[int], int, EventLog | None], PrefixIndex]
"""Makes an index: pool size, block size of each group, tokens per hash, where to tell what comes and goes."""

"""The nodes of the radix tree over blocks of tokens, and what a request's blocks are compared with them by.

A node is a run of blocks: their packed tokens, what else their content depends on, and for each group the ids of
the blocks that hold them. `core.radix_index` grows, splits and joins them.
"""

from array import array

import numpy as np

from jaxcache.core.hashing import BlockHash
from jaxcache.core.request import Request

TOKEN_BYTES = 4
NOWHERE = -1

Namespace = tuple[str | None, int | None, str | None]
"""Adapter, its version, salt (`Request.namespace`)."""
HashBlockKeys = tuple[tuple[tuple[str, int], ...], bytes | None]
"""Features and digest of embeddings."""
BlockKeys = tuple[HashBlockKeys, ...] | None
"""Of each hash block in a block; `None` where tokens are all."""
NO_KEYS: HashBlockKeys = ((), None)


FirstBlock = bytes | tuple[bytes, BlockKeys]
"""What a run is known by among its siblings."""


class Run:
    """Blocks `[start, end)` of all sequences that begin with what the path from the root spells."""

    __slots__ = (
        "children",
        "copies",
        "hashes",
        "ids",
        "keys",
        "live",
        "marks",
        "number",
        "parent",
        "start",
        "tokens",
    )

    def __init__(self, number: int, parent: "Run | None", start: int, num_groups: int) -> None:
        self.number = number
        self.parent = parent
        self.start = start
        self.tokens = bytearray()
        self.keys: list[BlockKeys] | None = None
        """Per block; `None` where there are none."""
        self.ids = np.zeros((num_groups, 4), np.int32)
        """Columns past the run's end are spare."""
        self.live = 0
        """Ids that are not holes."""
        self.copies: dict[tuple[int, int], list[int]] = {}
        """(group, position): further blocks of the same content, oldest first."""
        self.children: dict[FirstBlock, Run] = {}
        self.hashes: list[BlockHash] = []
        """Fingerprints of the first blocks, as far as they were asked for."""
        self.marks = array("I")
        """32 bits per block, likewise."""


class Root(Run):
    """Of one namespace, in one tree. Spells nothing itself."""

    __slots__ = ("namespace", "tree")

    def __init__(self, tree: "Tree", namespace: Namespace) -> None:
        super().__init__(NOWHERE, None, 0, 0)
        self.tree = tree
        self.namespace = namespace


class Tree:
    """The groups of one block size."""

    def __init__(self, block_size: int, hash_block_size: int) -> None:
        self.block_size = block_size
        self.hash_block_size = hash_block_size
        self.stride = block_size * TOKEN_BYTES
        """Bytes per block of packed tokens."""
        self.group_ids: list[int] = []
        self.roots: dict[Namespace, Root] = {}

    @property
    def hash_blocks(self) -> int:
        """In one block."""
        return self.block_size // self.hash_block_size

    def end(self, run: Run) -> int:
        return run.start + len(run.tokens) // self.stride

    def first(self, run: Run) -> FirstBlock:
        tokens = bytes(run.tokens[: self.stride])
        keys = run.keys[0] if run.keys else None
        return tokens if keys is None else (tokens, keys)

    def keys_of(self, request: Request, num_blocks: int) -> list[BlockKeys] | None:
        """What the request's first blocks depend on besides tokens; `None` where that is nothing."""
        if request.only_tokens:
            return None
        scale = self.hash_blocks
        extra = request.extra_keys(self.hash_block_size, num_blocks * scale)
        fine: list[HashBlockKeys] = [(keys.features, keys.embeds) if keys else NO_KEYS for keys in extra]
        coarse = [tuple(fine[nth : nth + scale]) for nth in range(0, len(fine), scale)]
        return [None if all(keys == NO_KEYS for keys in one) else one for one in coarse]


class Content:
    """What a request holds at blocks `[start, stop)`."""

    __slots__ = ("keys", "start", "stop", "stride", "tokens")

    def __init__(self, tree: Tree, request: Request, start: int, stop: int) -> None:
        size = tree.block_size
        self.start, self.stop, self.stride = start, stop, tree.stride
        self.tokens = request.all_token_ids[start * size : stop * size].tobytes()
        self.keys = tree.keys_of(request, stop)

    def first(self, position: int) -> FirstBlock:
        """What a run is known by that begins with what is at `position`."""
        at = (position - self.start) * self.stride
        tokens = self.tokens[at : at + self.stride]
        keys = self.keys[position] if self.keys else None
        return tokens if keys is None else (tokens, keys)

    def common(self, run: Run, end: int, position: int) -> int:
        """Where `run`, which ends at `end`, and this stop being equal, both looked at from `position` on."""
        stop = min(end, self.stop)
        here, there = (position - self.start) * self.stride, (position - run.start) * self.stride
        if position == run.start and stop == end and self.tokens.startswith(run.tokens, here):
            equal = stop
        else:
            length = (stop - position) * self.stride
            a = np.frombuffer(self.tokens, np.int32, length // TOKEN_BYTES, here)
            b = np.frombuffer(bytes(run.tokens[there : there + length]), np.int32)
            wrong = np.flatnonzero(a != b)
            equal = position + int(wrong[0]) * TOKEN_BYTES // self.stride if len(wrong) else stop
        if self.keys is not None or run.keys is not None:
            for at in range(position, equal):
                mine, theirs = self.keys and self.keys[at], run.keys and run.keys[at - run.start]
                if mine != theirs:
                    return at
        return equal


def root_of(run: Run) -> Root:
    while not isinstance(run, Root):
        assert run.parent is not None
        run = run.parent
    return run


def add_keys(run: Run, keys: list[BlockKeys] | None, length: int, more: int) -> None:
    """`run` of `length` blocks gets `more`, with `keys`."""
    if keys is not None or run.keys is not None:
        before: list[BlockKeys] = run.keys or [None] * length
        after: list[BlockKeys] = keys or [None] * more
        run.keys = before + after

"""A compressed radix tree over blocks of tokens: look-up, naming and eviction in runs, exact by construction.

A node is a run of blocks: their packed tokens, what else their content depends on, and for each group the ids of
the blocks that hold them (0: a hole, nobody holds it). Children differ in their first block. Adapter and salt
choose the root, so what must not be shared cannot meet. Three integers per block lead from a block id to its run.

Each thing that happens to a request touches a few runs, not its blocks one by one: a look-up compares bytes, a
prompt that was never seen adds one run, generated blocks lengthen the run at the end of their chain in place, and
an eviction, deepest block first, shortens it. A run that holds nothing and leads nowhere is unlinked, so the tree
spells only what is there and the way to it.

No fingerprint is needed for any of this. They are computed run by run when somebody asks (events, metrics,
snapshots), and are those of `core.hashing`.
"""

import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import numpy as np

from jaxcache.core.events import EventLog
from jaxcache.core.hashing import BlockHash, BlockHasher, ExtraKeys, block_hash_with_group_id, hash_block_tokens
from jaxcache.core.index import NO_IDS
from jaxcache.core.pool import NULL_BLOCK
from jaxcache.core.radix_tree import (
    NO_KEYS,
    NOWHERE,
    TOKEN_BYTES,
    BlockKeys,
    Content,
    Namespace,
    Root,
    Run,
    Tree,
    add_keys,
    root_of,
)
from jaxcache.core.request import Request


class RadixIndex:
    """See the module. Implements `core.index.PrefixIndex`."""

    def __init__(
        self,
        num_blocks: int,
        block_sizes: Sequence[int],
        hash_block_size: int,
        events: EventLog | None = None,
    ) -> None:
        """`block_sizes`: tokens per block of each group, multiples of `hash_block_size`."""
        self.num_rejected = 0
        """Always 0: nothing is found by its fingerprint."""
        self._events = events
        self._hash_block_size = hash_block_size
        self._hasher: BlockHasher | None = None
        self._trees: dict[int, Tree] = {}
        self._place: list[tuple[Tree, int]] = []
        """Per group: its tree, and its row in each run's ids."""
        for group_id, block_size in enumerate(block_sizes):
            tree = self._trees.setdefault(block_size, Tree(block_size, hash_block_size))
            self._place.append((tree, len(tree.group_ids)))
            tree.group_ids.append(group_id)
        self._num_blocks = num_blocks
        self._start_empty()

    def _start_empty(self) -> None:
        self._runs: dict[int, Run] = {}
        self._unused_numbers: list[int] = []
        """Of runs that are no more, to be given out again: run numbers are 32 bits."""
        self._num_contents = 0
        for tree in self._trees.values():
            tree.roots.clear()
        # Each array twice: one number at a time through `array`, many through numpy, in the same memory.
        self._run_of = array("i", [NOWHERE]) * self._num_blocks
        self._position_of = array("i", bytes(TOKEN_BYTES * self._num_blocks))
        self._row_of = array("b", bytes(self._num_blocks))
        self._runs_of = np.frombuffer(self._run_of, np.int32)
        self._positions_of = np.frombuffer(self._position_of, np.int32)
        self._rows_of = np.frombuffer(self._row_of, np.int8)

    def __len__(self) -> int:
        return self._num_contents

    def is_named(self, block_id: int) -> bool:
        return self._run_of[block_id] != NOWHERE

    def clear(self) -> None:
        self._start_empty()
        if self._events is not None:
            self._events.cleared()

    # Looking up

    def resident(self, request: Request, group_ids: Sequence[int], num_blocks: int) -> np.ndarray:
        tree = self._place[group_ids[0]][0]
        rows = [self._place[group_id][1] for group_id in group_ids]
        parts = [run.ids[rows, : end - run.start] for run, end in self._walk(tree, request, num_blocks)]
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts, axis=1) if parts else np.zeros((len(rows), 0), np.int32)

    def _walk(self, tree: Tree, request: Request, stop: int) -> list[tuple[Run, int]]:
        """The runs that spell `request` up to block `stop`, each with the position up to which it does."""
        run = tree.roots.get(request.namespace)
        if run is None or not run.children or stop <= 0:
            return []
        content, position, path = Content(tree, request, 0, stop), 0, []
        while position < stop and (run := run.children.get(content.first(position))) is not None:
            end = tree.end(run)
            position = content.common(run, end, position)
            path.append((run, position))
            if position < end:
                break
        return path

    # Naming

    def insert(
        self, request: Request, group_id: int, start: int, block_ids: np.ndarray, previous: int
    ) -> np.ndarray:
        tree, row = self._place[group_id]
        self._hasher = request.block_hasher
        stop = start + len(block_ids)
        if not block_ids.any():
            if self._events is not None:
                self._events.stored(request, group_id, start, stop, [])
            return NO_IDS
        run, position = self._end_of(tree, request, start, previous)
        content = Content(tree, request, position, stop)
        inserted = []
        while position < stop:
            end = tree.end(run)
            if position == end:
                child = run.children.get(content.first(position))
                if child is None:
                    run = self._room(tree, run, position, content)
                    reached = stop
                else:
                    run = child
                    reached = content.common(run, tree.end(run), position)
            else:
                reached = content.common(run, end, position)
                if reached == position:
                    self._split(tree, run, position)
                    continue
            first = max(position, start)
            if first < reached:
                inserted.append(self._fill(run, row, first, block_ids[first - start : reached - start]))
            position = reached
        ids = inserted[0] if len(inserted) == 1 else np.concatenate([NO_IDS, *inserted])
        if self._events is not None:
            self._events.stored(request, group_id, start, stop, self._positions_of[ids].tolist())
        return ids

    def _end_of(self, tree: Tree, request: Request, start: int, previous: int) -> tuple[Run, int]:
        """The run in which `request`'s blocks before `start` end, and where: at `start` if all are spelled."""
        if previous != NULL_BLOCK and self._run_of[previous] != NOWHERE:
            return self._runs[self._run_of[previous]], self._position_of[previous] + 1
        if path := self._walk(tree, request, start):
            return path[-1]
        root = tree.roots.get(request.namespace)
        if root is None:
            root = tree.roots[request.namespace] = Root(tree, request.namespace)
        return root, 0

    def _room(self, tree: Tree, run: Run, position: int, content: Content) -> Run:
        """A run that spells `content` from `position` on, where nothing does: `run` lengthened, or a child."""
        tokens = content.tokens[(position - content.start) * tree.stride :]
        keys = content.keys and content.keys[position:]
        if run.children or run.parent is None:
            child = self._new_run(run, position, len(tree.group_ids))
            run.children[content.first(position)] = child
            run = child
        add_keys(run, keys, tree.end(run) - run.start, len(tokens) // tree.stride)
        run.tokens += tokens
        length = len(run.tokens) // tree.stride
        if length > run.ids.shape[1]:
            grown = np.zeros((len(run.ids), max(length, 2 * run.ids.shape[1])), np.int32)
            grown[:, : run.ids.shape[1]] = run.ids
            run.ids = grown
        return run

    def _new_run(self, parent: Run, start: int, num_rows: int) -> Run:
        run = Run(self._unused_numbers.pop() if self._unused_numbers else len(self._runs), parent, start, num_rows)
        self._runs[run.number] = run
        return run

    def _forget_run(self, run: Run) -> None:
        del self._runs[run.number]
        self._unused_numbers.append(run.number)

    def _fill(self, run: Run, row: int, position: int, block_ids: np.ndarray) -> np.ndarray:
        """Name `block_ids` in `run` from `position` on. Returns those that are new."""
        if len(block_ids) == 1:
            return block_ids if self._fill_one(run, row, position, int(block_ids[0])) else NO_IDS
        at = position - run.start
        held = run.ids[row, at : at + len(block_ids)]
        if held.any() or (self._runs_of[block_ids] != NOWHERE).any():
            fills = [self._fill_one(run, row, position + nth, i) for nth, i in enumerate(block_ids.tolist())]
            return block_ids[fills]
        held[:] = block_ids
        new = block_ids != NULL_BLOCK
        ids = block_ids[new]
        self._runs_of[ids] = run.number
        self._rows_of[ids] = row
        self._positions_of[ids] = np.arange(position, position + len(block_ids), dtype=np.int32)[new]
        run.live += len(ids)
        self._num_contents += len(ids)
        return ids

    def _fill_one(self, run: Run, row: int, position: int, block_id: int) -> bool:
        if block_id == NULL_BLOCK:
            return False
        if self._run_of[block_id] != NOWHERE:
            there = (self._run_of[block_id], self._position_of[block_id], self._row_of[block_id])
            if there == (run.number, position, row):
                return False
            raise RuntimeError(f"block {block_id} has a name already: evict it before it gets another")
        if run.ids[row, position - run.start] == NULL_BLOCK:
            run.ids[row, position - run.start] = block_id
            run.live += 1
            self._num_contents += 1
        else:
            run.copies.setdefault((row, position), []).append(block_id)
        self._run_of[block_id], self._position_of[block_id], self._row_of[block_id] = run.number, position, row
        return True

    def _split(self, tree: Tree, run: Run, position: int) -> None:
        """Let `run` end at `position`; what is behind becomes its only child."""
        at = position - run.start
        length = len(run.tokens) // tree.stride
        tail = self._new_run(run, position, len(run.ids))
        tail.tokens = run.tokens[at * tree.stride :]
        tail.ids = run.ids[:, at:length].copy()
        if run.keys is not None:
            tail.keys = run.keys[at:]
            del run.keys[at:]
        tail.hashes, tail.marks = run.hashes[at:], run.marks[at:]
        tail.children, run.children = run.children, {}
        for child in tail.children.values():
            child.parent = tail
        tail.copies = {place: ids for place, ids in run.copies.items() if place[1] >= position}
        for place, ids in tail.copies.items():
            del run.copies[place]
            self._runs_of[ids] = tail.number
        ids = tail.ids[tail.ids != NULL_BLOCK]
        self._runs_of[ids] = tail.number
        tail.live = len(ids)
        run.live -= tail.live
        del run.tokens[at * tree.stride :], run.hashes[at:], run.marks[at:]
        run.ids[:, at:] = NULL_BLOCK
        run.children[tree.first(tail)] = tail

    # Taking names away

    def evict(self, block_ids: np.ndarray) -> np.ndarray:
        runs = self._runs_of[block_ids]
        ids, runs = block_ids[runs != NOWHERE], runs[runs != NOWHERE]
        if not len(ids):
            return NO_IDS
        if self._events is not None:
            cuts = list(range(1, len(ids)))
        else:
            cuts = (np.flatnonzero(np.diff(runs)) + 1).tolist()
        for begin, end in pairwise([0, *cuts, len(ids)]):
            self._evict_from(self._runs[self._run_of[ids[begin]]], ids[begin:end])
        return ids

    def _evict_from(self, run: Run, ids: np.ndarray) -> None:
        """Take the names of `ids` away, which are all in `run`; one at a time where events are wanted."""
        tree = self._tree_of(run)
        positions, rows = self._positions_of[ids], self._rows_of[ids]
        block_hash = self._hashes(tree, run)[positions[0] - run.start] if self._events is not None else b""
        self._runs_of[ids] = NOWHERE
        still_served = False
        if run.copies:
            for row, position, block_id in zip(rows.tolist(), positions.tolist(), ids.tolist()):
                still_served = self._drop(run, row, position, block_id)
        else:
            run.ids[rows, positions - run.start] = NULL_BLOCK
            run.live -= len(ids)
            self._num_contents -= len(ids)
        self._shrink(tree, run)
        if self._events is not None:
            self._events.removed(block_hash, tree.group_ids[int(rows[0])], still_served)

    def _drop(self, run: Run, row: int, position: int, block_id: int) -> bool:
        """Take one block out of its run. Whether another holds the same content."""
        copies = run.copies.get((row, position), [])
        at = position - run.start
        if run.ids[row, at] != block_id:
            copies.remove(block_id)
        elif copies:
            run.ids[row, at] = copies.pop(0)
        else:
            run.ids[row, at] = NULL_BLOCK
            run.live -= 1
            self._num_contents -= 1
            return False
        if not copies:
            del run.copies[row, position]
        return True

    def _shrink(self, tree: Tree, run: Run) -> None:
        """Forget the content at the end of `run` that nothing holds and that leads nowhere."""
        while not run.children:
            parent = run.parent
            if run.live == 0:
                if parent is None:
                    del tree.roots[root_of(run).namespace]
                    return
                del parent.children[tree.first(run)]
                self._forget_run(run)
                run = parent
                if len(run.children) == 1 and run.parent is not None:
                    self._join(tree, run)
                    return
                continue
            length = len(run.tokens) // tree.stride
            kept = int(np.flatnonzero(np.any(run.ids[:, :length], axis=0))[-1]) + 1
            if kept < length:
                del run.tokens[kept * tree.stride :], run.hashes[kept:], run.marks[kept:]
                if run.keys is not None:
                    del run.keys[kept:]
            return

    def _join(self, tree: Tree, run: Run) -> None:
        """`run` and its only child become one."""
        (child,) = run.children.values()
        length, more = tree.end(run) - run.start, tree.end(child) - child.start
        run.ids = np.concatenate([run.ids[:, :length], child.ids[:, :more]], axis=1)
        if len(run.hashes) == length:
            run.hashes += child.hashes
        if len(run.marks) == length:
            run.marks += child.marks
        add_keys(run, child.keys, length, more)
        run.tokens += child.tokens
        run.children = child.children
        for grandchild in run.children.values():
            grandchild.parent = run
        run.copies |= child.copies
        for ids in child.copies.values():
            self._runs_of[ids] = run.number
        moved = child.ids[:, :more]
        self._runs_of[moved[moved != NULL_BLOCK]] = run.number
        run.live += child.live
        self._forget_run(child)

    def _tree_of(self, run: Run) -> Tree:
        if len(self._trees) == 1:
            return self._place[0][0]
        return root_of(run).tree

    # Fingerprints, for those who ask

    def keys(self) -> Iterator[bytes]:
        for run in self._runs.values():
            tree = self._tree_of(run)
            hashes = self._hashes(tree, run)
            for row, group_id in enumerate(tree.group_ids):
                for at in np.flatnonzero(run.ids[row, : len(hashes)]).tolist():
                    yield block_hash_with_group_id(hashes[at], group_id)

    def fingerprints(self, block_ids: np.ndarray) -> np.ndarray:
        return np.array([self._fingerprint(block_id) for block_id in block_ids.tolist()], np.uint32)

    def _fingerprint(self, block_id: int) -> int:
        if self._run_of[block_id] == NOWHERE:
            return 0
        run = self._runs[self._run_of[block_id]]
        tree = self._tree_of(run)
        at = self._position_of[block_id] - run.start
        return _mark_in_group(self._marks(tree, run)[at], tree.group_ids[self._row_of[block_id]])

    def fingerprint_at(self, request: Request, group_id: int, position: int) -> int:
        tree, _ = self._place[group_id]
        path = self._walk(tree, request, position)
        mark, start = _root_mark(request.namespace), 0
        if path:
            run, start = path[-1]
            mark = self._marks(tree, run)[start - run.start - 1]
        content = Content(tree, request, start, position + 1)
        marks = _chain(mark, content.tokens, content.keys and content.keys[start:], tree.stride)
        return _mark_in_group(list(marks)[-1], group_id)

    def _marks(self, tree: Tree, run: Run) -> array:
        for one in _unfinished(tree, run, "marks"):
            before = one.parent
            assert before is not None
            done = len(one.marks)
            mark = (
                one.marks[-1]
                if done
                else before.marks[-1]
                if before.tokens
                else _root_mark(root_of(one).namespace)
            )
            keys = one.keys and one.keys[done:]
            one.marks.extend(_chain(mark, bytes(one.tokens[done * tree.stride :]), keys, tree.stride))
        return run.marks

    def _hashes(self, tree: Tree, run: Run) -> list[BlockHash]:
        if self._hasher is None:
            raise ValueError("fingerprints need requests with a block_hasher: see get_request_block_hasher")
        size, scale = tree.hash_block_size, tree.hash_blocks
        for one in _unfinished(tree, run, "hashes"):
            before = one.parent
            assert before is not None
            tokens = array("I", bytes(one.tokens))
            adapter, _, salt = root_of(one).namespace
            for nth in range(len(one.hashes), len(tokens) // tree.block_size):
                block_hash = (
                    one.hashes[-1] if one.hashes else before.hashes[-1] if before.tokens else self._hasher.root
                )
                keys = one.keys[nth] if one.keys else None
                for part in range(nth * scale, (nth + 1) * scale):
                    features, embeds = keys[part - nth * scale] if keys else NO_KEYS
                    extra = ExtraKeys(adapter, features, salt if one.start == part == 0 else None, embeds)
                    piece = tokens[part * size : (part + 1) * size]
                    block_hash = hash_block_tokens(self._hasher.hash_function, block_hash, piece, extra.flat())
                one.hashes.append(block_hash)
        return run.hashes

    def check_invariants(self) -> None:
        problems: list[str] = []
        named: set[int] = set()
        for run in self._runs.values():
            tree = self._tree_of(run)
            length = len(run.tokens) // tree.stride
            held = run.ids[:, :length]
            if not length or len(run.tokens) % tree.stride or run.ids[:, length:].any():
                problems.append(f"run {run.number} spells {len(run.tokens)} bytes and holds ids beyond them")
            if run.live != np.count_nonzero(held) or not (run.children or held[:, -1].any()):
                problems.append(
                    f"run {run.number} counts {run.live} of {np.count_nonzero(held)} ids, or ends in holes"
                )
            for row, at in zip(*np.nonzero(held)):
                place = (int(row), run.start + int(at))
                for block_id in [int(held[row, at]), *run.copies.get(place, [])]:
                    named.add(block_id)
                    if (self._row_of[block_id], self._position_of[block_id]) != place:
                        problems.append(f"block {block_id} is at {place} but does not know")
                    if self._run_of[block_id] != run.number:
                        problems.append(f"block {block_id} is in run {run.number} but does not know")
            for key, child in run.children.items():
                if child.parent is not run or child.start != run.start + length or key != tree.first(child):
                    problems.append(f"run {child.number} does not hang where its content belongs")
        if named != set(np.flatnonzero(self._runs_of != NOWHERE).tolist()):
            problems.append("blocks are in runs or have back pointers, not both")
        if self._num_contents != sum(run.live for run in self._runs.values()):
            problems.append(f"{self._num_contents} contents are counted, the runs hold another number")
        if problems:
            raise RuntimeError("radix index: " + "; ".join(problems[:8]))


def _unfinished(tree: Tree, run: Run, what: str) -> list[Run]:
    """The runs from the root to `run` whose `what` is not there for all of their blocks, topmost first."""
    found: list[Run] = []
    one: Run | None = run
    while one is not None and one.parent is not None:
        if len(getattr(one, what)) < len(one.tokens) // tree.stride:
            found.append(one)
        one = one.parent
    return found[::-1]


def _root_mark(namespace: Namespace) -> int:
    return zlib.crc32(repr(namespace).encode())


def _chain(mark: int, tokens: bytes, keys: list[BlockKeys] | None, stride: int) -> Iterable[int]:
    """The marks of consecutive blocks, each covering all before it."""
    for nth, at in enumerate(range(0, len(tokens), stride)):
        mark = zlib.crc32(tokens[at : at + stride], mark)
        if keys is not None:
            mark = zlib.crc32(repr(keys[nth]).encode(), mark)
        yield mark


def _mark_in_group(mark: int, group_id: int) -> int:
    return zlib.crc32(group_id.to_bytes(4, "big"), mark)

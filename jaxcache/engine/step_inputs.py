"""From a plan to arrays: what the device call of a step is given, padded to one of a few shapes."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxcache.engine.shared_runs import find_runs
from jaxcache.kernels.step import PAD_SLOT, StepInputs, make_tiles
from jaxcache.models.rows import RowInputs
from jaxcache.settings import settings


class SequenceSlice(NamedTuple):
    """The tokens of one sequence that a step computes."""

    token_ids: np.ndarray
    """int32 [n], at positions `start`, `start + 1`, ..."""
    start: int
    block_ids: Sequence[np.ndarray]
    """int32, the sequence's block table in each group."""
    adapter: int = 0
    """The slot of its adapter, 0 for none."""
    rows: Sequence[tuple[int, np.ndarray]] = ()
    """What stands in the place of tokens' embeddings: (from which of the tokens on, float32 [n, width])."""


class StepShape(NamedTuple):
    """The static sizes of a step: rows, sequences, tiles."""

    num_tokens: int
    num_seqs: int
    num_tiles: int


@settings
class Buckets:
    """The shapes that steps are padded to. Each one is compiled once.

    A step in which every sequence has one new token has as many rows as sequences and no tiles.
    """

    token_counts: tuple[int, ...]
    seq_counts: tuple[int, ...]
    tile_size: int = 128
    """Query rows that the attention kernel takes at a time."""

    def __post_init__(self) -> None:
        for name in ("token_counts", "seq_counts"):
            counts = getattr(self, name)
            if not counts or any(c <= 0 for c in counts) or tuple(sorted(set(counts))) != tuple(counts):
                raise ValueError(f"Buckets.{name} must be rising positive integers, got {counts!r}")
        if self.tile_size <= 0:
            raise ValueError(f"Buckets.tile_size must be positive, got {self.tile_size!r}")

    @classmethod
    def for_limits(cls, max_tokens: int, max_seqs: int) -> "Buckets":
        """Powers of two from 16 tokens on, powers of eight from 1 sequence on, up to the limits."""
        return cls(_powers(16, 2, max_tokens), _powers(1, 8, max_seqs))

    def check_room(self, max_tokens: int, max_seqs: int) -> None:
        """A `ValueError` unless steps of so many tokens and sequences fit."""
        if self.token_counts[-1] < max_tokens or self.seq_counts[-1] < max_seqs:
            raise ValueError(
                f"buckets of up to {self.token_counts[-1]} tokens and {self.seq_counts[-1]} sequences do not hold "
                f"steps of {max_tokens} tokens and {max_seqs} sequences: add larger ones, or lower "
                "SchedulerConfig.max_num_batched_tokens and max_num_seqs"
            )

    def fit(self, num_tokens: int, num_seqs: int) -> StepShape:
        """The smallest shape for so many rows of so many sequences; a `ValueError` if there is none."""
        seqs = _at_least(self.seq_counts, num_seqs, "sequences")
        if num_tokens == num_seqs:
            return StepShape(seqs, seqs, 0)
        return self._mixed(_at_least(self.token_counts, num_tokens, "tokens"), seqs)

    def all_shapes(self) -> list[StepShape]:
        """Every shape that `fit` can give, smallest first."""
        shapes = {StepShape(seqs, seqs, 0) for seqs in self.seq_counts}
        for below, seqs in zip((0, *self.seq_counts), self.seq_counts):
            fewest = below + 1
            shapes |= {self._mixed(tokens, seqs) for tokens in self.token_counts if tokens > fewest}
        return sorted(shapes)

    def _mixed(self, tokens: int, seqs: int) -> StepShape:
        tokens = max(tokens, seqs)
        return StepShape(tokens, seqs, tokens // self.tile_size + seqs)


def _powers(first: int, factor: int, last: int) -> tuple[int, ...]:
    counts = [min(first, last)]
    while counts[-1] < last:
        counts.append(min(counts[-1] * factor, last))
    return tuple(counts)


def _at_least(counts: tuple[int, ...], wanted: int, what: str) -> int:
    for count in counts:
        if count >= wanted:
            return count
    raise ValueError(f"a step of {wanted} {what} fits no bucket: the largest holds {counts[-1]}")


def build_step_inputs(
    slices: Sequence[SequenceSlice],
    shape: StepShape,
    *,
    block_size: int,
    table_width: int,
    tile_size: int,
    num_groups: int = 1,
    share_runs: bool = True,
) -> tuple[StepInputs, ...]:
    """The arrays of a step over `slices`, in their order, as numpy int32: one `StepInputs` per KV-cache group.

    Those differ in block tables, slots and shared runs alone, and have all other arrays in common. Shared runs are
    looked for in steps of decodes alone, if `share_runs`.
    """
    lengths = np.array([len(piece.token_ids) for piece in slices], np.int32)
    starts = np.array([piece.start for piece in slices], np.int32)
    num_seqs, rows = len(slices), int(lengths.sum())
    token_ids = np.zeros(shape.num_tokens, np.int32)
    positions = np.zeros(shape.num_tokens, np.int32)
    slot_mapping = np.full((num_groups, shape.num_tokens), PAD_SLOT, np.int32)
    block_tables = np.zeros((num_groups, shape.num_seqs, table_width), np.int32)
    seq_lens = np.zeros(shape.num_seqs, np.int32)
    query_start = np.full(shape.num_seqs + 1, rows, np.int32)
    if rows:
        token_ids[:rows] = np.concatenate([piece.token_ids for piece in slices])
        query_start[: num_seqs + 1] = np.append(0, np.cumsum(lengths))
        seq_lens[:num_seqs] = starts + lengths
        seq_of_row = np.repeat(np.arange(num_seqs), lengths)
        at = np.arange(rows, dtype=np.int32) + (starts - query_start[:num_seqs])[seq_of_row]
        positions[:rows] = at
        for group in range(num_groups):
            tables = block_tables[group]
            for nth, piece in enumerate(slices):
                blocks = piece.block_ids[group]
                tables[nth, : len(blocks)] = blocks
            slot_mapping[group, :rows] = tables[seq_of_row, at // block_size] * block_size + at % block_size
    tiles = make_tiles(query_start, seq_lens, tile_size, shape.num_tiles)
    logits_rows = np.maximum(query_start[1:] - 1, 0)

    def of_group(group: int) -> StepInputs:
        shared = None
        if share_runs and not shape.num_tiles:
            shared = find_runs(block_tables[group], seq_lens, block_size)
        own: list[Any] = [slot_mapping[group], block_tables[group], seq_lens, query_start, logits_rows, tiles]
        return StepInputs(token_ids, positions, *own)._replace(shared=shared)  # pyright: ignore[reportArgumentType]

    return tuple(of_group(group) for group in range(num_groups))


def build_row_inputs(
    slices: Sequence[SequenceSlice], num_tokens: int, *, adapters: bool, embeds_width: int | None
) -> RowInputs | None:
    """What the rows of a step bring along, padded to `num_tokens`; `None` for a plain step.

    `adapters`: whether the model has slots. `embeds_width`: of the embeddings, where there are any.
    """
    if not adapters and embeds_width is None:
        return None
    slots = np.zeros(num_tokens, np.int32) if adapters else None
    embeds = given = None
    if embeds_width is not None:
        embeds, given = np.zeros((num_tokens, embeds_width), np.float32), np.zeros(num_tokens, np.bool_)
    row = 0
    for piece in slices:
        if slots is not None:
            slots[row : row + len(piece.token_ids)] = piece.adapter
        for at, rows in piece.rows:
            if embeds is not None and given is not None:
                embeds[row + at : row + at + len(rows)] = rows
                given[row + at : row + at + len(rows)] = True
        row += len(piece.token_ids)
    arrays: Any = (slots, embeds, given)
    return RowInputs(*arrays)

"""Which decodes of a step begin with the same blocks, so that attention over those is computed once for all."""

from typing import Any

import numpy as np

from jaxcache.kernels.layout import NULL_BLOCK
from jaxcache.kernels.step import SharedRuns

MAX_RUNS = 4
"""Runs per step."""
MIN_TOKENS = 256
"""Shorter runs are not worth a pass of their own."""
MIN_GAIN = 2
"""Tokens that need not be read for each token of a run: a run is read by all rows of the step."""


def find_runs(block_tables: np.ndarray, seq_lens: np.ndarray, block_size: int) -> SharedRuns:
    """The runs of blocks that save the most reading, numpy int32; none where they save too little.

    `block_tables` [S, W], `seq_lens` [S]: of sequences with one new row each; 0 for padding. Sequences whose first
    block is the same share what all of them have in common, less the block that the new row goes to.
    """
    found = []
    firsts, counts = np.unique(block_tables[:, 0], return_counts=True)
    for first in firsts[(counts > 1) & (firsts != NULL_BLOCK)]:
        members = np.flatnonzero(block_tables[:, 0] == first)
        blocks = _common(block_tables[members], seq_lens[members], block_size)
        if blocks * block_size >= MIN_TOKENS:
            found.append(((len(members) - 1) * blocks, blocks, members))
    found.sort(key=lambda run: -run[0])
    runs = _no_runs(*block_tables.shape)
    for nth, (_, blocks, members) in enumerate(found[:MAX_RUNS]):
        runs.tables[nth, :blocks] = block_tables[members[0], :blocks]
        runs.lengths[nth] = blocks * block_size
        runs.run[members] = nth
    return runs if _gain(runs, seq_lens) >= MIN_GAIN * runs.lengths.sum() else _no_runs(*block_tables.shape)


def _gain(runs: SharedRuns, seq_lens: np.ndarray) -> int:
    """Tokens that a step reads less: sequences are walked side by side, all as far as the longest has to go."""
    left = seq_lens - np.append(runs.lengths, 0)[runs.run]
    return len(seq_lens) * int(seq_lens.max(initial=0) - left.max(initial=0))


def _no_runs(sequences: int, width: int) -> SharedRuns:
    arrays: Any = (np.zeros((MAX_RUNS, width)), np.zeros(MAX_RUNS), np.full(sequences, MAX_RUNS))
    return SharedRuns(*(array.astype(np.int32) for array in arrays))


def _common(tables: np.ndarray, seq_lens: np.ndarray, block_size: int) -> int:
    """Leading blocks that all `tables` have in common, held, and full before the new row."""
    same = np.logical_and.accumulate((tables == tables[0]).all(axis=0) & (tables[0] != NULL_BLOCK))
    return min(int(same.sum()), int(seq_lens.min() - 1) // block_size)

"""Are a step's block ids and slots what they can be? On the host, before the device call.

The kernels drop what lies outside the KV array and never clamp it to somebody else's block, so a wrong id shows as
a wrong answer, not as an error. This is for finding out where it came from.
"""

import numpy as np

from jaxcache.kernels.step import PAD_SLOT, StepInputs


def check_step(step: StepInputs, *, num_blocks: int, block_size: int) -> None:
    """A `ValueError` with the first block id or slot that is wrong.

    Checked: ids lie in the array; a row of a sequence writes to its position in the block that the sequence's
    table names (that may be the null block: nowhere); no two rows write to one slot; rows beyond the sequences
    write nowhere. Copies the step's arrays to the host where they are not there.
    """
    tables, slots = np.asarray(step.block_tables), np.asarray(step.slot_mapping)
    start, positions = np.asarray(step.query_start), np.asarray(step.positions)
    _check_ids(tables, num_blocks)
    if start[0] != 0 or (np.diff(start) < 0).any() or start[-1] > len(slots):
        raise ValueError(f"query_start must rise from 0 to at most {len(slots)} rows, got {start.tolist()}")
    rows = int(start[-1])
    _check_padding(slots, rows)
    sequences = np.searchsorted(start, np.arange(rows), side="right") - 1
    _check_slots(slots[:rows], positions[:rows], sequences, tables, block_size)
    ids, counts = np.unique(slots[:rows][slots[:rows] >= block_size], return_counts=True)
    if (counts > 1).any():
        slot = ids[counts > 1][0]
        raise ValueError(f"rows {np.flatnonzero(slots == slot).tolist()} all write to slot {slot}")


def _check_ids(tables: np.ndarray, num_blocks: int) -> None:
    wrong = np.argwhere((tables < 0) | (tables >= num_blocks))
    if wrong.size:
        row, column = wrong[0].tolist()
        raise ValueError(
            f"block_tables[{row}, {column}] is {tables[row, column]}, but the KV array has blocks 0 to "
            f"{num_blocks - 1}; {len(wrong)} such ids in all"
        )


def _check_padding(slots: np.ndarray, rows: int) -> None:
    writing = np.flatnonzero(slots[rows:] != PAD_SLOT)
    if writing.size:
        row = rows + writing[0]
        raise ValueError(f"row {row} belongs to no sequence, but has slot {slots[row]} in place of PAD_SLOT")


def _check_slots(
    slots: np.ndarray, positions: np.ndarray, sequences: np.ndarray, tables: np.ndarray, block_size: int
) -> None:
    columns = positions // block_size
    beyond = np.flatnonzero((positions < 0) | (columns >= tables.shape[1]))
    if beyond.size:
        row, end = beyond[0], tables.shape[1] * block_size
        raise ValueError(f"row {row} has position {positions[row]}, but block tables end at {end}")
    wanted = tables[sequences, columns] * block_size + positions % block_size
    other = np.flatnonzero(slots != wanted)
    if other.size:
        row = other[0]
        raise ValueError(
            f"slot_mapping[{row}] is {slots[row]}, but by its block table position {positions[row]} of sequence "
            f"{sequences[row]} is slot {wanted[row]}; {len(other)} such rows in all"
        )

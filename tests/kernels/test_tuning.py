"""Tile sizes per device kind, and what they must satisfy."""

import pytest

from jaxcache.kernels.tuning import known_kinds, tpu_tuning


@pytest.mark.parametrize("kind", [None, *known_kinds()])
def test_entries_are_sound(kind):
    tuning = tpu_tuning(kind)
    for sizes in (tuning.prefill_sizes, tuning.decode_sizes):
        assert list(sizes) == sorted(set(sizes))
        assert sizes[-1] == tuning.chunk
        assert all(size % 128 == 0 for size in sizes)
    assert tuning.row_sum in ("lanes", "matmul")
    assert min(tuning.prefill_rows, tuning.stacked_heads, tuning.decode_tiles) > 0
    assert tuning.depth >= 0


def test_unknown_kind_takes_the_default():
    assert tpu_tuning("TPU v99") == tpu_tuning(None)


def test_every_current_tpu_has_an_entry():
    assert {"TPU v5 lite", "TPU v5", "TPU v6 lite", "TPU7x"} <= set(known_kinds())

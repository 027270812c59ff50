"""Tile sizes per device kind, and what they must satisfy."""

import pytest

from jaxcache.kernels.tuning import gpu_tuning, known_kinds, tpu_tuning


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


@pytest.mark.parametrize("kind", [None, *known_kinds()])
def test_gpu_entries_are_sound(kind):
    tuning = gpu_tuning(kind)
    for size in (tuning.prefill_rows, tuning.prefill_chunk, tuning.decode_chunk):
        assert size >= 16
        assert size & (size - 1) == 0
    for warps in (tuning.prefill_warps, tuning.decode_warps):
        assert warps in (1, 2, 4, 8, 16)
    assert min(tuning.prefill_stages, tuning.decode_stages, tuning.decode_programs, tuning.split_tokens) > 0


def test_unknown_kind_takes_the_default():
    assert tpu_tuning("TPU v99") == tpu_tuning(None)
    assert gpu_tuning("NVIDIA Z1") == gpu_tuning(None)


def test_every_current_tpu_has_an_entry():
    assert {"TPU v5 lite", "TPU v5", "TPU v6 lite", "TPU7x"} <= set(known_kinds())

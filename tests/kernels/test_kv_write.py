"""Every backend puts each row where its slot says, and writes nothing else."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcache.kernels import PAD_SLOT, KVCache, KVLayout, init_kv
from jaxcache.kernels.kv_write import write_kv

IMPLEMENTATIONS = ("reference", "xla")
LAYERS, BLOCKS, BLOCK_SIZE, HEADS = 3, 5, 4, 2
SLOTS = [4, 19, PAD_SLOT, 10, -1, 3, 20, 11]
"""Blocks 1, 4 and 2; nowhere: padding, a negative slot, the null block, one past the array."""
WRITTEN = {0: (1, 0), 1: (4, 3), 3: (2, 2), 7: (2, 3)}


def cache(head_dim: int, dtype: str) -> KVCache:
    return init_kv(KVLayout(HEADS, head_dim, BLOCK_SIZE), LAYERS, BLOCKS, jnp.dtype(dtype))


def rows(head_dim: int, dtype: str, scale: float = 1.0) -> tuple[jax.Array, jax.Array]:
    k, v = np.random.default_rng(0).standard_normal((2, len(SLOTS), HEADS, head_dim)).astype(np.float32) * scale
    return jnp.asarray(k, jnp.dtype(dtype)), jnp.asarray(v, jnp.dtype(dtype))


def split(data: np.ndarray, head_dim: int) -> tuple[np.ndarray, np.ndarray]:
    """K and V of one slot of one layer, `[H, P, D]`, as the layout promises."""
    if head_dim <= 64:
        return data[:, 0, :head_dim], data[:, 0, head_dim:]
    return data[:, 0, :head_dim], data[:, 1, :head_dim]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
def test_rows_land_in_their_slots_and_nowhere_else(implementation, head_dim, dtype):
    k, v = rows(head_dim, "float32")
    write = jax.jit(lambda kv: write_kv(kv, 1, k, v, jnp.array(SLOTS), implementation=implementation))
    kv = write(cache(head_dim, dtype))
    assert kv.data.dtype == dtype
    data = np.array(kv.data.astype(jnp.float32))
    for row, (block, offset) in WRITTEN.items():
        found = split(data[1, block, :, :, offset], head_dim)
        for stored, given in zip(found, (k, v)):
            np.testing.assert_array_equal(stored, given[row].astype(kv.data.dtype).astype(jnp.float32))
        data[1, block, :, :, offset] = 0
    assert not data.any()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_int8_keeps_each_head_within_half_a_step(implementation, head_dim):
    k, v = rows(head_dim, "float32", scale=7.0)
    k = k.at[0, 0].set(0.0)  # a scale of zero
    kv = write_kv(cache(head_dim, "int8"), 1, k, v, jnp.array(SLOTS), implementation=implementation)
    assert kv.scales is not None
    data, scales = np.array(kv.data, np.float32), np.array(kv.scales).reshape(*kv.data.shape[:3], 2, -1)
    for row, (block, offset) in WRITTEN.items():
        found = split(data[1, block, :, :, offset], head_dim)
        for plane, (stored, given) in enumerate(zip(found, (k, v))):
            step = scales[1, block, :, plane, offset]
            np.testing.assert_allclose(step, np.abs(given[row]).max(-1) / 127, rtol=1e-6)
            assert (np.abs(stored * step[:, None] - given[row]) <= 0.501 * step[:, None]).all()
        data[1, block, :, :, offset] = 0
        scales[1, block, :, :, offset] = 0
    assert not data.any()
    assert not scales.any()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", ["float16", "float8_e4m3fn", "float8_e5m2"])
def test_narrow_floats_saturate(implementation, dtype):
    k, v = rows(16, "float32", scale=1e6)
    kv = write_kv(cache(16, dtype), 0, k, v, jnp.array(SLOTS), implementation=implementation)
    stored = np.asarray(kv.data.astype(jnp.float32))
    assert np.isfinite(stored).all()
    assert np.abs(stored).max() == float(jnp.finfo(dtype).max)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
def test_write_is_in_place_when_donated(dtype):
    k, v = rows(64, "float32")
    kv = init_kv(KVLayout(HEADS, 64, BLOCK_SIZE), LAYERS, 4096, jnp.dtype(dtype))
    slots = jnp.array(SLOTS)
    write = jax.jit(lambda kv: write_kv(kv, jnp.int32(1), k, v, slots), donate_argnums=0)
    memory = write.lower(kv).compile().memory_analysis()
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(kv))
    assert memory.alias_size_in_bytes >= size
    assert memory.temp_size_in_bytes < size / 10


class TestErrors:
    def call(self, **changes):
        plain = inspect.unwrap(write_kv)  # without the annotation check, which would speak first
        k, v = rows(16, "float32")
        arguments = {"kv": cache(16, "float32"), "layer": 0, "k": k, "v": v, "slot_mapping": jnp.array(SLOTS)}
        return plain(**(arguments | changes))

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            (
                {"implementation": "gpu9"},
                "write_kv has no implementation 'gpu9': choose one of 'reference', 'xla'",
            ),
            ({"k": jnp.zeros((8, 32))}, r"k must have 3 axes.*\(8, 32\)"),
            ({"k": jnp.zeros((8, 2, 16), jnp.int32)}, "k must be float32, bfloat16 or float16, got int32"),
            ({"k": jnp.zeros((8, 2, 128))}, "head_dim 128 needs 2 plane"),
            ({"k": jnp.zeros((8, 3, 16))}, "has 3 heads, but the KV array has 2"),
            ({"v": jnp.zeros((8, 2, 8))}, r"v is float32\(8, 2, 8\), but k is float32\(8, 2, 16\)"),
            ({"v": jnp.zeros((8, 2, 16), jnp.bfloat16)}, "v is bfloat16"),
            (
                {"slot_mapping": jnp.zeros(7, jnp.int32)},
                r"one integer per row of k, shape \(8,\), got int32\(7,\)",
            ),
            ({"slot_mapping": jnp.zeros(8)}, r"got float32\(8,\)"),
            ({"layer": 3}, "layer 3 is not one of the 3 layers"),
            ({"layer": "1"}, "layer must be an integer, got '1'"),
            ({"kv": KVCache(jnp.zeros((3, 5)))}, r"kv.data must be \[layers, .*got shape \(3, 5\)"),
        ],
    )
    def test_message(self, changes, message):
        with pytest.raises(ValueError, match=message):
            self.call(**changes)

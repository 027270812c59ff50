"""Abstract operands of a step: shapes without memory, and what a compiled step must satisfy."""

import functools
import math

import jax
import jax.numpy as jnp

from jaxcache.kernels import KVLayout, StepInputs, Tiles, init_kv

KV_BYTES = 2 * 2**30
"""Enough that XLA does not move the array into fast memory, as it does with small ones."""

LAYERS = 4
TEMP_BYTES = 128 * 2**20
"""Bound on everything beside the arguments: q, outputs and new rows, packed into as many tiles as there might
be."""

MIXED = (512, 64, 40)
DECODE = (64, 64, 0)


def step_inputs(rows: int, sequences: int, tiles: int, width: int = 256) -> StepInputs:
    def ints(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    return StepInputs(
        ints(rows),
        ints(rows),
        ints(rows),
        ints(sequences, width),
        ints(sequences),
        ints(sequences + 1),
        ints(sequences),
        Tiles(*(ints(tiles) for _ in range(4))),
    )


def kv_array(layout: KVLayout, dtype: str, num_layers: int = LAYERS):
    num_blocks = KV_BYTES // layout.block_bytes(num_layers, dtype)
    return jax.eval_shape(functools.partial(init_kv, layout, num_layers, num_blocks, dtype))


def num_bytes(tree) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def check_in_place(compiled: jax.stages.Compiled, kv, temp_bytes: int = TEMP_BYTES) -> None:
    """The KV array is one memory from argument to result, and nothing as big appears beside it."""
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= num_bytes(kv)
    assert memory.temp_size_in_bytes <= temp_bytes
    pool = ",".join(map(str, kv.data.shape))
    copies = [line for line in compiled.as_text().splitlines() if f"[{pool}]" in line and " copy" in line]
    assert not copies

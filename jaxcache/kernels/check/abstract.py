"""Abstract operands of a step: shapes without memory, and what a compiled step must satisfy."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxcache.kernels.layout import KVCache, KVLayout, init_kv
from jaxcache.kernels.step import SharedRuns, StepInputs, Tiles

KV_BYTES = 2 * 2**30
"""Enough that XLA does not move the array into fast memory, as it does with small ones."""

LAYERS = 4
TEMP_BYTES = 128 * 2**20
"""Bound on everything beside the arguments: q, outputs and new rows, packed into as many tiles as there might
be."""

MIXED = (512, 64, 40)
"""Rows, sequences and tiles of a step."""
DECODE = (64, 64, 0)
RUNS = 4


def step_inputs(rows: int, sequences: int, tiles: int, width: int = 256) -> StepInputs:
    """A step of `jax.ShapeDtypeStruct`, each sequence with `width` blocks at most; one of decodes alone is told of
    shared runs."""

    def ints(*shape: int) -> Any:
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
        None if tiles else SharedRuns(ints(RUNS, width), ints(RUNS), ints(sequences)),
    )


def kv_array(layout: KVLayout, dtype: str, num_layers: int = LAYERS) -> KVCache:
    """A KV array of about `KV_BYTES`, of `jax.ShapeDtypeStruct`."""
    num_blocks = KV_BYTES // layout.block_bytes(num_layers, dtype)
    return jax.eval_shape(functools.partial(init_kv, layout, num_layers, num_blocks, dtype))


def num_bytes(tree: Any) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def faults(compiled: jax.stages.Compiled, kv: KVCache, temp_bytes: int = TEMP_BYTES) -> list[str]:
    """What keeps the KV array from being one memory from argument to result, with nothing as big beside it."""
    memory = compiled.memory_analysis()
    if memory is None:
        return ["the compiler does not tell how much memory the program takes"]
    found = []
    if memory.alias_size_in_bytes < num_bytes(kv):
        found.append(f"{memory.alias_size_in_bytes} of the KV array's {num_bytes(kv)} bytes are updated in place")
    if memory.temp_size_in_bytes > temp_bytes:
        found.append(f"{memory.temp_size_in_bytes} bytes of temporary memory, more than {temp_bytes}")
    pool = ",".join(map(str, kv.data.shape))
    lines = (compiled.as_text() or "").splitlines()
    copies = [line.strip() for line in lines if f"[{pool}]" in line and " copy" in line]
    return found + [f"a copy of the KV array: {line}" for line in copies]

"""How keys and values lie in memory. Everything that touches the KV array asks this module."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

NULL_BLOCK = 0
"""Block 0 belongs to nobody: block tables point at it where a sequence holds no block. Never read, never
written."""

SIDE_BY_SIDE_MAX_HEAD_DIM = 64

REGISTER_LANES = 128
"""Lanes of a TPU register. An array whose last axis is no multiple of it is stored otherwise than kernels read
it."""


KV_DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8")


class KVCache(NamedTuple):
    """The KV of all layers of one group. `L` layers, `B` blocks, `H` KV heads, `P` planes, `S` slots, `D`
    lanes."""

    data: Shaped[Array, "L B H P S D"]
    scales: Float[Array, "L B 1 X"] | None = None
    """Per token and head, for K and for V; only where `data` is int8: value = data * scale. `X` is `H * 2 * S`:
    one row of a TPU register's lanes per block, where `[H, 2, S]` would be padded to eight times its size."""


@dataclass(frozen=True)
class KVLayout:
    """Shape of the KV of one layer: `[num_blocks, num_kv_heads, planes, block_size, lanes]`.

    A block of all heads is contiguous, so it is one copy to fetch it, and the head axis can be sharded.
    Heads of up to 64 lanes hold K and V side by side (`planes` 1, `lanes` 2 * head_dim), so that 64-wide heads
    fill the 128 lanes of a TPU register; wider heads hold K and V as two planes of whole registers (`planes` 2,
    `lanes` head_dim, rounded up to a multiple of 128: heads of 80 and 96 leave lanes empty, as a TPU would
    anyway).
    """

    num_kv_heads: int
    head_dim: int
    block_size: int

    def __post_init__(self) -> None:
        for name in ("num_kv_heads", "head_dim", "block_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
                raise ValueError(f"KVLayout.{name} must be a positive integer, got {value!r}")

    @property
    def side_by_side(self) -> bool:
        return self.head_dim <= SIDE_BY_SIDE_MAX_HEAD_DIM

    @property
    def planes(self) -> int:
        return 1 if self.side_by_side else 2

    @property
    def lanes(self) -> int:
        if self.side_by_side:
            return 2 * self.head_dim
        return -(-self.head_dim // REGISTER_LANES) * REGISTER_LANES

    @property
    def block_shape(self) -> tuple[int, int, int, int]:
        """`[num_kv_heads, planes, block_size, lanes]`"""
        return (self.num_kv_heads, self.planes, self.block_size, self.lanes)

    @property
    def scale_shape(self) -> tuple[int, int]:
        """`[1, num_kv_heads * 2 * block_size]`: head by head, K before V, slot by slot."""
        return (1, self.num_kv_heads * 2 * self.block_size)

    def block_bytes(self, num_layers: int, dtype: jax.typing.DTypeLike) -> int:
        """Bytes that one block takes over all layers, K and V together, scales included."""
        per_layer = math.prod(self.block_shape) * jnp.dtype(dtype).itemsize
        scales = 4 * math.prod(self.scale_shape) if jnp.dtype(dtype) == jnp.int8 else 0
        return num_layers * (per_layer + scales)

    @staticmethod
    def of(kv: KVCache, head_dim: int) -> "KVLayout":
        """The layout of `kv` for queries of `head_dim`; a `ValueError` where they do not go together."""
        _, _, num_kv_heads, planes, block_size, lanes = kv.data.shape
        layout = KVLayout(num_kv_heads, head_dim, block_size)
        if (planes, lanes) != (layout.planes, layout.lanes):
            raise ValueError(
                f"head_dim {head_dim} needs {layout.planes} plane(s) of {layout.lanes} lanes, but the KV array "
                f"{kv.data.shape} has {planes} of {lanes}: make it with init_kv(..., head_dim={head_dim})"
            )
        return layout


def kv_dtype(dtype: jax.typing.DTypeLike) -> jnp.dtype:
    """`dtype`; a `ValueError` if a KV array cannot have it."""
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    if found is None or found.name not in KV_DTYPES:
        name = getattr(found, "name", dtype)
        raise ValueError(f"KV dtype {name} is not supported: choose one of {', '.join(KV_DTYPES)}")
    return found


def init_kv(layout: KVLayout, num_layers: int, num_blocks: int, dtype: jax.typing.DTypeLike) -> KVCache:
    """A zeroed KV array of `num_layers * num_blocks` blocks, allocated once and then donated from step to step.

    `dtype`: float32, bfloat16, float16, float8_e4m3fn, float8_e5m2, or int8 (with f32 scales beside the blocks).
    """
    dtype = kv_dtype(dtype)
    if num_layers <= 0 or num_blocks <= 1:
        raise ValueError(
            f"a KV array needs at least 1 layer and 2 blocks (block 0 is the null block), "
            f"got num_layers={num_layers}, num_blocks={num_blocks}"
        )
    data = jnp.zeros((num_layers, num_blocks, *layout.block_shape), dtype)
    if dtype != jnp.int8:
        return KVCache(data)
    return KVCache(data, jnp.zeros((num_layers, num_blocks, *layout.scale_shape), jnp.float32))

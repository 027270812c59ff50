"""How keys and values lie in memory. Everything that touches the KV array asks this module."""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

NULL_BLOCK = 0
"""Block 0 belongs to nobody: block tables point at it where a sequence holds no block. Never read, never written."""

SIDE_BY_SIDE_MAX_HEAD_DIM = 64


class KVCache(NamedTuple):
    """The KV of all layers of one group. `L` layers, `B` blocks, `H` KV heads, `P` planes, `S` slots, `D` lanes."""

    data: Shaped[Array, "L B H P S D"]
    scales: Float[Array, "L B H 2 S"] | None = None
    """Per token and head, for K and for V; only where `data` is int8: value = data * scale."""


@dataclass(frozen=True)
class KVLayout:
    """Shape of the KV of one layer: `[num_blocks, num_kv_heads, planes, block_size, lanes]`.

    A block of all heads is contiguous, so it is one copy to fetch it, and the head axis can be sharded.
    Heads of up to 64 lanes hold K and V side by side (`planes` 1, `lanes` 2 * head_dim), so that 64-wide heads
    fill the 128 lanes of a TPU register; wider heads hold K and V as two planes (`planes` 2, `lanes` head_dim).
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
        return 2 * self.head_dim if self.side_by_side else self.head_dim

    @property
    def block_shape(self) -> tuple[int, int, int, int]:
        """`[num_kv_heads, planes, block_size, lanes]`"""
        return (self.num_kv_heads, self.planes, self.block_size, self.lanes)

    def block_bytes(self, num_layers: int, dtype: jax.typing.DTypeLike) -> int:
        """Bytes that one block takes over all layers, K and V together, scales included."""
        per_layer = 2 * self.num_kv_heads * self.block_size
        scales = 4 * per_layer if jnp.dtype(dtype) == jnp.int8 else 0
        return num_layers * (per_layer * self.head_dim * jnp.dtype(dtype).itemsize + scales)

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


def init_kv(layout: KVLayout, num_layers: int, num_blocks: int, dtype: jax.typing.DTypeLike) -> KVCache:
    """A zeroed KV array of `num_layers * num_blocks` blocks, allocated once and then donated from step to step.

    `dtype`: float32, bfloat16, float16, float8_e4m3fn, float8_e5m2, or int8 (with f32 scales beside the blocks).
    """
    dtype = jnp.dtype(dtype)
    supported = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8")
    if dtype.name not in supported:
        raise ValueError(f"KV dtype {dtype.name} is not supported: choose one of {', '.join(supported)}")
    if num_layers <= 0 or num_blocks <= 1:
        raise ValueError(
            f"a KV array needs at least 1 layer and 2 blocks (block 0 is the null block), "
            f"got num_layers={num_layers}, num_blocks={num_blocks}"
        )
    data = jnp.zeros((num_layers, num_blocks, *layout.block_shape), dtype)
    if dtype != jnp.int8:
        return KVCache(data)
    heads, _, block_size, _ = layout.block_shape
    return KVCache(data, jnp.zeros((num_layers, num_blocks, heads, 2, block_size), jnp.float32))

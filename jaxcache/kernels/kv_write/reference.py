"""The oracle: the layer spelled out slot by slot, new rows put in, and folded back into blocks."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxcache.kernels.layout import KVCache, KVLayout
from jaxcache.kernels.packing import pack_rows


def write_kv(
    kv: KVCache,
    layer: Int[Array, ""],
    k: Float[Array, "T H D"],
    v: Float[Array, "T H D"],
    slot_mapping: Int[Array, " T"],
) -> KVCache:
    """As `api.write_kv`; copies the layer."""
    layout = KVLayout.of(kv, k.shape[-1])
    rows, scales = pack_rows(k, v, layout, kv.data.dtype)
    data = _put(kv.data, layer, rows, slot_mapping)
    if kv.scales is None or scales is None:
        return KVCache(data)
    by_head = kv.scales.reshape(*kv.scales.shape[:2], layout.num_kv_heads, 2, layout.block_size, 1)
    return KVCache(data, _put(by_head, layer, scales[..., None], slot_mapping).reshape(kv.scales.shape))


def _put(pool: Array, layer: Array, rows: Array, slots: Array) -> Array:
    """`pool` [L, B, H, P, S, D] with `rows` [T, H, P, D] in `slots` of `layer`."""
    blocks, heads, planes, block_size, lanes = pool.shape[1:]
    by_slot = pool[layer].transpose(0, 3, 1, 2, 4).reshape(blocks * block_size, heads, planes, lanes)
    slots = jnp.where(slots >= block_size, slots, blocks * block_size)
    by_slot = by_slot.at[slots].set(rows, mode="drop")
    by_block = by_slot.reshape(blocks, block_size, heads, planes, lanes).transpose(0, 2, 3, 1, 4)
    return pool.at[layer].set(by_block)

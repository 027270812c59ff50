"""A scatter into the array of all layers, indexed by layer, block and offset: in place where `kv` is donated.

Never through a `[blocks * block_size, ...]` view: XLA then copies the whole pool for one token. On CPU it does so
all the same for 8-bit floats, and under jax 0.10 for bfloat16, since it widens them to scatter (moving the bits as
integers costs a copy too): there, KV is best float32, float16 or int8.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxcache.kernels.layout import NULL_BLOCK, KVCache, KVLayout
from jaxcache.kernels.packing import pack_rows


def write_kv(
    kv: KVCache,
    layer: Int[Array, ""],
    k: Float[Array, "T H D"],
    v: Float[Array, "T H D"],
    slot_mapping: Int[Array, " T"],
) -> KVCache:
    """As `api.write_kv`."""
    layout = KVLayout.of(kv, k.shape[-1])
    rows, scales = pack_rows(k, v, layout, kv.data.dtype)
    num_blocks = kv.data.shape[1]
    block, offset = jnp.divmod(slot_mapping, layout.block_size)
    block = jnp.where(block > NULL_BLOCK, block, num_blocks)  # out of range: dropped
    data = kv.data.at[layer, block, :, :, offset].set(rows, mode="drop")
    if kv.scales is None or scales is None:
        return KVCache(data)
    lane = jnp.arange(2 * layout.num_kv_heads, dtype=offset.dtype)[None] * layout.block_size + offset[:, None]
    of_row = scales.reshape(lane.shape)
    return KVCache(data, kv.scales.at[layer, block[:, None], 0, lane].set(of_row, mode="drop"))

"""`write_kv`: one call for every backend."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxcache.kernels.checks import check_float, check_kv, check_layer
from jaxcache.kernels.dispatch import backend
from jaxcache.kernels.layout import KVCache

BACKENDS = {
    "reference": "jaxcache.kernels.kv_write.reference",
    "xla": "jaxcache.kernels.kv_write.xla",
}


def write_kv(
    kv: KVCache,
    layer: int | Int[Array, ""],
    k: Float[Array, "T H D"],
    v: Float[Array, "T H D"],
    slot_mapping: Int[Array, " T"],
    *,
    implementation: str | None = None,
) -> KVCache:
    """`kv` with row `t` of `k` and `v` in slot `slot_mapping[t]` of `layer`.

    A slot is `block_id * block_size + offset`. Rows whose slot is negative, beyond the array (`PAD_SLOT`) or
    in the null block are written nowhere. No two rows may name the same slot. K and V are converted to the
    array's dtype: narrower floats saturate, int8 gets a scale per token and head. Under jit, donate `kv`: the
    write is in place.

    `ValueError`: shapes or dtypes that do not go together, `layer` out of range, unknown `implementation`.
    """
    module = backend("write_kv", implementation, BACKENDS)
    check_float("k", k, rank=3)
    layout = check_kv(kv, k.shape[-1])
    if k.shape[1] != layout.num_kv_heads:
        raise ValueError(f"k {k.shape} has {k.shape[1]} heads, but the KV array has {layout.num_kv_heads}")
    if v.shape != k.shape or v.dtype != k.dtype:
        raise ValueError(f"v is {v.dtype}{v.shape}, but k is {k.dtype}{k.shape}: they must be alike")
    if slot_mapping.shape != k.shape[:1] or not jnp.issubdtype(slot_mapping.dtype, jnp.integer):
        raise ValueError(
            f"slot_mapping must be one integer per row of k, shape {k.shape[:1]}, "
            f"got {slot_mapping.dtype}{slot_mapping.shape}"
        )
    return module.write_kv(kv, check_layer(layer, kv), k, v, jnp.asarray(slot_mapping))

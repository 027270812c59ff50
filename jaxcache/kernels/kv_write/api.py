"""`write_kv`: one call for every backend."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxcache.kernels.checks import check_layer, check_rows
from jaxcache.kernels.dispatch import Implementation, backend
from jaxcache.kernels.layout import KVCache

BACKENDS = {
    "reference": "jaxcache.kernels.kv_write.reference",
    "xla": "jaxcache.kernels.kv_write.xla",
    "tpu": "jaxcache.kernels.kv_write.tpu",
    "gpu": "jaxcache.kernels.kv_write.gpu",
}


def write_kv(
    kv: KVCache,
    layer: int | Int[Array, ""],
    k: Float[Array, "T H D"],
    v: Float[Array, "T H D"],
    slot_mapping: Int[Array, " T"],
    *,
    implementation: Implementation = None,
) -> KVCache:
    """`kv` with row `t` of `k` and `v` in slot `slot_mapping[t]` of `layer`.

    A slot is `block_id * block_size + offset`. Rows whose slot is negative, beyond the array (`PAD_SLOT`) or
    in the null block are written nowhere. No two rows may name the same slot. K and V are converted to the
    array's dtype: narrower floats saturate, int8 gets a scale per token and head. Under jit, donate `kv`: the
    write is in place.

    `ValueError`: shapes or dtypes that do not go together, `layer` out of range, unknown `implementation`.
    """
    write = backend("write_kv", implementation, BACKENDS)
    check_rows(kv, k, v, slot_mapping)
    return write(kv, check_layer(layer, kv), k, v, jnp.asarray(slot_mapping))

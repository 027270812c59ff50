"""Writing KV on GPU: XLA's scatter, which is in place there for every KV dtype (`tests/aot/test_gpu.py`)."""

from typing import Any

from jaxtyping import Array, Float, Int

from jaxcache.kernels.kv_write import xla
from jaxcache.kernels.layout import KVCache
from jaxcache.kernels.tuning import GpuTuning


def write_kv(
    kv: KVCache,
    layer: Int[Array, ""],
    k: Float[Array, "T H D"],
    v: Float[Array, "T H D"],
    slot_mapping: Int[Array, " T"],
    *,
    tuning: GpuTuning,
    head_axis: str | None = None,
    interpret: Any = False,
) -> KVCache:
    """As `api.write_kv`. Nothing is tuned, XLA cuts a scatter over heads by itself and runs it anywhere."""
    del tuning, head_axis, interpret
    return xla.write_kv(kv, layer, k, v, slot_mapping)

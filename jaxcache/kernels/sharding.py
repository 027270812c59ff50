"""Tensor parallelism of the Pallas backends: XLA cannot cut a hand-written kernel, so it is told how.

Heads are independent, so every device runs the kernel on its own KV heads and their query heads.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from jaxcache.kernels.layout import KVCache


def over_heads(
    function: Callable[..., Any],
    axis: str | None,
    rows: tuple[Array, ...],
    kv: KVCache,
    sinks: Array | None,
    *alike: Any,
    returns: tuple[type, ...],
) -> Any:
    """`function(rows, kv, sinks, *alike)` with heads cut over mesh axis `axis` of the ambient mesh
    (`jax.set_mesh`).

    `rows`: arrays `[T, heads, head_dim]`; `sinks`: one per query head; `alike`: what all devices need as it is.
    `returns`: `Array` for rows, `KVCache`, or both. `axis` `None`: on one device.
    """
    if axis is None:
        return function(rows, kv, sinks, *alike)
    head = P(None, axis)
    cache = KVCache(P(None, None, axis), None if kv.scales is None else P(None, None, None, axis))  # pyright: ignore
    specs = (
        tuple(head for _ in rows),
        cache,
        None if sinks is None else P(axis),
        *(jax.tree.map(lambda _: P(), other) for other in alike),
    )
    out_specs = tuple(cache if kind is KVCache else head for kind in returns)
    mapped = jax.shard_map(
        function, in_specs=specs, out_specs=out_specs if len(returns) > 1 else out_specs[0], check_vma=False
    )
    return mapped(rows, kv, sinks, *alike)

"""`paged_attention`, and with the write before it `write_and_attend`: one call for every backend."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxcache.kernels.checks import check_float, check_kv, check_layer, check_rows
from jaxcache.kernels.dispatch import Implementation, Tpu, backend
from jaxcache.kernels.kv_write.api import write_kv
from jaxcache.kernels.layout import KVCache
from jaxcache.kernels.step import StepInputs

BACKENDS = {
    "reference": "jaxcache.kernels.paged_attention.reference",
    "xla": "jaxcache.kernels.paged_attention.xla",
    "tpu": "jaxcache.kernels.paged_attention.tpu",
    "gpu": "jaxcache.kernels.paged_attention.gpu",
}


def paged_attention(
    q: Float[Array, "T N D"],
    kv: KVCache,
    layer: int | Int[Array, ""],
    step: StepInputs,
    *,
    sm_scale: float | None = None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    implementation: Implementation = None,
) -> Float[Array, "T N D"]:
    """Causal attention of `T` query rows with `N` heads over the KV of `layer`, new rows already written.

    Query head `n` reads KV head `n // (N // num_kv_heads)`. A row at position `i` sees positions
    `max(0, i - sliding_window + 1) .. i` of its sequence, where its block table holds a block. Scores are
    `q k * sm_scale` (default `head_dim ** -0.5`), then `soft_cap * tanh(scores / soft_cap)`. `sinks` holds one
    more logit per head, which takes its share of the softmax and adds nothing to the output (gpt-oss).
    Softmax and sums are f32.

    Padding rows come out finite, and so do all rows whatever lies in slots that no row may see.

    `ValueError`: shapes or dtypes that do not go together, `layer` out of range, unknown `implementation`.
    """
    attend = backend("paged_attention", implementation, BACKENDS)
    options = _checked(q, kv, step, sm_scale, sliding_window, soft_cap, sinks)
    return attend(q, kv, check_layer(layer, kv), jax.tree.map(jnp.asarray, step), **options)


def write_and_attend(
    q: Float[Array, "T N D"],
    k: Float[Array, "R H D"],
    v: Float[Array, "R H D"],
    kv: KVCache,
    layer: int | Int[Array, ""],
    step: StepInputs,
    *,
    sm_scale: float | None = None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    implementation: Implementation = None,
) -> tuple[Float[Array, "T N D"], KVCache]:
    """`write_kv` of the step's new rows (`R` is `T`), then `paged_attention`, in one call where a backend has one.

    On TPU the attention kernel has a decode's last block in fast memory anyway and writes the new row from there.
    In exchange, a block that one decode of the step writes may not be read by another decode of the same step:
    name such a block only when the step is done. Slots of decodes follow from the block table and `seq_lens`.
    """
    if not (implementation == "tpu" or isinstance(implementation, Tpu)):
        kv = write_kv(kv, layer, k, v, step.slot_mapping, implementation=implementation)
        out = paged_attention(
            q,
            kv,
            layer,
            step,
            sm_scale=sm_scale,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
            sinks=sinks,
            implementation=implementation,
        )
        return out, kv
    fused = backend("write_and_attend", implementation, {"tpu": BACKENDS["tpu"]})
    options = _checked(q, kv, step, sm_scale, sliding_window, soft_cap, sinks)
    check_rows(kv, k, v, step.slot_mapping)
    if q.shape[0] != k.shape[0]:
        raise ValueError(f"q has {q.shape[0]} rows and k has {k.shape[0]}: they must be those of the step")
    return fused(q, k, v, kv, check_layer(layer, kv), jax.tree.map(jnp.asarray, step), **options)


def _checked(
    q: Array,
    kv: KVCache,
    step: StepInputs,
    sm_scale: float | None,
    sliding_window: int | None,
    soft_cap: float | None,
    sinks: Array | None,
) -> dict[str, Any]:
    """The options of attention, once everything goes together."""
    check_float("q", q, rank=3)
    layout = check_kv(kv, q.shape[-1])
    if q.shape[1] % layout.num_kv_heads:
        raise ValueError(f"q {q.shape}: {q.shape[1]} heads are no multiple of {layout.num_kv_heads} KV heads")
    _check_step(q.shape[0], step)
    scale = _positive("sm_scale", sm_scale)
    if sinks is not None and sinks.shape != q.shape[1:2]:
        raise ValueError(f"sinks must hold one logit per query head, shape {q.shape[1:2]}, got {sinks.shape}")
    return {
        "sm_scale": layout.head_dim**-0.5 if scale is None else scale,
        "sliding_window": _window(sliding_window),
        "soft_cap": _positive("soft_cap", soft_cap),
        "sinks": sinks,
    }


def _positive(name: str, value: float | None) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{name} must be a positive finite number or None, got {value!r}")
    return float(value)


def _window(value: int | None) -> int | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value <= 0):
        raise ValueError(f"sliding_window must be a positive number of tokens or None, got {value!r}")
    return value


def _check_step(rows: int, step: StepInputs) -> None:
    if step.block_tables.ndim != 2:
        raise ValueError(f"step.block_tables must be [sequences, blocks], got shape {step.block_tables.shape}")
    sequences = step.block_tables.shape[0]
    tiles = step.tiles.seq.shape
    wanted = {
        "positions": (step.positions, (rows,)),
        "seq_lens": (step.seq_lens, (sequences,)),
        "query_start": (step.query_start, (sequences + 1,)),
        **{f"tiles.{name}": (getattr(step.tiles, name), tiles) for name in ("row", "pos", "kv_end")},
    }
    for name, (array, shape) in wanted.items():
        if array.shape != shape:
            raise ValueError(
                f"step.{name} must have shape {shape} for {rows} rows of q and {sequences} block tables, "
                f"got {array.shape}"
            )

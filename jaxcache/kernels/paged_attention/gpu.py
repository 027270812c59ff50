"""Paged attention on GPU: tiles cut to size, a Pallas kernel each for prefill and decode, and the splits merged.

Sequences with one new row go through the decode kernel, all others through the prefill kernel; a step without
tiles has only decodes.
"""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxcache.kernels.layout import NULL_BLOCK, KVCache, KVLayout
from jaxcache.kernels.packing import product_dtype
from jaxcache.kernels.paged_attention import gpu_kernel
from jaxcache.kernels.paged_attention.gpu_kernel import Operands, Plan
from jaxcache.kernels.paged_attention.tiles import cut_tiles
from jaxcache.kernels.sharding import over_heads
from jaxcache.kernels.step import StepInputs
from jaxcache.kernels.tuning import GpuTuning

LOG2_E = math.log2(math.e)
MIN_SIDE = 16
"""The smallest side of a matrix product."""

SIZED_FOR_LANES = 128
"""Tile sizes on file are for heads of up to 128 in 16 bits."""

F32_SHARE = 4
"""By how much tiles are smaller where products are f32: no tensor core takes them unrounded, so their operands lie
in registers."""

MAX_HEAD_DIM = 256


def paged_attention(
    q: Float[Array, "T N D"],
    kv: KVCache,
    layer: Int[Array, ""],
    step: StepInputs,
    *,
    sm_scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    sinks: Float[Array, " N"] | None,
    tuning: GpuTuning,
    head_axis: str | None = None,
    interpret: bool = False,
) -> Float[Array, "T N D"]:
    """As `api.paged_attention`; rows that see nothing are zero."""
    scale = sm_scale * LOG2_E if soft_cap is None else sm_scale / soft_cap
    cap = None if soft_cap is None else soft_cap * LOG2_E

    def attend(rows, kv, sinks, layer, step):
        (q,) = rows
        layout = KVLayout.of(kv, q.shape[-1])
        check_supported(kv, layout)
        tables = step.block_tables
        operands = Operands(
            layer=layer.reshape(1),
            tables=jnp.where((tables > NULL_BLOCK) & (tables < kv.data.shape[1]), tables, NULL_BLOCK),
            q=q,
            data=kv.data,
            scales=kv.scales,
            sinks=None if sinks is None else sinks.astype(jnp.float32) * LOG2_E,
        )

        def plan(rows: int, chunk: int, warps: int, stages: int) -> Plan:
            dtype = product_dtype(q, kv)
            group = q.shape[1] // layout.num_kv_heads
            return _fitted(Plan(layout, group, rows, chunk, dtype, scale, cap, sliding_window, warps, stages))

        return _decode(_prefill(step, operands, plan, tuning, interpret), step, operands, plan, tuning, interpret)

    return over_heads(attend, head_axis, (q,), kv, sinks, layer, step, returns=(Array,))


def _prefill(step: StepInputs, operands: Operands, make_plan: Any, tuning: GpuTuning, interpret: bool) -> Array:
    """Rows of the tiles; the other rows are zero."""
    q = operands.q
    out = jnp.zeros_like(q)
    if not step.tiles.seq.size:
        return out
    plan = make_plan(tuning.prefill_rows, tuning.prefill_chunk, tuning.prefill_warps, tuning.prefill_stages)
    tiles = cut_tiles(step.tiles, plan.tile_tokens, q.shape[0])
    return gpu_kernel.prefill(tiles, operands, out, plan, interpret=interpret)


def _decode(
    out: Array, step: StepInputs, operands: Operands, make_plan: Any, tuning: GpuTuning, interpret: bool
) -> Array:
    """`out` with the rows of the sequences that have one new row."""
    plan = make_plan(MIN_SIDE, tuning.decode_chunk, tuning.decode_warps, tuning.decode_stages)
    alone = jnp.diff(step.query_start) == 1
    row = jnp.where(alone, step.query_start[:-1], out.shape[0])
    end = jnp.where(alone, step.seq_lens, 0)
    splits = num_splits(step.block_tables.shape, plan, tuning)
    parts = gpu_kernel.decode(
        row, end, operands, plan, splits=splits, split_tokens=tuning.split_tokens, interpret=interpret
    )
    return out.at[row].set(gpu_kernel.merge(parts).astype(out.dtype), mode="drop")


def _fitted(plan: Plan) -> Plan:
    """`plan` with as many rows and keys as head_dim and dtype leave room for; a group of heads at least."""
    share = max(1, plan.lanes // SIZED_FOR_LANES) * (F32_SHARE if plan.dtype == jnp.float32 else 1)
    rows = max(plan.rows // share, MIN_SIDE, 1 << (plan.group - 1).bit_length())
    return dataclasses.replace(plan, rows=rows, chunk=max(plan.chunk // share, MIN_SIDE))


def num_splits(table_shape: tuple[int, ...], plan: Plan, tuning: GpuTuning) -> int:
    """Splits per sequence: enough programs for the device, none with fewer than `split_tokens` keys."""
    sequences, width = table_shape
    tokens = width * plan.layout.block_size
    if plan.window is not None:
        tokens = min(tokens, plan.window)
    wanted = -(-tuning.decode_programs // (sequences * plan.layout.num_kv_heads))
    return max(1, min(wanted, -(-tokens // tuning.split_tokens)))


def check_supported(kv: KVCache, layout: KVLayout) -> None:
    """`ValueError` where the kernels cannot read `kv`."""
    if layout.head_dim > MAX_HEAD_DIM:
        raise ValueError(f"the GPU kernel takes head dims up to {MAX_HEAD_DIM}, got {layout.head_dim}")
    if kv.data.dtype.itemsize == 1 and 2**31 < kv.data.size <= 2**32:
        raise ValueError(
            f"a KV array of {kv.data.size} bytes in {kv.data.dtype.name}: between 2 and 4 GiB, Pallas's Triton "
            "backend addresses bytes with 32 signed bits. Choose more or fewer blocks, or a 16-bit KV dtype"
        )

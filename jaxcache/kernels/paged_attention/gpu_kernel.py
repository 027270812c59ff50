"""The GPU kernels, for Pallas's Triton backend: one program is one KV head and a tile of query rows.

Nothing is packed outside: a program gathers its rows of q, walks its keys in chunks, each row of K and V found
through the block table, and scatters its output. So block sizes, head counts and head dims are free; what Triton
wants as powers of two (rows, keys, lanes) is padded here, and the padding never loaded.

Prefill has a program per tile and KV head. Decode cuts each sequence's keys into `splits` programs, which leave
unnormalised sums, for `merge` to put together: one sequence alone would otherwise keep one processor busy.
"""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Int

from jaxcache.kernels.layout import NULL_BLOCK, KVLayout
from jaxcache.kernels.step import Tiles

MASKED = -1e30
"""Where the running maximum starts: below any score, and finite, so that a row that sees nothing stays at zero."""

CONTRACT_LANES = (((1,), (1,)), ((), ()))  # a @ b.T
CONTRACT_KEYS = (((1,), (0,)), ((), ()))  # a @ b


@dataclass(frozen=True)
class Plan:
    """What is fixed when a kernel is compiled. Scores are in base 2."""

    layout: KVLayout
    group: int
    """Query heads per KV head."""
    rows: int
    """Query rows per program, head by head within a token: a power of two, at least 16 and `group`."""
    chunk: int
    """Keys at a time: a power of two, at least 16."""
    dtype: Any
    """Of the operands of matrix products, which sum in f32."""
    scale: float
    """From products to scores in base 2; with a soft cap, to its argument."""
    cap: float | None
    window: int | None
    warps: int
    stages: int

    @property
    def lanes(self) -> int:
        """head_dim as Triton takes it."""
        return max(16, pl.next_power_of_2(self.layout.head_dim))

    @property
    def tile_tokens(self) -> int:
        return self.rows // self.group


class Operands(NamedTuple):
    """What both kernels read, as refs. `N` query heads."""

    layer: Any  # [1] int32
    tables: Any  # [S, W] int32; ids outside the array are 0
    q: Any  # [T, N, D]
    data: Any  # [layers, blocks, H, P, S, L]
    scales: Any  # [layers, blocks, 1, H*2*S] f32, or None
    sinks: Any  # [N] f32 in base 2, or None


class _Rows(NamedTuple):
    """A program's query rows, `R` of them; those that are none lie beyond the arrays and are masked."""

    token: Any  # [R] row of q
    head: Any  # [R] query head
    position: Any  # [R]
    real: Any  # [R] bool


class _Softmax(NamedTuple):
    peak: Any  # [R] f32
    total: Any  # [R] f32
    out: Any  # [R, lanes] f32


def _rows(plan: Plan, tokens: int, kv_head: Any, first_token: Any, first_position: Any, end: Any) -> _Rows:
    """The rows of positions `first_position` to `end`, as many as a program has; q has `tokens` rows."""
    row = jnp.arange(plan.rows, dtype=jnp.int32)
    nth, head = lax.div(row, jnp.int32(plan.group)), lax.rem(row, jnp.int32(plan.group))
    position = first_position + nth
    real = (position < end) & (nth < plan.tile_tokens)
    return _Rows(jnp.where(real, first_token + nth, tokens), kv_head * plan.group + head, position, real)


def _at(plan: Plan, rows: _Rows) -> tuple[tuple[Any, Any, Any], Any]:
    """Where the rows lie in a `[T, N, D]` array, and which of the lanes do."""
    lane = jnp.arange(plan.lanes, dtype=jnp.int32)[None]
    mask = rows.real[:, None] & (lane < plan.layout.head_dim)
    return (rows.token[:, None], rows.head[:, None], lane), mask


def _load_rows(plan: Plan, ref: Any, rows: _Rows) -> Any:
    at, mask = _at(plan, rows)
    return triton.load(ref.at[at], mask=mask, other=0.0).astype(plan.dtype)


def _start(plan: Plan, operands: Operands, rows: _Rows) -> _Softmax:
    """Nothing seen yet but the sinks."""
    peak, total = jnp.full((plan.rows,), MASKED, jnp.float32), jnp.zeros((plan.rows,), jnp.float32)
    if operands.sinks is not None:
        peak = triton.load(operands.sinks.at[rows.head], mask=rows.real, other=0.0)
        total = jnp.ones_like(total)
    return _Softmax(peak, total, jnp.zeros((plan.rows, plan.lanes), jnp.float32))


def _walk(
    plan: Plan,
    operands: Operands,
    sequence: Any,
    kv_head: Any,
    rows: _Rows,
    keys: tuple[Any, Any],
    state: _Softmax,
) -> _Softmax:
    """`state` once the rows have seen positions `keys[0]` to `keys[1]` of the sequence, as far as they may."""
    start, end = keys
    layer = operands.layer[0]
    q = _load_rows(plan, operands.q, rows)
    layout, block_size = plan.layout, jnp.int32(plan.layout.block_size)
    lane = jnp.arange(plan.lanes, dtype=jnp.int32)[None]
    values_at = layout.head_dim if layout.side_by_side else 0

    def turn(nth, state):
        at = start + nth * plan.chunk + jnp.arange(plan.chunk, dtype=jnp.int32)
        live = at < end
        block = triton.load(
            operands.tables.at[sequence, lax.div(at, block_size)], mask=live, other=jnp.int32(NULL_BLOCK)
        )
        live &= block != NULL_BLOCK
        slot = lax.rem(at, block_size)
        mask = live[:, None] & (lane < layout.head_dim)

        def tokens(plane, lane):
            """Slots that no row may see are not read: they may hold NaN."""
            where = operands.data.at[layer, block[:, None], kv_head, plane, slot[:, None], lane]
            return triton.load(where, mask=mask, other=jnp.zeros((), operands.data.dtype)).astype(plan.dtype)

        def per_key(value):
            lane = (2 * kv_head + value) * plan.layout.block_size + slot
            return triton.load(operands.scales.at[layer, block, 0, lane], mask=live, other=0.0)

        scores = _dot(q, tokens(0, lane), CONTRACT_LANES) * plan.scale
        if operands.scales is not None:
            scores *= per_key(0)[None]
        if plan.cap is not None:
            scores = plan.cap * jnp.tanh(scores)
        scores = jnp.where(_mask(plan, rows, at, live), scores, -jnp.inf)
        peak = jnp.maximum(state.peak, jnp.max(scores, axis=1))
        weights = jnp.exp2(scores - peak[:, None])
        kept = jnp.exp2(state.peak - peak)
        total = state.total * kept + jnp.sum(weights, axis=1)
        if operands.scales is not None:
            weights *= per_key(1)[None]
        values = _dot(weights.astype(plan.dtype), tokens(layout.planes - 1, values_at + lane), CONTRACT_KEYS)
        return _Softmax(peak, total, state.out * kept[:, None] + values)

    return lax.fori_loop(0, lax.div(end - start + (plan.chunk - 1), jnp.int32(plan.chunk)), turn, state)


def _mask(plan: Plan, rows: _Rows, at: Any, live: Any) -> Any:
    """Which keys (columns) each row sees."""
    sees = live[None] & (at[None] <= rows.position[:, None])
    return sees if plan.window is None else sees & (at[None] > rows.position[:, None] - plan.window)


def _dot(a: Any, b: Any, contract: Any) -> Any:
    """Summed in f32; f32 operands are not rounded on the way."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return lax.dot_general(a, b, contract, precision=precision, preferred_element_type=jnp.float32)


def _oldest_seen(plan: Plan, position: Any) -> Any:
    return jnp.int32(0) if plan.window is None else jnp.maximum(position - plan.window + 1, 0)


# ---- prefill


def _prefill_kernel(tiles: Tiles, operands: Operands, _: Any, out: Any, *, plan: Plan) -> None:
    tile, kv_head = pl.program_id(0), pl.program_id(1)
    end = tiles.kv_end[tile]

    @pl.when(end > 0)
    def _():
        position = tiles.pos[tile]
        rows = _rows(plan, operands.q.shape[0], kv_head, tiles.row[tile], position, end)
        keys = (_oldest_seen(plan, position), end)
        state = _start(plan, operands, rows)
        state = _walk(plan, operands, tiles.seq[tile], kv_head, rows, keys, state)
        value = state.out / jnp.maximum(state.total, jnp.finfo(jnp.float32).tiny)[:, None]
        at, mask = _at(plan, rows)
        triton.store(out.at[at], value.astype(out.dtype), mask=mask)


def prefill(
    tiles: Tiles, operands: Operands, out: Float[Array, "T N D"], plan: Plan, *, interpret: bool
) -> Float[Array, "T N D"]:
    """`out` with the rows of `tiles` (each of at most `plan.tile_tokens` rows) in it, in place."""
    given = (tiles, operands, out)
    return pl.pallas_call(
        functools.partial(_prefill_kernel, plan=plan),
        grid=(tiles.seq.shape[0], plan.layout.num_kv_heads),
        out_shape=jax.ShapeDtypeStruct(out.shape, out.dtype),
        input_output_aliases={len(jax.tree.leaves(given)) - 1: 0},
        compiler_params=triton.CompilerParams(num_warps=plan.warps, num_stages=plan.stages),
        interpret=interpret,
        name="paged_attention_prefill",
    )(*given)


# ---- decode


class Parts(NamedTuple):
    """Softmax over each split of each row's keys, unnormalised; `out` is rubbish where `total` is 0."""

    peak: Float[Array, "C S N"]
    total: Float[Array, "C S N"]
    out: Float[Array, "C S N D"]


def _decode_kernel(
    row: Any, end: Any, operands: Operands, peak: Any, total: Any, out: Any, *, plan: Plan, split_tokens: int
) -> None:
    sequence, kv_head, split = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    splits, end = peak.shape[0], end[sequence]
    rows = _rows(plan, operands.q.shape[0], kv_head, row[sequence], end - 1, end)
    first = _oldest_seen(plan, end - 1)
    each = jnp.maximum(lax.div(end - first + (splits - 1), jnp.int32(splits)), split_tokens)
    start = first + split * each
    stop = jnp.minimum(start + each, end)
    own_rows = rows._replace(token=jnp.where(rows.real, sequence, peak.shape[1]))

    def write(state: _Softmax) -> None:
        for ref, value in ((peak, state.peak), (total, state.total)):
            triton.store(ref.at[split, own_rows.token, rows.head], value, mask=rows.real)
        at, mask = _at(plan, own_rows)
        triton.store(out.at[(split, *at)], state.out, mask=mask)

    state = _start(plan, operands, rows)
    if operands.sinks is not None:  # counted once
        state = state._replace(
            peak=jnp.where(split == 0, state.peak, MASKED), total=jnp.where(split == 0, state.total, 0.0)
        )

    @pl.when(start < stop)
    def _():
        write(_walk(plan, operands, sequence, kv_head, rows, (start, stop), state))

    @pl.when(start >= stop)
    def _():
        triton.store(total.at[split, own_rows.token, rows.head], jnp.zeros_like(state.total), mask=rows.real)


def decode(
    row: Int[Array, " S"],
    end: Int[Array, " S"],
    operands: Operands,
    plan: Plan,
    *,
    splits: int,
    split_tokens: int,
    interpret: bool,
) -> Parts:
    """Row `row[s]` of q over the keys of sequence `s` up to `end[s]`; 0: the sequence is none."""
    heads, head_dim = operands.q.shape[1:]
    shape = (splits, row.shape[0], heads)
    stats = jax.ShapeDtypeStruct(shape, jnp.float32)
    parts = pl.pallas_call(
        functools.partial(_decode_kernel, plan=plan, split_tokens=split_tokens),
        grid=(row.shape[0], plan.layout.num_kv_heads, splits),
        out_shape=(stats, stats, jax.ShapeDtypeStruct((*shape, head_dim), jnp.float32)),
        compiler_params=triton.CompilerParams(num_warps=plan.warps, num_stages=plan.stages),
        interpret=interpret,
        name="paged_attention_decode",
    )(row, end, operands)
    return Parts(*parts)


def merge(parts: Parts) -> Float[Array, "S N D"]:
    """The splits as one softmax: each weighted by its share of the sum under the common maximum."""
    some = parts.total > 0
    peaks = jnp.where(some, parts.peak, MASKED)
    share = jnp.where(some, jnp.exp2(peaks - jnp.max(peaks, axis=0, keepdims=True)), 0.0)
    total = jnp.sum(share * jnp.where(some, parts.total, 0.0), axis=0)
    out = jnp.sum(jnp.where(some[..., None], parts.out, 0.0) * share[..., None], axis=0)
    return out / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)[..., None]

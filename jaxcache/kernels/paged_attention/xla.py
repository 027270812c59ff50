"""Flash attention in plain XLA operations: KV in groups of blocks, softmax statistics carried along.

Two parts share the arithmetic. Prefill goes through the tile list, one tile after another, and reads only the
groups that the tile's rows can see. Decode takes all sequences with one new row together, each from the start of
its own window, as many turns as the longest needs. A part that a step has no work for takes no turn. Blocks that
many decodes begin with (`step.shared`) are read once for all of them, before each goes on with its own.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxcache.kernels.layout import NULL_BLOCK, KVCache, KVLayout
from jaxcache.kernels.packing import product_dtype, unpack_blocks
from jaxcache.kernels.step import SharedRuns, StepInputs, Tiles

GROUP_TOKENS = 128
"""KV positions taken at a time. 256 take 2 to 5% more CPU time: more is read beyond the end of a sequence."""
DECODE_TOKENS = 1 << 14
"""KV positions that all decodes together take at a time, at most: fewer each where they are more than 128."""
TILE_ROWS = 128
"""Query rows taken at a time: longer tiles are cut."""
SMALLEST_PEAK = -1e30
"""Where the running maximum starts: below any score, and finite, so that a row that sees nothing stays at zero."""


class Scoring(NamedTuple):
    """From the product of q and k to a weight."""

    sm_scale: float
    sliding_window: int | None
    soft_cap: float | None
    sinks: Float[Array, "H G"] | None
    """Per KV head, its group of query heads."""


class Source(NamedTuple):
    """Where K and V come from."""

    kv: KVCache
    layer: Int[Array, ""]
    layout: KVLayout
    dtype: jnp.dtype
    """Of q, k, v and the weights in the matrix products, which sum in f32."""


class Queries(NamedTuple):
    """`B` runs of `R` query rows, one run of one sequence; a row is a query head of a token."""

    rows: Float[Array, "B H R D"]
    positions: Int[Array, "B R"]
    first: Int[Array, " B"]
    """The oldest position that any row of the run sees."""
    end: Int[Array, " B"]
    """One past the newest."""
    tables: Int[Array, "B W"]
    """Block ids."""


class Softmax(NamedTuple):
    """What is known of each row's softmax so far; f32."""

    peak: Float[Array, "B H R"]
    total: Float[Array, "B H R"]
    out: Float[Array, "B H R D"]


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
) -> Float[Array, "T N D"]:
    """As `api.paged_attention`; rows that see nothing are zero."""
    tokens, heads, head_dim = q.shape
    layout = KVLayout.of(kv, head_dim)
    by_kv_head = (layout.num_kv_heads, heads // layout.num_kv_heads)
    source = Source(kv, layer, layout, product_dtype(q, kv))
    if sinks is not None:
        sinks = sinks.astype(jnp.float32).reshape(by_kv_head)
    scoring = Scoring(sm_scale, sliding_window, soft_cap, sinks)

    grouped = q.astype(source.dtype).reshape(tokens, *by_kv_head, head_dim)
    if step.tiles.seq.size:
        out = _prefill(grouped, source, step.block_tables, step.tiles, scoring)
    else:
        out = jnp.zeros(grouped.shape, jnp.float32)
    return _decode(out, grouped, source, step, scoring).reshape(q.shape).astype(q.dtype)


def _prefill(
    q: Float[Array, "T H G D"], source: Source, tables: Int[Array, "S W"], tiles: Tiles, scoring: Scoring
) -> Float[Array, "T H G D"]:
    """Rows of the tiles; the other rows are zero."""
    tokens, kv_heads, per_kv_head, head_dim = q.shape
    size = min(TILE_ROWS, tokens)
    span = size * per_kv_head
    # Heads first, so that a tile is one contiguous slice per head; `size` rows more, so that no slice is clamped.
    by_head = q.transpose(1, 0, 2, 3).reshape(kv_heads, tokens * per_kv_head, head_dim)
    by_head = jnp.pad(by_head, ((0, 0), (0, span), (0, 0)))
    token_of_row = jnp.arange(span, dtype=jnp.int32) // per_kv_head
    pieces = -(-jnp.maximum(tiles.kv_end - tiles.pos, 0) // size)
    ends = jnp.cumsum(pieces)

    def piece(nth: Int[Array, ""], out: Float[Array, "H R D"]) -> Float[Array, "H R D"]:
        tile = jnp.searchsorted(ends, nth, side="right")
        skipped = (nth - ends[tile] + pieces[tile]) * size
        start = (0, (tiles.row[tile] + skipped) * per_kv_head, 0)
        first_row = tiles.pos[tile] + skipped
        positions = first_row + token_of_row
        end = jnp.minimum(first_row + size, tiles.kv_end[tile])
        rows = lax.dynamic_slice(by_head, start, (kv_heads, span, head_dim))
        first = _oldest_seen(first_row, scoring)
        queries = Queries(rows[None], positions[None], first[None], end[None], tables[tiles.seq[tile]][None])
        new = _normalised(_walk(queries, source, scoring, GROUP_TOKENS, _nothing_seen(queries, scoring)))[0]
        kept = lax.dynamic_slice(out, start, new.shape)
        return lax.dynamic_update_slice(out, jnp.where((positions < end)[None, :, None], new, kept), start)

    out = lax.fori_loop(0, ends[-1], piece, jnp.zeros(by_head.shape, jnp.float32))
    out = out[:, : tokens * per_kv_head].reshape(kv_heads, tokens, per_kv_head, head_dim)
    return out.transpose(1, 0, 2, 3)


def _decode(
    out: Float[Array, "T H G D"],
    q: Float[Array, "T H G D"],
    source: Source,
    step: StepInputs,
    scoring: Scoring,
) -> Float[Array, "T H G D"]:
    """`out` with the rows of the sequences that have one new row."""
    tokens = q.shape[0]
    row = step.query_start[:-1]
    alone = jnp.diff(step.query_start) == 1
    end = jnp.where(alone, step.seq_lens, 0)
    queries = Queries(
        rows=q[jnp.where(alone, row, 0)],
        positions=jnp.broadcast_to((end - 1)[:, None], (end.size, q.shape[2])),
        first=_oldest_seen(end - 1, scoring),
        end=end,
        tables=step.block_tables,
    )
    state = _nothing_seen(queries, scoring)
    if step.shared is not None:
        queries, state = _walk_shared(queries, source, scoring, step.shared, state)
    new = _normalised(_walk(queries, source, scoring, min(GROUP_TOKENS, max(1, DECODE_TOKENS // end.size)), state))
    return out.at[jnp.where(alone, row, tokens)].set(new, mode="drop")


def _oldest_seen(position: Int[Array, "..."], scoring: Scoring) -> Int[Array, "..."]:
    if scoring.sliding_window is None:
        return jnp.zeros_like(position)
    return jnp.maximum(position - scoring.sliding_window + 1, 0)


def _walk_shared(
    queries: Queries, source: Source, scoring: Scoring, shared: SharedRuns, state: Softmax
) -> tuple[Queries, Softmax]:
    """`state` once each run's members have seen it, and what is left for each sequence to see.

    The rows of all sequences stand side by side as if they were one's, so that a run is read once; whoever is no
    member sees nothing. Each row's statistics go on from one part to the next, so that there is nothing to merge.
    """
    sequences, heads, rows, _ = queries.rows.shape

    def side_by_side(x: Array) -> Array:
        return jnp.moveaxis(x, 0, 1).reshape(1, heads, sequences * rows, *x.shape[3:])

    def run(nth: Int[Array, ""], state: Softmax) -> Softmax:
        member = (shared.run == nth) & (queries.end > 0)
        one = Queries(
            rows=together,
            positions=jnp.where(member[:, None], queries.positions, -1).reshape(1, -1),
            first=jnp.min(jnp.where(member, queries.first, shared.lengths[nth]))[None],
            end=shared.lengths[nth][None],
            tables=shared.tables[nth][None],
        )
        return _walk(one, source, scoring, GROUP_TOKENS, state)

    together = side_by_side(queries.rows)
    runs = jnp.sum(shared.lengths > 0, dtype=jnp.int32)
    seen = lax.fori_loop(0, runs, run, Softmax(*map(side_by_side, state)))
    apart = [jnp.moveaxis(x[0].reshape(heads, sequences, rows, *x.shape[3:]), 1, 0) for x in seen]
    skipped = shared.lengths.at[shared.run].get(mode="fill", fill_value=0)
    return queries._replace(first=jnp.maximum(queries.first, skipped)), Softmax(*apart)


def _walk(queries: Queries, source: Source, scoring: Scoring, group_tokens: int, state: Softmax) -> Softmax:
    """`state` once all rows have seen all they may, about `group_tokens` KV positions a turn."""
    block_size = source.layout.block_size
    width = min(max(group_tokens // block_size, 1), queries.tables.shape[1])
    span = width * block_size
    held = (queries.tables > NULL_BLOCK) & (queries.tables < source.kv.data.shape[1])
    tables = jnp.where(held, queries.tables, NULL_BLOCK)
    tables = jnp.pad(tables, ((0, 0), (0, -tables.shape[1] % width)), constant_values=NULL_BLOCK)
    tables = tables.reshape(tables.shape[0], -1, width)
    first_group = queries.first // span
    turns = jnp.max(-(-queries.end // span) - first_group)

    def turn(nth: Int[Array, ""], state: Softmax) -> Softmax:
        group = first_group + nth
        inside = jnp.minimum(group, tables.shape[1] - 1)  # runs already done: nothing is live there
        ids = jnp.take_along_axis(tables, inside[:, None, None], axis=1, mode="promise_in_bounds")[:, 0]
        at = (group * span)[:, None] + jnp.arange(span, dtype=jnp.int32)[None, :]
        live = (at >= queries.first[:, None]) & (at < queries.end[:, None])
        live &= jnp.repeat(ids != NULL_BLOCK, block_size, axis=1)
        k, v = _fetch(source, ids)
        # A slot that nobody may read may hold NaN, which no weight of zero removes.
        v = jnp.where(live[:, None, :, None], v, jnp.zeros((), v.dtype))
        return _add_group(state, queries, k, v, at, live, scoring)

    return lax.fori_loop(0, turns, turn, state)


def _normalised(state: Softmax) -> Float[Array, "B H R D"]:
    return state.out / jnp.maximum(state.total, jnp.finfo(jnp.float32).tiny)[..., None]


def _nothing_seen(queries: Queries, scoring: Scoring) -> Softmax:
    shape = queries.rows.shape
    out = jnp.zeros(shape, jnp.float32)
    if scoring.sinks is None:
        return Softmax(jnp.full(shape[:3], SMALLEST_PEAK), jnp.zeros(shape[:3], jnp.float32), out)
    per_row = jnp.tile(scoring.sinks, (1, shape[2] // scoring.sinks.shape[1]))
    return Softmax(jnp.broadcast_to(per_row, shape[:3]), jnp.ones(shape[:3], jnp.float32), out)


def _fetch(source: Source, ids: Int[Array, "B G"]) -> tuple[Float[Array, "B H K D"], Float[Array, "B H K D"]]:
    """K and V of the blocks. Indexes the array of all layers: slicing the layer off first would copy it."""
    blocks = source.kv.data.at[source.layer, ids].get(mode="promise_in_bounds")
    scales = source.kv.scales
    if scales is not None:
        scales = scales.at[source.layer, ids].get(mode="promise_in_bounds")
    return unpack_blocks(blocks, scales, source.layout, source.dtype)


def _add_group(
    state: Softmax,
    queries: Queries,
    k: Float[Array, "B H K D"],
    v: Float[Array, "B H K D"],
    at: Int[Array, "B K"],
    live: Bool[Array, "B K"],
    scoring: Scoring,
) -> Softmax:
    """`state` once the rows have seen the KV positions `at`, as far as `live` and causal."""
    scores = _product(queries.rows, k, contract=(3, 3)) * scoring.sm_scale
    if scoring.soft_cap is not None:
        scores = scoring.soft_cap * jnp.tanh(scores / scoring.soft_cap)
    sees = live[:, None, :] & (at[:, None, :] <= queries.positions[:, :, None])
    if scoring.sliding_window is not None:
        sees &= at[:, None, :] > queries.positions[:, :, None] - scoring.sliding_window
    scores = jnp.where(sees[:, None], scores, -jnp.inf)
    peak = jnp.maximum(state.peak, jnp.max(scores, axis=-1))
    weights = jnp.exp(scores - peak[..., None])
    kept = jnp.exp(state.peak - peak)
    return Softmax(
        peak,
        state.total * kept + jnp.sum(weights, axis=-1),
        state.out * kept[..., None] + _product(weights.astype(v.dtype), v, contract=(3, 2)),
    )


def _product(a: Float[Array, "B H R X"], b: Array, contract: tuple[int, int]) -> Float[Array, "B H R Y"]:
    """Head by head, summed in f32; f32 operands are not rounded on the way."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT
    return lax.dot_general(
        a,
        b,
        (((contract[0],), (contract[1],)), ((0, 1), (0, 1))),
        precision=precision,
        preferred_element_type=jnp.float32,
    )

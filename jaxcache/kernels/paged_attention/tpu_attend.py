"""The arithmetic of one KV chunk: scores, online softmax and weighted values, for all heads, in VMEM.

Rows of a head's tile lie `[group, token]`: `R = group * tile_rows` in prefill; in decode `group`, padded to a
sublane. Scores come in base 2: whoever packs q folds `log2(e)` in, so that `exp2` does for `exp`.

The running maximum and sum keep 128 equal or partial lanes instead of one number per row: a slice of lane 0 would
cost a broadcast at each use, more than any other single choice here.
"""

from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

try:
    from jax.experimental.pallas.tpu import reciprocal  # pyright: ignore[reportAttributeAccessIssue]
except ImportError:  # before jax 0.12
    from jax.experimental.pallas import reciprocal  # pyright: ignore[reportAttributeAccessIssue]

from jaxcache.kernels.paged_attention.tpu_scales import ChunkScales

LANES = 128
MAX_UNROLLED_HEADS = 8
MASKED = -1e30
"""Below any score, yet finite: `MASKED - MASKED` is 0. A row whose first chunks are masked in full sums rubbish,
which its first real score then scales by `exp2(MASKED - score)` = 0."""

CONTRACT_LANES = (((1,), (1,)), ((), ()))  # a @ b.T
CONTRACT_ROWS = (((1,), (0,)), ((), ()))  # a @ b


class SoftmaxRefs(NamedTuple):
    """Scratch in f32: what a tile has seen so far."""

    peak: Any  # [H, R, LANES] running maximum, all lanes equal
    total: Any  # [H, R, LANES] running sum: in parts over the lanes, or whole in each (row_sum "matmul")
    out: Any  # [H, R, L] running weighted values


@dataclass(frozen=True)
class Visible:
    """Which keys of a chunk a row may see. `None` in its place: all of them."""

    first_key: Any
    """Position of the chunk's first key."""
    first_row: Any
    """Position of the tile's first query row."""
    kv_end: Any
    tile_rows: int
    window: int | None

    def mask(self, shape: tuple[int, ...]) -> jax.Array:
        """Which keys (lanes) each row sees."""
        key = self.first_key + lax.broadcasted_iota(jnp.int32, shape, 1)
        if self.tile_rows == 1:
            seen = key < self.kv_end
            return seen if self.window is None else seen & (key >= self.kv_end - self.window)
        row = self.first_row + lax.rem(lax.broadcasted_iota(jnp.int32, shape, 0), self.tile_rows)
        seen = key <= row
        return seen if self.window is None else seen & (key > row - self.window)

    def written(self, shape: tuple[int, ...]) -> jax.Array:
        """Which keys (lanes) exist at all: the scales of others may be NaN."""
        return self.first_key + lax.broadcasted_iota(jnp.int32, shape, 1) < self.kv_end


class _Work(NamedTuple):
    """The arguments of `Attend.chunk`."""

    q: Any
    kv: Any
    scales: Any
    size: int
    visible: Visible | None
    first: Any

    def head_scales(self, start: Any, heads: int) -> ChunkScales | None:
        if self.scales is None:
            return None
        return ChunkScales.load(self.scales, self.kv.shape[3], start, heads)


@dataclass(frozen=True)
class Attend:
    """How to attend to a chunk; `q` and the slot of `chunks` are views into refs."""

    softmax: SoftmaxRefs
    num_kv_heads: int
    lanes: int
    compute_dtype: Any
    cap: float | None
    """Soft cap in base 2: q is packed so that `cap * tanh(q k)` is the score."""
    row_sum: str
    """"lanes": partial sums on the vector unit. "matmul": a column of ones rides along with V, free where the
    matrix unit is 256 wide."""
    depth: int
    """Heads between their softmax and their weighted values, so that one head's latency hides behind another's."""
    stacked_heads: int
    """Heads whose rows share one softmax (decode, where a head has too few rows); 0: head by head (prefill)."""

    def chunk(self, q: Any, kv: Any, scales: Any, size: int, visible: Visible | None, first: Any) -> None:
        """Attend to the first `size` tokens of the chunk in `kv` [blocks, H, P, S, L].

        `scales`: those of an int8 chunk, `[blocks, 1, H * 2 * S]`, or `None`. `first`: whether it is the tile's
        first chunk, so that the scratch holds another tile's; `None` where the scratch was cleared.
        """
        work = _Work(q, kv, scales, size, visible, first)
        if self.stacked_heads:
            for start in range(0, self.num_kv_heads, self.stacked_heads):
                self._stacked(work, start, min(self.stacked_heads, self.num_kv_heads - start))
            return
        unrolled = self._unrolled_heads(work)
        if unrolled == self.num_kv_heads:
            self._head_by_head(work, 0, unrolled)
            return

        @pl.loop(0, self.num_kv_heads // unrolled)
        def _(group):
            self._head_by_head(work, group * unrolled, unrolled)

    def _unrolled_heads(self, work: "_Work") -> int:
        """Heads whose code is spelled out one after another; the more, the better they overlap, up to a point."""
        heads = next(
            n for n in range(min(MAX_UNROLLED_HEADS, self.num_kv_heads), 0, -1) if self.num_kv_heads % n == 0
        )
        scales_aligned = work.scales is None or 2 * heads * work.kv.shape[3] % LANES == 0
        return heads if heads > self.depth and scales_aligned else self.num_kv_heads

    def clear(self) -> None:
        self.softmax.peak[...] = jnp.full(self.softmax.peak.shape, MASKED, jnp.float32)
        self.softmax.total[...] = jnp.zeros(self.softmax.total.shape, jnp.float32)
        self.softmax.out[...] = jnp.zeros(self.softmax.out.shape, jnp.float32)

    def total(self, head: int, sink: Any) -> jax.Array:
        """What a head's weights sum to, `[R, LANES]`. `sink`, alike in base 2: one more logit, without a value."""
        total = self.softmax.total[head]
        if self.row_sum == "lanes":
            total = jnp.broadcast_to(jnp.sum(total, axis=1, keepdims=True), total.shape)
        return total if sink is None else total + jnp.exp2(sink - self.softmax.peak[head])

    def result(self, head: int, total: jax.Array, dtype: Any) -> jax.Array:
        """Normalised output `[R, L]` of a head."""
        inverse = 1.0 / total if dtype == jnp.float32 else reciprocal(total, approx=True)
        return (self.softmax.out[head] * to_lanes(inverse, self.lanes)).astype(dtype)

    def log_sum(self, head: int, total: jax.Array) -> jax.Array:
        """`log2` of the sum over all keys of `2 ** score`, `[R, LANES]`."""
        return self.softmax.peak[head] + jnp.log2(total)

    # ---- prefill: head by head, `depth` heads in flight

    def _head_by_head(self, work: _Work, start: Any, heads: int) -> None:
        peak, total, _ = self.softmax
        scales = work.head_scales(start, heads)
        in_flight: deque = deque()
        for i in range(heads):
            head = start + i
            scores = self._scores(work, head, scales and scales.keys(i))
            before = fresh(work.first, peak[head], MASKED)
            peak[head], weights, decay = self._softmax(scores, before)
            if self.row_sum == "lanes":
                total[head] = fresh(work.first, total[head], 0.0) * decay + lane_sums(weights)
            in_flight.append((head, self._value_weights(work, weights, scales and scales.values(i)), decay))
            if len(in_flight) > self.depth:
                self._add_values(work, *in_flight.popleft())
        while in_flight:
            self._add_values(work, *in_flight.popleft())

    def _add_values(self, work: _Work, head: Any, weights: jax.Array, decay: jax.Array) -> None:
        _, total, out = self.softmax
        values = self._values(work, head)
        before = fresh(work.first, out[head], 0.0) * to_lanes(decay, self.lanes)
        if self.row_sum == "lanes":
            out[head] = before + self._dot(weights, values, CONTRACT_ROWS)
            return
        ones = jnp.ones((work.size, LANES), values.dtype)
        both = self._dot(weights, jnp.concatenate([values, ones], axis=1), CONTRACT_ROWS)
        out[head] = before + both[:, : self.lanes]
        total[head] = fresh(work.first, total[head], 0.0) * decay + both[:, self.lanes :]

    # ---- decode: the rows of several heads stacked in one softmax

    def _stacked(self, work: _Work, start: int, heads: int) -> None:
        peak, total, out = self.softmax
        rows = peak.shape[1]
        group, stacked, apart = pl.ds(start, heads), (heads * rows, LANES), (heads, rows, LANES)
        scales = work.head_scales(start, heads)
        scores = [self._scores(work, start + i, scales and scales.keys(i)) for i in range(heads)]
        now, weights, decay = self._softmax(jnp.concatenate(scores, axis=0), peak[group].reshape(stacked))
        peak[group] = now.reshape(apart)
        total[group] = (total[group].reshape(stacked) * decay + lane_sums(weights)).reshape(apart)
        for i in range(heads):
            head, mine = start + i, slice(i * rows, (i + 1) * rows)
            weighted = self._value_weights(work, weights[mine], scales and scales.values(i))
            values = self._dot(weighted, self._values(work, head), CONTRACT_ROWS)
            out[head] = out[head] * to_lanes(decay[mine], self.lanes) + values

    # ---- parts

    def _scores(self, work: _Work, head: Any, per_key: jax.Array | None) -> jax.Array:
        scores = self._dot(work.q[head], self._tokens(work, head, 0), CONTRACT_LANES)
        if per_key is not None:
            scores *= per_key[:, : work.size]
        if self.cap is not None:
            scores = jnp.tanh(scores) * self.cap
        if work.visible is not None:
            scores = jnp.where(work.visible.mask(scores.shape), scores, MASKED)
        return scores

    def _softmax(self, scores, before) -> tuple[jax.Array, jax.Array, jax.Array]:
        """`(peak, weights, decay)`: new maximum, the scores' weights under it, the factor of what came before."""
        peak = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
        return peak, jnp.exp2(scores - to_lanes(peak, scores.shape[1])), jnp.exp2(before - peak)

    def _value_weights(self, work: _Work, weights: jax.Array, per_key: jax.Array | None) -> jax.Array:
        if per_key is not None:
            per_key = per_key[:, : work.size]
            if work.visible is not None:
                per_key = jnp.where(work.visible.written(per_key.shape), per_key, 0.0)
            weights *= per_key
        return weights.astype(self.compute_dtype)

    def _values(self, work: _Work, head: Any) -> jax.Array:
        """V, read only when needed (alive for longer, it spills). Side by side with K: K rides along, unused."""
        return self._tokens(work, head, work.kv.shape[2] - 1)

    def _tokens(self, work: _Work, head: Any, plane: int) -> jax.Array:
        block_size, lanes = work.kv.shape[3:]
        blocks = work.kv[pl.ds(0, work.size // block_size), head, plane]
        return blocks.reshape(work.size, lanes).astype(self.compute_dtype)

    def _dot(self, a, b, contract) -> jax.Array:
        precision = lax.Precision.HIGHEST if self.compute_dtype == jnp.float32 else None
        return lax.dot_general(a, b, contract, precision=precision, preferred_element_type=jnp.float32)


def to_lanes(x: jax.Array, lanes: int) -> jax.Array:
    """`[R, LANES]` of equal lanes as `[R, lanes]`."""
    if lanes > LANES:
        x = jnp.concatenate([x] * pl.cdiv(lanes, LANES), axis=1)
    return x[:, :lanes]


def lane_sums(x: jax.Array) -> jax.Array:
    """`[R, n * LANES]` summed over the `n` groups of lanes; what is left to sum waits for the end of the tile."""
    total = x[:, :LANES]
    for start in range(LANES, x.shape[1], LANES):
        total += x[:, start : start + LANES]
    return total


def fresh(first: Any, x: jax.Array, value: float) -> jax.Array:
    return x if first is None else jnp.where(first, value, x)

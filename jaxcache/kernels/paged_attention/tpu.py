"""Paged attention on TPU: q is packed into tiles, two instances of one Pallas kernel do the work, rows are
unpacked.

Sequences with one new row go through the decode instance, all others through the prefill instance. Either can be
absent: a step without tiles has only decodes, and then row `s` is sequence `s`.

Blocks that several decodes begin with (`step.shared`) are attended to once: to the kernel, the members of a run
are query heads of one decode. Each member's own blocks go through the decode instance as ever, and the two parts
are merged by the logarithms of their softmax sums. Layers with a window read little of a run and ignore the hint.

Block tables are trusted more than elsewhere: all blocks from the first one that a row's window reaches to the last
one must be held. Ids outside the array are read as the null block, never as somebody else's.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from jaxcache.kernels.kv_write.tpu import on_all_slots, write_rows
from jaxcache.kernels.layout import NULL_BLOCK, KVCache, KVLayout
from jaxcache.kernels.packing import pack_rows
from jaxcache.kernels.paged_attention import tpu_kernel
from jaxcache.kernels.paged_attention.tiles import cut_runs, cut_tiles, find_decodes
from jaxcache.kernels.paged_attention.tpu_attend import LANES, MASKED
from jaxcache.kernels.paged_attention.tpu_kernel import Inputs, Plan
from jaxcache.kernels.paged_attention.tpu_ring import SLOTS, TileRefs
from jaxcache.kernels.sharding import over_heads
from jaxcache.kernels.step import SharedRuns, StepInputs, Tiles
from jaxcache.kernels.tuning import TpuTuning

LOG2_E = math.log2(math.e)
SUBLANES = 8
BLOCK_SIZES = (8, 16, 32, 64, 128, 256)
KV_DTYPES = ("float32", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8")
MAX_TILE_TOKENS = 256
RING_BYTES = 32 * 2**20
"""VMEM for KV chunks. With the tiles and the compiler's own it stays below `tpu_kernel.VMEM_LIMIT`."""

TILE_BYTES = 20 * 2**20
"""VMEM for q, outputs and statistics of a prefill tile."""


def paged_attention(
    q: Float[Array, "T N D"],
    kv: KVCache,
    layer: Int[Array, ""],
    step: StepInputs,
    *,
    sinks: Float[Array, " N"] | None,
    tuning: TpuTuning,
    head_axis: str | None = None,
    interpret: Any = False,
    **scoring: Any,
) -> Float[Array, "T N D"]:
    """As `api.paged_attention`, whose `sm_scale`, `sliding_window` and `soft_cap` are `scoring`."""

    def attend(rows, kv, sinks, layer, step):
        (q,) = rows
        attention = _Attention.of(q, kv, layer, step, sinks, tuning, interpret, **scoring)
        decoded, _ = attention.decode(q, kv, None)
        return attention.put_decodes(attention.prefill(q, kv), decoded)

    return over_heads(attend, head_axis, (q,), kv, sinks, layer, step, returns=(Array,))


def write_and_attend(
    q: Float[Array, "T N D"],
    k: Float[Array, "T H D"],
    v: Float[Array, "T H D"],
    kv: KVCache,
    layer: Int[Array, ""],
    step: StepInputs,
    *,
    sinks: Float[Array, " N"] | None,
    tuning: TpuTuning,
    head_axis: str | None = None,
    interpret: Any = False,
    **scoring: Any,
) -> tuple[Float[Array, "T N D"], KVCache]:
    """As `api.write_and_attend`: the decode kernel writes the decodes' rows, the writer those of the others."""

    def attend(rows, kv, sinks, layer, step):
        q, k, v = rows
        attention = _Attention.of(q, kv, layer, step, sinks, tuning, interpret, **scoring)
        packed, scales = pack_rows(k, v, attention.layout, kv.data.dtype)
        # In this order decodes may read what a prefill of the step writes, and prefills what a decode writes.
        if step.tiles.seq.size:
            elsewhere = jnp.where(attention.in_decode_row(), -1, step.slot_mapping)
            kv = write_rows(kv, layer, packed, scales, elsewhere, interpret=interpret)
        decoded, kv = attention.decode(q, kv, (packed, scales))
        return attention.put_decodes(attention.prefill(q, kv), decoded), kv

    return over_heads(attend, head_axis, (q, k, v), kv, sinks, layer, step, returns=(Array, KVCache))


class _Part(NamedTuple):
    """What decodes get from some of their keys; f32."""

    out: Float[Array, "D N L"]
    log_sums: Float[Array, "D N"]
    """`log2` of the sum of `2 ** score`."""


@dataclass(frozen=True)
class _Attention:
    """One call: its operands in the forms that both instances need."""

    layout: KVLayout
    layer: Int[Array, "1"]
    step: StepInputs
    shared: SharedRuns | None
    tables: Int[Array, "S W"]
    """Those of the sequences and, below them, those of the shared runs."""
    decodes: Tiles
    """Sequences with one new row, as tiles of one row, the real ones first."""
    num_decodes: Int[Array, ""]
    group: int
    q_scale: float
    cap: float | None
    window: int | None
    sinks: Float[Array, "H G"] | None
    compute_dtype: Any
    token_bytes: int
    """Of one token in the KV of one layer."""
    tuning: TpuTuning
    interpret: Any

    @staticmethod
    def of(q, kv, layer, step, sinks, tuning, interpret, *, sm_scale, sliding_window, soft_cap) -> "_Attention":
        layout = KVLayout.of(kv, q.shape[-1])
        _check_supported(q, kv, layout)
        group = q.shape[1] // layout.num_kv_heads
        decodes, num_decodes = find_decodes(step)
        if sinks is not None:
            sinks = sinks.astype(jnp.float32).reshape(layout.num_kv_heads, group) * LOG2_E
        shared = step.shared if sliding_window is None else None
        tables = step.block_tables if shared is None else jnp.concatenate([step.block_tables, shared.tables])
        return _Attention(
            layout=layout,
            layer=layer.reshape(1),
            step=step,
            shared=shared,
            tables=_pad_table(tables, kv.data.shape[1]),
            decodes=decodes,
            num_decodes=num_decodes,
            group=group,
            q_scale=sm_scale * LOG2_E if soft_cap is None else sm_scale / soft_cap,
            cap=None if soft_cap is None else soft_cap * LOG2_E,
            window=sliding_window,
            sinks=sinks,
            compute_dtype=jnp.float32 if kv.data.dtype == jnp.float32 else jnp.bfloat16,
            token_bytes=layout.block_bytes(1, kv.data.dtype) // layout.block_size,
            tuning=tuning,
            interpret=interpret,
        )

    # ---- prefill

    def prefill(self, q: Float[Array, "T N D"], kv: KVCache) -> Float[Array, "T N D"]:
        """Rows of the tiles; the other rows are zero."""
        if not self.step.tiles.seq.size:
            return jnp.zeros_like(q)
        size = self._tile_tokens(jnp.dtype(q.dtype).itemsize * self.layout.lanes)
        tiles = cut_tiles(self.step.tiles, size, q.shape[0])
        rows = tiles.row[:, None] + jnp.arange(size, dtype=jnp.int32)[None]
        plan = self._plan_of_many_rows(size)
        refs = self._tile_refs(tiles, jnp.sum(tiles.kv_end > 0, dtype=jnp.int32), self._window_start(tiles))
        inputs = self._inputs(self._pack(q, rows), kv, sinks=self._sinks_of_rows(size))
        return self._unpack(self._call("paged_attention_prefill", plan, refs, inputs, q.dtype).out, tiles, q.shape)

    def _plan_of_many_rows(self, tile_rows: int, *, log_sums: bool = False) -> Plan:
        """For tiles of a prefill, or (`tile_rows` 1) of a run's members."""
        chunk, sizes = self._chunk(self.tuning.prefill_sizes)
        return Plan(
            tile_rows=tile_rows,
            chunk=chunk,
            sizes=sizes,
            tiles_per_program=1,
            row_sum=self.tuning.row_sum if self.layout.lanes % LANES == 0 else "lanes",
            depth=self.tuning.depth,
            stacked_heads=0,
            window=self.window,
            cap=self.cap,
            log_sums=log_sums,
        )

    def _tile_tokens(self, result_bytes: int) -> int:
        """A power of two of tokens that makes about `prefill_rows` rows per KV head, as far as they fit in VMEM;
        `result_bytes` for what a row of a head returns."""
        item, lanes = jnp.dtype(self.compute_dtype).itemsize, self.layout.lanes
        in_and_out = 2 * (item * lanes + result_bytes)
        row_bytes = self.layout.num_kv_heads * (in_and_out + 4 * (2 * LANES + lanes))  # and statistics
        rows = min(self.tuning.prefill_rows, TILE_BYTES // row_bytes)
        wanted = max(rows // self.group, 2 * SUBLANES)
        return min(1 << (wanted.bit_length() - 1), MAX_TILE_TOKENS)

    def _unpack(self, out: Shaped[Array, "M H R L"], tiles: Tiles, shape: tuple[int, ...]) -> Array:
        size, total = out.shape[2] // self.group, shape[0]
        by_row = self._values(out).reshape(-1, self.layout.num_kv_heads, self.group, size, shape[2])
        by_row = by_row.transpose(0, 3, 1, 2, 4).reshape(-1, *shape[1:])
        # The tile of a row is the last one that starts at or before it.
        real = tiles.kv_end > 0
        starts = jnp.zeros(total, jnp.int32).at[jnp.where(real, tiles.row, total)].add(1, mode="drop")
        tile = jnp.maximum(jnp.cumsum(starts) - 1, 0)
        offset = jnp.arange(total, dtype=jnp.int32) - tiles.row[tile]
        inside = (offset >= 0) & (offset < tiles.kv_end[tile] - tiles.pos[tile])
        rows = by_row[tile * size + jnp.clip(offset, 0, size - 1)]
        return jnp.where(inside[:, None, None], rows, jnp.zeros_like(rows))

    # ---- decode

    def decode(self, q: Float[Array, "T N D"], kv: KVCache, new: tuple[Array, Array | None] | None):
        """Outputs `[S, N, D]` of `self.decodes`, and `kv`, with their `new` rows and scales written if given."""
        if self.shared is None:
            result, kv = self._decode(q, kv, new, self._window_start(self.decodes), q.dtype)
            return self._decoded(self._values(result.out)), kv
        real = jnp.arange(self.decodes.seq.shape[0]) < self.num_decodes
        run = jnp.where(real, self.shared.run[self.decodes.seq], self.shared.lengths.shape[0])
        skipped = self.shared.lengths.at[run].get(mode="fill", fill_value=0)
        result, kv = self._decode(q, kv, new, skipped // self.layout.block_size, jnp.float32)
        own = _Part(self._decoded(self._values(result.out)), self._decoded(result.log_sums[..., :1])[..., 0])
        return _merged(own, self._attend_to_runs(q, kv, run)).astype(q.dtype), kv

    def _decode(self, q, kv, new, first_block, out_dtype) -> tuple[tpu_kernel.Outputs, KVCache]:
        """`self.decodes`, each from its `first_block` on."""
        per_program = min(self.tuning.decode_tiles, self.decodes.seq.shape[0])
        short = -self.decodes.seq.shape[0] % per_program
        tiles, first_block = jax.tree.map(lambda x: jnp.pad(x, (0, short)), (self.decodes, first_block))
        packed = self._pack(q, tiles.row[:, None])  # [S, H, G, L]
        rows = -(-self.group // SUBLANES) * SUBLANES
        packed = jnp.pad(packed, ((0, 0), (0, 0), (0, rows - self.group), (0, 0)))
        chunk, sizes = self._chunk(self.tuning.decode_sizes)
        plan = Plan(
            tile_rows=1,
            chunk=chunk,
            sizes=sizes,
            tiles_per_program=per_program,
            row_sum="lanes",
            depth=0,
            stacked_heads=self.tuning.stacked_heads,
            window=self.window,
            cap=self.cap,
            log_sums=self.shared is not None,
        )
        new = jax.tree.map(lambda x: jnp.take(x, tiles.row, axis=0, mode="clip"), new)
        refs = self._tile_refs(tiles, self.num_decodes, first_block)
        inputs = self._inputs(packed, kv, sinks=self._sinks_of_rows(1, rows), new=new)
        result = self._call("paged_attention_decode", plan, refs, inputs, out_dtype)
        return result, KVCache(result.kv, result.kv_scales)

    def _decoded(self, rows: Shaped[Array, "M H R L"]) -> Shaped[Array, "S N L"]:
        """Rows of `self.decodes`, which the decode instance pads in number and in their groups."""
        rows = rows[: self.decodes.seq.shape[0], :, : self.group]
        return rows.reshape(rows.shape[0], -1, rows.shape[3])

    def _attend_to_runs(self, q: Float[Array, "T N D"], kv: KVCache, run: Int[Array, " S"]) -> _Part:
        """What each of `self.decodes` gets from the keys of its shared run."""
        assert self.shared is not None
        size = min(self._tile_tokens(4 * (self.layout.lanes + LANES)), -(-run.shape[0] // SUBLANES) * SUBLANES)
        tiles = cut_runs(self.shared, run, size)
        plan = self._plan_of_many_rows(1, log_sums=True)
        table = self.step.block_tables.shape[0] + tiles.run
        refs = self._tile_refs(
            Tiles(table, tiles.run, tiles.kv_end - 1, tiles.kv_end), jnp.sum(tiles.kv_end > 0, dtype=jnp.int32)
        )
        inputs = self._inputs(self._pack(q, self.decodes.row[tiles.members]), kv)
        result = self._call("paged_attention_run", plan, refs, inputs, jnp.float32)

        def of_decodes(rows: Shaped[Array, "M H R L"], nothing: float) -> Shaped[Array, "S N L"]:
            rows = rows.reshape(*rows.shape[:2], self.group, size, rows.shape[3]).transpose(0, 3, 1, 2, 4)
            rows = rows.reshape(-1, q.shape[1], rows.shape[4])
            return rows.at[tiles.place].get(mode="fill", fill_value=nothing)

        return _Part(
            of_decodes(self._values(result.out), 0.0), of_decodes(result.log_sums[..., :1], MASKED)[..., 0]
        )

    def put_decodes(self, out: Float[Array, "T N D"], decoded: Float[Array, "S N D"]) -> Float[Array, "T N D"]:
        """`out` with the decodes in their rows."""
        return out.at[self._decode_rows()].set(decoded, mode="drop")

    def in_decode_row(self) -> Bool[Array, " T"]:
        return jnp.zeros(self.step.positions.shape[0], bool).at[self._decode_rows()].set(True, mode="drop")

    def _decode_rows(self) -> Int[Array, " S"]:
        """The rows of the decodes; beyond the last row where there is no further decode."""
        rows = self.decodes.row
        return jnp.where(jnp.arange(rows.shape[0]) < self.num_decodes, rows, self.step.positions.shape[0])

    # ---- both

    def _chunk(self, sizes: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
        """Tokens per chunk, halved until the ring fits in VMEM, and the sizes up to it."""
        chunk, smallest = self.tuning.chunk, max(LANES, self.layout.block_size)
        while chunk > smallest and SLOTS * chunk * self.token_bytes > RING_BYTES:
            chunk //= 2
        return chunk, (*(size for size in sizes if smallest <= size < chunk), chunk)

    def _values(self, out: Shaped[Array, "M H R L"]) -> Shaped[Array, "M H R D"]:
        """The lanes that hold weighted values; side by side, the lower half holds weighted keys."""
        head_dim = self.layout.head_dim
        return out[..., head_dim:] if self.layout.side_by_side else out[..., :head_dim]

    def _pack(self, q: Float[Array, "T N D"], rows: Int[Array, "M Q"]) -> Shaped[Array, "M H R L"]:
        """Scaled q of `rows`, tile by tile, rows of a KV head in order `[group, token]`."""
        scaled = (q.astype(jnp.float32) * self.q_scale).astype(self.compute_dtype)
        taken = jnp.take(scaled, rows, axis=0, mode="clip")
        tiles, size, _, head_dim = taken.shape
        taken = taken.reshape(tiles, size, self.layout.num_kv_heads, self.group, head_dim).transpose(0, 2, 3, 1, 4)
        packed = taken.reshape(tiles, self.layout.num_kv_heads, self.group * size, head_dim)
        return jnp.pad(packed, ((0, 0), (0, 0), (0, 0), (0, self.layout.lanes - head_dim)))

    def _window_start(self, tiles: Tiles) -> Int[Array, " M"] | None:
        """The first block that a tile's rows see."""
        if self.window is None:
            return None
        return jnp.maximum(tiles.pos - self.window + 1, 0) // self.layout.block_size

    def _sinks_of_rows(self, tokens: int, padded: int = 0) -> Float[Array, "H R LANES"] | None:
        """Each head's sink for its `tokens` rows in a tile; 0 for further rows, up to `padded`."""
        if self.sinks is None:
            return None
        per_row = jnp.repeat(self.sinks, tokens, axis=1)
        per_row = jnp.pad(per_row, ((0, 0), (0, max(padded - per_row.shape[1], 0))))
        return jnp.broadcast_to(per_row[..., None], (*per_row.shape, LANES))

    def _tile_refs(self, tiles: Tiles, count: Int[Array, ""], first_block: Array | None = None) -> TileRefs:
        return TileRefs(self.layer, count.reshape(1), tiles.seq, tiles.pos, tiles.kv_end, first_block)

    def _inputs(self, q: Shaped[Array, "M H R L"], kv: KVCache, *, sinks=None, new=None) -> Inputs:
        rows, scales = (None, None) if new is None else new
        if rows is not None:
            rows = rows[:, :, :, None]
        if scales is not None:
            scales = on_all_slots(scales, self.layout.block_size)
        return Inputs(q, rows, scales, sinks, self.tables, kv.data, kv.scales)

    def _call(self, name: str, plan: Plan, tiles: TileRefs, inputs: Inputs, out_dtype: Any) -> tpu_kernel.Outputs:
        return tpu_kernel.call(
            tiles, inputs, plan, out_dtype, self.compute_dtype, name=name, interpret=self.interpret
        )


def _merged(a: _Part, b: _Part) -> Float[Array, "D N L"]:
    """Attention over the keys of both parts."""
    peak = jnp.maximum(a.log_sums, b.log_sums)
    weights = [jnp.exp2(part.log_sums - peak)[..., None] for part in (a, b)]
    return (weights[0] * a.out + weights[1] * b.out) / (weights[0] + weights[1])


def _pad_table(tables: Int[Array, "S W"], num_blocks: int) -> Int[Array, "S V"]:
    """Ids outside the array as the null block, and rows of whole lanes, as the copy to scalar memory needs
    them."""
    tables = jnp.where((tables > NULL_BLOCK) & (tables < num_blocks), tables, NULL_BLOCK)
    return jnp.pad(tables, ((0, 0), (0, -tables.shape[1] % LANES)))


def _check_supported(q: Array, kv: KVCache, layout: KVLayout) -> None:
    if kv.data.dtype.name not in KV_DTYPES:
        raise ValueError(
            f"the TPU kernel has no KV dtype {kv.data.dtype.name}: choose one of {', '.join(KV_DTYPES)}"
        )
    if q.dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(f"the TPU kernel takes float32 or bfloat16 queries, got {q.dtype.name}")
    if layout.block_size not in BLOCK_SIZES:
        sizes = ", ".join(map(str, BLOCK_SIZES))
        raise ValueError(f"the TPU kernel has no block size {layout.block_size}: choose one of {sizes}")

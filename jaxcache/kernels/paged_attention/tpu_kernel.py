"""The TPU kernel: for each tile of query rows, walk the KV chunks of its sequence.

A tile's chunks are of two kinds. An *interior* chunk is seen in full by every row of the tile: no mask, no
branch, and if the next chunk to fetch is a full one too, its copies are issued in the same bundles. All others
(the ends of the sequence and of the window, and interior ones whose fetch is not full) take the *general* way,
masked, sized to the tokens that are there.

Prefill and decode are two instances of this kernel. Decode has one row per tile and may write that row's K and
V: the block that takes it is in VMEM already, so it is merged there and one block goes back to HBM.
"""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxcache.kernels.paged_attention.tpu_attend import LANES, Attend, SoftmaxRefs, Visible
from jaxcache.kernels.paged_attention.tpu_ring import ROWS, SLOTS, Ring, RingRefs, TileRefs

VMEM_LIMIT = 64 * 2**20


@dataclass(frozen=True)
class Plan:
    """What is fixed when a kernel is compiled."""

    tile_rows: int
    """Query rows of one sequence per tile; 1: all rows of the tile are at one position."""
    chunk: int
    """Tokens per KV chunk."""
    sizes: tuple[int, ...]
    """Ascending, the last one `chunk`: what a chunk that is not full is rounded up to."""
    tiles_per_program: int
    row_sum: str
    """As `Attend.row_sum`. For int8 always "lanes": the matrix unit is given weights that V's scales are in."""
    depth: int
    stacked_heads: int
    window: int | None = None
    cap: float | None = None
    log_sums: bool = False
    """Whether rows come with the logarithm of their softmax sum, by which parts of a row are merged."""

    @property
    def decode(self) -> bool:
        return self.tile_rows == 1


class Inputs(NamedTuple):
    """Operands. `N` tiles, `H` KV heads, `R` rows per head and tile."""

    q: Any  # [N, H, R, L]
    new: Any  # [N, H, P, 1, L]: the row to write, or None
    new_scales: Any  # [N, 1, H*2*S]: its scales, each on all slots, or None
    sinks: Any  # [H, R, LANES] f32 in base 2, or None
    tables: Any  # [sequences, W] int32, in HBM
    kv: Any  # [layers, blocks, H, P, S, L], in HBM
    kv_scales: Any  # [layers, blocks, 1, H*2*S] f32, in HBM, or None


class Outputs(NamedTuple):
    out: Any  # [N, H, R, L]
    log_sums: Any = None  # [N, H, R, LANES] f32 in base 2, all lanes equal, or None
    kv: Any = None  # `Inputs.kv` in place, if a row is written
    kv_scales: Any = None


class Scratch(NamedTuple):
    ring: RingRefs
    softmax: SoftmaxRefs
    merged: Any  # [H, P, S, L]: the block on its way back to HBM, or None
    merged_scales: Any  # [1, H*2*S], or None
    merged_sem: Any


def _kernel(
    tiles: TileRefs, inputs: Inputs, outputs: Outputs, scratch: Scratch, *, plan: Plan, compute_dtype: Any
) -> None:
    kv_heads, _, block_size, lanes = inputs.kv.shape[2:]
    ring = Ring(
        tiles, scratch.ring, inputs.kv, inputs.kv_scales, inputs.tables, block_size, plan.chunk // block_size
    )
    row_sum = plan.row_sum if inputs.kv_scales is None else "lanes"
    attend = Attend(
        scratch.softmax, kv_heads, lanes, compute_dtype, plan.cap, row_sum, plan.depth, plan.stacked_heads
    )
    program = pl.program_id(0)

    @pl.when(program == 0)
    def _():
        ring.start()

    @pl.loop(0, plan.tiles_per_program)
    def _(i):
        tile = program * plan.tiles_per_program + i
        out = outputs.out.at[i]

        @pl.when(tile < tiles.count[0])
        def _():
            walk = _Walk(plan, tiles, ring, attend, inputs.q.at[i], tile)
            writer = None
            if inputs.new is not None:
                new_scales = None if inputs.new_scales is None else inputs.new_scales.at[i]
                writer = _RowWriter(ring, scratch, inputs.new.at[i], new_scales, outputs.kv, outputs.kv_scales)
            walk.run(writer)
            for head in range(kv_heads):
                sink = None if inputs.sinks is None else inputs.sinks[head]
                total = attend.total(head, sink)
                out[head] = attend.result(head, total, out.dtype)
                if plan.log_sums:
                    outputs.log_sums[i, head] = attend.log_sum(head, total)


@dataclass(frozen=True)
class _RowWriter:
    """The new row of a decode tile: merged into its block in VMEM, and the block written to HBM behind the
    compute."""

    ring: Ring
    scratch: Scratch
    new: Any  # [H, P, 1, L]
    new_scales: Any  # [1, H*2*S], or None
    kv: Any  # the outputs, in HBM
    kv_scales: Any = None

    def merge(self, tile: Any, chunk: Any, block: Any, slot: Any, row: Any) -> None:
        """Put the row at `row` of `block`; what lies after it is zeroed in VMEM (it may be NaN), not in HBM."""
        chunks, scales = self.ring.ring.chunks, self.ring.ring.scales

        @pl.when(tile > 0)
        def _():
            self._wait()  # for the block of the tile before, long since gone

        held = chunks[slot, block]
        at = lax.broadcasted_iota(jnp.int32, held.shape, 2)
        held = jnp.where(at == row, jnp.broadcast_to(self.new[...], held.shape), held)
        self.scratch.merged[...] = held
        chunks[slot, block] = jnp.where(at <= row, held, jnp.zeros_like(held))
        if scales is not None:
            held = scales[slot, block]
            at = lax.rem(lax.broadcasted_iota(jnp.int32, held.shape, 1), self.ring.block_size)
            held = jnp.where(at == row, self.new_scales[...], held)
            self.scratch.merged_scales[...] = held
            scales[slot, block] = held

        for copy in self._copies(self.ring.block_id(tile, chunk, block)):
            copy.start()

        @pl.when(tile == self.ring.tiles.count[0] - 1)
        def _():
            self._wait()

    def _wait(self) -> None:
        for copy in self._copies(0):
            copy.wait()

    def _copies(self, block: Any) -> list[Any]:
        layer, sem = self.ring.tiles.layer[0], self.scratch.merged_sem
        copies = [pltpu.make_async_copy(self.scratch.merged, self.kv.at[layer, block], sem)]
        if self.kv_scales is not None:
            to = self.kv_scales.at[layer, block]
            copies.append(pltpu.make_async_copy(self.scratch.merged_scales, to, sem))
        return copies


@dataclass(frozen=True)
class _Walk:
    """One tile over its chunks."""

    plan: Plan
    tiles: TileRefs
    ring: Ring
    attend: Attend
    q: Any  # [H, R, L]
    tile: Any

    def run(self, writer: _RowWriter | None) -> None:
        plan, ring = self.plan, self.ring
        ring.prefetch_row(self.tile)
        if plan.decode:
            self.attend.clear()
        chunks = ring.num_chunks(self.tile)
        interior_from, interior_to = self._interior(writer is not None)

        def more(chunk):
            return chunk < chunks

        def step(chunk):
            run = jnp.minimum(interior_to - chunk, ring.full_fetches())
            run = jnp.where(chunk >= interior_from, run, 0)
            return lax.cond(run > 0, lambda: self._interior_run(chunk, run), lambda: self._general(chunk, writer))

        lax.while_loop(more, step, jnp.int32(0))

    def _interior(self, writes: bool) -> tuple[Any, Any]:
        """First interior chunk of the tile and the end of the run of them."""
        plan, tile = self.plan, self.tile
        start = self.ring.first_block(tile) * self.ring.block_size
        seen_by_first_row = self.tiles.pos[tile] + (0 if writes else 1)
        until = lax.div(seen_by_first_row - start, plan.chunk)
        if plan.window is None:
            return 0, until
        hidden_from_last_row = jnp.maximum(self.tiles.kv_end[tile] - plan.window - start, 0)
        return _ceil_div(hidden_from_last_row, plan.chunk), until

    def _interior_run(self, chunk: Any, run: Any) -> Any:
        ring, cursor = self.ring, self.ring.ring.cursor
        fetch_tile, fetch_chunk = cursor[0], cursor[1]

        def one(i, slot):
            ring.wait_full(slot)
            self._attend(slot, chunk + i, self.plan.chunk, None)
            ring.fetch_full(fetch_tile, fetch_chunk + i, _previous(slot))
            return _next(slot)

        lax.fori_loop(0, run, one, ring.slot_in_use())
        ring.advance(run)
        ring.retire(run)
        return chunk + run

    def _general(self, chunk: Any, writer: _RowWriter | None) -> Any:
        plan, ring, tile = self.plan, self.ring, self.tile
        slot, blocks = ring.slot_in_use(), ring.blocks_in(tile, chunk)
        start = (ring.first_block(tile) + chunk * ring.blocks_per_chunk) * ring.block_size
        kv_end = self.tiles.kv_end[tile]
        ring.wait_blocks(slot, blocks)

        @pl.when(start + plan.chunk >= kv_end)
        def _():
            last_row = lax.rem(kv_end - 1, ring.block_size)
            if writer is None:
                self._zero_values_after(slot, blocks - 1, last_row)
            else:
                writer.merge(tile, chunk, blocks - 1, slot, last_row)

        @pl.when(ring.first_lap())
        def _():
            @pl.loop(blocks, ring.blocks_per_chunk)
            def _(block):
                self._zero_values_after(slot, block, -1)

        visible = Visible(start, self.tiles.pos[tile], kv_end, plan.tile_rows, plan.window)
        smaller = 0
        for size in plan.sizes:
            tokens = kv_end - start

            @pl.when((tokens > smaller) & ((tokens <= size) | (size == plan.chunk)))
            def _(size=size):
                self._attend(slot, chunk, size, visible)

            smaller = size
        ring.fetch_next()
        ring.retire(1)
        return chunk + 1

    def _attend(self, slot: Any, chunk: Any, size: int, visible: Visible | None) -> None:
        first = None if self.plan.decode else chunk == 0
        ring = self.ring.ring
        scales = None if ring.scales is None else ring.scales.at[slot]
        self.attend.chunk(self.q, ring.chunks.at[slot], scales, size, visible, first)

    def _zero_values_after(self, slot: Any, block: Any, row: Any) -> None:
        """Zero V after `row` of a block in VMEM: whatever lies there has weight 0, but NaN times 0 is NaN."""
        chunks = self.ring.ring.chunks
        plane = chunks.shape[3] - 1
        values = chunks[slot, block, :, plane]
        at = lax.broadcasted_iota(jnp.int32, values.shape, 1)
        chunks[slot, block, :, plane] = jnp.where(at <= row, values, jnp.zeros_like(values))


def _next(slot: Any) -> Any:
    return jnp.where(slot == SLOTS - 1, 0, slot + 1)


def _previous(slot: Any) -> Any:
    return jnp.where(slot == 0, SLOTS - 1, slot - 1)


def _ceil_div(a: Any, b: int) -> Any:
    return lax.div(a + (b - 1), b)


def call(
    tiles: TileRefs,
    inputs: Inputs,
    plan: Plan,
    out_dtype: Any,
    compute_dtype: Any,
    *,
    name: str,
    interpret: Any = False,
) -> Outputs:
    """Run the kernel. `kv` and `kv_scales` come back with `inputs.new` written in place, if there is any.

    Tiles beyond `tiles.count` leave their output unwritten.
    """
    hbm = pl.BlockSpec(memory_space=pl.ANY)

    def per_tile(array):
        """The program's tiles; programs without a tile stay with the last block, so that nothing is copied."""

        def index(program, tiles):
            last = lax.div(jnp.maximum(tiles.count[0] - 1, 0), plan.tiles_per_program)
            return jnp.minimum(program, last), *(0,) * (array.ndim - 1)

        return pl.BlockSpec((plan.tiles_per_program, *array.shape[1:]), index)

    in_specs = Inputs(
        q=per_tile(inputs.q),
        new=None if inputs.new is None else per_tile(inputs.new),
        new_scales=None if inputs.new_scales is None else per_tile(inputs.new_scales),
        sinks=None if inputs.sinks is None else pl.BlockSpec(memory_space=pltpu.VMEM),
        tables=hbm,
        kv=hbm,
        kv_scales=None if inputs.kv_scales is None else hbm,
    )
    outputs = Outputs(out=jax.ShapeDtypeStruct(inputs.q.shape, out_dtype))
    out_specs = Outputs(out=per_tile(inputs.q))
    if plan.log_sums:
        log_sums = jax.ShapeDtypeStruct((*inputs.q.shape[:3], LANES), jnp.float32)
        outputs, out_specs = outputs._replace(log_sums=log_sums), out_specs._replace(log_sums=per_tile(log_sums))
    in_place = {}
    if inputs.new is not None:
        kv = (inputs.kv, inputs.kv_scales)
        place = {id(leaf): i for i, leaf in enumerate(jax.tree.leaves((tiles, inputs)))}
        before = len(jax.tree.leaves(outputs))
        in_place = {place[id(array)]: before + i for i, array in enumerate(jax.tree.leaves(kv))}
        shapes, specs = jax.tree.map(jax.typeof, kv), jax.tree.map(lambda _: hbm, kv)
        outputs = outputs._replace(kv=shapes[0], kv_scales=shapes[1])
        out_specs = out_specs._replace(kv=specs[0], kv_scales=specs[1])
    (results,) = pl.pallas_call(
        functools.partial(_kernel, plan=plan, compute_dtype=compute_dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(inputs.q.shape[0] // plan.tiles_per_program,),
            in_specs=[in_specs],
            out_specs=[out_specs],
            scratch_shapes=[_scratch(inputs, plan)],
        ),
        out_shape=[outputs],
        input_output_aliases=in_place,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), disable_bounds_checks=True, vmem_limit_bytes=VMEM_LIMIT
        ),
        interpret=interpret,
        name=name,
    )(tiles, inputs)
    return results if inputs.new is not None else results._replace(kv=inputs.kv, kv_scales=inputs.kv_scales)


def _scratch(inputs: Inputs, plan: Plan) -> Scratch:
    _, kv_heads, rows, lanes = inputs.q.shape
    block_shape, block_size, kv_dtype = inputs.kv.shape[2:], inputs.kv.shape[4], inputs.kv.dtype
    blocks = plan.chunk // block_size
    scales = None if inputs.kv_scales is None else inputs.kv_scales.shape[3]
    writes = inputs.new is not None
    f32, dma = jnp.float32, pltpu.SemaphoreType.DMA
    return Scratch(
        ring=RingRefs(
            chunks=pltpu.VMEM((SLOTS, blocks, *block_shape), kv_dtype),
            rows=pltpu.SMEM((ROWS, inputs.tables.shape[1]), jnp.int32),
            cursor=pltpu.SMEM((4,), jnp.int32),
            chunk_sems=dma((SLOTS,)),
            row_sems=dma((ROWS,)),
            scales=pltpu.VMEM((SLOTS, blocks, 1, scales), f32) if scales else None,
        ),
        softmax=SoftmaxRefs(
            peak=pltpu.VMEM((kv_heads, rows, LANES), f32),
            total=pltpu.VMEM((kv_heads, rows, LANES), f32),
            out=pltpu.VMEM((kv_heads, rows, lanes), f32),
        ),
        merged=pltpu.VMEM(block_shape, kv_dtype) if writes else None,
        merged_scales=pltpu.VMEM((1, scales), f32) if writes and scales else None,
        merged_sem=dma(()) if writes else None,
    )

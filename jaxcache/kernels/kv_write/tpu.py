"""Writing KV on TPU, in place, in whole blocks: a row alone is less than the memory can address.

Rows with consecutive slots in one block make a *run*. A run that fills its block is one copy from HBM to HBM of
a block that XLA has laid out; any other run reads its block, puts its rows in, and writes it back, `IN_FLIGHT`
blocks at a time. Blocks that no row names are not touched.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int, Shaped

from jaxcache.kernels.layout import KVCache, KVLayout
from jaxcache.kernels.packing import pack_rows
from jaxcache.kernels.sharding import over_heads
from jaxcache.kernels.tuning import TpuTuning

IN_FLIGHT = 8
PIECE = 16
"""Rows of a run fetched at a time; a row alone takes a whole tile of VMEM."""

VMEM_LIMIT = 64 * 2**20


def write_kv(
    kv: KVCache,
    layer: Int[Array, ""],
    k: Float[Array, "T H D"],
    v: Float[Array, "T H D"],
    slot_mapping: Int[Array, " T"],
    *,
    tuning: TpuTuning,
    head_axis: str | None = None,
    interpret: Any = False,
) -> KVCache:
    """As `api.write_kv`. Nothing here is tuned."""
    del tuning

    def write(rows, kv, _, layer, slot_mapping):
        k, v = rows
        packed, scales = pack_rows(k, v, KVLayout.of(kv, k.shape[-1]), kv.data.dtype)
        return write_rows(kv, layer, packed, scales, slot_mapping, interpret=interpret)

    return over_heads(write, head_axis, (k, v), kv, None, layer, slot_mapping, returns=(KVCache,))


def write_rows(
    kv: KVCache,
    layer: Int[Array, ""],
    rows: Shaped[Array, "T H P L"],
    scales: Float[Array, "T H 2"] | None,
    slot_mapping: Int[Array, " T"],
    *,
    interpret: Any = False,
) -> KVCache:
    """`kv` with packed rows in their slots; rows with a slot outside the array or in the null block are
    dropped."""
    num_blocks, block_size = kv.data.shape[1], kv.data.shape[4]
    runs = find_runs(slot_mapping, num_blocks, block_size)
    full_rows = runs.full_row[:, None] + jnp.arange(block_size, dtype=jnp.int32)[None]

    full = jnp.take(rows, full_rows, axis=0, mode="clip").transpose(0, 2, 3, 1, 4)
    operands = _Operands(rows[:, :, :, None], full, kv.data)
    if scales is None:
        data = _write(layer.reshape(1), runs, operands, None, interpret=interpret)[0]
        return kv._replace(data=data)
    full = jnp.take(scales, full_rows, axis=0, mode="clip").transpose(0, 2, 3, 1)
    scale_operands = _Operands(on_all_slots(scales, block_size), full.reshape(full.shape[0], 1, -1), kv.scales)
    return KVCache(*_write(layer.reshape(1), runs, operands, scale_operands, interpret=interpret))


def on_all_slots(scales: Float[Array, "T H 2"], block_size: int) -> Float[Array, "T 1 X"]:
    """The scales of a row as those of a block, each repeated on all slots, so that one is picked without a
    shift."""
    return jnp.repeat(scales.reshape(scales.shape[0], 1, -1), block_size, axis=2)


class Runs(NamedTuple):
    """Rows with consecutive slots in one block. Full runs first counted, then listed; partial ones likewise."""

    full_count: Int[Array, " 1"]
    full_block: Int[Array, " F"]
    full_row: Int[Array, " F"]
    part_count: Int[Array, " 1"]
    part_slot: Int[Array, " T"]
    """Slot of the run's first row."""
    part_row: Int[Array, " T"]
    part_length: Int[Array, " T"]
    part_together: Int[Array, " 1"]
    """Partial runs that may be in flight together: 1 if two near each other are in the same block."""


def find_runs(slots: Int[Array, " T"], num_blocks: int, block_size: int) -> Runs:
    """The runs of a slot mapping."""
    total = slots.shape[0]
    row = jnp.arange(total, dtype=jnp.int32)
    valid = (slots >= block_size) & (slots < num_blocks * block_size)
    slots = jnp.where(valid, slots, -1)
    follows = (slots == jnp.roll(slots, 1) + 1) & (row > 0) & (slots % block_size != 0)
    starts = valid & ~follows
    run = jnp.where(valid, jnp.cumsum(starts) - 1, total)
    length = jnp.zeros(total, jnp.int32).at[run].add(1, mode="drop")[jnp.minimum(run, total - 1)]
    full = starts & (length == block_size)
    part = starts & (length < block_size)

    def listed(which, capacity, *columns):
        place = jnp.where(which, jnp.cumsum(which) - 1, capacity)
        return [jnp.full(capacity, -1, jnp.int32).at[place].set(column, mode="drop") for column in columns]

    full_block, full_row = listed(full, max(total // block_size, 1), slots // block_size, row)
    part_slot, part_row, part_length = listed(part, total, slots, row, length)
    block = jnp.where(part_slot >= 0, part_slot // block_size, -1 - row)  # no two unused entries alike
    near = [jnp.any(block[:-apart] == block[apart:]) for apart in range(1, min(IN_FLIGHT, total))]
    clash = functools.reduce(jnp.logical_or, near, jnp.bool_(False))
    return Runs(
        jnp.sum(full, dtype=jnp.int32).reshape(1),
        full_block,
        full_row,
        jnp.sum(part, dtype=jnp.int32).reshape(1),
        part_slot,
        part_row,
        part_length,
        jnp.where(clash, 1, IN_FLIGHT).astype(jnp.int32).reshape(1),
    )


class _Operands(NamedTuple):
    """What is written to one array, in HBM."""

    rows: Any  # data: [T, H, P, 1, L]; scales: [T, 1, H*2*S]
    full: Any  # the full runs as blocks: [F, H, P, S, L]; [F, 1, H*2*S]
    pool: Any  # [layers, blocks, H, P, S, L]; [layers, blocks, 1, H*2*S]


class _Scratch(NamedTuple):
    blocks: Any  # [IN_FLIGHT, ...]: blocks to merge into
    rows: Any  # [IN_FLIGHT, PIECE, ...]: the next rows of their runs
    full_sem: Any
    read_sems: Any  # [IN_FLIGHT]
    write_sems: Any  # [IN_FLIGHT]


class _Pool(NamedTuple):
    """One array that is written, and how: the KV itself, or its scales."""

    layer: Any
    runs: Runs
    rows: Any
    full: Any
    pool: Any
    scratch: _Scratch
    block_size: int

    def full_copy(self, i: Any) -> Any:
        return pltpu.make_async_copy(self.full.at[i], self._block(self.runs.full_block[i]), self.scratch.full_sem)

    def read_block(self, run: Any, at: Any) -> Any:
        block = self._block(self._block_of(run))
        return pltpu.make_async_copy(block, self.scratch.blocks.at[at], self.scratch.read_sems.at[at])

    def read_rows(self, run: Any, at: Any, skipped: Any) -> Any:
        length = jnp.minimum(self.runs.part_length[run] - skipped, PIECE)
        rows = self.rows.at[pl.ds(self.runs.part_row[run] + skipped, length)]
        to = self.scratch.rows.at[at, pl.ds(0, length)]
        return pltpu.make_async_copy(rows, to, self.scratch.read_sems.at[at])

    def write(self, run: Any, at: Any) -> Any:
        to = self._block(self._block_of(run))
        return pltpu.make_async_copy(self.scratch.blocks.at[at], to, self.scratch.write_sems.at[at])

    def merge(self, run: Any, at: Any) -> None:
        """Put the run's rows into its block, of which both the block and the first piece of rows are there."""
        first, length = lax.rem(self.runs.part_slot[run], self.block_size), self.runs.part_length[run]
        shape = self.scratch.blocks.shape[1:]
        axis = 2 if len(shape) == 4 else 1  # data: slots are sublanes; scales: lanes within a head
        slot = lax.rem(lax.broadcasted_iota(jnp.int32, shape, axis), self.block_size)

        @pl.loop(0, lax.div(length + (PIECE - 1), PIECE))
        def _(piece):
            skipped = piece * PIECE

            @pl.when(piece > 0)
            def _():
                self.read_rows(run, at, skipped).start()
                self.read_rows(run, at, skipped).wait()

            def put(i, block):
                row = jnp.broadcast_to(self.scratch.rows[at, i], shape)
                return jnp.where(slot == first + skipped + i, row, block)

            end = jnp.minimum(length - skipped, PIECE)
            self.scratch.blocks[at] = lax.fori_loop(0, end, put, self.scratch.blocks[at])

    def _block_of(self, run: Any) -> Any:
        return lax.div(self.runs.part_slot[run], self.block_size)

    def _block(self, block: Any) -> Any:
        return self.pool.at[self.layer[0], block]


def _kernel(layer: Any, runs: Runs, data: _Operands, scales: _Operands | None, *rest: Any) -> None:
    *outputs, scratch = rest
    block_size = outputs[0].shape[4]
    pools = [
        _Pool(layer, runs, operands.rows, operands.full, output, space, block_size)
        for operands, output, space in zip([data, scales] if scales else [data], outputs, scratch)
    ]

    @pl.loop(0, runs.full_count[0])
    def _(i):
        for pool in pools:
            pool.full_copy(i).start()

    together = runs.part_together[0]

    @pl.loop(0, lax.div(runs.part_count[0] + together - 1, together))
    def _(group):
        first = group * together
        count = jnp.minimum(together, runs.part_count[0] - first)

        @pl.loop(0, count)
        def _(at):
            for pool in pools:
                pool.read_block(first + at, at).start()
                pool.read_rows(first + at, at, 0).start()

        @pl.loop(0, count)
        def _(at):
            for pool in pools:
                pool.read_block(first + at, at).wait()
                pool.read_rows(first + at, at, 0).wait()
                pool.merge(first + at, at)
                pool.write(first + at, at).start()

        @pl.loop(0, count)
        def _(at):
            for pool in pools:
                pool.write(first + at, at).wait()

    @pl.loop(0, runs.full_count[0])
    def _(i):
        for pool in pools:
            pool.full_copy(i).wait()


def _write(
    layer: Array, runs: Runs, data: _Operands, scales: _Operands | None, *, interpret: Any
) -> Sequence[Array]:
    hbm = pl.BlockSpec(memory_space=pl.ANY)

    def scratch(operands):
        block_shape, dtype = operands.full.shape[1:], operands.pool.dtype
        return _Scratch(
            blocks=pltpu.VMEM((IN_FLIGHT, *block_shape), dtype),
            rows=pltpu.VMEM((IN_FLIGHT, PIECE, *operands.rows.shape[1:]), dtype),
            full_sem=pltpu.SemaphoreType.DMA(()),
            read_sems=pltpu.SemaphoreType.DMA((IN_FLIGHT,)),
            write_sems=pltpu.SemaphoreType.DMA((IN_FLIGHT,)),
        )

    written = [operands for operands in (data, scales) if operands is not None]
    arguments = (layer, runs, data, scales)
    place = {id(leaf): i for i, leaf in enumerate(jax.tree.leaves(arguments))}
    return pl.pallas_call(
        _kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(1,),
            in_specs=[_Operands(hbm, hbm, hbm), None if scales is None else _Operands(hbm, hbm, hbm)],
            out_specs=[hbm for _ in written],
            scratch_shapes=[[scratch(operands) for operands in written]],
        ),
        out_shape=[jax.ShapeDtypeStruct(operands.pool.shape, operands.pool.dtype) for operands in written],
        input_output_aliases={place[id(operands.pool)]: i for i, operands in enumerate(written)},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), disable_bounds_checks=True, vmem_limit_bytes=VMEM_LIMIT
        ),
        interpret=interpret,
        name="kv_write",
    )(*arguments)

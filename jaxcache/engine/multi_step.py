"""Several decode steps in one device call: the block pool's transitions run inside the loop.

The loop does what single steps do, token for token and block for block: it allocates a block where a sequence's
last one is full, computes one row per sequence, and chooses the next tokens. It ends after the number of steps
asked for, when a sequence ends, or when the pool has too few free blocks; then the host goes on as after any step.
So nobody waits longer for a free place, and preemption stays the scheduler's business.
"""

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Int

from jaxcache.core.pool import NULL_BLOCK
from jaxcache.engine.sampling import UNUSED_ID, SamplingInputs, sample
from jaxcache.kernels.step import PAD_SLOT, SharedRuns, StepInputs, Tiles
from jaxcache.models.rows import RowInputs

MAX_ENDING_IDS = 8
"""Token ids that may end a sequence inside the loop; a request with more is decoded step by step."""


class Sequences(NamedTuple):
    """`S` sequences, padding last."""

    tokens: Int[Array, " S"]
    """The last known token of each, which has no KV yet."""
    lengths: Int[Array, " S"]
    """Tokens known; 0 for padding."""
    tables: Int[Array, "S W"]
    num_blocks: Int[Array, " S"]
    """Entries of the table that are held."""
    full_at: Int[Array, " S"]
    """The length at which the sequence ends."""
    ending_ids: Int[Array, "S E"]
    """`UNUSED_ID` where there are fewer."""
    shared: SharedRuns | None = None
    """What the tables begin with in common: they only grow, so that it holds for all steps."""


class Generated(NamedTuple):
    """What the loop did in its steps; rows past `num_steps` are padding."""

    num_steps: Int[Array, ""]
    tokens: Int[Array, "K S"]
    new_blocks: Int[Array, "K S"]
    """The block that a sequence got for the token it computed, `NULL_BLOCK` for none."""


def sequences(
    rows: Sequence[tuple[int, int, np.ndarray, int, Collection[int]]], num_seqs: int, table_width: int
) -> Sequences:
    """Of (last token, length, block table, length at which it ends, ids that end it) each, and padding."""
    tokens, lengths, num_blocks, full_at = np.zeros((4, num_seqs), np.int32)
    tables = np.full((num_seqs, table_width), NULL_BLOCK, np.int32)
    ending_ids = np.full((num_seqs, MAX_ENDING_IDS), UNUSED_ID, np.int32)
    for nth, (token, length, table, end, ending) in enumerate(rows):
        tokens[nth], lengths[nth], num_blocks[nth], full_at[nth] = token, length, len(table), end
        tables[nth, : len(table)] = table
        ending_ids[nth, : len(ending)] = list(ending)
    arrays: list[Any] = [tokens, lengths, tables, num_blocks, full_at, ending_ids]
    return Sequences(*arrays)


@partial(
    jax.jit,
    static_argnames=("graphdef", "implementation", "policy", "block_size", "num_steps"),
    donate_argnames="kv",
)
def decode_steps(
    graphdef: Any,
    params: Any,
    adapters: Any,
    kv: Any,
    pool: Any,
    seqs: Sequences,
    sampling: SamplingInputs,
    rows: RowInputs | None,
    *,
    implementation: Any,
    policy: Any,
    block_size: int,
    num_steps: int,
) -> tuple[Any, Any, Generated]:
    """Up to `num_steps` steps. Returns the KV array, the pool's state, and what was generated.

    `policy`: the module whose transitions move `pool`. `sampling.positions` is ignored: a token's is its own.
    """
    model = nnx.merge(graphdef, params, adapters)
    size = seqs.tokens.shape[0]
    active = jnp.asarray(seqs.lengths) > 0
    options = {} if rows is None else {"rows": rows}
    nobody = jnp.zeros((num_steps, size), jnp.int32)

    def going_on(carry: Any) -> Array:
        _, _, _, done, going = carry
        return going & (done.num_steps < num_steps)

    def one_step(carry: Any) -> Any:
        kv, pool, seqs, done, _ = carry
        lacking = active & (seqs.lengths > seqs.num_blocks * block_size)
        wanted = jnp.sum(lacking, dtype=jnp.int32)
        pool, ids, ok = policy.acquire(pool, jnp.zeros(0, jnp.int32), wanted, capacity=size)

        def compute(operands: Any) -> Any:
            kv, seqs, done = operands
            own = jnp.where(lacking, ids[jnp.cumsum(lacking, dtype=jnp.int32) - 1], NULL_BLOCK)
            at = jnp.where(lacking, seqs.num_blocks, seqs.tables.shape[1])
            tables = seqs.tables.at[jnp.arange(size), at].set(own, mode="drop")
            step = _step_inputs(seqs._replace(tables=tables), active, block_size)
            hidden, kv = model(step, kv, implementation=implementation, **options)
            logits = model.logits(hidden[step.logits_rows])
            tokens, _ = sample(logits, sampling._replace(positions=seqs.lengths))
            lengths = seqs.lengths + active.astype(jnp.int32)
            ended = jnp.any(tokens[:, None] == seqs.ending_ids, axis=1) | (lengths >= seqs.full_at)
            seqs = seqs._replace(
                tokens=tokens,
                lengths=lengths,
                tables=tables,
                num_blocks=seqs.num_blocks + lacking.astype(jnp.int32),
            )
            nth = done.num_steps
            done = Generated(nth + 1, done.tokens.at[nth].set(tokens), done.new_blocks.at[nth].set(own))
            return kv, seqs, done, ~jnp.any(active & ended)

        kv, seqs, done, going = lax.cond(ok, compute, lambda same: (*same, jnp.array(False)), (kv, seqs, done))
        return kv, pool, seqs, done, going

    begin = Generated(jnp.zeros((), jnp.int32), nobody, nobody)
    seqs = jax.tree.map(jnp.asarray, seqs)
    kv, pool, _, done, _ = lax.while_loop(going_on, one_step, (kv, pool, seqs, begin, jnp.array(True)))
    return kv, pool, done


def _step_inputs(seqs: Sequences, active: Array, block_size: int) -> StepInputs:
    """One row per sequence: its last known token."""
    size = seqs.tokens.shape[0]
    positions = jnp.maximum(seqs.lengths - 1, 0)
    blocks = seqs.tables[jnp.arange(size), positions // block_size]
    slots = jnp.where(active, blocks * block_size + positions % block_size, PAD_SLOT)
    none = jnp.zeros(0, jnp.int32)
    query_start = jnp.minimum(jnp.arange(size + 1, dtype=jnp.int32), jnp.sum(active, dtype=jnp.int32))
    return StepInputs(
        token_ids=seqs.tokens,
        positions=positions,
        slot_mapping=slots,
        block_tables=seqs.tables,
        seq_lens=seqs.lengths,
        query_start=query_start,
        logits_rows=jnp.maximum(query_start[1:] - 1, 0),
        tiles=Tiles(none, none, none, none),
        shared=seqs.shared,
    )

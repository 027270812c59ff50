"""The block pool as a pure value: inside jit, over time with scan, over many sizes at once with vmap.

Run: python examples/pool_in_jit.py
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxcache import pool

CAPACITY = 8
"""Most blocks that one request takes."""


@functools.partial(jax.jit, static_argnames="num_blocks")
def serve(num_blocks: int, lengths: jax.Array) -> tuple[pool.PoolState, jax.Array]:
    """Requests one after another, each holding `lengths[i]` blocks while the next starts; who got blocks."""

    def turn(carry, wanted):
        state, previous = carry
        state, ids, ok = pool.allocate(state, wanted, capacity=CAPACITY)
        state = pool.name(state, ids)
        state = pool.release(state, previous[::-1])
        return (state, ids), ok

    nobody = jnp.full(CAPACITY, num_blocks, jnp.int32)
    (state, _), served = jax.lax.scan(turn, (pool.init(num_blocks), nobody), lengths)
    return state, served


@jax.jit
def grow_together(pools: pool.PoolState, wanted: jax.Array) -> tuple[pool.PoolState, jax.Array]:
    """One allocation in each of many pools: every leaf of the state has a leading axis."""
    pools, _, ok = jax.vmap(lambda state, n: pool.allocate(state, n, capacity=CAPACITY))(pools, wanted)
    return pools, ok


def main() -> None:
    lengths = jnp.array([3, 4, 2, 8, 8, 1, 5])
    for num_blocks in (8, 12, 16):
        state, served = serve(num_blocks, lengths)
        pool.check_invariants(state)
        print(
            f"{num_blocks:2} blocks: served {np.flatnonzero(served).tolist()} of {len(lengths)}, "
            f"next victims {pool.queue(state)}"
        )

    replicas = 4
    pools = jax.vmap(lambda _: pool.init(10))(jnp.arange(replicas))
    for wanted in ([1, 3, 5, 7], [1, 3, 5, 7]):
        pools, ok = grow_together(pools, jnp.array(wanted))
        print(f"four replicas want {wanted}: {ok.tolist()}, free now {pools.num_free.tolist()}")


if __name__ == "__main__":
    main()

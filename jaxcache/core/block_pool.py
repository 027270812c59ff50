"""The host's handle on the block pool: one jitted, donated transition per decision, on the CPU backend."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcache.core import pool, pool_s3fifo

_MIN_CAPACITY = 8
NO_IDS = np.zeros(0, np.int32)


class _Transitions:
    """One policy's transitions, jitted and donated."""

    def __init__(self, policy: Any) -> None:
        def acquire(state, hits, counts, capacity):
            """`counts` is [n, headroom]; ids, success and the free count come back in one vector."""
            state, ids, ok = policy.acquire(state, hits, counts[0], counts[1], capacity=capacity)
            return state, jnp.concatenate([ids, jnp.stack([ok.astype(jnp.int32), state.num_free])])

        def release(state, ids_and_flags):
            """`ids`, whether each got a name that the state does not know of yet, and whether they go first."""
            ids, fresh, first = ids_and_flags
            if policy is pool:
                state = pool.name(state, jnp.where(fresh > 0, ids, pool.NULL_BLOCK))
            state = policy.release(state, ids, first[0] > 0)
            return state, state.num_free

        self.policy = policy
        self.acquire = jax.jit(acquire, static_argnames="capacity", donate_argnums=0)
        self.release = jax.jit(release, donate_argnums=0)
        self.name = jax.jit(policy.name, donate_argnums=0)
        self.unname = jax.jit(policy.unname, donate_argnums=0)
        self.unname_all = jax.jit(policy.unname_all, donate_argnums=0)


_TRANSITIONS = {"lru": _Transitions(pool), "s3fifo": _Transitions(pool_s3fifo)}


def host_device() -> Any:
    """The CPU that the host side's state lives on, beside whatever accelerator computes."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError as error:
        raise RuntimeError(
            "jaxcache keeps its block pool on JAX's CPU backend, and there is none: add cpu to JAX_PLATFORMS, "
            f"for instance JAX_PLATFORMS=tpu,cpu ({error})"
        ) from error


class BlockPool:
    """Reference counts and eviction order of all blocks. Content and names are the index's business."""

    def __init__(self, num_blocks: int, policy: str = "lru") -> None:
        """`policy`: one of `core.config.EVICTION_POLICIES`."""
        self._transitions = _TRANSITIONS[policy]
        self.needs_fingerprints = policy == "s3fifo"
        """Whether `name` must be told which content each block holds."""
        with jax.default_device(host_device()):
            state = self._transitions.policy.init(num_blocks)
        self._state: Any = jax.device_put(state, host_device())
        self._num_blocks = num_blocks
        self._num_free = num_blocks - 1
        self._fresh = np.zeros(num_blocks, np.bool_)
        """Named, but the state does not know yet: it matters only once the block is released."""

    @property
    def num_blocks(self) -> int:
        """All blocks, the null block included."""
        return self._num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, named ones included."""
        return self._num_free

    @property
    def usage(self) -> float:
        """The share of usable blocks that are held, 0 to 1."""
        return 1.0 - self._num_free / (self._num_blocks - 1)

    def acquire(self, hits: np.ndarray, n: int, headroom: int = 0) -> np.ndarray | None:
        """Hold `hits` and take `n` more from the queue; `None`, and nothing changed, if that is not possible.

        Possible means that the free ones among `hits`, the `n` new ones and `headroom` more are free.
        Returns the new ids, int32 [n]; whoever named them before must forget it.
        """
        if n + headroom > self._num_free:
            return None
        if n == 0 and len(hits) == 0:
            return NO_IDS
        capacity = _capacity(max(n, len(hits)))
        counts = np.array([n, headroom], np.int32)
        self._state, result = self._transitions.acquire(self._state, self._pad(hits, capacity), counts, capacity)
        result = np.asarray(result)
        if not result[-2]:
            return None
        self._num_free = int(result[-1])
        return result[:n]

    def release(self, ids: np.ndarray, first: bool = False) -> None:
        """Let go of `ids` in this order: deepest block of a sequence first.

        `first`: they are the next to be used, also those with a name.
        """
        if len(ids):
            padded = np.full((3, _capacity(len(ids))), self._num_blocks, np.int32)
            padded[0, : len(ids)] = ids
            padded[1] = 0
            padded[1, : len(ids)] = self._fresh[ids]
            padded[2] = first
            self._fresh[ids] = False
            self._state, num_free = self._transitions.release(self._state, padded)
            self._num_free = int(num_free)

    def name(self, ids: np.ndarray, fingerprints: np.ndarray | None = None) -> None:
        """`ids`, which are held, now hold content that others can find: released, they go to the queue's tail.

        `fingerprints`: uint32 per id, telling contents apart, where `needs_fingerprints`.
        """
        if not len(ids):
            return
        if not self.needs_fingerprints:
            self._fresh[ids] = True
        else:
            capacity = _capacity(len(ids))
            padded = np.zeros(capacity, np.uint32)
            padded[: len(ids)] = 0 if fingerprints is None else fingerprints
            self._state = self._transitions.name(self._state, self._pad(ids, capacity), padded)

    def unname(self, ids: np.ndarray) -> None:
        if len(ids):
            self._fresh[ids] = False
            self._state = self._transitions.unname(self._state, self._pad(ids, _capacity(len(ids))))

    def unname_all(self) -> None:
        self._fresh[:] = False
        self._state = self._transitions.unname_all(self._state)

    @property
    def policy(self) -> Any:
        """The module of transitions, for those who move the state themselves (`state`, `adopt`)."""
        return self._transitions.policy

    @property
    def state(self) -> Any:
        """The present state, which the next transition consumes."""
        return self._state

    def adopt(self, state: Any) -> None:
        """Go on from a state that `policy`'s transitions made of this one elsewhere."""
        self._state = jax.device_put(jax.tree.map(np.asarray, state), host_device())
        self._num_free = int(self._state.num_free)

    def warmup(self, max_ids: int) -> None:
        """Compile the transitions for all id vectors of up to `max_ids`. Changes nothing."""
        capacity = _MIN_CAPACITY
        while True:
            nobody, nothing = self._pad(NO_IDS, capacity), np.zeros(capacity, np.int32)
            self._state, _ = self._transitions.acquire(self._state, nobody, np.zeros(2, np.int32), capacity)
            self._state, _ = self._transitions.release(self._state, np.stack([nobody, nothing, nothing]))
            if self.needs_fingerprints:
                self._state = self._transitions.name(self._state, nobody, np.zeros(capacity, np.uint32))
            self._state = self._transitions.unname(self._state, nobody)
            if capacity >= max_ids:
                break
            capacity *= 2
        self._transitions.unname_all(jax.tree.map(jnp.copy, self._state))

    def queue(self) -> np.ndarray:
        """Ids of all free blocks, the next victim first. O(pool): for tests and diagnosis."""
        return self._transitions.policy.queue(self._state)

    def ref_count(self) -> np.ndarray:
        """int32 [num_blocks]. O(pool): for tests and diagnosis."""
        return np.array(self._state.ref_count)

    def named(self) -> np.ndarray:
        """bool [num_blocks]. O(pool): for tests and diagnosis."""
        return np.array(self._state.named) | self._fresh

    def check_invariants(self) -> None:
        """Raise `RuntimeError` if the state contradicts itself. O(pool)."""
        self._transitions.policy.check_invariants(self._state)
        if self._num_free != int(self._state.num_free):
            raise RuntimeError(f"{self._num_free} blocks are free on the host, {self._state.num_free} in the pool")

    def _pad(self, ids: np.ndarray, capacity: int) -> np.ndarray:
        padded = np.full(capacity, self._num_blocks, np.int32)
        padded[: len(ids)] = ids
        return padded


def _capacity(n: int) -> int:
    """Id vectors come in few lengths, since each is compiled once."""
    return max(_MIN_CAPACITY, 1 << (n - 1).bit_length() if n else 0)

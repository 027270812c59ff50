"""Every backend against the reference: outputs within a tolerance, and the KV array bit for bit."""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from jaxcache.kernels.check.problem import Problem
from jaxcache.kernels.dispatch import Implementation
from jaxcache.kernels.layout import KVCache
from jaxcache.kernels.paged_attention import write_and_attend
from jaxcache.kernels.paged_attention.shapes import SHAPES, AttentionShape

LENGTHS = ((5, 1), (300, 1), (0, 37), (272, 20))
"""Decodes and prefills, contexts of one block and of several chunks."""

COMMON = 256
WITH_COMMON = ((300, 1), (COMMON, 1), (400, 1), (272, 20))
"""Of sequences that begin with `COMMON` tokens in the same blocks."""

TOLERANCE = {"float32": 1e-5, "bfloat16": 3e-2, "float16": 4e-3}
"""Largest absolute error of an output, by the dtype of products; K and V are standard normal, and the reference
reads the same KV array, so that narrow KV costs nothing here."""


@dataclass(frozen=True)
class Finding:
    """What came of one comparison."""

    name: str
    worst: float
    """Largest absolute error of an output; NaN if one was not finite."""
    allowed: float
    kv_equal: bool
    refused: str = ""
    """Why the backend would not take the problem."""
    broken: str = ""
    """What the compiler or the device said instead of an answer."""

    @property
    def good(self) -> bool:
        return bool(self.refused) or (self.worst <= self.allowed and self.kv_equal)

    def __str__(self) -> str:
        if self.refused:
            return f"{self.name}: refused ({self.refused})"
        if self.broken:
            return f"{self.name}: BROKEN ({self.broken})"
        kv = "" if self.kv_equal else ", and it writes another KV array"
        verdict = "ok" if self.good else "WRONG"
        return f"{self.name}: largest error {self.worst:.1e} of {self.allowed:.0e}{kv}  {verdict}"


def reduced(shape: AttentionShape) -> AttentionShape:
    """The same group and head_dim with at most two KV heads, and a window that the lengths outgrow."""
    kv_heads = min(shape.kv_heads, 2)
    window = None if shape.sliding_window is None else min(shape.sliding_window, 128)
    return replace(shape, heads=shape.heads // shape.kv_heads * kv_heads, kv_heads=kv_heads, sliding_window=window)


def run(
    names: Sequence[str],
    dtypes: Sequence[tuple[str, str]],
    implementations: dict[str, Implementation],
    *,
    reduce: bool,
) -> Iterator[Finding]:
    """One finding per shape, pair of dtypes (q, KV) and implementation, and one with a shared run in the first of
    them, as they come."""
    for name in names:
        shape = reduced(SHAPES[name]) if reduce else SHAPES[name]
        problems = {f"{q} on {kv} KV": Problem(shape, LENGTHS, q, kv) for q, kv in dtypes}
        problems["a shared run"] = Problem(shape, WITH_COMMON, *dtypes[0], common=COMMON)
        for what, problem in problems.items():
            wanted = _step(problem, "reference")
            for label, implementation in implementations.items():
                yield compare(f"{name}, {what}, {label}", problem, implementation, wanted)


def compare(
    name: str, problem: Problem, implementation: Implementation, wanted: tuple[jax.Array, KVCache]
) -> Finding:
    """`implementation` on `problem` against what the reference makes of it."""
    allowed = TOLERANCE[problem.dtype]
    try:
        out, kv = _step(problem, implementation)
    except (ValueError, NotImplementedError) as error:
        return Finding(name, float("nan"), allowed, kv_equal=False, refused=first_line(error))
    except jax.errors.JaxRuntimeError as error:
        return Finding(name, float("nan"), allowed, kv_equal=False, broken=first_line(error))
    errors = np.abs(np.asarray(out, np.float32) - np.asarray(wanted[0], np.float32))
    found, expected = ([leaf.astype(jnp.float32) for leaf in jax.tree.leaves(cache)] for cache in (kv, wanted[1]))
    same = [bool(jnp.array_equal(a, b, equal_nan=True)) for a, b in zip(found, expected)]
    return Finding(name, float(errors.max()), allowed, all(same))


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _step(problem: Problem, implementation: Implementation) -> tuple[jax.Array, KVCache]:
    call = jax.jit(
        functools.partial(write_and_attend, layer=0, implementation=implementation, **problem.options),
        donate_argnames="kv",
    )
    k, v = problem.new_kv()
    return call(problem.queries(), k, v, problem.written_kv(), step=problem.step(), sinks=problem.sinks())

"""What decode takes of the memory's bandwidth and prefill of the matrix units, on the device that is here."""

import functools
import time
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxcache.kernels.check.peaks import PEAKS
from jaxcache.kernels.check.problem import Problem
from jaxcache.kernels.dispatch import Implementation
from jaxcache.kernels.paged_attention import paged_attention
from jaxcache.kernels.paged_attention.shapes import AttentionShape

Lengths = tuple[tuple[int, int], ...]

DECODE: Lengths = ((4095, 1),) * 64
PREFILL: Lengths = ((2048, 512),) * 4
REPEATS = 16
"""Calls in one program, each fed by the one before, so that dispatch does not count."""
RUNS = 5


@dataclass(frozen=True)
class Measurement:
    """`amount` bytes or operations in `seconds`."""

    seconds: float
    amount: float
    unit: str
    peak: float | None

    @property
    def rate(self) -> float:
        return self.amount / self.seconds

    def __str__(self) -> str:
        share = "" if self.peak is None else f", {100 * self.rate / self.peak:.0f}% of its peak"
        scale, prefix = (1e12, "T") if self.unit == "FLOP/s" else (1e9, "G")
        return f"{1e6 * self.seconds:.0f} us, {self.rate / scale:.1f} {prefix}{self.unit}{share}"


def decode(
    shape: AttentionShape,
    implementation: Implementation,
    kind: str,
    lengths: Lengths = DECODE,
    repeats: int = REPEATS,
) -> Measurement:
    """Bytes of KV that the rows see, per second; all else is small beside them. `kind`: the device's."""
    problem = Problem(shape, lengths)
    amount = problem.keys * problem.layout.block_bytes(1, problem.kv_dtype) / problem.block_size
    peak = PEAKS[kind].bytes_per_second if kind in PEAKS else None
    return Measurement(seconds(problem, implementation, repeats), amount, "B/s", peak)


def prefill(
    shape: AttentionShape,
    implementation: Implementation,
    kind: str,
    lengths: Lengths = PREFILL,
    repeats: int = REPEATS,
) -> Measurement:
    """Operations of the two matrix products over the keys that the rows see, per second."""
    problem = Problem(shape, lengths)
    amount = 4.0 * problem.keys * shape.heads * shape.head_dim
    peak = PEAKS[kind].flops_per_second if kind in PEAKS else None
    return Measurement(seconds(problem, implementation, repeats), amount, "FLOP/s", peak)


def seconds(problem: Problem, implementation: Implementation, repeats: int = REPEATS) -> float:
    """Of one call of `paged_attention`: the least of `RUNS` runs of `repeats` calls."""
    attend = functools.partial(paged_attention, implementation=implementation, **problem.options)

    @jax.jit
    def run(q, kv, step, sinks):
        def again(_, q):
            return attend(q, kv, jnp.int32(0), step, sinks=sinks)

        return jax.lax.fori_loop(0, repeats, again, q)

    arguments = (problem.queries(), problem.random_kv(), problem.step(), problem.sinks())
    jax.block_until_ready(run(*arguments))
    times = []
    for _ in range(RUNS):
        start = time.perf_counter()
        jax.block_until_ready(run(*arguments))
        times.append(time.perf_counter() - start)
    return min(times) / repeats

"""Tile sizes for the device that is here: one field after another, each kept at what measures best."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from jaxcache.kernels.check import speed
from jaxcache.kernels.dispatch import Gpu, Tpu
from jaxcache.kernels.paged_attention.shapes import SHAPES, AttentionShape
from jaxcache.kernels.tuning import GpuTuning, TpuTuning

Tuning = GpuTuning | TpuTuning

GPU_CANDIDATES: dict[str, tuple[Any, ...]] = {
    "prefill_rows": (64, 128, 256),
    "prefill_chunk": (32, 64, 128),
    "prefill_warps": (4, 8),
    "prefill_stages": (1, 2, 3, 4),
    "decode_chunk": (16, 32, 64, 128),
    "decode_warps": (1, 2, 4, 8),
    "decode_stages": (1, 2, 3, 4),
    "decode_programs": (128, 256, 512, 1024, 2048),
    "split_tokens": (128, 256, 512),
}
TPU_CANDIDATES: dict[str, tuple[Any, ...]] = {
    "chunk": (256, 512, 1024),
    "prefill_rows": (128, 256, 512),
    "row_sum": ("lanes", "matmul"),
    "depth": (1, 3, 5, 7),
    "stacked_heads": (4, 8, 16),
    "decode_tiles": (4, 8, 16),
}
DECODE_ONLY = ("decode_", "split_", "stacked_")
PREFILL_ONLY = ("prefill_", "row_sum", "depth")
SHAPE_NAMES = ("SmolLM2-135M", "Llama-3-8B")
FEW_LENGTHS = ((16_383, 1),) * 2
"""Beside the batch of `speed.DECODE`: where splitting pays."""


def changed(tuning: Tuning, field: str, value: Any) -> Tuning:
    """`tuning` with another value, and with what goes along with it."""
    changes: dict[str, Any] = {field: value}
    if field == "chunk":
        sizes = (value // 2, value)
        changes |= {"prefill_sizes": sizes, "decode_sizes": sizes}
    return dataclasses.replace(tuning, **changes)


def cost(tuning: Tuning, field: str, shapes: Sequence[AttentionShape], repeats: int = speed.REPEATS) -> float:
    """Sum over the shapes of the logarithm of the times that `field` bears on; `inf` where it does not compile."""
    implementation = Gpu(tuning=tuning) if isinstance(tuning, GpuTuning) else Tpu(tuning=tuning)
    total = 0.0
    try:
        for shape in shapes:
            if not field.startswith(PREFILL_ONLY):
                for lengths in (speed.DECODE, FEW_LENGTHS):
                    total += math.log(speed.decode(shape, implementation, "", lengths, repeats).seconds)
            if not field.startswith(DECODE_ONLY):
                total += math.log(speed.prefill(shape, implementation, "", repeats=repeats).seconds)
    except (jax.errors.JaxRuntimeError, ValueError, NotImplementedError):
        return math.inf
    return total


def search(
    start: Tuning,
    candidates: dict[str, tuple[Any, ...]],
    cost_of: Callable[[Tuning, str], float],
    smallest_gain: float = 0.02,
) -> Iterator[tuple[str, Any, float, Tuning]]:
    """Try each value of each field on top of what is best so far: `(field, value, cost, best)` as they come.

    A value replaces the one that is there if it takes at least `smallest_gain` off the logarithm of the time.
    """
    best = start
    for field, values in candidates.items():
        least = cost_of(best, field)
        for value in values:
            if value == getattr(best, field):
                continue
            tried = changed(best, field, value)
            found = cost_of(tried, field)
            if found < least - smallest_gain:
                best, least = tried, found
            yield field, value, found, best


def shapes() -> list[AttentionShape]:
    return [SHAPES[name] for name in SHAPE_NAMES]

"""Do the kernels compile for devices that are not here, and in place? As far as the compilers are installed."""

import functools
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from jaxcache.kernels.check.abstract import DECODE, MIXED, faults, kv_array, step_inputs
from jaxcache.kernels.check.correctness import first_line
from jaxcache.kernels.check.targets import (
    GPU_SPECS,
    TPU_TOPOLOGIES,
    abstract_mesh,
    can_compile_for,
    compile_for,
    devices,
)
from jaxcache.kernels.dispatch import Gpu, Implementation, Tpu
from jaxcache.kernels.layout import KVLayout
from jaxcache.kernels.paged_attention import write_and_attend
from jaxcache.kernels.paged_attention.shapes import SHAPES, AttentionShape

CUSTOM_CALL = "__gpu$xla.gpu.triton"


def run(names: list[str]) -> Iterator[tuple[str, bool]]:
    """A line per shape, step and target, and whether it is good; a line for what could not be done."""
    if can_compile_for("tpu"):
        yield from _compiled(names, list(TPU_TOPOLOGIES))
    else:
        yield "TPU: not compiled, libtpu is not installed (pip install 'jaxcache[aot]')", True
    if can_compile_for("cuda"):
        yield from _compiled(names, list(GPU_SPECS))
    else:
        yield "GPU: lowered only, JAX's CUDA plugin is not installed (make aot-gpu)", True
        yield from _lowered(names)


def _compiled(names: list[str], targets: list[str]) -> Iterator[tuple[str, bool]]:
    for target in targets:
        for name in names:
            for rows in (MIXED, DECODE):
                yield _outcome(f"{target}, {name}, {_kind(rows)}", functools.partial(_compile, target, name, rows))


def _lowered(names: list[str]) -> Iterator[tuple[str, bool]]:
    for name in names:
        for rows in (MIXED, DECODE):
            yield _outcome(f"cuda, {name}, {_kind(rows)}", functools.partial(_lower, name, rows))


def _outcome(title: str, check: Any) -> tuple[str, bool]:
    try:
        found = check()
    except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
        found = [first_line(error)]
    return f"{title}: {'; '.join(found) or 'ok'}", not found


def _kind(rows: tuple[int, int, int]) -> str:
    return "decodes" if rows is DECODE else "prefills and decodes"


def _compile(target: str, name: str, rows: tuple[int, int, int]) -> list[str]:
    kind = devices(target)[0].device_kind
    implementation = Tpu(device_kind=kind) if target in TPU_TOPOLOGIES else Gpu(device_kind=kind)
    function, arguments = _step(SHAPES[name], rows, implementation)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)
        return faults(compile_for(target, function, *arguments, donate=(0,)), arguments[0])


def _lower(name: str, rows: tuple[int, int, int]) -> list[str]:
    function, arguments = _step(SHAPES[name], rows, Gpu())
    with jax.sharding.use_abstract_mesh(abstract_mesh("h100")), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)
        text = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    kernels = text.count(CUSTOM_CALL)
    wanted = 1 if rows is DECODE else 2
    return [] if kernels == wanted else [f"{kernels} kernels in place of {wanted}"]


def _step(
    shape: AttentionShape, rows: tuple[int, int, int], implementation: Implementation
) -> tuple[Any, tuple[Any, ...]]:
    """A function of one layer's step, and its abstract arguments, the KV array first."""
    tokens = rows[0]
    kv = kv_array(KVLayout(shape.kv_heads, shape.head_dim, 16), "bfloat16")
    q, k = (
        jax.ShapeDtypeStruct((tokens, heads, shape.head_dim), jnp.bfloat16)
        for heads in (shape.heads, shape.kv_heads)
    )
    sinks = jax.ShapeDtypeStruct((shape.heads,), jnp.float32) if shape.sinks else None

    def function(kv, q, k, v, layer, step, sinks):
        options = {"sliding_window": shape.sliding_window, "sinks": sinks, "implementation": implementation}
        return write_and_attend(q, k, v, kv, layer, step, **options)

    return function, (kv, q, k, k, jax.ShapeDtypeStruct((), jnp.int32), step_inputs(*rows), sinks)

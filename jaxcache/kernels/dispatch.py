"""From `implementation` to the module that does the work. A backend is one line in its operation's table."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from jaxcache.kernels.tuning import GpuTuning, TpuTuning, gpu_tuning, tpu_tuning

DEFAULT = "xla"
"""What `implementation=None` means: it works on every platform."""


@dataclass(frozen=True)
class Tpu:
    """`implementation=Tpu(...)`: the TPU kernels, told what they do not find out by themselves.

    The name `"tpu"` alone means `Tpu()`. Hashable, so that it can be a static argument of a jitted step.
    """

    device_kind: str | None = None
    """`jax.Device.device_kind` of the TPU to compile for; chooses the tile sizes. `None`: sizes that fit all."""
    tuning: TpuTuning | None = None
    """Tile sizes in place of those on file for the device kind."""
    head_axis: str | None = None
    """Mesh axis over which heads are cut (tensor parallelism); the mesh is the ambient one (`jax.set_mesh`)."""
    interpret: Any = False
    """`pltpu.InterpretParams(...)` runs the kernels on a CPU, DMA and semaphores included."""


@dataclass(frozen=True)
class Gpu:
    """`implementation=Gpu(...)`: the GPU kernels, in the same way; `"gpu"` alone means `Gpu()`."""

    device_kind: str | None = None
    tuning: GpuTuning | None = None
    head_axis: str | None = None
    interpret: bool = False
    """`True` runs the kernels on a CPU."""


Implementation = str | Tpu | Gpu | None


def backend(operation: str, implementation: Implementation, modules: Mapping[str, str]) -> Callable[..., Any]:
    """`operation` of the backend; `modules` maps backend names to module paths, imported on first use."""
    options: dict[str, Any] = {}
    if implementation in ("tpu", "gpu"):
        implementation = Tpu() if implementation == "tpu" else Gpu()
    if isinstance(implementation, Tpu | Gpu):
        name, on_file = ("tpu", tpu_tuning) if isinstance(implementation, Tpu) else ("gpu", gpu_tuning)
        tuning = implementation.tuning or on_file(implementation.device_kind)
        options = {"tuning": tuning, "head_axis": implementation.head_axis, "interpret": implementation.interpret}
    else:
        name = DEFAULT if implementation is None else implementation
    if name not in modules:
        raise ValueError(
            f"{operation} has no implementation {implementation!r}: choose one of "
            f"{', '.join(repr(known) for known in modules)}, or None for the one that works everywhere"
        )
    return partial(getattr(importlib.import_module(modules[name]), operation), **options)


def check_runs_here(operation: str, implementation: Implementation, modules: Mapping[str, str]) -> None:
    """A `ValueError` for a backend that `operation` does not have, or that the default device cannot run."""
    backend(operation, implementation, modules)
    here, interpreted = jax.default_backend(), getattr(implementation, "interpret", False)
    for name, kind in (("tpu", Tpu), ("gpu", Gpu)):
        asked = implementation == name or isinstance(implementation, kind)
        if asked and here != name and not interpreted:
            raise ValueError(
                f"implementation {implementation!r} needs a {name.upper()}, but JAX computes on {here}: leave it "
                "out for the one that works everywhere, or install JAX for that device"
            )

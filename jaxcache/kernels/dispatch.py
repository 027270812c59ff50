"""From `implementation` to the module that does the work. A backend is one line in its operation's table."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

DEFAULT = "xla"
"""What `implementation=None` means: it works on every platform."""


@dataclass(frozen=True)
class Tpu:
    """`implementation=Tpu(...)`: the TPU kernels, told what they do not find out by themselves.

    The name `"tpu"` alone means `Tpu()`. Hashable, so that it can be a static argument of a jitted step.
    """

    device_kind: str | None = None
    """`jax.Device.device_kind` of the TPU to compile for; it chooses the tile sizes. `None`: sizes that fit all."""
    interpret: Any = False
    """`pltpu.InterpretParams(...)` runs the kernels on a CPU, DMA and semaphores included."""


Implementation = str | Tpu | None


def backend(operation: str, implementation: Implementation, modules: Mapping[str, str]) -> Callable[..., Any]:
    """`operation` of the backend; `modules` maps backend names to module paths, imported on first use."""
    options: dict[str, Any] = {}
    if isinstance(implementation, Tpu):
        name = "tpu"
        options = {"device_kind": implementation.device_kind, "interpret": implementation.interpret}
    else:
        name = DEFAULT if implementation is None else implementation
    if name not in modules:
        raise ValueError(
            f"{operation} has no implementation {implementation!r}: choose one of "
            f"{', '.join(repr(known) for known in modules)}, or None for the one that works everywhere"
        )
    return partial(getattr(importlib.import_module(modules[name]), operation), **options)

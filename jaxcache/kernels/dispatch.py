"""From `implementation` to the module that does the work. A backend is one line in its operation's table."""

import importlib
from collections.abc import Mapping
from types import ModuleType

DEFAULT = "xla"
"""What `implementation=None` means: it works on every platform."""


def backend(operation: str, implementation: str | None, modules: Mapping[str, str]) -> ModuleType:
    """The backend module of `operation`; `modules` maps its names to module paths, imported on first use."""
    name = DEFAULT if implementation is None else implementation
    if name not in modules:
        raise ValueError(
            f"{operation} has no implementation {implementation!r}: choose one of "
            f"{', '.join(repr(known) for known in modules)}, or None for the one that works everywhere"
        )
    return importlib.import_module(modules[name])

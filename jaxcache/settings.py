"""Dataclasses of settings that tell what was meant, where Python would only refuse an unknown keyword."""

import difflib
import functools
import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeVar, dataclass_transform

SettingsT = TypeVar("SettingsT")


@dataclass_transform(frozen_default=True)
def settings(cls: type[SettingsT]) -> type[SettingsT]:
    """A frozen dataclass. A keyword that is none of its fields is a `ValueError` that names the nearest one."""
    made = dataclass(frozen=True)(cls)
    names = list(inspect.signature(made).parameters)
    init = made.__init__

    @functools.wraps(init)
    def checked(self: SettingsT, *values: Any, **named: Any) -> None:
        for name in named:
            if name not in names:
                meant = did_you_mean(name, names) or f": it has {', '.join(names)}"
                raise ValueError(f"{cls.__name__} has no {name!r}{meant}")
        init(self, *values, **named)

    made.__init__ = checked
    return made


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A question after the known name that is nearest to `name`, to end a message with; empty if none is near."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f": did you mean {near[0]}?" if near else ""

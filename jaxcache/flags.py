"""Command-line flags made from config dataclasses: one per field, with its name, described by its docstring."""

import argparse
import ast
import inspect
import re
import types
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from jaxcache.settings import did_you_mean

ConfigT = TypeVar("ConfigT")


def add_flags(parser: argparse.ArgumentParser, config: type) -> None:
    """`--field-name VALUE` for each field of `config`; `--field-name/--no-field-name` for booleans."""
    group = parser.add_argument_group(config.__name__)
    hints, described = get_type_hints(config), _descriptions(config)
    for field in fields(config):
        kind, optional = _kind(hints[field.name])
        text = " ".join(described.get(field.name, "").replace("%", "%%").split())
        name = "--" + field.name.replace("_", "-")
        options: dict[str, Any] = {"dest": field.name, "default": field.default}
        options["help"] = f"{text} (default: {field.default})".strip()
        if kind is bool:
            group.add_argument(name, action=argparse.BooleanOptionalAction, **options)
        else:
            metavar = kind.__name__.upper()
            group.add_argument(name, type=_optional(kind) if optional else kind, metavar=metavar, **options)


def from_options(config: type[ConfigT], options: argparse.Namespace) -> ConfigT:
    """The `config` that the flags say; a `ValueError` where it refuses them."""
    return config(**{field.name: getattr(options, field.name) for field in fields(config)})  # pyright: ignore


def refuse(parser: argparse.ArgumentParser, unknown: Sequence[str]) -> None:
    """End the program over flags that do not exist, naming the ones that may have been meant."""
    known = re.findall(r"--[\w-]+", parser.format_help())
    messages = []
    for argument in [one for one in unknown if one.startswith("-")] or unknown:
        name = argument.split("=")[0]
        meant = did_you_mean(name, known) if name.startswith("-") else ""
        messages.append(f"unknown argument {argument}{meant}")
    parser.error("; ".join(messages))


def _kind(hint: Any) -> tuple[type, bool]:
    """(type, whether it may be `None`) of an annotation `T` or `T | None`."""
    if get_origin(hint) in (Union, types.UnionType):
        (kind,) = [part for part in get_args(hint) if part is not type(None)]
        return kind, True
    return hint, False


def _optional(kind: type) -> Any:
    def convert(text: str) -> Any:
        return None if text.lower() == "none" else kind(text)

    convert.__name__ = kind.__name__
    return convert


def _descriptions(config: type) -> dict[str, str]:
    """The docstring that follows each field in the class's source."""
    (node,) = ast.parse(inspect.cleandoc(inspect.getsource(config))).body
    described, name = {}, None
    for statement in node.body:  # pyright: ignore[reportAttributeAccessIssue]
        match statement:
            case ast.AnnAssign(target=ast.Name(id=field)):
                name = field
            case ast.Expr(value=ast.Constant(value=str(text))) if name is not None:
                described[name], name = text, None
            case _:
                name = None
    return described

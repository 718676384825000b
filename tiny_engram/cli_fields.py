"""Options of a command for the fields of a config, and the fields that were given. Imports the standard library."""

import argparse
import dataclasses
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["add_fields", "flat", "given_fields", "ints"]


def _or_none(kind: type) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        return None if text.lower() == "none" else kind(text)

    convert.__name__ = f"{kind.__name__} or none"
    return convert


def ints(text: str) -> tuple[int, ...]:
    """Of "2,10", as of "2"."""
    return tuple(int(word) for word in text.split(","))


ints.__name__ = "int"  # which argparse names in its errors


def add_fields(parser: argparse.ArgumentParser, config: type, helps: Mapping[str, str], *, required: bool = True) -> None:
    """One option for each field of a dataclass; whole numbers of a tuple may stand apart or with commas between them. `--no_{field}` takes
    back what a file said of one that is true or false.

    Args:
        required: do fields without a default have to be given?
    """
    hints = typing.get_type_hints(config)
    for field in dataclasses.fields(config):
        hint = hints[field.name]
        options: dict[str, Any]
        if isinstance(hint, types.UnionType):
            options = {"type": _or_none(next(t for t in typing.get_args(hint) if t is not types.NoneType))}
        elif hint is bool:
            options = {"action": "store_true"}
        elif typing.get_origin(hint) is tuple:
            item = typing.get_args(hint)[0]
            options = {"nargs": "+", "type": ints if item is int else item}
        else:
            options = {"type": hint}
        bare = field.default is dataclasses.MISSING
        default = " ".join(map(str, field.default)) if isinstance(field.default, tuple) else field.default
        shown = "" if bare or default is None or default is False or default == "" else f" (default: {default})"
        needed = bare and required
        parser.add_argument(f"--{field.name}", required=needed, default=argparse.SUPPRESS, help=helps[field.name] + shown, **options)
        if hint is bool:
            hidden = argparse.SUPPRESS
            parser.add_argument(f"--no_{field.name}", dest=field.name, action="store_false", default=hidden, help=hidden)


def given_fields(args: argparse.Namespace, config: type) -> dict[str, Any]:
    """What a command line said of a config's fields, lists as tuples."""
    given = {field.name: getattr(args, field.name) for field in dataclasses.fields(config) if hasattr(args, field.name)}
    return {name: flat(value) if isinstance(value, list) else value for name, value in given.items()}


def flat(values: list[Any]) -> tuple[Any, ...]:
    """Of values that may themselves be tuples, as `ints` gives them."""
    return tuple(item for value in values for item in (value if isinstance(value, tuple) else (value,)))

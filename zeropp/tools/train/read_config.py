"""Nested tables to dataclasses. Unknown keys and wrong types are errors that name the key."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


def read(kind: type[T], table: Mapping[str, Any], where: str = "") -> T:
    """Return an instance of the dataclass `kind`; missing keys have their defaults.

    >>> from dataclasses import dataclass
    >>> @dataclass
    ... class Size:
    ...     width: int = 3
    >>> read(Size, {"width": "wide"}, "size.")
    Traceback (most recent call last):
    ...
    ValueError: size.width is 'wide'; expected a whole number
    """
    hints = get_type_hints(kind)
    known = [f.name for f in fields(kind)]  # type: ignore[arg-type]
    if unknown := [key for key in table if key not in known]:
        raise ValueError(f"{where}{unknown[0]} is not a key; expected one of {', '.join(known)}")
    return kind(**{key: _convert(hints[key], value, f"{where}{key}") for key, value in table.items()})


def _convert(kind: Any, value: Any, name: str) -> Any:
    if is_dataclass(kind) and isinstance(kind, type):
        if isinstance(value, kind):
            return value
        if isinstance(value, Mapping):
            return read(kind, value, f"{name}.")
    elif _fits(kind, value):
        return Path(value) if kind is Path else float(value) if kind is float else _tuple(kind, value)
    raise ValueError(f"{name} is {value!r}; expected {_describe(kind)}")


def _tuple(kind: Any, value: Any) -> Any:
    """Convert a list to a tuple where `kind` is one: TOML and JSON have no tuples."""
    return tuple(value) if get_origin(kind) is tuple else value


def _fits(kind: Any, value: Any) -> bool:
    if kind in (int, float):
        numbers = (int,) if kind is int else (int, float)
        return isinstance(value, numbers) and not isinstance(value, bool)
    if kind is Path:
        return isinstance(value, (str, Path))
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if get_origin(kind) in (Union, types.UnionType):
        return any(_fits(part, value) for part in get_args(kind))
    if get_origin(kind) is tuple:
        parts = get_args(kind)
        if not isinstance(value, (list, tuple)) or len(value) != len(parts):
            return False
        return all(_fits(part, item) for part, item in zip(parts, value, strict=True))
    return isinstance(value, kind)


def _describe(kind: Any) -> str:
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false", Path: "a path"}
    names[types.NoneType] = "nothing"
    if kind in names:
        return names[kind]
    if get_origin(kind) is Literal:
        return " or ".join(repr(choice) for choice in get_args(kind))
    if get_origin(kind) is tuple:
        return f"a list of {len(get_args(kind))}: {', '.join(_describe(part) for part in get_args(kind))}"
    if get_origin(kind) in (Union, types.UnionType):
        return " or ".join(_describe(part) for part in get_args(kind))
    return "a table"

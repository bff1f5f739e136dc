"""Tables to dataclasses."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from zeropp.tools.train.read_config import read


@dataclass(frozen=True)
class Inner:
    size: int = 1
    pair: tuple[float, float] = (1.0, 2.0)


@dataclass(frozen=True)
class Outer:
    name: str = "a"
    rate: float = 0.5
    kind: Literal["x", "y"] = "x"
    maybe: int | None = None
    flag: bool = False
    path: Path = Path()
    inner: Inner = field(default_factory=Inner)


def test_values_of_every_type_are_read() -> None:
    table: dict[str, Any] = {"name": "b", "rate": 2, "kind": "y", "maybe": 3, "flag": True, "path": "p"}
    assert read(Outer, table | {"inner": {"size": 4, "pair": [3, 4.5]}}) == Outer(
        "b", 2.0, "y", 3, True, Path("p"), Inner(4, (3, 4.5))
    )
    assert read(Outer, {}) == Outer()


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"nam": "b"}, "nam is not a key; expected one of name, rate, kind, maybe, flag, path, inner"),
        ({"inner": {"sze": 1}}, "inner.sze is not a key; expected one of size, pair"),
        ({"name": 3}, "name is 3; expected text"),
        ({"rate": "fast"}, "rate is 'fast'; expected a number"),
        ({"rate": True}, "rate is True; expected a number"),
        ({"kind": "z"}, "kind is 'z'; expected 'x' or 'y'"),
        ({"maybe": 1.5}, "maybe is 1.5; expected a whole number or nothing"),
        ({"flag": 1}, "flag is 1; expected true or false"),
        ({"path": 1}, "path is 1; expected a path"),
        ({"inner": 3}, "inner is 3; expected a table"),
        ({"inner": {"pair": [1.0]}}, "inner.pair is [1.0]; expected a list of 2: a number, a number"),
    ],
)
def test_errors_name_key_value_and_the_expected_type(table: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011
        read(Outer, table)
    assert str(error.value) == message

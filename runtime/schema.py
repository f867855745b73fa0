"""JSON values -> frozen dataclasses, strictly: every key present whose field has no default, none
unknown, types as annotated.

Understands what the manifest needs: dataclasses, `tuple[X, ...]`, `X | None`, `dict[str, X]`,
scalars.
Lists become tuples; nothing else is converted.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any

from seekforge.kernels.errors import EngineError


def decode(kind: Any, value: Any, where: str = "") -> Any:
    """`value` as read from JSON -> an instance of the annotated type `kind`.

    Raises `EngineError` that names the key (`where` is its path so far).
    """
    if dataclasses.is_dataclass(kind):
        return _decode_fields(kind, value, where)
    if typing.get_origin(kind) is types.UnionType:
        options = typing.get_args(kind)
        # The member whose type this value has; the first one serves for the message when none fits.
        kind = next((o for o in options if _plain(o) is type(value)), options[0])
    if typing.get_origin(kind) is tuple and isinstance(value, list):
        item = typing.get_args(kind)[0]
        return tuple(decode(item, entry, f"{where}[{i}]") for i, entry in enumerate(value))
    if typing.get_origin(kind) is dict and isinstance(value, dict):
        item = typing.get_args(kind)[1]
        if item is not Any:
            return {name: decode(item, entry, f"{where}.{name}") for name, entry in value.items()}
    if type(value) is not _plain(kind):
        raise EngineError(f"key {where!r}: {_plain(kind).__name__} was expected, not {value!r}")
    return value


def _decode_fields(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise EngineError(f"key {where!r}: an object was expected, not {value!r}")
    hints = typing.get_type_hints(kind)
    prefix = f"{where}." if where else ""
    optional = {f.name for f in dataclasses.fields(kind) if f.default is not dataclasses.MISSING}
    for name in hints:
        if name not in value and name not in optional:
            raise EngineError(f"key {prefix + name!r} is missing")
    for name in value:
        if name not in hints:
            raise EngineError(f"unknown key {prefix + name!r}")
    given = {n: decode(hint, value[n], prefix + n) for n, hint in hints.items() if n in value}
    return kind(**given)


def _plain(kind: Any) -> type:
    """The class behind an annotation: dict[str, Any] -> dict."""
    plain: type = typing.get_origin(kind) or kind
    return plain

"""TOML files -> typed tables; what is wrong with one is named by its whole key, with the nearest that there is."""

from __future__ import annotations

import typing
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from farm.errors import ConfigError, UnknownNameError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_T = TypeVar("_T")


def read_table(path: Path, kind: type[_T]) -> _T:
    """Return a TOML file as a `kind`, a msgspec.Struct.

    Raises ConfigError with the key of the first thing that is wrong, and the nearest known one where it is unknown;
    OSError for a file that cannot be read.
    """
    content = path.read_bytes()
    try:
        table = msgspec.toml.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(path, "", str(error)) from None
    return convert_table(path, table, kind)


def convert_table(path: Path, table: object, kind: type[_T], key: str = "") -> _T:
    """Return what a TOML file has at `key` as a `kind`. Raises ConfigError as `read_table` does."""
    try:
        return msgspec.convert(table, kind)
    except msgspec.ValidationError as error:
        place, problem = _find(table, kind, key) or (key, str(error))
        raise ConfigError(path, place, problem) from None


def _find(value: object, kind: Any, key: str) -> tuple[str, str] | None:
    """Return the key of the first thing in `value` that a `kind` cannot have, and what is wrong; None where it is one.

    msgspec has no names of the tables in a table: `$.case[...].inputs[0]`.
    """
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        problem = str(error).partition(" - at `")[0]
    else:
        return None
    kind = _without_none(kind, value)
    if isinstance(value, dict) and _is_struct(kind):
        known = [field.encode_name for field in msgspec.structs.fields(kind)]
        for name in value:
            if name not in known:
                return key, str(UnknownNameError("key", name, known))
    for place, part, its_kind in _parts(value, kind, key):
        if found := _find(part, its_kind, place):
            return found
    if typing.get_origin(kind) is typing.Literal and isinstance(value, str):
        problem = str(UnknownNameError("value", value, typing.get_args(kind)))
    return key, problem


def _parts(value: object, kind: Any, key: str) -> Iterator[tuple[str, object, Any]]:
    """Yield what `value` consists of: the key of each part, the part and its kind."""
    dot = f"{key}." if key else ""
    if isinstance(value, dict) and _is_struct(kind):
        fields = {field.encode_name: field.type for field in msgspec.structs.fields(kind)}
        yield from ((f"{dot}{name}", part, fields[name]) for name, part in value.items())
    elif isinstance(value, dict) and typing.get_origin(kind) is dict:
        yield from ((f"{dot}{name}", part, typing.get_args(kind)[1]) for name, part in value.items())
    elif isinstance(value, list) and typing.get_origin(kind) in (tuple, list):
        yield from ((f"{key}[{index}]", part, typing.get_args(kind)[0]) for index, part in enumerate(value))


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _without_none(kind: Any, value: object) -> Any:
    """Return the kind of `X | None`, X, for a value that is there."""
    kinds = [one for one in typing.get_args(kind) if one is not type(None)]
    is_optional = type(None) in typing.get_args(kind)
    return kinds[0] if is_optional and len(kinds) == 1 and value is not None else kind

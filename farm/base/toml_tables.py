"""TOML files -> typed tables; errors name the whole key and the nearest valid one. Types made ready before threads."""

from __future__ import annotations

import contextlib
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from farm.base.errors import ConfigError, UnknownNameError
from farm.base.forms import in_seconds

_T = TypeVar("_T")


def read_table(path: Path, kind: type[_T]) -> _T:
    """Return a TOML file as a `kind`, a msgspec.Struct.

    Raises ConfigError with the first wrong key, and the nearest known key for an unknown one; OSError for a file that
    cannot be read.
    """
    content = path.read_bytes()
    try:
        table = msgspec.toml.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(path, "", str(error)) from None
    return convert_table(path, table, kind)


def convert_table(path: Path, table: object, kind: type[_T], key: str = "") -> _T:
    """Return the value of a TOML file at `key` as a `kind`. Raises ConfigError as `read_table` does.

    A key that ends in `_s` takes a time such as `30m` as well as seconds.
    """
    try:
        return msgspec.convert(table, kind)
    except msgspec.ValidationError:
        table = _with_seconds(table, kind)
    try:
        return msgspec.convert(table, kind)
    except msgspec.ValidationError as error:
        place, problem = _find(table, kind, key) or (key, str(error))
        raise ConfigError(path, place, problem) from None


def seconds_of(key: str, value: Any) -> Any:
    """Return the value of `key`, converted to seconds if the key ends in `_s` and the value is a time."""
    seconds = in_seconds(value) if key.endswith("_s") and isinstance(value, str) else None
    return value if seconds is None else seconds


def _with_seconds(value: Any, kind: Any) -> Any:
    kind = _without_none(kind, value)
    if isinstance(value, dict) and _is_struct(kind):
        fields = {field.encode_name: field.type for field in msgspec.structs.fields(kind)}
        return {
            name: seconds_of(name, part) if fields.get(name) is float else _with_seconds(part, fields.get(name))
            for name, part in value.items()
        }
    if isinstance(value, list) and typing.get_origin(kind) is tuple:
        return [_with_seconds(part, typing.get_args(kind)[0]) for part in value]
    return value


def _find(value: object, kind: Any, key: str) -> tuple[str, str] | None:
    """Return the key of the first invalid part of `value` for a `kind`, and its problem; None for a valid value.

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
    if kind is float and key.endswith("_s") and isinstance(value, str):
        problem = f"is {value!r}, expected seconds, or a time of at most 30 days, such as 90s, 10m or 1h30m"
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


# msgspec's types made ready before there are threads.


_READY = set[type]()
"""Structs that this process, or the process that forked it, has prepared, if they can be decoded."""


def prepare_decoders() -> int:
    """Prepare the decoding of every imported Struct, and return their number.

    msgspec 0.22 analyses a type at its first decoding, and ends the process with SIGSEGV if two threads do so at once.
    Call this before threads begin that decode.
    """
    kinds, seen = [msgspec.Struct], set[type]()
    while kinds:
        for kind in kinds.pop().__subclasses__():
            if kind not in seen:
                seen.add(kind)
                kinds.append(kind)
                if kind in _READY:
                    continue
                _READY.add(kind)
                # Names that only a type checker imports: such a type is never decoded.
                with contextlib.suppress(NameError, TypeError):
                    msgspec.json.Decoder(kind)
    return len(seen)

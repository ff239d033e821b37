"""Fields of an attempt and its details -> columns, bounds, and lines of exports: most new fields need no entry here."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from enum import StrEnum
from functools import partial
from types import NoneType
from typing import Annotated, Any, NamedTuple, get_args

import msgspec
from sqlalchemy import JSON, BigInteger, Boolean, Column, Float, Integer, String, Text
from sqlalchemy.types import TypeEngine

from farm.results.attempt import Attempt, Comparison, LayerComparison, OperatorProfile
from farm.store import values


class Kind(NamedTuple):
    """Kind of value: its column, its type in a line of an export, and the function that bounds it, if needed."""

    column: TypeEngine[Any]
    line: Any
    bounded: Callable[[Any], Any] | None = None


def _text(limit: int) -> Kind:
    return Kind(String(limit), Annotated[str, msgspec.Meta(max_length=limit)], partial(values.clean, limit=limit))


_COUNT = Kind(Integer(), values.Count)
_NAME = _text(values.NAME_LIMIT)
_OUTPUT_NAME = _text(values.METRIC_LIMIT)
# NaN and infinity are meaningful figures; NULL stands for NaN, which SQLite stores as NULL.
_FIGURE = Kind(Float(53), values.Number)
_BY_TYPE = {
    str: Kind(Text(), values.Text, values.clean),
    int: Kind(BigInteger(), values.Int64),
    # Neither SQLite nor JSON has NaN: such a field is `float | None`.
    float: Kind(Float(53), float, lambda value: value if math.isfinite(value) else None),
    bool: Kind(Boolean(), bool),
    tuple[str, ...]: Kind(
        JSON(),
        Annotated[tuple[values.Text, ...], msgspec.Meta(max_length=values.NOTES_LIMIT)],
        lambda notes: tuple(map(values.clean, notes[: values.NOTES_LIMIT])),
    ),
}
_BY_NAME = {
    "started_ms": Kind(BigInteger(), values.Time),
    "seconds": Kind(Float(53), values.Seconds),
    "bundle_key": Kind(String(values.KEY_LIMIT), values.Key, partial(values.clean, limit=values.KEY_LIMIT)),
    "log": Kind(Text(), values.LongText, values.clean_log),
}
_OF_DETAILS = {
    **dict.fromkeys(("node", "delegate", "module", "source", "layer", "operator"), _NAME),
    "name": _OUTPUT_NAME,
    "unit": _text(values.UNIT_LIMIT),
    "reference": _text(values.KIND_LIMIT),
    "n": _COUNT,
    "output": _COUNT,
}
# Job and device are rows of other tables, and a tuple of structs has a table of its own.
_ELSEWHERE = frozenset({"job_id", "device", "comparisons", "measurements", "operators", "layers"})


class Field(NamedTuple):
    """Field of a struct that is a column of its row."""

    info: msgspec.structs.FieldInfo
    kind: Kind
    is_optional: bool

    @property
    def column_name(self) -> str:
        """Name of the field's column."""
        # Users' queries use the longer name of this column.
        return "output_name" if self.kind is _OUTPUT_NAME else self.info.name

    @property
    def column(self) -> Column[Any]:
        """A new column for the field."""
        return Column(self.column_name, self.kind.column, nullable=self.is_optional or self.kind is _FIGURE)

    @property
    def line(self) -> tuple[str, Any] | tuple[str, Any, Any]:
        """Name, type and, if present, default of the field in a line of an export."""
        kind = self.kind.line | None if self.is_optional else self.kind.line
        has_default = self.info.default is not msgspec.NODEFAULT
        return (self.info.name, kind, self.info.default) if has_default else (self.info.name, kind)

    def bounded(self, value: Any) -> Any:
        """Return a value within the store's length limit, in characters that both databases hold."""
        return value if value is None or self.kind.bounded is None else self.kind.bounded(value)


def fields_of(kind: type[msgspec.Struct]) -> dict[str, Field]:
    """Return by name the fields of an attempt, or of a struct of its details, with a column of their own."""
    return {info.name: _field(info, kind) for info in msgspec.structs.fields(kind) if info.name not in _ELSEWHERE}


def _field(info: msgspec.structs.FieldInfo, of: type[msgspec.Struct]) -> Field:
    is_optional = NoneType in get_args(info.type)
    plain = next(kind for kind in get_args(info.type) if kind is not NoneType) if is_optional else info.type
    if isinstance(plain, type) and issubclass(plain, StrEnum):
        return Field(info, Kind(String(values.KIND_LIMIT), plain), is_optional)
    by_name, by_type = (_OF_DETAILS, {**_BY_TYPE, float: _FIGURE}) if of in _DETAILS else (_BY_NAME, _BY_TYPE)
    return Field(info, by_name.get(info.name) or by_type[plain], is_optional)


_DETAILS = (Comparison, OperatorProfile, LayerComparison)
ATTEMPT_FIELDS = fields_of(Attempt)
DETAIL_FIELDS: dict[type[msgspec.Struct], dict[str, Field]] = {kind: fields_of(kind) for kind in _DETAILS}


def columns_of(attempt: Attempt) -> dict[str, Any]:
    """Return the columns of an attempt's row for its fields."""
    return {name: getattr(attempt, name) for name in ATTEMPT_FIELDS}


def attempt_of(columns: Mapping[Any, Any], job_id: str, serial: str | None, **details: Any) -> Attempt:
    """Return the attempt of a row; fields without a column in it have their defaults."""
    facts = {name: columns[name] for name in ATTEMPT_FIELDS if name in columns}
    attempt = msgspec.convert({**facts, "job_id": job_id, "device": serial or ""}, Attempt, strict=False)
    return msgspec.structs.replace(attempt, **details)

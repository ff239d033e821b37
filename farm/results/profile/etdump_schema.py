"""The tables of an ETDump, from devtools/etdump/etdump_schema_flatcc.fbs of executorch 1.5.1.

Made by tools/generate_etdump_schema.py: do not edit.
"""

from __future__ import annotations

from farm.program.flatbuffer import Slot

IDENTIFIER = b"ED00"


class AllocationEvent:
    """`etdump.AllocationEvent`."""

    ALLOCATOR_ID = Slot(0, "<i4")
    ALLOCATION_SIZE = Slot(1, "<u8")


class Allocator:
    """`etdump.Allocator`."""

    NAME = Slot(0, "text")


class Bool:
    """`etdump.Bool`."""

    BOOL_VAL = Slot(0, "?")


class DebugEvent:
    """`etdump.DebugEvent`."""

    CHAIN_INDEX = Slot(0, "<u8")
    INSTRUCTION_ID = Slot(1, "<i4", -1)
    DEBUG_ENTRY = Slot(2, "table")
    DELEGATE_DEBUG_ID_INT = Slot(3, "<i4", -1)
    DELEGATE_DEBUG_ID_STR = Slot(4, "text")
    NAME = Slot(5, "text")


class Double:
    """`etdump.Double`."""

    DOUBLE_VAL = Slot(0, "<f8")


class ETDump:
    """`etdump.ETDump`."""

    VERSION = Slot(0, "<u4")
    RUN_DATA = Slot(1, "[table]")


class Event:
    """`etdump.Event`."""

    PROFILE_EVENT = Slot(0, "table")
    ALLOCATION_EVENT = Slot(1, "table")
    DEBUG_EVENT = Slot(2, "table")


class Float:
    """`etdump.Float`."""

    FLOAT_VAL = Slot(0, "<f4")


class Int:
    """`etdump.Int`."""

    INT_VAL = Slot(0, "<i8")


class Null:
    """`etdump.Null`."""


class ProfileEvent:
    """`etdump.ProfileEvent`."""

    NAME = Slot(0, "text")
    CHAIN_INDEX = Slot(1, "<i4")
    INSTRUCTION_ID = Slot(2, "<i4", -1)
    DELEGATE_DEBUG_ID_INT = Slot(3, "<i4", -1)
    DELEGATE_DEBUG_ID_STR = Slot(4, "text")
    DELEGATE_DEBUG_METADATA = Slot(5, "[<u1]")
    START_TIME = Slot(6, "<u8")
    END_TIME = Slot(7, "<u8")


class RunData:
    """`etdump.RunData`."""

    NAME = Slot(0, "text")
    BUNDLED_INPUT_INDEX = Slot(1, "<i4", -1)
    ALLOCATORS = Slot(2, "[table]")
    EVENTS = Slot(3, "[table]")


class String:
    """`etdump.String`."""

    STRING_VAL = Slot(0, "text")


class Tensor:
    """`etdump.Tensor`."""

    SCALAR_TYPE = Slot(0, "<i1")
    SIZES = Slot(1, "[<i8]")
    STRIDES = Slot(2, "[<i8]")
    OFFSET = Slot(3, "<i8")


class TensorList:
    """`etdump.TensorList`."""

    TENSORS = Slot(0, "[table]")


class Value:
    """`etdump.Value`."""

    VAL = Slot(0, "<i1")
    TENSOR = Slot(1, "table")
    TENSOR_LIST = Slot(2, "table")
    INT_VALUE = Slot(3, "table")
    FLOAT_VALUE = Slot(4, "table")
    DOUBLE_VALUE = Slot(5, "table")
    BOOL_VALUE = Slot(6, "table")
    OUTPUT = Slot(7, "table")

"""The tables of an ETDump that are read, from devtools/etdump/etdump_schema_flatcc.fbs of executorch 1.5.1.

Made by tools/generate_etdump_schema.py: do not edit.
"""

from __future__ import annotations

from farm.builds.program.flatbuffer import Slot

IDENTIFIER = b"ED00"


class DebugEventSlots:
    """`etdump.DebugEvent`."""

    CHAIN_INDEX = Slot(0, "<u8")
    INSTRUCTION_ID = Slot(1, "<i4", -1)
    DEBUG_ENTRY = Slot(2, "table")
    DELEGATE_DEBUG_ID_INT = Slot(3, "<i4", -1)
    DELEGATE_DEBUG_ID_STR = Slot(4, "text")
    NAME = Slot(5, "text")


class ETDumpSlots:
    """`etdump.ETDump`."""

    VERSION = Slot(0, "<u4")
    RUN_DATA = Slot(1, "[table]")


class EventSlots:
    """`etdump.Event`."""

    PROFILE_EVENT = Slot(0, "table")
    ALLOCATION_EVENT = Slot(1, "table")
    DEBUG_EVENT = Slot(2, "table")


class ProfileEventSlots:
    """`etdump.ProfileEvent`."""

    NAME = Slot(0, "text")
    CHAIN_INDEX = Slot(1, "<i4")
    INSTRUCTION_ID = Slot(2, "<i4", -1)
    DELEGATE_DEBUG_ID_INT = Slot(3, "<i4", -1)
    DELEGATE_DEBUG_ID_STR = Slot(4, "text")
    DELEGATE_DEBUG_METADATA = Slot(5, "[<u1]")
    START_TIME = Slot(6, "<u8")
    END_TIME = Slot(7, "<u8")


class RunDataSlots:
    """`etdump.RunData`."""

    NAME = Slot(0, "text")
    BUNDLED_INPUT_INDEX = Slot(1, "<i4", -1)
    ALLOCATORS = Slot(2, "[table]")
    EVENTS = Slot(3, "[table]")

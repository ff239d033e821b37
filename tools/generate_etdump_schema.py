"""Writes farm/results/profile/etdump_schema.py from the schema that the executorch wheel brings.

    python tools/generate_etdump_schema.py           write the module
    python tools/generate_etdump_schema.py --check   fail if the module is not up to date

flatc, of the same wheel, makes a binary schema, which is a flatbuffer itself, with the tables of flatbuffers'
reflection.fbs.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT)]

from farm.builds.program.flatbuffer import Flatbuffer, Slot  # noqa: E402 - also where farm is not installed

if TYPE_CHECKING:
    from numpy.typing import NDArray

TARGET = ROOT / "farm" / "results" / "profile" / "etdump_schema.py"
# Tables that farm/results/profile/etdump.py reads.
TABLES = ("DebugEvent", "ETDump", "Event", "ProfileEvent", "RunData")
SCHEMA = Path("devtools", "etdump", "etdump_schema_flatcc.fbs")

# reflection.fbs: `id` and the `offset` in a list of fields go together, offset = 4 + 2 id.
_SCHEMA_OBJECTS, _SCHEMA_IDENTIFIER = Slot(0, "[table]"), Slot(2, "text")
_OBJECT_NAME, _OBJECT_FIELDS = Slot(0, "text"), Slot(1, "[table]")
_FIELD_NAME, _FIELD_TYPE, _FIELD_ID, _FIELD_DEFAULT = Slot(0, "text"), Slot(1, "table"), Slot(2, "<u2"), Slot(4, "<i8")
_TYPE_BASE, _TYPE_ELEMENT = Slot(0, "<i1"), Slot(1, "<i1")

# reflection.fbs, BaseType: from Bool to Double, then String, Vector and Obj.
_SCALARS = ("?", "<i1", "<u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", "<f4", "<f8")
_KINDS = {**dict(enumerate(_SCALARS, start=2)), 13: "text", 15: "table"}
_VECTOR = 14

_HEAD = '''"""The tables of an ETDump that are read, from {schema} of executorch {version}.

Made by tools/{tool}: do not edit.
"""

from __future__ import annotations

from farm.builds.program.flatbuffer import Slot

'''


def main() -> None:
    """Write the module, or check it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 when something would change")
    made = generate()
    if not parser.parse_args().check:
        TARGET.write_text(made, encoding="utf-8")
    elif TARGET.read_text(encoding="utf-8") != made:
        sys.exit(f"{TARGET} is not what the schema says: run {Path(__file__).name}")


def generate() -> str:
    """Return the module."""
    schema = Flatbuffer(binary_schema())
    root = schema.root(0)
    [identifier] = schema.texts(root, _SCHEMA_IDENTIFIER)
    _, objects = schema.vectors(root, _SCHEMA_OBJECTS)
    release = version("executorch").partition("+")[0]
    head = _HEAD.format(schema=SCHEMA.as_posix(), version=release, tool=Path(__file__).name)
    parts = [f'{head}IDENTIFIER = b"{identifier}"\n']
    for name, position in sorted(zip(schema.texts(objects, _OBJECT_NAME), objects, strict=True)):
        if name.rpartition(".")[2] in TABLES:
            parts.append(_table(schema, name, np.array([position], np.int64)))
    return "\n\n".join(part.rstrip("\n") + "\n" for part in parts)


def binary_schema() -> bytes:
    """Return the binary schema that flatc makes. The wheel must be installed."""
    spec = find_spec("executorch")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("executorch is not installed: pip install 'snapdragon-farm[build]'")
    package = Path(next(iter(spec.submodule_search_locations)))
    flatc = package / "data" / "bin" / "flatc"
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([flatc, "--schema", "--binary", "-o", folder, package / SCHEMA], check=True)
        return Path(folder, SCHEMA.with_suffix(".bfbs").name).read_bytes()


def _table(schema: Flatbuffer, name: str, position: NDArray[Any]) -> str:
    title = name.rpartition(".")[2]
    lines = [f"class {title}Slots:", f'    """`{name}`."""', ""]
    _, fields = schema.vectors(position, _OBJECT_FIELDS)
    types = schema.tables(fields, _FIELD_TYPE).positions
    rows = zip(
        schema.numbers(fields, _FIELD_ID).tolist(),
        schema.texts(fields, _FIELD_NAME),
        schema.numbers(types, _TYPE_BASE).tolist(),
        schema.numbers(types, _TYPE_ELEMENT).tolist(),
        schema.numbers(fields, _FIELD_DEFAULT).tolist(),
        strict=True,
    )
    for index, field, base, element, default in sorted(rows):
        kind = f"[{_KINDS[element]}]" if base == _VECTOR else _KINDS[base]
        last = f", {default}" if default else ""
        lines.append(f'    {field.upper()} = Slot({index}, "{kind}"{last})')
    return "\n".join(lines if len(lines) > 3 else lines[:2]) + "\n"


if __name__ == "__main__":
    main()

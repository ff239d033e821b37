"""Bytecode of other code beside a source, as another user may leave it in a checkout."""

from __future__ import annotations

import importlib.util
import py_compile
from pathlib import Path


def write_foreign_bytecode(source: Path, code: str, mode: str = "UNCHECKED_HASH") -> None:
    """Write bytecode of `code` as bytecode of `source`; the mode TIMESTAMP adds time and size of the source."""
    status, compiled = source.stat(), Path(importlib.util.cache_from_source(str(source)))
    other = source.with_name(f"other_{source.name}")
    other.write_text(code)
    compiled.parent.mkdir(exist_ok=True)
    py_compile.compile(
        str(other), str(compiled), str(source), doraise=True,
        invalidation_mode=py_compile.PycInvalidationMode[mode],
    )  # fmt: skip
    other.unlink()
    if mode == "TIMESTAMP":
        times = (int(number) & 0xFFFFFFFF for number in (status.st_mtime, status.st_size))
        data = compiled.read_bytes()
        compiled.write_bytes(data[:8] + b"".join(one.to_bytes(4, "little") for one in times) + data[16:])

"""farm.toml edited in one place, with everything else in it left as its author wrote it.

tomlkit 0.15.2 puts a new key behind the comment of the next table.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

from farm.base.atomic import write_atomically
from farm.base.errors import ConfigError

_TABLE = re.compile(r"\s*\[")
_QNN = re.compile(r"\s*\[\s*qnn\s*\]\s*(#.*)?$")
_KEY = re.compile(r"\s*sdk_root\s*=")


def set_sdk_root(file: Path, root: Path | None) -> bool:
    """Write `sdk_root` into the [qnn] table of a farm.toml, or take it out for None; return whether that changed it.

    Raises ConfigError for a file that is written so that one line cannot be changed without others.
    """
    text = file.read_text(encoding="utf-8")
    before = tomllib.loads(text)
    wanted = _with_root(before, root)
    if before == wanted:
        return False
    changed = _edited(text.splitlines(keepends=True), f'sdk_root = "{root}"\n' if root is not None else "")
    try:
        done = tomllib.loads(changed) == wanted
    except tomllib.TOMLDecodeError:
        done = False
    if not done:
        line = f'sdk_root = "{root}"' if root is not None else "no sdk_root"
        raise ConfigError(file, "qnn.sdk_root", f"is written in a way that farm does not edit: write {line} yourself")
    write_atomically(file, changed, mode=file.stat().st_mode & 0o777)
    return True


def _with_root(table: dict[str, Any], root: Path | None) -> dict[str, Any]:
    qnn = {key: value for key, value in table.get("qnn", {}).items() if key != "sdk_root"}
    if root is not None:
        qnn["sdk_root"] = str(root)
    return {**table, "qnn": qnn} if qnn or "qnn" in table else table


def _edited(lines: list[str], wanted: str) -> str:
    """Return the file with the line replaced, put first in its table, or at the end in a table of its own."""
    start = next((number for number, line in enumerate(lines) if _QNN.match(line.rstrip())), None)
    if start is None:
        end = "" if not lines or lines[-1].endswith("\n") else "\n"
        return "".join([*lines, end, "\n" if lines else "", "[qnn]\n", wanted])
    after = next((number for number in range(start + 1, len(lines)) if _TABLE.match(lines[number])), len(lines))
    for number in range(start + 1, after):
        if _KEY.match(lines[number]):
            return "".join([*lines[:number], wanted, *lines[number + 1 :]])
    head = lines[start] if lines[start].endswith("\n") else f"{lines[start]}\n"
    return "".join([*lines[:start], head, wanted, *lines[start + 1 :]])

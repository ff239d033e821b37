"""Shell scripts for devices, in the common part of toybox (Android) and GNU tools."""

from functools import cache
from pathlib import Path


@cache
def shell_script(name: str) -> str:
    """Return the script `name` of this folder, for `sh -c`, without its comments."""
    text = Path(__file__).with_name(f"{name}.sh").read_text(encoding="utf-8")
    return "".join(line for line in text.splitlines(keepends=True) if not line.startswith("#"))

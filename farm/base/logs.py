"""The end of a log file."""

from __future__ import annotations

from pathlib import Path


def end_of_log(path: Path, most_bytes: int = 4096) -> str:
    """Return the last bytes of a file as text; empty where it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - most_bytes))
            return file.read(most_bytes).decode(errors="replace")
    except OSError:
        return ""

"""Current node of a compiler process, kept in a file beside its log, which outlives a process ended by a signal."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Self

from farm.base.text import one_line

if TYPE_CHECKING:
    from types import TracebackType

_MOST_BYTES = 400


class CurrentNode:
    """Writer of the file; a context manager, which removes the file. A killed process leaves it with the last node."""

    def __init__(self, log: Path) -> None:
        self._path = _beside(log)

    def __enter__(self) -> Self:
        self._file = os.open(self._path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC, 0o644)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._file)
        self._path.unlink(missing_ok=True)

    def note(self, node: str) -> None:
        """Replace the noted node by `node`, in one system call, as a graph has thousands of nodes."""
        # On a full disk the job fails with the right cause when it writes its bundle.
        with contextlib.suppress(OSError):
            os.pwrite(self._file, node.encode(errors="replace")[:_MOST_BYTES] + b"\n", 0)


def take_node(log: Path) -> str:
    """Return the last node of a compiler that ended without a reply, and add it to the log; "" for an unknown node."""
    path = _beside(log)
    try:
        with path.open("rb") as file:
            node = one_line(file.readline(_MOST_BYTES + 1).decode(errors="replace"))
        path.unlink()
        if node:
            with log.open("ab") as file:
                file.write(f"\nfarm: the compiler was at {node}\n".encode())
    except OSError:
        return ""
    return node


def _beside(log: Path) -> Path:
    return log.with_name(f"{log.name}.at")

"""Compiling under watch: a failure has QNN's own reason, and a process that a signal ends leaves its node. Torch-free.

The node at work is in a file beside the log of its process, which outlives a process ended by a signal.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from farm.base.backends.registry import runs_on_cpu
from farm.base.text import one_line
from farm.builds.compile.protocol import failure_of
from farm.builds.compile.qnn_errors import explained

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from farm.builds.compile.graph_watch import GraphWatch
    from farm.suites.suite import Job

_MOST_BYTES = 400


def watched_failure_of(job: Job, log: Path, act: Callable[[], object]) -> tuple[str, bool]:
    """Compile `job` by `act`, and return the result of `failure_of`; `log` is the file of this process's output."""
    with noting_node(log) as note:
        watch = _watch(job, note)
        reason, infra = failure_of(act if watch is None else watch.watching()(act))
        if not reason or infra or watch is None:
            return reason, infra
        sys.stderr.flush()
        printed = log.read_text(encoding="utf-8", errors="replace")
        return explained(reason, printed, watch.origins, watch.odd_values), infra


def _watch(job: Job, note: Callable[[str], None]) -> GraphWatch | None:
    """Return the watch of a job's graphs for QNN; None for a job without QNN, or in another version of ExecuTorch."""
    if runs_on_cpu(job.target.backend) or job.case.pte:
        return None
    # After a failed import the compilation fails at the same import, with its own message.
    with contextlib.suppress(ImportError, AttributeError):
        from farm.builds.compile.graph_watch import GraphWatch

        return GraphWatch(job.case, note)
    return None


@contextlib.contextmanager
def noting_node(log: Path) -> Iterator[Callable[[str], None]]:
    """Yield a function that notes the node at work; the file is removed after the body, and stays after a kill."""
    path = _beside(log)
    file = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC, 0o644)

    def note(node: str) -> None:
        # A graph has thousands of nodes: each is one system call. On a full disk the job fails with the right cause
        # when it writes its bundle.
        with contextlib.suppress(OSError):
            os.pwrite(file, node.encode(errors="replace")[:_MOST_BYTES] + b"\n", 0)

    try:
        yield note
    finally:
        os.close(file)
        path.unlink(missing_ok=True)


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

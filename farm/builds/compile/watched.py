"""Compiling under watch: a failure has QNN's own reason, and a process that a signal ends leaves its node."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from farm.base.backends.registry import runs_on_cpu
from farm.builds.compile.current_node import CurrentNode
from farm.builds.compile.protocol import failure_of
from farm.builds.compile.qnn_errors import explained

if TYPE_CHECKING:
    from collections.abc import Callable

    from farm.builds.compile.graph_watch import GraphWatch
    from farm.suites.suite import Job


def watched_failure_of(job: Job, log: Path, act: Callable[[], object]) -> tuple[str, bool]:
    """Compile `job` by `act`, and return the result of `failure_of`; `log` is the file of this process's output."""
    with CurrentNode(log) as current_node:
        watch = _watch(job, current_node.note)
        with_watch = act if watch is None else watch.watching()(act)
        reason, infra = failure_of(with_watch)
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

        return GraphWatch(Path(job.case.folder).parent, note)
    return None

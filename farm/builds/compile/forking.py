"""Forks of a tracing builder: the process does the first steps of every job once, and each job has a fork of it.

A job sees what this process did before the fork, which is in its trace as well, and nothing of other jobs. If a fork
ends early, this process ends in the same way, so that the caller sees no difference.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def run_in_fork(act: Callable[[], None]) -> None:
    """Call `act` in a fork of this process and return after its success; otherwise end as the fork ended."""
    sys.stdout.flush()
    sys.stderr.flush()
    done, say_done = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            act()
            os.write(say_done, b".")
            os._exit(0)
        except BaseException:  # noqa: BLE001 - nothing of it may reach the loop of the process it is a copy of
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
    os.close(say_done)
    _, status = os.waitpid(pid, 0)
    # A process that a job started may hold the other end open and outlive the job.
    os.set_blocking(done, False)
    try:
        is_done = os.read(done, 1) == b"."
    except BlockingIOError:
        is_done = False
    os.close(done)
    if not is_done:
        _end_as(os.waitstatus_to_exitcode(status))


def _end_as(code: int) -> None:
    """End this process with an exit code, or by signal -code."""
    if code < 0:
        # The fork has written a core file already, and a second file has no use.
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code & 0xFF)


def warm_up() -> None:
    """Do the first steps of every job: export, quantize and serialize a tiny module.

    No backend runs and no QNN is loaded. Errors are ignored, as a job reports them as well.
    """
    with contextlib.suppress(Exception):
        # tqdm's thread only watches progress bars, and a process with threads must not be forked.
        from tqdm import tqdm

        tqdm.monitor_interval = 0
    with contextlib.suppress(Exception):
        import torch
        from executorch.exir import to_edge
        from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
        from torchao.quantization.pt2e.quantizer import Quantizer

        from farm.builds.compile.flows.shortcuts.every import less_work

        class Nothing(Quantizer):  # type: ignore[misc]
            def annotate(self, model: torch.fx.GraphModule) -> torch.fx.GraphModule:
                return model

            def validate(self, model: torch.fx.GraphModule) -> None:
                pass

        class Add(torch.nn.Module):  # type: ignore[misc]
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x + x

        inputs = (torch.ones(1, 4),)
        # Forks inherit the kernels of composite operators.
        with less_work():
            exported = torch.export.export(Add(), inputs, strict=True)
            prepared = prepare_pt2e(exported.module(), Nothing())
            prepared(*inputs)
            convert_pt2e(prepared)
            to_edge(exported).to_executorch()


def is_single_threaded() -> bool:
    """Return whether this process may be forked: a lock of another thread would stay closed in the copy."""
    try:
        return sum(1 for _ in Path("/proc/self/task").iterdir()) == 1
    except OSError:
        import threading

        return threading.active_count() == 1

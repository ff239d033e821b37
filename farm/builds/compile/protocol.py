"""Protocol between a compiler process and its caller: one JSON line each way."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import re
import signal
import traceback
from typing import IO, TYPE_CHECKING

import msgspec

from farm.base.errors import InfraError
from farm.base.text import one_line
from farm.suites.suite import Job

if TYPE_CHECKING:
    from collections.abc import Callable

CRASHES = {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL}
"""Signals of a crashed compiler; any other signal that ends a builder comes from outside."""

BUILDER_NAME, TEMPLATE_NAME = "farm-builder", "farm-template"
"""Names in `ps -o comm`."""

BEGAN = b"began\n"
"""Line that a builder sends before it compiles a request: its end after this line is due to the compiler."""

_REASON_CHARS = 500
# `_IOLBF` of stdio.h.
_BY_LINE = 1
_OF_A_PASS = re.compile(r"An error occurred when running the '(\w+)' pass")


class BuildRequest(msgspec.Struct, frozen=True):
    """Request to build the bundle of a job."""

    job: Job
    key: str
    versions: dict[str, str]
    log: str
    """File for the output of the compiler."""
    anew: bool = False
    """True to compile a bundle that is in the cache, and to replace it."""
    suite_as_of_ns: int = 0
    """Time when the files of its suite were read for `key`; 0 turns the check of their age off."""


class BuildReply(msgspec.Struct, frozen=True):
    """Reply to a BuildRequest."""

    key: str
    ok: bool
    seconds: float
    reason: str = ""
    """Exception as one line; empty when ok."""
    infra: bool = False
    """True for a fault of the machine (no space, no permission), not of the job."""

    @property
    def lost_reason(self) -> str:
        """Reason for a missing bundle: the compiler's, or the removal of the bundle after its build."""
        gone = "the bundle was built and is gone: check for a user or a job that prunes the cache"
        return gone if self.ok else self.reason


def is_text(job: Job) -> bool:
    """Return whether `job` needs the decoders of ExecuTorch's examples, whose import takes seconds."""
    return job.case.generate is not None and not job.case.pte


def exit_reason(code: object) -> str:
    """Return the reason of a compiler that called `sys.exit` with `code`, or whose process ended with it."""
    if code is None or isinstance(code, int):
        return f"the compiler called exit({code or 0})"
    return one_line(f"the compiler called exit(1): {code}", _REASON_CHARS)


def reason_of(error: BaseException) -> str:
    """Return an error of the compiler as the reason of a reply: one line of bounded length."""
    within = ""
    # torch's PassManager raises its own error, which lists all earlier passes and leaves the cause out.
    while error.__cause__ is not None and (wrapped := _OF_A_PASS.match(str(error))):
        within += f"pass {wrapped[1]}: "
        error = error.__cause__
    return one_line(f"{within}{type(error).__name__}: {error}", _REASON_CHARS)


def reply_pipe() -> IO[bytes]:
    """Return a pipe for replies in place of standard output, which goes to standard error from now on."""
    # QNN's C++ code prints to descriptors 1 and 2, so that replies need a separate descriptor.
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    _end_lines_at_once()
    return replies


def _end_lines_at_once() -> None:
    """Let native code write each line at its end: C keeps a block of output to a file, beyond the end of a job."""
    import ctypes

    with contextlib.suppress(AttributeError, OSError, ValueError):
        native = ctypes.CDLL(None)
        native.setvbuf(ctypes.c_void_p.in_dll(native, "stdout"), None, _BY_LINE, ctypes.c_size_t(0))


def collect_rarely() -> None:
    """Set the garbage collector's thresholds for a process that imports torch and compiles.

    A compile creates many objects that live until its end, beside 400,000 objects of torch and ExecuTorch. With
    Python's own thresholds, collections take a quarter of the time of imports and a tenth of a compile.
    """
    gc.set_threshold(100_000, 10, 10)


def dump_stacks() -> None:
    """Let this process write its stack to standard error when a signal ends it.

    The stack goes to descriptor 2, which leads to the log of the current job in a builder.
    """
    faulthandler.enable(file=2)
    # SIGTERM ends a compiler after its time limit.
    faulthandler.register(signal.SIGTERM, file=2, chain=True)


def failure_of(act: Callable[[], object]) -> tuple[str, bool]:
    """Call `act`; return the reason of a failure or "", and whether the machine is at fault. Prints the traceback."""
    try:
        act()
    except SystemExit as error:
        traceback.print_exc()
        return exit_reason(error.code), False
    except Exception as error:  # noqa: BLE001 - each exception of a compiler is the verdict of this job alone
        traceback.print_exc()
        return reason_of(error), isinstance(error, InfraError | MemoryError)
    return "", False

"""A program from its start to its exit code, whatever kind of transport runs it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from farm.devices.transport import Completed
from farm.errors import DeviceError, DeviceTimeoutError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from farm.devices.transport import Output, Process

# What is told of a program's standard error when it is to blame.
TAIL_BYTES = 400


def communicate(
    process: Process, serial: str, argv: Sequence[str], *, stdin: bytes, timeout_s: float, max_output: int
) -> Completed:
    """Send all of standard input, take in the output and return the result; the caller closes `process`.

    Raises DeviceTimeoutError when the time is over, DeviceError when the output is too large or the connection breaks.
    """
    started = time.monotonic()
    process.send(stdin)
    process.close_stdin()
    pieces: list[Output] = []
    size, tail = 0, b""
    while not pieces or pieces[-1].code is None:
        left = timeout_s - (time.monotonic() - started)
        if left <= 0:
            problem = f"did not finish in {timeout_s:g} s and was ended"
            raise DeviceTimeoutError(serial, problem, argv=argv, stderr=tail.decode(errors="replace"))
        pieces.append(process.receive(left))
        size += len(pieces[-1].stdout) + len(pieces[-1].stderr)
        tail = (tail + pieces[-1].stderr[-TAIL_BYTES:])[-TAIL_BYTES:]
        if size > max_output:
            problem = f"wrote more than {max_output} bytes and was ended"
            raise DeviceError(serial, problem, argv=argv, stderr=tail.decode(errors="replace"))
    stdout, stderr = (b"".join(part) for part in ((p.stdout for p in pieces), (p.stderr for p in pieces)))
    return Completed(pieces[-1].code or 0, stdout, stderr, time.monotonic() - started)

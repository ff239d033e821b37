"""The caller's end of the compiler process of `farm debug`: `farm.compile.debug.debugger`. Torch-free."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from typing import TYPE_CHECKING

import msgspec

from farm.compile.debug.protocol import DebugReply
from farm.compile.protocol import CRASHES, exit_reason

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from farm.compile.debug.protocol import CompareRequest, CompileRequest
    from farm.system.processes import Supervisor


class DebugProcess:
    """One process, which is asked from one thread at a time."""

    def __init__(self, supervisor: Supervisor, env: Mapping[str, str], log: Path, folder: Path) -> None:
        """Start it; `env` is added to the environment, `log` takes what the compiler prints.

        It works in the new `folder`, which the caller removes with all that the compiler leaves.
        """
        folder.mkdir()
        self._log = log
        self._child = supervisor.spawn(
            [sys.executable, "-m", "farm.compile.debug.debugger", str(folder)],
            name="debugger",
            env={**os.environ, **env, "TOKENIZERS_PARALLELISM": "false"},
            stdin_pipe=True,
            stdout_pipe=True,
            stderr=log,
        )

    def send(self, request: CompileRequest | CompareRequest) -> None:
        """Ask for something; `receive` has to follow before the next request."""
        pipe = self._child.process.stdin
        # Where it has died, the empty answer says how.
        with contextlib.suppress(BrokenPipeError):
            if pipe is not None:
                pipe.write(msgspec.json.encode(request) + b"\n")
                pipe.flush()

    def receive(self, timeout_s: float) -> DebugReply:
        """Return how the request went; a process that crashes or takes longer is a reply as well."""
        process = self._child.process
        if process.stdout is None:
            return DebugReply(ok=False, reason="the debugger has no pipes", infra=True)
        with self._child.limited(timeout_s) as overdue:
            line = process.stdout.readline()
            if line.endswith(b"\n"):
                return msgspec.json.decode(line, type=DebugReply)
            # It may have closed its output and hang all the same.
            code = process.wait()
        if overdue.is_set():
            return DebugReply(ok=False, reason=f"the compiler did not finish in {timeout_s:g} s and was ended")
        if -code in CRASHES:
            return DebugReply(ok=False, reason=f"the compiler crashed ({signal.Signals(-code).name})")
        if code >= 0:
            return DebugReply(ok=False, reason=exit_reason(code))
        return DebugReply(ok=False, reason=f"the compiler process ended with signal {-code}: see {self._log}", infra=True)

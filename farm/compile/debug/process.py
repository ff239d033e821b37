"""The caller's end of the compiler process of `farm debug`: `farm.compile.debug.debugger`. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from farm.compile.compiler_process import CompilerEnding, CompilerProcess
from farm.compile.debug.protocol import DebugReply

if TYPE_CHECKING:
    from pathlib import Path

    from farm.system.processes import Supervisor
    from farm.toolchains.toolchain import Compiler


class DebugProcess(CompilerProcess):
    """One process, which is asked from one thread at a time."""

    def __init__(self, supervisor: Supervisor, compiler: Compiler, log: Path, folder: Path) -> None:
        """Start it.

        It works in the new `folder`, which the caller removes with all that the compiler leaves.
        """
        folder.mkdir()
        super().__init__("farm.compile.debug.debugger", [str(folder)], supervisor, "debugger", compiler, log)

    def receive(self, timeout_s: float) -> DebugReply:
        """Return how the request went; a process that crashes or takes longer is a reply as well."""
        line = self.receive_line(timeout_s)
        if not isinstance(line, CompilerEnding):
            return msgspec.json.decode(line, type=DebugReply)
        if reason := line._replace(began=True).compiler_reason(timeout_s):
            return DebugReply(ok=False, reason=reason)
        return DebugReply(
            ok=False, reason=f"the compiler process ended with signal {-line.code}: see {self.log}", infra=True
        )

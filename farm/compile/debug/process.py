"""The caller's end of the compiler process of `farm debug`: `farm.compile.debug.debugger`. Torch-free."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import msgspec

from farm.compile.compiler_process import CompilerEnding, CompilerProcess
from farm.compile.debug.protocol import DebugReply

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from farm.system.processes import Supervisor


class DebugProcess(CompilerProcess):
    """One process, which is asked from one thread at a time."""

    def __init__(self, supervisor: Supervisor, env: Mapping[str, str], log: Path, folder: Path) -> None:
        """Start it; `env` is added to the environment.

        It works in the new `folder`, which the caller removes with all that the compiler leaves.
        """
        folder.mkdir()
        super().__init__(
            "farm.compile.debug.debugger", [str(folder)], supervisor, "debugger", {**os.environ, **env}, log
        )

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

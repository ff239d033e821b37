"""Caller's end of the compiler process of `farm debug`: `farm.builds.compile.debug.debugger`. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from farm.builds.compile.compiler_process import CompilerEnding, CompilerProcess
from farm.builds.compile.debug.protocol import DebugReply, no_module
from farm.builds.compile.watched import take_node
from farm.builds.toolchains.interpreters import process_environment

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from farm.base.processes import Supervisor
    from farm.builds.compile.debug.protocol import UserMetric
    from farm.builds.toolchains.toolchain import Compiler

_FIND = "import importlib.util, sys; sys.exit(3 if importlib.util.find_spec(sys.argv[1]) is None else 0)"
_MISSING = 3
_FIND_SECONDS = 60.0


def require_modules(
    supervisor: Supervisor, compiler: Compiler, metrics: Sequence[UserMetric], suite_folder: Path
) -> None:
    """Raise UsageError for the first of `metrics` without a module, as the compiler process would later.

    The toolchain's interpreter looks for the module without importing code of the user.
    """
    for metric in metrics:
        first, *_ = metric.module.removeprefix(".").split(".")
        if metric.module.startswith("."):
            if not (suite_folder / first).is_dir() and not any(suite_folder.glob(f"{first}.*")):
                raise no_module(metric, f"{first} in {suite_folder}")
            continue
        argv = [compiler.python, "-c", _FIND, first]
        child = supervisor.spawn(argv, name="metric", env=process_environment(compiler.env))
        with child.limited(_FIND_SECONDS):
            code = child.process.wait()
        if code == _MISSING:
            raise no_module(metric, first)


class DebugProcess(CompilerProcess):
    """Compiler process of `farm debug`, for requests from one thread at a time."""

    def __init__(self, supervisor: Supervisor, compiler: Compiler, log: Path, folder: Path) -> None:
        """Start the process in the new `folder`.

        The caller removes the folder with the compiler's leftovers.
        """
        folder.mkdir()
        # The process has another current folder than this process, so that the path must be absolute.
        words = [str(folder), str(log.absolute())]
        super().__init__("farm.builds.compile.debug.debugger", words, supervisor, "debugger", compiler, log)

    def receive(self, timeout_s: float) -> DebugReply:
        """Return the reply to the request; a crash and an exceeded time limit become a reply as well."""
        line = self.receive_line(timeout_s)
        if not isinstance(line, CompilerEnding):
            return msgspec.json.decode(line, type=DebugReply)
        node = take_node(self.log)
        if reason := line._replace(began=True).compiler_reason(timeout_s):
            return DebugReply(ok=False, reason=f"{reason}; it was at {node}" if node else reason)
        return DebugReply(
            ok=False, reason=f"the compiler process ended with signal {-line.code}: see {self.log}", infra=True
        )

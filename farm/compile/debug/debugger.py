"""The compiler process of `farm debug`, `python -m farm.compile.debug.debugger FOLDER`: what is compiled stays there.

It answers a CompileRequest, then as many CompareRequests as come, on standard output; all else goes to standard error.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from farm.bundles.leftovers import work_in
from farm.compile.debug.protocol import DebugReply, CompareRequest, CompileRequest
from farm.compile.protocol import exit_reason, reason_of
from farm.errors import InfraError, UsageError

if TYPE_CHECKING:
    from farm.compile.debug.compiler import DebugProgram

_NAMED = 4


def main(argv: list[str]) -> int:
    """Serve requests from stdin until it is closed, in a folder for what a compiler leaves."""
    work_in(Path(argv[0]))
    # QNN's C++ code prints to the descriptors themselves: replies need one of their own.
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    debugger = Debugger()
    decoder = msgspec.json.Decoder(CompileRequest | CompareRequest)
    for line in sys.stdin.buffer:
        replies.write(msgspec.json.encode(debugger.serve(decoder.decode(line))) + b"\n")
        sys.stderr.flush()
    return 0


class Debugger:
    """Compiles one program and compares what it wrote."""

    def __init__(self) -> None:
        self._program: DebugProgram | None = None

    def serve(self, request: CompileRequest | CompareRequest) -> DebugReply:
        """Return how a request went. Raises nothing: whatever a compiler raises is a reply."""
        try:
            if isinstance(request, CompileRequest):
                return self._compile(request)
            return self._compare(request)
        except UsageError as error:
            return DebugReply(ok=False, reason=" ".join(str(error).split()), refused=True)
        except (InfraError, MemoryError) as error:
            traceback.print_exc()
            return DebugReply(ok=False, reason=reason_of(error), infra=True)
        except SystemExit as error:
            traceback.print_exc()
            return DebugReply(ok=False, reason=exit_reason(error.code))
        except Exception as error:  # noqa: BLE001 - whatever a compiler raises is the verdict of this job
            traceback.print_exc()
            return DebugReply(ok=False, reason=reason_of(error))

    def _compile(self, request: CompileRequest) -> DebugReply:
        started = time.perf_counter()
        from farm.compile.debug.compiler import compile_debug

        seconds = {"imports": time.perf_counter() - started}
        self._program = compile_debug(request.job, request.versions, request.sample, Path(request.folder))
        return DebugReply(ok=True, seconds={**seconds, **self._program.seconds}, notes=self._program.notes)

    def _compare(self, request: CompareRequest) -> DebugReply:
        from farm.compile.debug.compare import compare_layers, missing_layers

        if self._program is None:
            return DebugReply(ok=False, reason="nothing was compiled", infra=True)
        started = time.perf_counter()
        layers = compare_layers(self._program, request.simulator, request.device)
        notes = []
        if missing := missing_layers(self._program, layers):
            more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
            why = "the CPU runs them, the compiler fused them into others, or they have several outputs"
            notes.append(f"nothing was written of {', '.join(missing[:_NAMED])}{more}: {why}")
        return DebugReply(ok=True, seconds={"compare": time.perf_counter() - started}, layers=layers, notes=tuple(notes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Compiler process of `farm debug`: `python -m farm.builds.compile.debug.debugger FOLDER LOG`.

The process answers a CompileRequest and any number of CompareRequests on standard output. FOLDER keeps its programs;
all other output goes to standard error, which is LOG.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from farm.base.errors import UsageError
from farm.base.text import one_line
from farm.builds.bundles.cache import work_in
from farm.builds.compile.debug.protocol import CompareRequest, CompileRequest, DebugReply
from farm.builds.compile.loaded import import_from_source
from farm.builds.compile.protocol import collect_rarely, dump_stacks, failure_of, reply_pipe
from farm.builds.compile.watched import watched_failure_of

if TYPE_CHECKING:
    from farm.builds.compile.debug.compiler import DebugProgram

_NAMED = 4


def main(argv: list[str]) -> int:
    """Serve requests from stdin until it is closed, in a folder for the compiler's leftovers."""
    folder, log = map(Path, argv)
    work_in(folder)
    replies = reply_pipe()
    dump_stacks()
    collect_rarely()
    import_from_source()
    debugger = Debugger(log)
    decoder = msgspec.json.Decoder(CompileRequest | CompareRequest)
    for line in sys.stdin.buffer:
        replies.write(msgspec.json.encode(debugger.serve(decoder.decode(line))) + b"\n")
        sys.stderr.flush()
    return 0


class Debugger:
    """Compiler of one program, and comparison of its layers."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._program: DebugProgram | None = None

    def serve(self, request: CompileRequest | CompareRequest) -> DebugReply:
        """Return the reply to a request. Raises nothing: each exception of a compiler becomes a reply."""
        replies: list[DebugReply] = []
        began = time.perf_counter()

        def act() -> None:
            try:
                if isinstance(request, CompileRequest):
                    replies.append(self._compile(request, began))
                else:
                    replies.append(self._compare(request))
            except UsageError as error:
                replies.append(DebugReply(ok=False, reason=one_line(str(error)), refused=True))

        if isinstance(request, CompileRequest):
            reason, infra = watched_failure_of(request.job, self._log, act)
        else:
            reason, infra = failure_of(act)
        return replies[0] if replies else DebugReply(ok=False, reason=reason, infra=infra)

    def _compile(self, request: CompileRequest, began: float) -> DebugReply:
        from farm.builds.compile.debug.compiler import compile_debug

        seconds = {"imports": time.perf_counter() - began}
        folder = Path(request.folder)
        self._program = compile_debug(request.job, request.versions, request.sample, folder)
        return DebugReply(ok=True, seconds={**seconds, **self._program.seconds}, notes=self._program.notes)

    def _compare(self, request: CompareRequest) -> DebugReply:
        from farm.builds.compile.debug.compare import compare_layers, missing_layers

        if self._program is None:
            return DebugReply(ok=False, reason="nothing was compiled", infra=True)
        started = time.perf_counter()
        layers = compare_layers(self._program, request.simulator, request.device)
        notes = []
        if missing := missing_layers(layers):
            more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
            why = "the compiler fused them into others, or ExecuTorch's passes put another operator in their place"
            notes.append(f"nothing was written of {', '.join(missing[:_NAMED])}{more}: {why}")
        seconds = {"compare": time.perf_counter() - started}
        return DebugReply(ok=True, seconds=seconds, packed_layers=msgspec.msgpack.encode(layers), notes=tuple(notes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

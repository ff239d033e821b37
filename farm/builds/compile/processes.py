"""Compiler processes as their caller sees them, and the template of which builders are forks. Torch-free."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import secrets
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from farm.base import machine
from farm.base.errors import InfraError
from farm.base.files import sweep_own
from farm.base.fork_server import ForkServer, serve_forks, take_name
from farm.base.processes import ready_of
from farm.builds.bundles.cache import builder_folders, folder_size
from farm.builds.compile.protocol import BEGAN, CRASHES, TEMPLATE_NAME, BuildReply, BuildRequest, exit_reason, is_text
from farm.builds.toolchains.interpreters import process_environment

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from farm.base.fork_server import ForkProcess
    from farm.base.processes import Supervisor
    from farm.builds.compile.loaded import LoadedFiles
    from farm.builds.toolchains.toolchain import Compiler
    from farm.suites.suite import Job


_MEGABYTE = 2**20
# The pool has a builder per processor by default: more threads in a builder would only slow down others.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
# QNN leaves bytes between the weights of a convolution unset. They would hold old contents of the memory, such as
# weights of the previous job, and differ each time. With `perturb=255` glibc clears the memory that it hands out, and
# `tcache_count=0` extends that to all of it. The hash seed fixes the order of a set of names.
SAME_EACH_TIME = {
    "GLIBC_TUNABLES": "glibc.malloc.perturb=255:glibc.malloc.tcache_count=0",
    "PYTHONHASHSEED": "0",
}
# Seconds between two checks of the memory. A module fills some GB a second, and passes the limit by less than 1 GB.
_MEMORY_LOOK_S = 0.1
# Most bytes that compilers may leave in the folder of a builder before it gets no further job.
_MOST_LEFT_BYTES = 2**30


def _process_environment(env: Mapping[str, str]) -> dict[str, str]:
    return {**process_environment(env), **SAME_EACH_TIME, "TOKENIZERS_PARALLELISM": "false"}


class CompilerEnding(NamedTuple):
    """End of a process without a reply."""

    code: int
    """Exit code; -n for signal n."""
    began: bool = False
    """True for a process that had begun to compile."""
    overdue: bool = False
    """True for a process that was ended after its time limit."""
    greedy: bool = False
    """True for a process that was ended above its memory limit."""

    def compiler_reason(self, timeout_s: float) -> str:
        """Return the reason if the compiler caused this end; "" for another cause."""
        if self.overdue:
            more = "build.timeout_s in farm.toml allows more"
            return f"the compiler did not finish in {timeout_s:g} s and was ended: {more}"
        if -self.code in CRASHES:
            return f"the compiler crashed ({signal.Signals(-self.code).name})"
        return exit_reason(self.code) if self.code >= 0 and self.began else ""


class CompilerProcess:
    """Process of `farm.builds.compile` that answers each line of JSON with another line; any thread may end it."""

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        supervisor: Supervisor,
        name: str,
        compiler: Compiler,
        log: Path,
        popen: Callable[..., Any] | None = None,
    ) -> None:
        """Start the process, as a fork by `popen`; its output goes to `log`. Raises InfraError."""
        self.log = log
        self._child = supervisor.spawn(
            [compiler.python, "-m", module, *arguments],
            name=name,
            env=_process_environment(compiler.env),
            stdin_pipe=True,
            stdout_pipe=True,
            stderr=log,
            popen=popen,
        )

    @property
    def is_alive(self) -> bool:
        """True for a running process."""
        return self._child.process.poll() is None

    def send(self, request: msgspec.Struct) -> None:
        """Send `request`; `receive_line` has to follow before the next request."""
        # After a death at this moment, the end of the output shows the cause.
        with contextlib.suppress(BrokenPipeError):
            if (pipe := self._child.process.stdin) is not None:
                pipe.write(msgspec.json.encode(request) + b"\n")
                pipe.flush()

    def receive_line(self, timeout_s: float, most_mb: int | None = None) -> bytes | CompilerEnding:
        """Return the reply, or the end of a process without one. Raises OSError if the reply cannot be read."""
        process = self._child.process
        if process.stdout is None:
            raise OSError("the compiler process has no pipes")
        received, code, greedy = b"", None, False
        with self._child.limited(timeout_s) as overdue:
            while code is None and not received.removeprefix(BEGAN).endswith(b"\n"):
                if ready_of([process.stdout.fileno()], _MEMORY_LOOK_S):
                    data = os.read(process.stdout.fileno(), 2**16)
                    received += data
                    # A process may close its output and hang: `wait` is bounded by the time limit above.
                    code = None if data else process.wait()
                elif greedy := greedy or (most_mb is not None and self._is_greedy(most_mb)):
                    # The process is killed without grace, as it fills gigabytes a second.
                    self._child.terminate(timeout_s=0.0)
        if code is not None:
            return CompilerEnding(code, received.startswith(BEGAN), overdue.is_set(), greedy)
        return received.removeprefix(BEGAN)

    def interrupt(self) -> None:
        """End the process and all processes that it started, at any point of their work."""
        self._child.terminate(timeout_s=1.0)

    def _is_greedy(self, most_mb: int) -> bool:
        most = most_mb * _MEGABYTE
        return machine.resident_bytes(self._child.pid) > most and machine.own_bytes(self._child.pid) > most


class BuilderProcess(CompilerProcess):
    """Builder process that gets its requests from one thread."""

    def __init__(
        self,
        number: int,
        cache_root: Path,
        compiler: Compiler,
        supervisor: Supervisor,
        log: Path,
        popen: Callable[..., Any] | None = None,
    ) -> None:
        """Start the builder, as a fork of a template by `popen`. Raises InfraError if it cannot be started."""
        self.is_fresh = True
        """True until the first reply."""
        # The builder has another current folder than this process, so that the path must be absolute.
        cache_root = cache_root.absolute()
        self._cache_root, self._name = cache_root, f"{os.getpid()}-{number}-{secrets.token_hex(4)}"
        folders = [root.folder for root in compiler.developed]
        arguments = (str(cache_root), self._name, str(compiler.as_of_ns), *folders)
        compiler = msgspec.structs.replace(compiler, env={**compiler.env, **ONE_THREAD})
        name = f"builder-{number}"
        super().__init__("farm.builds.compile.builder", arguments, supervisor, name, compiler, log, popen)

    def has_grown(self, recycle_mb: int) -> bool:
        """Return whether more than `recycle_mb` of memory or a full folder exclude the builder from another job."""
        if machine.resident_bytes(self._child.pid) > recycle_mb * _MEGABYTE:
            return True
        return folder_size(builder_folders(self._cache_root) / self._name)[1] > _MOST_LEFT_BYTES

    def ask(self, request: BuildRequest, timeout_s: float, most_mb: int) -> BuildReply | CompilerEnding:
        """Return the reply to `request`, or the process's end. Raises OSError and ValueError for a broken reply."""
        self.send(request)
        line = self.receive_line(timeout_s, most_mb)
        if isinstance(line, CompilerEnding):
            return line
        self.is_fresh = False
        reply = msgspec.json.decode(line, type=BuildReply)
        if reply.key != request.key:
            raise ValueError(f"it answered an earlier request ({reply.key})")
        return reply

    def end(self) -> None:
        """End the builder as `interrupt` does, and remove its leftovers."""
        self.interrupt()
        sweep_own(builder_folders(self._cache_root), self._name)


# Process that has loaded ExecuTorch, of which builders are forks.
#
# Run as `python -m farm.builds.compile.processes CACHE AS_OF_NS BACKEND KIND` it is the server of the forks
# (farm/base/fork_server.py): the imports of a builder take 5 s of processor time and 290 MB, which forks share. It
# starts no thread, as a lock of another thread would stay closed in a fork; a fork of a process with threads is
# refused.
#
# Builders that trace start by themselves: their trace begins before the first import. Without a template, after its
# third end, or if it cannot load ExecuTorch in the time of a job, all builders do.


logger = logging.getLogger(__name__)

_MODULE = "farm.builds.compile.processes"
_TEXT = "text"
_STARTS = 3
# Seconds between two looks whether the template is no longer needed.
_LOOK_EVERY_S = 0.2
# Most seconds until the threads of imports have ended.
_THREADS_END_S = 1.0


class BuilderTemplate:
    """Template of the builders of one compiler at a time. Several threads may use it."""

    def __init__(self, supervisor: Supervisor, cache_root: Path, log_folder: Path) -> None:
        self._supervisor, self._log = supervisor, log_folder / "builder-template.log"
        # The process has another current folder than this one, so that the path must be absolute.
        self._cache_root = cache_root.absolute()
        self._lock = threading.Lock()
        self._server: ForkServer | None = None
        self._compiler: Compiler | None = None
        self._users = 0
        self._starts = 0

    def start(self, compiler: Compiler, job: Job) -> ForkServer | None:
        """Start the process unless it runs, with the flow of `job`. Returns at once; None where builders have none."""
        if compiler.developed:
            return None
        with self._lock:
            if compiler != self._compiler:
                if self._server is not None and self._users:
                    return None
                self._end()
                self._compiler, self._starts = compiler, 0
            if self._server is None or not self._server.is_alive:
                self._end()
                if self._starts == _STARTS:
                    return None
                self._starts += 1
                kind = (job.target.backend, _TEXT if is_text(job) else "")
                words = (str(self._cache_root), str(compiler.as_of_ns), *kind)
                with contextlib.suppress(InfraError):
                    self._server = ForkServer(
                        self._supervisor,
                        [compiler.python, "-m", _MODULE, *words],
                        name=TEMPLATE_NAME,
                        env=_process_environment({**compiler.env, **ONE_THREAD}),
                        log=self._log,
                    )
            return self._server

    def acquire(
        self, compiler: Compiler, job: Job, timeout_s: float, is_stopping: Callable[[], bool]
    ) -> Callable[..., ForkProcess] | None:
        """Return the starter of a fork once ExecuTorch is loaded; None if the builder has to start by itself.

        Each starter is released after the end of its builder.
        """
        deadline = time.monotonic() + timeout_s
        server = self.start(compiler, job)
        if server is None:
            return None
        try:
            while not is_stopping():
                if server.wait_ready(_LOOK_EVERY_S):
                    with self._lock:
                        if server is not self._server:
                            return None
                        self._users += 1
                    return server.popen
                if time.monotonic() > deadline:
                    raise TimeoutError(f"it is not ready in {timeout_s:g} s")
        except OSError as error:
            with self._lock:
                if server is self._server:
                    # No other process is started for this compiler.
                    self._starts = _STARTS
                    self._end()
            logger.warning("builders start without a template, as %s: see %s", error, self._log)
        return None

    def release(self) -> None:
        """Count the end of a builder whose starter was acquired."""
        with self._lock:
            self._users -= 1

    def end_unused(self) -> None:
        """End the process, which has 0.3 GB, unless a builder is its fork; the next job starts another."""
        # A process that is still loading has a slot that waits for it.
        with self._lock, contextlib.suppress(OSError):
            if self._server is not None and not self._users and self._server.wait_ready(0.0):
                self._starts = 0
                self._end()

    def close(self) -> None:
        """End the process, after its builders."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.close()


def main(argv: list[str]) -> None:
    """Serve forks that are builders."""
    from farm.builds.compile import builder

    loaded: list[LoadedFiles] = []

    def prepare() -> None:
        take_name(TEMPLATE_NAME)
        os.chdir("/")
        # torch names its folder of debug files as it is imported: each fork has its own current folder.
        os.environ.setdefault("TORCH_COMPILE_DEBUG_DIR", ".")
        loaded.append(builder.prepare(Path(argv[0]), int(argv[1])))
        # After an error the process ends: a second import in a fork would find half of torch.
        import torch

        torch.set_num_threads(1)
        builder.load_flow(argv[2], argv[3] == _TEXT)
        # A fork checks only the files that it loads itself.
        loaded[0].look()
        deadline = time.monotonic() + _THREADS_END_S
        while not builder.is_single_threaded():
            if time.monotonic() > deadline:
                sys.exit("a library has started a thread: this process cannot be forked")
            time.sleep(0.05)
        gc.collect()

    def run(words: Sequence[str]) -> int:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        # An import may have asked for the folder of temporary files, which the builder names anew.
        tempfile.tempdir = None
        _, _, _, *arguments = words
        return builder.serve(arguments, loaded[0])

    serve_forks(prepare, run, may_fork=builder.is_single_threaded)


if __name__ == "__main__":
    main(sys.argv[1:])

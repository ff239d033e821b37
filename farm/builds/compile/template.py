"""Process that has loaded ExecuTorch, of which builders are forks.

Run as `python -m farm.builds.compile.template CACHE AS_OF_NS BACKEND KIND` it is the server of the forks
(farm/base/fork_server.py): the imports of a builder take 5 s of processor time and 290 MB, which forks share. It starts
no thread, as a lock of another thread would stay closed in a fork; a fork of a process with threads is refused.

Builders that trace start by themselves: their trace begins before the first import. Without a template, after its third
end, or if it cannot load ExecuTorch in the time of a job, all builders do.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from farm.base.errors import InfraError
from farm.base.fork_server import ForkServer, serve_forks, take_name
from farm.builds.compile.compiler_process import builder_process_environment
from farm.builds.compile.protocol import TEMPLATE_NAME, is_text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from farm.base.fork_server import ForkProcess
    from farm.base.processes import Supervisor
    from farm.builds.compile.loaded import LoadedFiles
    from farm.builds.toolchains.toolchain import Compiler
    from farm.suites.suite import Job

logger = logging.getLogger(__name__)

_MODULE = "farm.builds.compile.template"
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
            server = self._server
            is_other = compiler != self._compiler
            if server is not None and is_other and self._users:
                return None
            if server is not None and not is_other and server.is_alive:
                return server
            self._end()
            if is_other:
                self._starts = 0
            if self._starts == _STARTS:
                return None
            self._starts += 1
            self._compiler = compiler
            kind = (job.target.backend, _TEXT if is_text(job) else "")
            words = (str(self._cache_root), str(compiler.as_of_ns), *kind)
            with contextlib.suppress(InfraError):
                self._server = ForkServer(
                    self._supervisor,
                    [compiler.python, "-m", _MODULE, *words],
                    name=TEMPLATE_NAME,
                    env=builder_process_environment(compiler),
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

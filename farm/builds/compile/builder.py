"""Builder process: `python -m farm.builds.compile.builder CACHE NAME AS_OF_NS [FOLDER...]`. Jobs come in on stdin.

Torch is loaded once, before this process was forked (farm/builds/compile/processes.py) or by itself. The builder works
in a folder of its own in the cache, which is removed with the leftovers of compilers: farm/builds/bundles/cache.py.
With folders the builder traces which of their files take part in each bundle. It does the first steps of every job
once, and each job has a fork of it: a job sees what this process did before the fork, which is in its trace as well,
and nothing of other jobs. If a fork ends early, the builder ends in the same way, so that the caller sees no
difference.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import resource
import shutil
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple

import msgspec

from farm.base.errors import FarmError
from farm.base.files import own_folder
from farm.base.fork_server import take_name
from farm.builds.bundles.cache import BundleCache, builder_folders, work_in
from farm.builds.bundles.reuse import write_trace
from farm.builds.compile.loaded import LoadedFiles, import_from_source, start_tracer
from farm.builds.compile.protocol import (
    BEGAN,
    BUILDER_NAME,
    BuildReply,
    BuildRequest,
    collect_rarely,
    dump_stacks,
    is_text,
    reason_of,
    reply_pipe,
)
from farm.builds.compile.torch_graphs import TorchGraphs
from farm.builds.compile.watched import watched_failure_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from farm.builds.bundles.bundle import Manifest
    from farm.builds.compile.loaded import Tracer

# Higher than the score of a user's programs (the most is 1000): the kernel ends a builder first, which is replaced.
_OOM_SCORE = "500"
# A simulated device's threads hand a step to each other dozens of times, and beside compilers of the same priority each
# of these waits for a time slice: a job took six times as long. The processes that drive phones must not wait either.
_NICENESS = 10
# Signal by which a fork ends itself after its job.
_DONE = signal.SIGRTMAX


def main(argv: list[str]) -> int:
    """Serve requests from stdin until it is closed."""
    return serve(argv, prepare(Path(argv[0]), int(argv[2]), argv[3:]))


def prepare(cache_root: Path, as_of_ns: int, folders: Iterable[str] = ()) -> LoadedFiles:
    """Set up this process before its first import of torch; return the files that it loads from now on.

    `as_of_ns` is the time when the toolchain was read, and `folders` are traced.
    """
    collect_rarely()
    import_from_source(folders)
    os.nice(_NICENESS)
    return LoadedFiles(as_of_ns, cache_root)


def serve(argv: list[str], loaded: LoadedFiles) -> int:
    """Serve requests from stdin until it is closed, in a process that was prepared."""
    replies = reply_pipe()
    dump_stacks()
    take_name(BUILDER_NAME)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE, encoding="ascii")
    root, name, as_of_ns, folders = Path(argv[0]), argv[1], int(argv[2]), argv[3:]
    requests = map(msgspec.json.Decoder(BuildRequest).decode, sys.stdin.buffer)
    with contextlib.ExitStack() as stack:
        while problem := _enter_folder(stack, root, name):
            request = next(requests, None)
            if request is None:
                return 1
            replies.write(msgspec.json.encode(_refusal(request, problem)) + b"\n")
        builder = _Builder(BundleCache(root), loaded, replies)
        tracer = start_tracer(folders)
        import torch

        # The pool has a builder per processor by default: more threads in a builder would only slow down others.
        torch.set_num_threads(1)
        if tracer is None:
            builder.serve(requests)
        else:
            tracer.watch_dynamo()
            builder.serve_in_forks(requests, tracer, as_of_ns)
        os.chdir("/")
    return 0


def _enter_folder(stack: contextlib.ExitStack, root: Path, name: str) -> Exception | None:
    """Work in a new folder of this builder until `stack` ends; return the error, such as a full disk, else None."""
    try:
        work_in(stack.enter_context(own_folder(builder_folders(root), name)))
    except (OSError, FarmError) as error:
        return error
    return None


def _refusal(request: BuildRequest, error: Exception) -> BuildReply:
    """Return the reply to a request that failed because of the machine."""
    return BuildReply(request.key, ok=False, seconds=0.0, reason=reason_of(error), infra=True)


class _Builder(NamedTuple):
    """Builder of bundles, which checks the files that it loads."""

    cache: BundleCache
    loaded: LoadedFiles
    replies: IO[bytes]

    def serve(self, requests: Iterable[BuildRequest]) -> None:
        """Build the bundles of `requests` in this process."""
        graphs = TorchGraphs()
        for request in requests:
            self.replies.write(BEGAN)
            self._answer(request)
            graphs.release()

    def serve_in_forks(self, requests: Iterable[BuildRequest], tracer: Tracer, as_of_ns: int) -> None:
        """Build each bundle in a fork of this process, with its trace; the toolchain was read at `as_of_ns`."""
        warm: set[tuple[str, bool]] = set()
        for request in requests:
            kind = (request.job.target.backend, is_text(request.job))
            if kind not in warm:
                load_flow(*kind)
                if not warm:
                    warm_up()
                warm.add(kind)
                # The files of this process are checked before the fork, so that a fork checks only the files it loads.
                self.loaded.look()
                gc.collect()
                gc.freeze()
            if not is_single_threaded():
                tracer.drop("a library has started a thread")

            def leave_trace(folder: Path) -> None:
                trace = tracer.finish(as_of_ns, self.cache.root)
                if trace is not None:
                    write_trace(folder, trace)
                else:
                    sys.stderr.write(f"farm: not known what took part: {tracer.problem}\n")

            def act(request: BuildRequest = request) -> None:
                tracer.hears_own = False
                self._answer(request, leave_trace)

            self.replies.write(BEGAN)
            tracer.hears_own = True
            run_in_fork(act)
            tracer.hears_own = False

    def _answer(self, request: BuildRequest, finish: Callable[[Path], None] = lambda _: None) -> None:
        try:
            reply = self._build(request, finish)
        except OSError as error:  # its log cannot be written
            reply = _refusal(request, error)
        self.replies.write(msgspec.json.encode(reply) + b"\n")

    def _build(self, request: BuildRequest, finish: Callable[[Path], None]) -> BuildReply:
        """Build the bundle of `request` and return the reply; `finish` gets the folder of a compiled bundle."""
        # Loaded outside the clock, so that the first job is as fast as the next.
        modules = len(sys.modules)
        load_flow(request.job.target.backend, is_text(request.job))
        if len(sys.modules) > modules:
            gc.freeze()
        started = time.perf_counter()

        def fill(folder: Path) -> None:
            # The import of a user's module belongs to compiling: its exception is the verdict of the job.
            try:
                compile_request(request, folder)
            finally:
                # A failure does not count as the verdict of the job either if a file was saved meanwhile.
                self.loaded.require_old(request.job.case, request.suite_as_of_ns)
            finish(folder)
            sys.stdout.flush()
            sys.stderr.flush()
            shutil.copyfile(request.log, folder / "build.log")

        log = Path(request.log)
        with _printing_to(log):
            reason, infra = watched_failure_of(
                request.job, log, lambda: self.cache.build(request.key, fill, anew=request.anew)
            )
        return BuildReply(request.key, ok=not reason, seconds=time.perf_counter() - started, reason=reason, infra=infra)


def load_flow(backend: str, text: bool) -> None:
    """Load the compile flow of jobs of a kind; a job reports the errors of loading."""
    with contextlib.suppress(Exception, SystemExit):
        from farm.builds.compile.flows.shortcuts.executorch_reads import edge_types_by_libyaml

        with edge_types_by_libyaml():
            from farm.builds.compile.flows.compiler import flow_of
        flow_of(backend)
        if text:
            importlib.import_module("farm.builds.compile.llm.compiler")


def compile_request(request: BuildRequest, folder: Path) -> Manifest:
    """Write the bundle of `request` into the empty `folder`. The compiler's exceptions pass through."""
    job, key, versions = request.job, request.key, request.versions
    if job.case.generate is None:
        from farm.builds.compile.flows.compiler import compile_job

        return compile_job(job, key, versions, folder)
    if job.case.pte:
        from farm.builds.compile.llm.ready import take_ready_text_job

        return take_ready_text_job(job, key, versions, folder)
    from farm.builds.compile.llm.compiler import compile_text_job

    return compile_text_job(job, key, versions, folder)


@contextlib.contextmanager
def _printing_to(path: Path) -> Iterator[None]:
    """Send the output of Python and of native code to `path`."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = os.dup(1), os.dup(2)
    log = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for descriptor, original in zip((1, 2), kept, strict=True):
            os.dup2(original, descriptor)
            os.close(original)


def run_in_fork(act: Callable[[], None]) -> None:
    """Call `act` in a fork of this process and return after its success; otherwise end as the fork ended."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        try:
            act()
            # Any exit code may be the job's own.
            os.kill(os.getpid(), _DONE)
        except BaseException:  # noqa: BLE001 - nothing of it may reach the loop of the process it is a copy of
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    if (code := os.waitstatus_to_exitcode(status)) != -_DONE:
        _end_as(code)


def _end_as(code: int) -> None:
    """End this process with an exit code, or by signal -code."""
    if code < 0:
        # The fork has written a core file already, and a second file has no use.
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code & 0xFF)


def warm_up() -> None:
    """Do the first steps of every job: export and serialize a tiny module.

    No backend runs and no QNN is loaded. Errors are ignored, as a job reports them as well.
    """
    with contextlib.suppress(Exception):
        # tqdm's thread only watches progress bars, and a process with threads must not be forked.
        from tqdm import tqdm

        tqdm.monitor_interval = 0
    with contextlib.suppress(Exception):
        import torch
        from executorch.exir import to_edge

        from farm.builds.compile.flows.shortcuts.every import less_work

        # Forks inherit the kernels of composite operators.
        with less_work():
            to_edge(torch.export.export(torch.nn.ReLU(), (torch.ones(1, 4),), strict=True)).to_executorch()


def is_single_threaded() -> bool:
    """Return whether this process may be forked: a lock of another thread would stay closed in the copy."""
    return len(list(Path("/proc/self/task").iterdir())) == 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

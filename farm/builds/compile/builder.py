"""Builder process: `python -m farm.builds.compile.builder CACHE NAME AS_OF_NS [FOLDER...]`. Jobs come in on stdin.

Torch is loaded once, before this process was forked (farm/builds/compile/template.py) or by itself. The builder works
in a folder of its own in the cache, which is removed with the leftovers of compilers: farm/builds/bundles/cache.py.
With folders the builder traces which of their files take part in each bundle, and every job has a fork of this process
(farm/builds/compile/forking.py).
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import shutil
import sys
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple

import msgspec

from farm.base.errors import FarmError
from farm.base.fork_server import take_name
from farm.base.memory import resident_bytes
from farm.builds.bundles.cache import BundleCache, builder_folder, work_in
from farm.builds.bundles.trace import write_trace
from farm.builds.compile.loaded import LoadedFiles
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
from farm.builds.compile.source_only import import_from_source
from farm.builds.compile.watched import watched_failure_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from farm.builds.bundles.bundle import Manifest
    from farm.builds.compile.tracing import Tracer

# Growth in memory that starts a garbage collection: Python counts objects, and a large model in cycles is few of them.
_LEFT_BYTES = 256 * 2**20
# Higher than the score of a user's programs (the most is 1000): the kernel ends a builder first, which is replaced.
_OOM_SCORE = "500"
# A simulated device's threads hand a step to each other dozens of times, and beside compilers of the same priority each
# of these waits for a time slice: a job took six times as long. The processes that drive phones must not wait either.
_NICENESS = 10


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
    root, requests = Path(argv[0]), iter(sys.stdin.buffer)
    with contextlib.ExitStack() as stack:
        while problem := _enter_folder(stack, root, argv[1]):
            line = next(requests, b"")
            if not line:
                return 1
            refusal = _refusal(msgspec.json.decode(line, type=BuildRequest), problem)
            replies.write(msgspec.json.encode(refusal) + b"\n")
        _serve_all(requests, replies, BundleCache(root), _Setup(int(argv[2]), tuple(argv[3:])), loaded)
        os.chdir("/")
    return 0


def _enter_folder(stack: contextlib.ExitStack, root: Path, name: str) -> Exception | None:
    """Work in a new folder of this builder until `stack` ends; return the error, such as a full disk, else None."""
    try:
        work_in(stack.enter_context(builder_folder(root, name)))
    except (OSError, FarmError) as error:
        return error
    return None


def _start_tracer(folders: tuple[str, ...]) -> Tracer | None:
    from farm.builds.compile.tracing import Tracer, can_trace

    if not can_trace(folders):
        return None
    tracer = Tracer(folders)
    tracer.start()
    return tracer


class _Setup(NamedTuple):
    as_of_ns: int
    """Time when the toolchain was read, in nanoseconds."""
    folders: tuple[str, ...]
    """Folders whose files are traced."""


def _serve_all(
    requests: Iterable[bytes], replies: IO[bytes], cache: BundleCache, setup: _Setup, loaded: LoadedFiles
) -> None:
    tracer = _start_tracer(setup.folders) if setup.folders else None
    import torch

    # The pool has a builder per processor by default: more threads in a builder would only slow down others.
    torch.set_num_threads(1)
    decoder = msgspec.json.Decoder(BuildRequest)
    if tracer is not None:
        tracer.watch_dynamo()
        _serve_in_forks(map(decoder.decode, requests), replies, cache, setup, tracer, loaded)
        return
    settled = resident_bytes(os.getpid())
    for line in requests:
        request = decoder.decode(line)
        replies.write(BEGAN)
        replies.write(msgspec.json.encode(_answer(request, cache, loaded)) + b"\n")
        if resident_bytes(os.getpid()) > settled + _LEFT_BYTES:
            gc.collect()
            settled = resident_bytes(os.getpid())


def _serve_in_forks(
    requests: Iterable[BuildRequest],
    replies: IO[bytes],
    cache: BundleCache,
    setup: _Setup,
    tracer: Tracer,
    loaded: LoadedFiles,
) -> None:
    from farm.builds.compile.forking import is_single_threaded, run_in_fork, warm_up

    warm: set[tuple[str, bool]] = set()
    for request in requests:
        kind = (request.job.target.backend, is_text(request.job))
        if kind not in warm:
            load_flow(*kind)
            if not warm:
                warm_up()
            warm.add(kind)
            # The files of this process are checked before the fork, so that a fork checks only the files it loads.
            loaded.look()
            gc.collect()
            gc.freeze()
        if not is_single_threaded():
            tracer.drop("a library has started a thread")

        def act(request: BuildRequest = request) -> None:
            def leave_trace(folder: Path) -> None:
                trace = tracer.finish(setup.as_of_ns, cache.root)
                if trace is not None:
                    write_trace(folder, trace)
                else:
                    sys.stderr.write(f"farm: not known what took part: {tracer.problem}\n")

            tracer.hears_own = False
            replies.write(msgspec.json.encode(_answer(request, cache, loaded, leave_trace)) + b"\n")

        replies.write(BEGAN)
        tracer.hears_own = True
        run_in_fork(act)
        tracer.hears_own = False


def _answer(
    request: BuildRequest, cache: BundleCache, loaded: LoadedFiles, finish: Callable[[Path], None] | None = None
) -> BuildReply:
    try:
        return _serve(request, cache, loaded, finish)
    except OSError as error:  # its log cannot be written
        return _refusal(request, error)


def _refusal(request: BuildRequest, error: Exception) -> BuildReply:
    """Return the reply to a request that failed because of the machine."""
    return BuildReply(request.key, ok=False, seconds=0.0, reason=reason_of(error), infra=True)


def load_flow(backend: str, text: bool) -> None:
    """Load the compile flow of jobs of a kind; a job reports the errors of loading."""
    with contextlib.suppress(Exception, SystemExit):
        from farm.builds.compile.flows.shortcuts.edge_types import edge_types_by_libyaml

        with edge_types_by_libyaml():
            from farm.builds.compile.flows.compiler import flow_of
        flow_of(backend)
        if text:
            importlib.import_module("farm.builds.compile.llm.compiler")


def _serve(
    request: BuildRequest, cache: BundleCache, loaded: LoadedFiles, finish: Callable[[Path], None] | None
) -> BuildReply:
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
            loaded.require_old(request.job.case.folder)
            loaded.require_suite_old(request.job.case, request.suite_as_of_ns)
        if finish is not None:
            finish(folder)
        sys.stdout.flush()
        sys.stderr.flush()
        shutil.copyfile(request.log, folder / "build.log")

    log = Path(request.log)
    with _printing_to(log):
        reason, infra = watched_failure_of(request.job, log, lambda: cache.build(request.key, fill, anew=request.anew))
    return BuildReply(request.key, ok=not reason, seconds=time.perf_counter() - started, reason=reason, infra=infra)


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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

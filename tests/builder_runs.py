"""Compiles jobs with real builder processes, as a run does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from farm.base.processes import Supervisor
from farm.builds.bundles.key import bundle_key
from farm.builds.compile.pool import BuilderPool, BuilderSettings, MemoryLimits
from farm.builds.compile.protocol import BuildReply, BuildRequest
from farm.builds.toolchains.toolchain import Compiler
from farm.suites.suite import Job

LIMITS = MemoryLimits(8192, 4096)


def request_of(job: Job, versions: dict[str, str], folder: Path, key: str = "") -> BuildRequest:
    """Return the request for a job, whose log is in a folder."""
    key = key or bundle_key(job, versions)
    return BuildRequest(job, key, versions, str(folder / f"{key}.log"))


def run_builders(
    requests: Sequence[BuildRequest],
    compiler: Compiler,
    cache: Path,
    folder: Path,
    *,
    width: int = 1,
    timeout_s: float = 600.0,
    limits: MemoryLimits = LIMITS,
    meanwhile: Callable[[Supervisor, BuilderPool], None] = lambda _supervisor, _pool: None,
    on_done: Callable[[BuildReply], None] = lambda _: None,
    **options: Any,
) -> list[BuildReply]:
    """Return the replies in the order of the requests, and none for a request whose builder was stopped.

    `options` are further arguments of BuilderPool. The logs of the processes are in `folder`.
    """
    replies: dict[str, BuildReply] = {}

    def done(reply: BuildReply) -> None:
        replies[reply.key] = reply
        on_done(reply)

    with Supervisor() as supervisor:
        settings = BuilderSettings(limits, timeout_s, cache, supervisor, folder)
        pool = BuilderPool(requests, compiler, settings, width=width, on_done=done, **options)
        pool.start()
        meanwhile(supervisor, pool)
        pool.join()
    return [replies[request.key] for request in requests if request.key in replies]

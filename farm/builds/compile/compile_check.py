"""Test of a toolchain: jobs compiled for real, into a temporary cache."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from farm.base.processes import Supervisor
from farm.base.text import bounded_log
from farm.builds.bundles.bundle import MODEL
from farm.builds.bundles.cache import BundleCache
from farm.builds.bundles.key import bundle_key
from farm.builds.compile.pool import BuilderSettings, build_one
from farm.builds.compile.protocol import BuildRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from farm.base.config.settings import Config
    from farm.builds.toolchains.toolchain import Toolchain
    from farm.suites.suite import Job


class CompileCheck(msgspec.Struct, frozen=True):
    """Result of compiling one job."""

    job: str
    backend: str
    ok: bool
    seconds: float
    pte_bytes: int
    reason: str
    """Reason of a failure; empty for a compiled job."""
    log: str
    """Last output of the compiler, for a job that did not compile."""


def try_compiling(config: Config, tools: Toolchain, jobs: Sequence[Job]) -> list[CompileCheck]:
    """Return the results of compiling `jobs` with a toolchain, each in a process of its own. Raises InfraError."""
    with tempfile.TemporaryDirectory(prefix="farm-check-") as folder, Supervisor() as supervisor:
        return [_try(config, tools, job, Path(folder), supervisor) for job in jobs]


def _try(config: Config, tools: Toolchain, job: Job, folder: Path, supervisor: Supervisor) -> CompileCheck:
    key, log = bundle_key(job, tools.versions), folder / "build.log"
    reply = build_one(
        BuildRequest(job, key, dict(tools.versions), str(log)),
        tools.compiler,
        BuilderSettings.of(config, supervisor, folder, cache_root=folder),
    )
    bundle = BundleCache(folder).lookup(key) if reply.ok else None
    printed = "" if bundle else "\n".join(_read(path) for path in (log, folder / "builder-0.log"))
    return CompileCheck(
        job=job.id,
        backend=job.target.backend,
        ok=bundle is not None,
        seconds=reply.seconds,
        pte_bytes=(bundle.folder / MODEL).stat().st_size if bundle else 0,
        reason=reply.reason if not bundle else "",
        log=bounded_log(printed),
    )


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.is_file() else ""

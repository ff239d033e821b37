"""Compiling overlaps running: the builder pool of one run, and where its replies go."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from farm.build.protocol import Reply, Request
from farm.engine.builds import builds_folder, leave_reply
from farm.errors import BundleError, FarmError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from farm.config import Config
    from farm.engine.front import Front
    from farm.engine.plan import RunPlan
    from farm.engine.toolchain import Toolchain
    from farm.processes import Supervisor
    from farm.store.store import Store


@contextmanager
def builders(
    config: Config, plan: RunPlan, tools: Toolchain, supervisor: Supervisor, front: Front, store: Store
) -> Iterator[int]:
    """Compile what the plan lacks while the body runs; yield how many bundles that is.

    Every reply is left for the workers and recorded for all jobs that share the bundle.
    """
    from farm.build.bundle import load_bundle
    from farm.build.cache import BundleCache
    from farm.build.pool import BuilderPool

    cache = BundleCache(config.cache_dir)

    jobs_of: dict[str, list[str]] = {}
    requests: dict[str, Request] = {}
    for planned in plan.jobs:
        jobs_of.setdefault(planned.key, []).append(planned.job.id)
        if not planned.cached and planned.key not in requests:
            log = builds_folder(plan.folder) / f"{planned.key}.log"
            requests[planned.key] = Request(planned.job, planned.key, dict(tools.versions), str(log))

    def started(key: str) -> None:
        front.build_started(jobs_of[key][0])

    def record(key: str, seconds: float, *, cached: bool) -> None:
        # Its manifest alone: the files were verified when it was looked up, and are again where they are used.
        try:
            fallback_ops = load_bundle(cache.folder(key)).manifest.fallback_ops
        except BundleError:
            fallback_ops = None
        for job_id in jobs_of[key]:
            store.record_build(
                plan.run_id, job_id, seconds=seconds, cached=cached, bundle_key=key, fallback_ops=fallback_ops
            )

    def ended(reply: Reply) -> None:
        try:
            record(reply.key, reply.seconds, cached=False)
        except FarmError as error:
            front.note(f"how {jobs_of[reply.key][0]} was compiled could not be recorded: {error}")
        finally:
            # Whatever else goes wrong: a worker waits for this.
            leave_reply(plan.folder, reply)
        front.build_ended(jobs_of[reply.key][0], reply)

    for key in jobs_of.keys() - requests.keys():
        record(key, 0.0, cached=True)
    pool = BuilderPool(
        requests.values(),
        width=config.builders,
        cache_root=config.cache_dir,
        env=tools.env,
        supervisor=supervisor,
        log_folder=plan.folder / "logs",
        timeout_s=config.build_timeout_s,
        on_start=started,
        on_done=ended,
    )
    pool.start()
    try:
        yield len(requests)
    finally:
        pool.stop()

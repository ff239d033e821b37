"""Both sides' bundles, compiled at the same time on the same machine, so that their compile times can be compared."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from farm.base.publish import make_folders
from farm.builds.bundles.bundle import Bundle, load_bundle
from farm.builds.bundles.cache import BundleCache
from farm.builds.bundles.reuse import find_bundles_for
from farm.builds.compile.pool import BuilderPool, BuilderSettings
from farm.builds.compile.protocol import BuildReply, BuildRequest
from farm.results.judge import build_failure

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from farm.base.config.settings import Config
    from farm.base.processes import Supervisor
    from farm.builds.toolchains.toolchain import Toolchain
    from farm.results.attempt import Attempt
    from farm.suites.suite import Job

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.2
_SAY_EVERY_S = 15.0


class BuildingSide(msgspec.Struct, frozen=True, kw_only=True):
    """Jobs and configuration that a side compiles."""

    label: str
    config: Config
    tools: Toolchain
    jobs: Mapping[str, Job]
    """Jobs by the name common to both sides."""


class BuiltJob(msgspec.Struct, frozen=True, kw_only=True):
    """Result of compiling a job."""

    bundle: Bundle | None = None
    cached: bool = False
    failure: Attempt | None = None
    """Judged failure of a job without a bundle; a job that was not reached has neither."""


def build_sides(
    sides: Sequence[BuildingSide], supervisor: Supervisor, folder: Path, stop: threading.Event
) -> list[dict[str, BuiltJob]]:
    """Return by side and name what became of every job; all are compiled unless `stop` is set before.

    `folder` takes the logs. Raises InfraError where builders cannot be started.
    """
    cache = BundleCache(sides[0].config.cache_dir)
    built: list[dict[str, BuiltJob]] = [{} for _ in sides]
    keys: list[dict[str, str]] = [{} for _ in sides]
    requests: list[dict[str, BuildRequest]] = [{} for _ in sides]
    known: set[str] = set()
    for number, side in enumerate(sides):
        logs = folder / side.label
        make_folders(logs)
        found = find_bundles_for(side.jobs.values(), side.tools, cache)
        for name, job in side.jobs.items():
            key, cached = found[job.id]
            keys[number][name] = key
            if cached:
                built[number][name] = BuiltJob(bundle=load_bundle(cache.folder(key)), cached=True)
            elif key not in known:
                # Bundles needed by both sides are compiled once, as a key covers all inputs.
                known.add(key)
                log = logs / f"{key}.log"
                requests[number][key] = BuildRequest(job, key, dict(side.tools.versions), str(log))
    replies = _build(sides, requests, supervisor, folder, stop)
    for number, side in enumerate(sides):
        for name, job in side.jobs.items():
            key = keys[number][name]
            if name not in built[number] and (reply := replies.get(key)) is not None:
                logs_of_key = [folder / one.label / f"{key}.log" for one in sides]
                built[number][name] = _built(cache, job, key, reply, logs_of_key)
    return built


def _build(
    sides: Sequence[BuildingSide],
    requests: Sequence[dict[str, BuildRequest]],
    supervisor: Supervisor,
    folder: Path,
    stop: threading.Event,
) -> dict[str, BuildReply]:
    """Return the replies to all requests, or the replies that came before `stop` was set."""
    replies: dict[str, BuildReply] = {}
    counts = [0 for _ in sides]
    pools = []
    widths = shares(sides[0].config.builders, [len(one) for one in requests])
    for number, (side, wanted, width) in enumerate(zip(sides, requests, widths, strict=True)):

        def done(reply: BuildReply, number: int = number) -> None:
            replies[reply.key] = reply
            counts[number] += 1

        if wanted:
            pool = BuilderPool(
                wanted.values(),
                side.tools.compiler,
                BuilderSettings.of(side.config, supervisor, folder / side.label),
                width=width,
                on_done=done,
            )
            pools.append(pool)
    if not pools:
        return replies
    totals = [len(one) for one in requests]
    shown = ", ".join(f"{total} of {side.label}" for total, side in zip(totals, sides, strict=True) if total)
    logger.info("compiling %s", shown)
    # With a single builder the sides compile one after the other.
    groups = [[pool] for pool in pools] if sides[0].config.builders == 1 else [pools]
    logged_s = time.monotonic()
    try:
        for group in groups:
            for pool in group:
                pool.start()
            waiting = [threading.Thread(target=pool.join, daemon=True) for pool in group]
            for thread in waiting:
                thread.start()
            while any(thread.is_alive() for thread in waiting) and not stop.is_set():
                time.sleep(_LOOK_EVERY_S)
                if time.monotonic() > logged_s + _SAY_EVERY_S:
                    logged_s = time.monotonic()
                    pairs = zip(counts, totals, sides, strict=True)
                    counted = ", ".join(f"{n} of {all_} of {side.label}" for n, all_, side in pairs if all_)
                    logger.info("compiled %s", counted)
            if stop.is_set():
                break
    finally:
        for pool in pools:
            pool.stop()
    return replies


def shares(builders: int, requests: Sequence[int]) -> list[int]:
    """Return the number of builders of each side, in proportion to its requests and at least one."""
    total = sum(requests)
    if not total or builders == 1:
        return [1 for _ in requests]
    found = [max(1, round(builders * one / total)) if one else 0 for one in requests]
    while sum(found) > builders and max(found) > 1:
        found[found.index(max(found))] -= 1
    return found


def _built(cache: BundleCache, job: Job, key: str, reply: BuildReply, logs: Sequence[Path]) -> BuiltJob:
    if reply.ok and (bundle := cache.lookup(key)) is not None:
        return BuiltJob(bundle=bundle)
    text = next((log.read_text(encoding="utf-8", errors="replace") for log in logs if log.is_file()), "")
    infra = reply.infra or reply.ok
    return BuiltJob(failure=build_failure(job, reply.lost_reason, text, key, infra=infra, seconds=reply.seconds))

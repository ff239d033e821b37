"""Sides of `farm perf compare`: their request and jobs, and their bundles, compiled at the same time."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from farm.base.backends.registry import DEFAULT_BACKEND
from farm.base.config.settings import Config
from farm.base.config.toolchains import DEFAULT
from farm.base.errors import UsageError
from farm.base.files import make_folders
from farm.base.paths import beside
from farm.base.processes import Supervisor
from farm.builds.bundles.bundle import Bundle, load_bundle
from farm.builds.bundles.cache import BundleCache
from farm.builds.bundles.reuse import find_bundles_for
from farm.builds.compile.pool import BuilderPool, BuilderSettings
from farm.builds.compile.protocol import BuildReply, BuildRequest
from farm.builds.toolchains.toolchain import Toolchain
from farm.dispatch.pool.fleet import Choice
from farm.dispatch.request.choose import jobs_of, select
from farm.dispatch.request.request import RunRequest
from farm.results.analysis.confirmation import PAIRS
from farm.results.attempt import Attempt
from farm.results.judge import build_failure
from farm.suites.options import parse_options
from farm.suites.suite import Job

# Request of `farm perf compare`: two sides and their jobs.


logger = logging.getLogger(__name__)

SIDES = ("A", "B")
_TWO = 2


class SideRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Requested properties of a side."""

    toolchain: str = ""
    """As `--toolchain` takes it; empty is the default."""
    base: str = ""
    """A commit of the checkout `toolchain`, whose source tree farm makes itself; empty for the checkout as it is."""
    qnn: str = ""
    """Version or path of QNN; empty for the toolchain's."""
    options: str = ""
    """`name=value name=value` for targets of this side alone."""

    @property
    def name(self) -> str:
        """As the user called it."""
        toolchain = self.toolchain or DEFAULT
        parts = [f"{self.base} of {toolchain}" if self.base else toolchain]
        parts += [f"QNN {self.qnn}"] * bool(self.qnn) + [self.options] * bool(self.options)
        return ", ".join(parts[1:] if parts[0] == DEFAULT and len(parts) > 1 else parts)


class ComparisonRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Sides to compare, jobs and devices."""

    sides: tuple[SideRequest, SideRequest]
    socs: tuple[str, ...]
    suites: tuple[str, ...]
    backend: str = DEFAULT_BACKEND
    precisions: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    """Option sets of both sides: every combination is its own target."""
    keyword: str = ""
    """As pytest's -k."""
    jobs: tuple[Job, ...] = ()
    """Jobs of both sides in place of a selection by suite; empty for the selection."""
    virtual: int = 0
    """Virtual devices a SoC; 0 for attached ones."""
    choice: Choice = Choice()
    most_devices: int | None = None
    pairs: int = PAIRS
    """Least number of pairs that confirm anything."""
    execute: bool = True
    """Run what differs; otherwise programs alone are compared."""
    command: str = ""


def sides_of(
    toolchains: Sequence[str], qnn: Sequence[str], options: Sequence[str], checkout: str, base: str
) -> tuple[SideRequest, SideRequest]:
    """Return both sides: a single value holds for both, two values for A and B.

    Raises UsageError for equal sides, or for more than two.
    """
    if bool(checkout) != bool(base):
        raise UsageError("--checkout DIR and --base COMMIT belong together: B is the checkout as it is, A that commit")
    if checkout and toolchains:
        raise UsageError("--checkout names both toolchains: leave --toolchain out")
    pairs = []
    for option, given in (("--toolchain", toolchains), ("--qnn", qnn), ("--options", options)):
        if len(given) > _TWO:
            raise UsageError(f"{option} is given {len(given)} times: two sides are compared, A and B")
        pairs.append((*given, *given)[:_TWO] if given else ("", ""))
    if checkout:
        folder = str(beside(Path.cwd(), checkout))
        pairs[0] = (folder, folder)
    a, b = (
        SideRequest(toolchain=toolchain, base=base if side == 0 else "", qnn=sdk, options=text)
        for side, (toolchain, sdk, text) in enumerate(zip(*pairs, strict=True))
    )
    if a == b:
        raise UsageError(
            "both sides are the same: give --toolchain, --qnn or --options twice, for A and for B, or --checkout DIR "
            "with --base COMMIT; --option is for both sides, --options parts them"
        )
    return a, b


def config_of(config: Config, request: ComparisonRequest, side: SideRequest) -> Config:
    """Return the configuration that a side works with; beside a commit of a checkout, the same but for its sources.

    Raises UnknownNameError, UsageError, MissingToolError for a toolchain or an SDK that cannot be had.
    """
    from farm.builds.toolchains.selection import select as use
    from farm.builds.toolchains.selection import toolchain_of

    if side.base:
        from farm.builds.toolchains.worktrees import Checkout, require_built, worktree

        checkout = Checkout(Path(side.toolchain))
        commit = checkout.commit(side.base)
        require_built(config, checkout, commit)
        tree = worktree(config, checkout, commit)
        for warning in tree.warnings:
            logger.warning(warning)
        toolchain = tree.toolchain
    elif any(one.base for one in request.sides):
        from farm.builds.toolchains.worktrees import toolchain_at

        # The settings of farm.toml for the checkout hold for its commit too, so that Python and QNN do not differ.
        found = toolchain_at(config, Path(side.toolchain).resolve())
        toolchain = msgspec.structs.replace(found, name=side.toolchain, named=False)
    elif side.toolchain not in ("", DEFAULT):
        toolchain = toolchain_of(config, side.toolchain)
    elif side.qnn:
        toolchain = config.toolchain
    else:
        return config
    if side.qnn:
        toolchain = msgspec.structs.replace(toolchain, qnn=side.qnn)
    return use(config, toolchain)


def jobs_of_side(config: Config, request: ComparisonRequest, side: SideRequest) -> dict[str, Job]:
    """Return the jobs of a side by the name that they have on both. Raises UsageError, NothingSelectedError."""
    if request.jobs:
        return {job.id: job for job in request.jobs}
    own = _own_options(request, side)
    asked = RunRequest(
        socs=request.socs,
        suites=request.suites,
        backend=request.backend,
        precisions=request.precisions,
        virtual=request.virtual,
        options=(*request.options, *(f"{name}={value}" for name, value in own.items())),
        keyword=request.keyword or "",
    )
    jobs = select(asked, jobs_of(config, asked))
    return {_common_name(job, own): job for job in jobs}


def own_options(request: ComparisonRequest, side: SideRequest) -> dict[str, str]:
    """Return the options of a side that the other does not have in the same way. Raises UsageError."""
    other = _own_options(request, next(one for one in request.sides if one != side))
    return {name: value for name, value in _own_options(request, side).items() if other.get(name) != value}


def _own_options(request: ComparisonRequest, side: SideRequest) -> dict[str, str]:
    sets = parse_options(side.options.split(), request.backend)
    if len(sets) != 1:
        raise UsageError(f"--options {side.options!r} makes {len(sets)} targets: one side is one of them")
    own = dict(sets[0])
    common = {text.partition("=")[0].strip() for text in request.options}
    if both := sorted(common & own.keys()):
        raise UsageError(
            f"option {both[0]} is given by --option, for both sides, and by --options: one of them is enough"
        )
    return own


def _common_name(job: Job, own: dict[str, str]) -> str:
    """Return a job's id without the options of its side."""
    options = tuple((name, value) for name, value in job.target.options if name not in own)
    return msgspec.structs.replace(job, target=msgspec.structs.replace(job.target, options=options)).id


# Both sides' bundles, compiled at the same time on the same machine, so that their compile times can be compared.


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
    missing: list[dict[str, str]] = [{} for _ in sides]
    requests: list[dict[str, BuildRequest]] = [{} for _ in sides]
    for number, side in enumerate(sides):
        make_folders(folder / side.label)
        found = find_bundles_for(side.jobs.values(), side.tools, cache)
        for name, job in side.jobs.items():
            key, cached = found[job.id]
            if cached:
                built[number][name] = BuiltJob(bundle=load_bundle(cache.folder(key)), cached=True)
                continue
            missing[number][name] = key
            # Bundles needed by both sides are compiled once, as a key covers all inputs.
            if not any(key in one for one in requests):
                log = folder / side.label / f"{key}.log"
                requests[number][key] = BuildRequest(job, key, dict(side.tools.versions), str(log))
    replies = _build(sides, requests, supervisor, folder, stop)
    for number, side in enumerate(sides):
        for name, key in missing[number].items():
            if key in replies:
                logs = [folder / one.label / f"{key}.log" for one in sides]
                built[number][name] = _built(cache, side.jobs[name], key, replies[key], logs)
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
    widths = shares(sides[0].config.builders, [len(one) for one in requests])
    pools = [
        BuilderPool(
            wanted.values(),
            side.tools.compiler,
            BuilderSettings.of(side.config, supervisor, folder / side.label),
            width=width,
            on_done=lambda reply: replies.update({reply.key: reply}),
        )
        for side, wanted, width in zip(sides, requests, widths, strict=True)
        if wanted
    ]
    if not pools:
        return replies
    wanted_of = {side.label: wanted for side, wanted in zip(sides, requests, strict=True) if wanted}
    logger.info("compiling %s", ", ".join(f"{len(wanted)} of {label}" for label, wanted in wanted_of.items()))
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
                    counted = (
                        f"{sum(key in replies for key in wanted)} of {len(wanted)} of {label}"
                        for label, wanted in wanted_of.items()
                    )
                    logger.info("compiled %s", ", ".join(counted))
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

"""Request of `farm perf compare`: two sides and their jobs."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from farm.base.backends.registry import DEFAULT_BACKEND
from farm.base.config.toolchains import DEFAULT
from farm.base.errors import UsageError
from farm.base.paths import beside
from farm.dispatch.pool.fleet import Choice
from farm.dispatch.request.choose import jobs_of, select
from farm.dispatch.request.request import RunRequest
from farm.results.analysis.confirmation import PAIRS
from farm.suites.options import parse_options
from farm.suites.suite import Job

if TYPE_CHECKING:
    from collections.abc import Sequence

    from farm.base.config.settings import Config

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
    from farm.builds.toolchains.select import select as use
    from farm.builds.toolchains.select import toolchain_of

    if side.base:
        from farm.builds.toolchains.commits import Checkout
        from farm.builds.toolchains.worktrees import require_built, worktree

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

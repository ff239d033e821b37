"""Request of a run and its outcome: plain data."""

from __future__ import annotations

from pathlib import Path

import msgspec

from farm.base.backends.registry import DEFAULT_BACKEND
from farm.dispatch.pool.fleet import Choice
from farm.dispatch.request.profiling import Profile
from farm.dispatch.request.selection import Shard
from farm.store.view import Purpose, RunView


class RunRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Request of the user."""

    socs: tuple[str, ...]
    suites: tuple[str, ...]
    backend: str = DEFAULT_BACKEND
    precisions: tuple[str, ...] = ()
    virtual: int = 0
    """Virtual devices a SoC; 0 for attached ones."""
    keyword: str = ""
    """Expression of `-k`; empty for all jobs."""
    most_failures: int | None = None
    """After so many failed jobs nothing else begins; None for no limit."""
    iterations: int = 3
    warm_up: int = 1
    reducible: bool = False
    """True if the user named neither iterations nor warm-up: a runner with files per execution may make fewer."""
    timeout_s: float = 300.0
    options: tuple[str, ...] = ()
    """`name=value,value`: every combination is a target of its own."""
    profile: Profile = Profile.AUTO
    heap: bool = False
    """Measure the DSP's heap, and nothing else."""
    seconds: int | None = None
    """Programs that generate go on for so long; None: every prompt once."""
    command: str = ""
    choice: Choice = Choice()
    """Choice of attached devices."""
    most_devices: int | None = None
    """Attached devices of each SoC at most; None for all that are free."""
    name: str = ""
    """Name of the run."""
    purpose: Purpose = Purpose.LOCAL
    """A nightly run hands a device over, between two jobs, to a person who waits for it."""
    night: str = ""
    """The id of the night that it is a cell of."""
    changed_since: str | None = None
    """A run: only jobs that have changed since, or that it has no verdict of."""
    shard: Shard | None = None
    """Part of the jobs to run; None for all."""
    last_failed: bool = False
    """Only jobs that did not pass when this user ran them last."""
    failed_first: bool = False
    """True to run failed jobs before all others."""
    budget_s: float | None = None
    """How long the run may take; what does not fit is skipped."""
    toolchain: str = ""
    """Toolchain as `--toolchain` takes it; empty for the environment of farm."""
    rebuild: bool = False
    """True to compile all jobs, also cached ones."""
    confirm: bool = False
    """True if suspected changes are measured again after the run."""
    wait_s: float | None = None
    """How long to wait for attached devices, also for absent ones; then SoCs without one are left out. None: for busy
    ones as long as the run may take, and for absent ones not at all."""

    @property
    def asks_the_store(self) -> bool:
        """True if its jobs depend on earlier runs."""
        return self.changed_since is not None or self.shard is not None or self.last_failed


class RunOutcome(msgspec.Struct, frozen=True):
    """How it ended."""

    exit_code: int
    view: RunView
    report: Path
    """The HTML file."""
    confirm: bool = False
    """As in its request, which may be of long ago."""
    toolchain: str = ""
    """The same."""
    left: bool = False
    """True for a run that continues on a shared farm without a follower."""

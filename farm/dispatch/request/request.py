"""Request of a run, and the outcome of the run: plain data."""

from __future__ import annotations

from pathlib import Path

import msgspec

from farm.base.backends.registry import DEFAULT_BACKEND
from farm.dispatch.pool.fleet import Choice
from farm.dispatch.request.profiling import Execution
from farm.dispatch.request.selection import Shard
from farm.store.view import Purpose, RunView


class RunRequest(Execution, frozen=True, kw_only=True):
    """Request of a run, from the options of `farm run` or a similar command."""

    socs: tuple[str, ...]
    suites: tuple[str, ...]
    backend: str = DEFAULT_BACKEND
    precisions: tuple[str, ...] = ()
    virtual: int = 0
    """Number of virtual devices per SoC; 0 to use attached devices."""
    keyword: str = ""
    """Expression of `-k`; empty for all jobs."""
    most_failures: int | None = None
    """Number of failed jobs after which no other job begins; None for no limit."""
    options: tuple[str, ...] = ()
    """Run-time options, `name=value,value`: every combination of values is a separate target."""
    command: str = ""
    choice: Choice = Choice()
    """Choice of attached devices."""
    most_devices: int | None = None
    """Greatest number of attached devices per SoC; None for all free devices."""
    name: str = ""
    """Name of the run."""
    purpose: Purpose = Purpose.LOCAL
    """Purpose of the run; a nightly run gives a device, between two jobs, to a person who waits for it."""
    nightly_run: str = ""
    """Id of the nightly run that this run is a part of; empty for other runs."""
    changed_since: str | None = None
    """Run to compare with: only jobs that changed since, or without a verdict there, are run; None for all."""
    shard: Shard | None = None
    """Part of the jobs to run; None for all."""
    last_failed: bool = False
    """True to run only jobs that did not pass in this user's last run of them."""
    failed_first: bool = False
    """True to run failed jobs before all others."""
    budget_s: float | None = None
    """Time limit of the run in seconds; jobs that do not fit are skipped. None for no limit."""
    toolchain: str = ""
    """Toolchain as `--toolchain` takes it; empty for the environment of farm."""
    rebuild: bool = False
    """True to compile all jobs, also cached ones."""
    confirm: bool = False
    """True to measure suspected regressions again after the run."""
    wait_s: float | None = None
    """Seconds to wait for busy or absent devices; SoCs without a device are then left out.

    None waits for busy devices as long as the run may take, and not for absent ones.
    """

    @property
    def asks_the_store(self) -> bool:
        """True if the selection of jobs depends on earlier runs."""
        return self.changed_since is not None or self.shard is not None or self.last_failed


class RunOutcome(msgspec.Struct, frozen=True):
    """Outcome of a run."""

    exit_code: int
    view: RunView
    report: Path
    """HTML file of the report."""
    confirm: bool = False
    """`RunRequest.confirm`; for a resumed run, of its first request."""
    toolchain: str = ""
    """`RunRequest.toolchain`; for a resumed run, of its first request."""
    left: bool = False
    """True for a run that continues on a shared farm without a follower."""

"""The steps that a run has in common wherever its devices hang: on this machine, or on the hosts of a shared farm.

`farm.dispatch.run.run` runs here; `farm.dispatch.cluster.client.submit` hands the same to agents.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from farm.base.errors import FarmError
from farm.builds.bundles.cache import BundleCache
from farm.builds.bundles.reuse import FoundBundle, find_bundles_for
from farm.dispatch.request.choose import check_machine, check_ready, jobs_of, select
from farm.dispatch.request.profiling import Profile
from farm.dispatch.request.records import (
    exit_code_of,
    is_private_run,
    leave_intent,
    missing_jobs,
    read_intent,
    run_record,
    write_report,
)
from farm.dispatch.request.request import RunOutcome, RunRequest
from farm.dispatch.run.compiling import Rebuild
from farm.store.cluster.records import PlannedJob
from farm.suites.options import runtime_flags

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from pathlib import Path

    from farm.base.config.settings import Config
    from farm.builds.toolchains.toolchain import Toolchain
    from farm.dispatch.dispatcher import ProgressListener
    from farm.dispatch.request.selection import Budget
    from farm.store.records import ExpectedJob, RunView
    from farm.store.store import Store
    from farm.suites.suite import Job

logger = logging.getLogger(__name__)


def take_secrets(config: Config) -> None:
    """Take the secrets of receivers out of the environment, before a process starts that would inherit them."""
    # Without receivers no run imports their channels.
    if config.notify.is_set:
        from farm.dispatch.notify.channels import hide_secrets

        hide_secrets(config.notify.webhook, config.notify.mail)


def choose(config: Config, request: RunRequest, only: Collection[str] | None = None) -> tuple[Config, tuple[Job, ...]]:
    """Return the jobs that `request` selects, and `config` with its toolchain; `only` are ids of jobs, None for all.

    Raises UsageError, NothingSelectedError, MissingToolError: nothing is changed yet.
    """
    from farm.builds.toolchains.selection import use_toolchain

    jobs = jobs_of(config, request)
    config = use_toolchain(config, request.toolchain)
    check_machine(config, request)
    jobs = select(request, jobs)
    if only is not None:
        jobs = tuple(job for job in jobs if job.id in only)
    check_ready(jobs, request)
    take_secrets(config)
    return config, jobs


def left_of(config: Config, store: Store, ref: str) -> tuple[Config, RunRequest, RunView, tuple[Job, ...]]:
    """Return configuration, request and view of a run, `latest` or an id, and its missing jobs.

    The configuration has the toolchain of the run. Raises UnknownNameError for a missing run, UsageError for a run that
    cannot be continued.
    """
    from farm.builds.toolchains.selection import use_toolchain

    run_id = store.runs.resolve(ref, unbegun=True)
    request, jobs = read_intent(config.run_folder(run_id))
    config = use_toolchain(config, request.toolchain)
    check_machine(config, request)
    view = store.runs.view(run_id)
    missing = missing_jobs(view, jobs)
    logger.info("run %s: %s of %s jobs are finished", run_id, len(jobs) - len(missing), len(jobs))
    return config, request, view, missing


def log_numbers(store: Store, run_id: str, *, record: bool = False, confirm: bool = False) -> None:
    """Log changes of the numbers of a run against comparable earlier runs; `record` writes them into the store."""
    from farm.dispatch.history_comparison import compare_with_history, record_comparison

    try:
        comparison = (record_comparison if record else compare_with_history)(store, run_id)
    except FarmError as error:
        # Verdicts are in the store, and stay.
        logger.warning("the numbers were not compared with those before: %s", error)
        return
    for line in comparison.summary_lines(confirm=confirm):
        logger.info(line)


@dataclass
class RunSteps:
    """Common steps of a run: expectations, records and report; subclasses execute the jobs."""

    _config: Config
    _request: RunRequest
    _listener: ProgressListener
    _store: Store
    _budget: Budget

    def __post_init__(self) -> None:
        self._past: dict[str, ExpectedJob] = {}
        """Expectations of the jobs by their history."""
        self._first: set[str] = set()
        """Jobs that are to be first."""
        self._rebuild = Rebuild(BundleCache(self._config.cache_dir), is_wanted=self._request.rebuild)

    def _fingerprint(self, tools: Toolchain, kind: str) -> dict[str, str]:
        """Return the facts that the numbers depend on, including unusual settings of measurement."""
        facts = tools.fingerprint(kind)
        if self._request.heap:
            return facts | {"heap": "measured"}
        if self._request.seconds is not None:
            facts = facts | {"seconds": str(self._request.seconds)}
        profile = self._request.profile
        usual = profile.flags(kind) == Profile.AUTO.flags(kind) and profile is not Profile.OPTRACE
        return facts if usual else facts | {"profile": str(profile)}

    def _begin(self, jobs: Sequence[Job], tools: Toolchain, fingerprint: dict[str, str]) -> str:
        """Record a run that begins, and return its id."""

        record = run_record(
            self._config, self._store, tools, command=self._request.command, facts=fingerprint,
            purpose=self._request.purpose, name=self._request.name, nightly_run=self._request.nightly_run,
        )  # fmt: skip
        # The intent is written before the run is visible, so that every visible run can be resumed.
        return self._store.begin_run(
            record, lambda run_id: leave_intent(self._config.run_folder(run_id), self._request, jobs)
        )

    def _read_history(self, jobs: Sequence[Job], tools: Toolchain, kind: str) -> None:
        """Read the history of the jobs, and the jobs that go first."""

        ids, private = [job.id for job in jobs], is_private_run(tools, self._request.purpose)
        mine = self._store.user if private else ""
        self._past = self._store.selection.expected(ids, kind, tools.branch, local_runs_of=mine)
        if self._request.failed_first:
            self._first = self._store.selection.failed_last(ids, kind, self._store.user, tools.branch, private=private)

    def _order(self, jobs: Sequence[Job], found: Mapping[str, FoundBundle]) -> list[PlannedJob]:
        """Return jobs in the order in which they are built and handed out, with the keys of the bundles `found`."""
        from farm.policy.divide import dispatch_order

        by_id = {job.id: job for job in jobs}
        order = dispatch_order(
            list(by_id),
            cached={job_id: bundle.cached for job_id, bundle in found.items()},
            expected_seconds={job_id: one.run_seconds for job_id, one in self._past.items()},
            sessions={job.id: tuple(runtime_flags(job.target).items()) for job in jobs},
            first=self._first,
        )
        red = {job_id for job_id, past in self._past.items() if past.last.outcome == "failed"}
        return [
            PlannedJob(
                by_id[job_id],
                found[job_id].key,
                cached=found[job_id].cached,
                failed_before=job_id in red,
                expected_s=self._past[job_id].run_seconds if job_id in self._past else 0.0,
            )
            for job_id in order
        ]

    def _order_health_checks(self, jobs: Sequence[Job], tools: Toolchain) -> list[PlannedJob]:
        """Return the programs that show whether a device is fit, and whether its heap can be measured."""
        from farm.dispatch.device_run.health_check import health_check_jobs

        checks = health_check_jobs(tuple(jobs))
        return self._order(checks, find_bundles_for(checks, tools, BundleCache(self._config.cache_dir)))

    def _outcome(self, run_id: str, exit_code: int) -> RunOutcome:
        """Write the report of a run that is over, and return how it ended."""
        return finished_outcome(self._config, self._store, self._request, self._store.runs.view(run_id), exit_code)


def report_of(config: Config, store: Store, view: RunView) -> Path:
    """Write the report of a run into its folder here, and return the file."""
    return write_report(view, config.run_folder(view.id) / "report.html", store, config)


def finished_outcome(
    config: Config, store: Store, request: RunRequest, view: RunView, exit_code: int | None = None
) -> RunOutcome:
    """Write the report of a run, and return how it ended; without `exit_code` nothing of the run is missing."""
    code = exit_code_of(view) if exit_code is None else exit_code
    return RunOutcome(code, view, report_of(config, store, view), request.confirm, request.toolchain)

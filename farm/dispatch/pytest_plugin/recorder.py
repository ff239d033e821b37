"""Part of the plugin in the reporting process: tests are jobs of a run, and each ended attempt is recorded."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from farm.base.errors import FarmError
from farm.base.text import visible
from farm.dispatch.pytest_plugin.lease import release_of
from farm.dispatch.pytest_plugin.plan import STORE_VARIABLE, SuitePlan
from farm.dispatch.pytest_plugin.record import PROCESS, attempt_of, collection_failure, job_of_test, unpack
from farm.dispatch.pytest_plugin.rework import count_report
from farm.results.attempt import Attempt
from farm.store.store import Store, open_store


class SuiteRecorder:
    """Run of a session, in its controller or in its only process."""

    def __init__(self, plan: SuitePlan, config: pytest.Config) -> None:
        self._plan, self._config = plan, config
        self._store: Store | None = None
        self._ids: dict[str, str] = {}
        """Planned jobs, by node id."""
        self._devices = {device.serial: device for device in plan.devices}
        self._recorded: set[str] = set()
        """Serials of the run's devices."""
        self._processes: dict[Any, int] = {}
        """Process id of each worker that has sent a report."""
        self._reports: dict[tuple[str, Any], list[pytest.TestReport]] = {}
        """Reports of running tests, by node id and worker."""

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Record the planned tests before the first one runs."""
        self._guarded(lambda: self._plan_tests([item.nodeid for item in session.items]))

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        """Record the planned tests of workers."""
        self._guarded(lambda: self._plan_tests(ids))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Record a collection error as a failed job."""
        if report.failed:
            self._guarded(
                lambda: self._record(report.nodeid or "collection", lambda job: collection_failure(job, report))
            )

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record an attempt of a test once it has ended."""
        node = getattr(report, "node", None)
        if node is not None:
            count_report(self._config, report)
            self._processes[node] = getattr(report, PROCESS, 0) or self._processes.get(node, 0)
        reports = self._reports.setdefault((report.nodeid, node), [])
        reports.append(report)
        if report.when in ("setup", "call"):
            return
        del self._reports[report.nodeid, node]
        facts = unpack(report)
        fence = facts.fence if facts is not None else 0
        self._guarded(lambda: self._record(report.nodeid, lambda job: attempt_of(job, reports), fence))

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object | None) -> None:
        """Release the device of a dead worker for its successor, as the lease would take a while to expire."""
        if error and (pid := self._processes.get(node)):
            self._guarded(lambda: release_of(self._plan, pid))

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """Note Ctrl-C and `pytest.exit` as interrupts, unlike -x, whose error is a KeyboardInterrupt as well."""
        if excinfo.type in (KeyboardInterrupt, pytest.exit.Exception):
            self._plan.leave_interrupted()

    def pytest_unconfigure(self) -> None:
        """Close the store."""
        if self._store is not None:
            self._store.close()

    def _plan_tests(self, nodeids: Sequence[str]) -> None:
        new = [nodeid for nodeid in nodeids if nodeid not in self._ids]
        if not new:
            return
        plan, store = self._plan, self._opened()
        run_id = plan.run_id
        if not run_id:
            run_id = store.begin_run(plan.record)
            plan.leave_run(run_id)
        files, hashes = plan.files(), dict[Path, str]()
        jobs = []
        for nodeid in new:
            place = nodeid.partition("::")[0]
            path = Path(files.get(place) or self._config.rootpath / place)
            # pytest has no name for a file outside of its root.
            name = nodeid if place else f"{path.name}{nodeid}"
            jobs.append(job_of_test(name, plan.soc, plan.backend, _source(path, hashes)))
        store.plan_jobs(run_id, jobs)
        self._ids |= {nodeid: job.id for nodeid, job in zip(new, jobs, strict=True)}

    def _record(self, nodeid: str, attempt: Callable[[str], Attempt], fence: int = 0) -> None:
        self._plan_tests([nodeid])
        made = attempt(self._ids[nodeid])
        store, run_id, device = self._opened(), self._plan.run_id, self._devices.get(made.device)
        if device is not None and device.serial not in self._recorded:
            store.record_device(run_id, device)
            self._recorded.add(device.serial)
        lease = (device.id, fence) if device is not None and fence else None
        store.record_attempt(run_id, made, fence=lease)

    def _opened(self) -> Store:
        if self._store is None:
            self._store = open_store(os.environ[STORE_VARIABLE])
        return self._store

    def _guarded(self, action: Callable[[], None]) -> None:
        """Run an action on the store. After an error of the store the tests go on, and the run lacks that record."""
        try:
            action()
        except FarmError as error:
            print(visible(f"\nfarm: a result is not recorded: {error}"), file=sys.stderr, flush=True)  # noqa: T201


def _source(path: Path, hashes: dict[Path, str]) -> str:
    """Return the hash of the file of a test; empty for a test without a file."""
    if path not in hashes:
        try:
            hashes[path] = hashlib.sha256(path.read_bytes()).hexdigest()
        except OSError:
            hashes[path] = ""
    return hashes[path]

"""The half of the plugin in the process that hands out tests: devices to workers, tests to devices; results kept."""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from xdist.scheduler import LoadScheduling

from farm.errors import FarmError
from farm.pytest_plugin.record import attempt_of, collection_failure, job_of_test, unpack
from farm.request.pytest_session import STORE_VARIABLE
from farm.store.store import open_store
from farm.system.text import visible

if TYPE_CHECKING:
    from collections.abc import Sequence

    from farm.pytest_plugin.plan import SuitePlan
    from farm.results.attempt import Attempt
    from farm.store.store import Store

GIVEN_UP = "farm_given_up"
"""Attribute of a report whose worker has no device any more."""


class FairScheduling(LoadScheduling):  # type: ignore[misc] # xdist has no types for mypy here
    """xdist's own distribution, but a worker whose device was given up gets nothing while others have theirs.

    It would end its tests sooner than all others, and so get most of them.
    """

    def __init__(self, config: pytest.Config, log: Any) -> None:
        super().__init__(config, log)
        self._idle: set[Any] = set()

    def give_up(self, node: Any) -> None:
        """Take back what the worker `node` has not begun."""
        if node in self._idle:
            return
        self._idle.add(node)
        if not self._has_others():
            for other in self.nodes:
                super().check_schedule(other)
        elif later := self.node2pending.get(node, [])[2:]:
            # It may have looked at the next two already.
            node.send_steal(later)

    def remove_pending_tests_from_node(self, node: Any, indices: Sequence[int]) -> None:
        """Give tests that a worker gave back to the others."""
        if node not in self.node2pending:
            # It had none any more, and has ended meanwhile.
            return
        self.node2pending[node] = [index for index in self.node2pending[node] if index not in indices]
        self.pending[:0] = indices
        for other in self.nodes:
            self.check_schedule(other)

    def check_schedule(self, node: Any, duration: float = 0) -> None:
        """Send a worker more tests where it should have some."""
        if not (node in self._idle and self.pending and self._has_others()):
            super().check_schedule(node, duration)

    def _has_others(self) -> bool:
        return any(node not in self._idle for node in self.nodes)


class Controller:
    """A plugin of the process that starts the workers."""

    def __init__(self, plan: SuitePlan, config: pytest.Config) -> None:
        self._plan, self._config = plan, config
        self._free = list(plan.chosen)
        self._device_of: dict[Any, int] = {}
        self._sched: FairScheduling | None = None
        self._store: Store | None = None
        self._ids: dict[str, str] = {}
        """Job by node id, of what is planned."""
        self._reports: dict[tuple[str, int], list[pytest.TestReport]] = {}
        """Of tests that run, by node id and number of the device."""

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Give a new worker a device that no other has."""
        self._device_of[node] = node.workerinput["farm_device"] = self._free.pop(0)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Take the device back."""
        self._free.append(self._device_of[node])

    @pytest.hookimpl(optionalhook=True, trylast=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> LoadScheduling | None:
        """Distribute tests where nobody says how."""
        if config.getoption("dist") == "load":
            self._sched = FairScheduling(config, log)
        return self._sched

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        """Record what is to be run, before any of it is."""
        self._guarded(lambda: self._plan_tests(ids))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Record what could not be collected as a job that failed."""
        if report.failed:
            nodeid = report.nodeid or "collection"
            self._guarded(lambda: self._record(nodeid, lambda job: collection_failure(job, report), 0, -1))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record a test once it has ended."""
        node = getattr(report, "node", None)
        if node is None:
            return
        if getattr(report, GIVEN_UP, False) and self._sched is not None:
            self._sched.give_up(node)
        number = self._device_of[node]
        reports = self._reports.setdefault((report.nodeid, number), [])
        reports.append(report)
        if report.when in ("setup", "call"):
            return
        del self._reports[report.nodeid, number]
        serial = self._plan.devices[number].serial
        facts = unpack(report)
        fence = facts.fence if facts is not None else 0
        self._guarded(lambda: self._record(report.nodeid, lambda job: attempt_of(job, reports, serial), fence, number))

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """Tell Ctrl-C and `pytest.exit` from pytest's own -x, whose exception derives from KeyboardInterrupt."""
        if excinfo.type in (KeyboardInterrupt, pytest.exit.Exception):
            self._plan.leave_interrupted()

    def pytest_unconfigure(self) -> None:
        """Let go of the store."""
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
            for number in plan.chosen:
                store.record_device(run_id, plan.devices[number])
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

    def _record(self, nodeid: str, attempt: Any, fence: int, number: int) -> None:
        self._plan_tests([nodeid])
        made: Attempt = attempt(self._ids[nodeid])
        lease = (self._plan.devices[number].id, fence) if fence else None
        self._opened().record_attempt(self._plan.run_id, made, fence=lease)

    def _opened(self) -> Store:
        if self._store is None:
            self._store = open_store(os.environ[STORE_VARIABLE])
        return self._store

    def _guarded(self, action: Any) -> None:
        """Do something with the store; where it refuses, the tests go on, and the run shows what it lacks."""
        try:
            action()
        except FarmError as error:
            print(visible(f"\nfarm: a result is not recorded: {error}"), file=sys.stderr, flush=True)  # noqa: T201


def _source(path: Path, hashes: dict[Path, str]) -> str:
    """Return the hash of the file of a test, empty where it has none."""
    if path not in hashes:
        try:
            hashes[path] = hashlib.sha256(path.read_bytes()).hexdigest()
        except OSError:
            hashes[path] = ""
    return hashes[path]

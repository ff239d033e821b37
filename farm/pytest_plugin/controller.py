"""The plugin in the process that starts the workers: devices to workers, tests to devices; results are recorded."""

from __future__ import annotations

import hashlib
import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from xdist.dsession import DSession
from xdist.scheduler import LoadScheduling

from farm.errors import FarmError
from farm.pytest_plugin.plan import GIVEN_UP, STORE_VARIABLE, devices_left
from farm.pytest_plugin.record import OPEN, attempt_of, collection_failure, job_of_test, unpack
from farm.pytest_plugin.rework import count_report
from farm.pytest_plugin.workers import Workers, WorkerSession
from farm.results.attempt import Cause, Stage, Verdict
from farm.results.blame import Tried, classify, is_open, settle, tried
from farm.store.store import open_store
from farm.system.text import visible

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from farm.pytest_plugin.plan import SuitePlan
    from farm.results.attempt import Attempt
    from farm.store.store import Store


class FairScheduling(LoadScheduling):  # type: ignore[misc] # xdist has no types for mypy here
    """xdist's own distribution, but a worker whose device was given up gets nothing while others have theirs.

    It would end its tests sooner than all others, and so get most of them.
    """

    def __init__(self, config: pytest.Config, log: Any, device_of: Callable[[Any], int] = lambda _: -1) -> None:
        """`device_of` returns the number of the device of a worker."""
        super().__init__(config, log)
        self.pending: list[int]
        self._idle: set[Any] = set()
        self._device_of = device_of
        self._tried: dict[int, frozenset[int]] = {}
        """Numbers of the devices that have tried a test, by its index."""

    def try_elsewhere(self, nodeid: str, devices: Collection[int]) -> None:
        """Run a test once more, on none of `devices`, given by their numbers."""
        index = (self.collection or []).index(nodeid)
        self._tried[index] = frozenset(devices)
        self.pending.insert(0, index)
        for node in self.nodes:
            self.check_schedule(node)

    def open_tests(self) -> dict[int, frozenset[int]]:
        """Return tests that wait for another device, with the numbers of the devices that have tried them."""
        return {index: self._tried[index] for index in self.pending if index in self._tried}

    def leave_open(self, index: int) -> None:
        """Let go of a test that no device is left for."""
        self.pending.remove(index)

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
        """Send a worker more tests where it should have some, and none that its device has tried."""
        if node in self._idle and self.pending and self._has_others():
            return
        device = self._device_of(node)
        held = [index for index in self.pending if device in self._tried.get(index, ())]
        self.pending = [index for index in self.pending if index not in held]
        super().check_schedule(node, duration)
        self.pending[:0] = held

    def _has_others(self) -> bool:
        return any(node not in self._idle for node in self.nodes)


class SuiteSession(WorkerSession):
    """The session of a run, for tests of the user's: what ends a session of xdist's ends this one as well.

    That is `pytest.exit`, an error inside of pytest, and --max-worker-restart.
    """

    # Of a run, a worker that ends in one of these ways is replaced.
    worker_internal_error = DSession.worker_internal_error
    worker_workerfinished = DSession.worker_workerfinished

    def __init__(
        self,
        config: pytest.Config,
        workers: Workers,
        may_repeat: Callable[[Any, pytest.TestReport], bool],
        ask_others: Callable[[], bool],
    ) -> None:
        """`may_repeat` returns whether another device tries a test that failed; `ask_others` frees a device for it."""
        super().__init__(config, workers)
        self._may_repeat, self._ask_others = may_repeat, ask_others
        self.shouldstop: bool | str = False
        self._retired = 0
        self._started: set[str] = set()

    def needs_worker(self) -> bool:
        """Return whether a device that lacks a worker should get one."""
        is_done = self.sched is not None and self.sched.tests_finished
        return not (self.shouldstop or self._summary_report or is_done)

    def retire(self) -> None:
        """Expect one worker less: the others wait for the tests that it would have collected."""
        self._retired += 1

    def worker_testreport(self, node: Any, rep: pytest.TestReport) -> None:
        """Hand on the report of a test; a failure that another device has to confirm is a rerun."""
        if rep.failed and self._may_repeat(node, rep):
            rep.outcome = "rerun"  # type: ignore[assignment]
        super().worker_testreport(node, rep)

    def look(self) -> None:
        """Let workers end when nothing is left to do, or nobody to do it."""
        if not (self.shouldstop or self._summary_report) and self._ask_others():
            self.shuttingdown = False
            self._start_missing()
        if self._retired:
            sched: Any = self.sched
            sched.numnodes -= self._retired
            self._retired = 0
            if sched.nodes and sched.collection_is_completed:
                sched.schedule()
        super().look()
        if not (self._active_nodes or self._summary_report or self.sched.tests_finished):
            self.shouldstop = self.shouldstop or "no worker is left"

    def worker_errordown(self, node: Any, error: object | None) -> None:
        """Replace a worker that died, as often as --max-worker-restart lets it."""
        self._failed_nodes_count += 1
        limit = self._max_worker_restart
        if limit is not None and self._failed_nodes_count > limit:
            self._summary_report = f"maximum crashed workers reached: {limit}"
            self.report_line(f"\n{self._summary_report}")
        super().worker_errordown(node, error)
        if self._summary_report:
            self.triggershutdown()

    def _start_missing(self) -> None:
        while self._workers.lacks_one():
            # The first ones have the names that users know: gw0, gw1.
            spec = self.nodemanager.specs[len(self._started) % len(self.nodemanager.specs)]
            if spec.id in self._started:
                spec.id = None
                self.nodemanager.group.allocate_id(spec)
            self._started.add(spec.id)
            with self._workers.starting():
                self._active_nodes.add(self.nodemanager.setup_node(spec, self.queue.put))


class SuiteController:
    """A plugin of the process that starts the workers."""

    def __init__(self, plan: SuitePlan, config: pytest.Config) -> None:
        self._plan, self._config = plan, config
        self._usable = set(plan.chosen)
        self._session: SuiteSession | None = None
        self._workers = Workers(
            [device.serial for device in plan.devices],
            is_wanted=lambda number: number in self._usable and (not self._session or self._session.needs_worker()),
            retire=self._retire,
            note=lambda text: self._session.report_line(text) if self._session else None,
            # Nobody watches them: a test of the user's takes as long as it takes.
            sign_of=lambda _: 0,
            most_silence_s=math.inf,
        )
        self._sched: FairScheduling | None = None
        self._store: Store | None = None
        self._ids: dict[str, str] = {}
        """Job by node id, of what is planned."""
        self._tried: dict[str, tuple[Tried, ...]] = {}
        """Attempts of a test whose failure may be a device's, by node id."""
        self._reports: dict[tuple[str, int], list[pytest.TestReport]] = {}
        """Of tests that run, by node id and number of the device."""

    def pytest_plugin_registered(self, plugin: object, manager: pytest.PytestPluginManager) -> None:
        """Take the place of xdist's session, which ends with the first worker that does not start."""
        if isinstance(plugin, DSession) and not isinstance(plugin, SuiteSession):
            manager.unregister(plugin)
            manager.unregister(name="terminaldistreporter")
            self._session = SuiteSession(plugin.config, self._workers, self._may_repeat, self._ask_others)
            manager.register(self._session, "dsession")

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Give a new worker a device that no other has."""
        node.workerinput["farm_device"] = self._workers.assign(node)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        """Take the device back."""
        if error:
            self._workers.died(node, str(error))
        else:
            self._workers.ended(node)

    @pytest.hookimpl(optionalhook=True, trylast=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> LoadScheduling | None:
        """Distribute tests where nobody says how."""
        if config.getoption("dist") == "load":
            self._sched = FairScheduling(config, log, self._workers.device_of)
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
        # Whatever became of the test: its worker has started.
        self._workers.job_done(node)
        count_report(self._config, report)
        number = self._workers.device_of(node)
        reports = self._reports.setdefault((report.nodeid, number), [])
        reports.append(report)
        if report.when in ("setup", "call"):
            return
        del self._reports[report.nodeid, number]
        serial = self._plan.devices[number].serial
        facts = unpack(report)
        fence = facts.fence if facts is not None else 0
        self._guarded(
            lambda: self._record(
                report.nodeid,
                lambda job: self._settled(report.nodeid, reports, attempt_of(job, reports, serial)),
                fence,
                number,
            )
        )

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """Tell Ctrl-C and `pytest.exit` from pytest's own -x, whose exception derives from KeyboardInterrupt."""
        if excinfo.type in (KeyboardInterrupt, pytest.exit.Exception):
            self._plan.leave_interrupted()

    def pytest_unconfigure(self) -> None:
        """Let go of the store."""
        if self._store is not None:
            self._store.close()

    def _may_repeat(self, node: Any, report: pytest.TestReport) -> bool:
        """Return whether another device tries a test whose failure may be the device's."""
        cause = getattr(report, OPEN, "")
        if not cause or self._sched is None:
            return False
        serial = self._plan.devices[self._workers.device_of(node)].serial
        now = Tried(serial, Verdict.FAILED, Cause(cause), Stage.EXECUTE, "")
        history = (*self._tried.get(report.nodeid, ()), now)
        return classify(history, others=len(self._untried({one.device for one in history}))).repeat

    def _settled(self, nodeid: str, reports: Sequence[pytest.TestReport], attempt: Attempt) -> Attempt:
        """Return the attempt of a test with a verdict that takes in every device that tried it; others may have to."""
        earlier = self._tried.get(nodeid, ())
        is_undecided = attempt.verdict is Verdict.FAILED and is_open(attempt.cause) and not attempt.known_issue
        # The report of a worker that died has no such mark: in a process of the user's, that is the test's doing.
        is_undecided = is_undecided and any(getattr(report, OPEN, "") for report in reports)
        if self._sched is None or not (earlier or is_undecided):
            return attempt
        history = self._tried[nodeid] = (*earlier, tried(attempt))
        serials = {one.device for one in history}
        decision = classify(history, others=len(self._untried(serials)))
        if decision.repeat:
            numbers = [number for number, device in enumerate(self._plan.devices) if device.serial in serials]
            self._sched.try_elsewhere(nodeid, numbers)
        return settle(attempt, history, decision)

    def _untried(self, serials: Collection[str]) -> list[int]:
        """Return the numbers of the devices that may run tests, but for those with the given serials."""
        left = devices_left(self._plan.folder)
        return [one for one in sorted(self._usable - left.keys()) if self._plan.devices[one].serial not in serials]

    def _ask_others(self) -> bool:
        """Free a device without a worker for tests that wait for another one; return whether there is any."""
        if self._sched is None or self._session is None:
            return False
        running = {self._workers.device_of(node) for node in self._session.nodes}
        is_freed = False
        for index, numbers in self._sched.open_tests().items():
            untried = self._untried({self._plan.devices[number].serial for number in numbers})
            if not untried:
                self._sched.leave_open(index)
            elif not running.intersection(untried):
                self._workers.want_again(untried[0])
                is_freed = True
        return is_freed

    def _retire(self, number: int, reason: str) -> None:
        """Give up a device whose workers do not start."""
        self._usable.discard(number)
        self._plan.leave_device(number, reason)
        if self._session is not None:
            self._session.retire()
            self._session.report_line(f"{self._plan.devices[number].serial} is not used any more: {reason}")

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

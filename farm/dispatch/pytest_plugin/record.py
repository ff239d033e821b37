"""Part of the plugin in the reporting process: tests become jobs of a run, and the reports of pytest attempts."""

from __future__ import annotations

import base64
import hashlib
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from farm.base.errors import FarmError
from farm.base.text import bounded_log, reason_line, visible
from farm.dispatch.pytest_plugin.plan import STORE_VARIABLE, SuitePlan
from farm.dispatch.pytest_plugin.upstream import count_report
from farm.policy.retries import Tried, as_recorded, classify, tried
from farm.results.attempt import Attempt, Cause, Measurement, OperatorProfile, Stage, Verdict
from farm.store.values import storable
from farm.suites.suite import Case, Job, Target

if TYPE_CHECKING:
    from farm.store.store import Store

SUITE = "pytest"
"""Suite of all tests."""

OPEN = "farm_open"
"""Attribute of a report with the cause of a failure that may be the device's fault as well."""

SERIAL = "farm_serial"
"""Attribute of a report: the device, for a worker that dies before its last report."""

PROCESS = "farm_process"
"""Attribute of a report: id of the process that has leased the device."""

FACTS = "farm_facts"
"""Attribute of a test's last report: facts of its worker that pytest does not have."""

# The id of a job has 512 characters in the store, with suite and target; parameters can make a node id longer.
_NAME_CHARS = 400
_PHASES = ("setup", "call", "teardown")


class DeviceFacts(msgspec.Struct, frozen=True):
    """Facts of a worker about a test that has ended."""

    device: str
    """Serial of the device."""
    fence: int
    """Fence of the lease; 0 without a lease."""
    infra: str = ""
    """Fault of the farm or the device; empty for none."""
    stage: Stage = Stage.EXECUTE
    """Stage of the failure, if any."""
    cause: Cause = Cause.NONE
    reason: str = ""
    """Reason of a failed test by upstream's own record; empty for pytest's."""
    unexecuted: str = ""
    """Reason why the program of a passed test was not executed, by upstream's own record; empty for an executed one."""
    bundle_key: str = ""
    measurements: tuple[Measurement, ...] = ()
    """Measurements of the test's program; none after several programs."""
    operators: tuple[OperatorProfile, ...] = ()
    notes: tuple[str, ...] = ()
    earlier: tuple[Tried, ...] = ()
    """Attempts of the test on other devices."""
    others: int = 0
    """Number of devices that might have tried the test again."""

    def packed(self) -> str:
        """Return the facts, infinities included, as text that any plugin can carry with a report."""
        return base64.b64encode(msgspec.msgpack.encode(self)).decode()


class UpstreamResult(msgspec.Struct, frozen=True):
    """Result of a test by upstream's own record."""

    reason: str = ""
    stage: Stage = Stage.EXECUTE
    cause: Cause = Cause.NONE
    notes: tuple[str, ...] = ()
    unexecuted: str = ""
    """Reason why the program of a success was not executed."""


def unpack(report: pytest.TestReport) -> DeviceFacts | None:
    """Return the worker's facts in a report; None if the worker died before, or had no facts."""
    packed = getattr(report, FACTS, None)
    return msgspec.msgpack.decode(base64.b64decode(packed), type=DeviceFacts) if isinstance(packed, str) else None


def job_of_test(nodeid: str, soc: str, backend: str, source: str) -> Job:
    """Return the job of a test: `pytest/tests/test_net.py::test_net[SM8650-htp]`.

    `source` is the hash of its file. The precision of a test is unknown, so that its target has none.
    """
    name = storable(nodeid)
    if len(name) > _NAME_CHARS:
        name = f"{name[: _NAME_CHARS - 17]}~{hashlib.sha256(name.encode()).hexdigest()[:16]}"
    case = Case(SUITE, name, module=f"nodeid:{storable(nodeid)}", inputs=(), kwargs={"source": source})
    return Job(case, Target(soc, backend, ""))


def attempt_of(job_id: str, reports: Sequence[pytest.TestReport]) -> Attempt:
    """Return the attempt of one execution of a test, from the reports of the test and its subtests.

    The verdict takes the test's earlier attempts on other devices into account.
    """
    facts = next((facts for report in reversed(reports) if (facts := unpack(report)) is not None), None)
    if facts is None:
        # A dead worker sends no facts.
        serial = next((str(found) for report in reports if (found := getattr(report, SERIAL, ""))), "")
        return _attempt_of(job_id, reports, DeviceFacts(serial, 0))
    attempt = _attempt_of(job_id, reports, facts)
    is_undecided = any(getattr(report, OPEN, "") for report in reports) and not attempt.known_issue
    if not (facts.earlier or is_undecided):
        return attempt
    history = (*facts.earlier, tried(attempt))
    return as_recorded(attempt, history, classify(history, others=facts.others))


def _attempt_of(job_id: str, reports: Sequence[pytest.TestReport], facts: DeviceFacts) -> Attempt:
    starts = [start for report in reports if (start := getattr(report, "start", 0.0))]
    bad = [report for report in reports if report.failed or report.outcome == "rerun"]  # type: ignore[comparison-overlap]
    verdict, stage, cause, reason, known_issue, notes = _ending(reports, bad, facts)
    return Attempt(
        job_id,
        verdict,
        stage,
        reason_line(reason),
        device=facts.device,
        started_ms=int(min(starts) * 1000) if starts else 0,
        seconds=sum(report.duration for report in reports if report.when in _PHASES),
        bundle_key=facts.bundle_key,
        known_issue=reason_line(known_issue),
        measurements=() if verdict is Verdict.INFRA else facts.measurements,
        operators=facts.operators,
        log=bounded_log("\n".join(_text(report) for report in (bad or _shown(reports)))),
        notes=tuple(map(reason_line, (*facts.notes, *notes))),
        cause=cause,
    )


def collection_failure(job_id: str, report: pytest.CollectReport) -> Attempt:
    """Return the attempt of a collection error, for example of a module with a failed import."""
    reason = reason_line(_last_line(report.longreprtext)) or "it cannot be collected"
    return Attempt(job_id, Verdict.FAILED, Stage.LOAD, reason, log=bounded_log(report.longreprtext))


_Ending = tuple[Verdict, Stage, Cause, str, str, tuple[str, ...]]
"""Verdict, stage, cause, reason, known issue, notes."""


def _ending(reports: Sequence[pytest.TestReport], bad: Sequence[pytest.TestReport], facts: DeviceFacts) -> _Ending:
    if bad:
        return _failure(bad, facts)
    expected = next((report for report in reports if hasattr(report, "wasxfail")), None)
    if expected is not None:
        why = str(expected.wasxfail).removeprefix("reason: ") or "it is expected to fail"
        if expected.skipped:
            # An expected failure is final: other devices do not confirm it.
            return Verdict.FAILED, facts.stage, Cause.NONE, _reason(expected), f"xfail: {why}", ()
        return Verdict.PASSED, Stage.DONE, Cause.NONE, "", "", (f"expected to fail, and passed: {why}",)
    # A skipped subtest does not skip the others.
    skip = next((report for report in reports if type(report) is pytest.TestReport and report.skipped), None)
    if skip is not None:
        return Verdict.SKIPPED, Stage.EXECUTE, Cause.NONE, _skip_reason(skip), "", ()
    # --setup-only and --setup-plan call nothing.
    is_called = any(report.when == "call" for report in reports)
    if unexecuted := facts.unexecuted if is_called else "set up, and not called":
        return Verdict.SKIPPED, Stage.EXECUTE, Cause.NONE, unexecuted, "", ()
    return Verdict.PASSED, Stage.DONE, Cause.NONE, "", "", ()


def _failure(bad: Sequence[pytest.TestReport], facts: DeviceFacts) -> _Ending:
    reason = (facts.reason or _reason(bad[0])) + (f" (and {len(bad) - 1} more)" if len(bad) > 1 else "")
    if bad[0].when not in _PHASES:
        # This is xdist's own report of a dead worker.
        return Verdict.FAILED, Stage.EXECUTE, Cause.CRASH, reason, "", ()
    if facts.infra:
        return Verdict.INFRA, facts.stage, facts.cause, facts.infra, "", ()
    by_plugin = bad[0].outcome == "rerun" and not getattr(bad[0], OPEN, "")  # type: ignore[comparison-overlap]
    notes = ("a plugin ran it again",) if by_plugin else ()
    return Verdict.FAILED, facts.stage, facts.cause, reason, "", notes


def _shown(reports: Sequence[pytest.TestReport]) -> list[pytest.TestReport]:
    return [report for report in reports if report.skipped and hasattr(report, "wasxfail")]


def _reason(report: pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    message = str(crash.message) if crash is not None else _last_line(report.longreprtext)
    where = "" if report.when in ("call", "???") else f"{report.when}: "
    # The first line of an assertion has the compared values.
    return where + (message.strip().partition("\n")[0] or "it failed without a reason")


def _skip_reason(report: pytest.TestReport) -> str:
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else _last_line(report.longreprtext)
    return reason.removeprefix("Skipped: ").strip() or "skipped"


def _text(report: pytest.TestReport) -> str:
    sections = [f"---- {title} ----\n{content}" for title, content in report.sections]
    # A log that is too long keeps its end: compilers print more than fits.
    return "\n".join([*sections, report.longreprtext])


def _last_line(text: str) -> str:
    last = next((line for line in reversed(text.splitlines()) if line.strip()), "")
    # Pytest marks the lines of an exception by this prefix.
    return last.removeprefix("E   ")


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
        self._is_each = config.getoption("dist", "no") == "each"
        self._workers = 0
        """Workers that have collected tests."""
        self._ended = Counter[str]()
        """Workers on which a test has ended, by node id; for `--dist each`."""
        self._held: dict[str, list[Attempt]] = {}
        """Failures that wait for the other devices, by node id; for `--dist each`."""

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Record the planned tests before the first one runs."""
        self._guarded(lambda: self._plan_tests([item.nodeid for item in session.items]))

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        """Record the planned tests of workers."""
        self._workers += 1
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
            from farm.dispatch.pytest_plugin.lease import release_of

            self._guarded(lambda: release_of(self._plan, pid))

    def pytest_sessionfinish(self) -> None:
        """Record the failures that still wait for other devices."""
        for nodeid in list(self._held):
            self._guarded(partial(self._record_held, nodeid))

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
        if self._is_each and made.verdict is Verdict.FAILED:
            # The last attempt decides about a job, and a test that every device runs fails if it does on any of them.
            # The lease may have ended when the failure is recorded.
            if lease := self._lease_of(made, fence):
                self._opened().leases.require(*lease)
            self._held.setdefault(nodeid, []).append(made)
        else:
            self._write(made, fence)
        self._ended[nodeid] += 1
        if self._ended[nodeid] >= self._workers:
            self._record_held(nodeid)

    def _lease_of(self, made: Attempt, fence: int) -> tuple[str, int] | None:
        device = self._devices.get(made.device)
        return (device.id, fence) if device is not None and fence else None

    def _record_held(self, nodeid: str) -> None:
        for made in sorted(self._held.pop(nodeid, []), key=lambda one: not one.known_issue):
            self._write(made, fence=0)

    def _write(self, made: Attempt, fence: int) -> None:
        store, run_id, device = self._opened(), self._plan.run_id, self._devices.get(made.device)
        if device is not None and device.serial not in self._recorded:
            store.record_device(run_id, device)
            self._recorded.add(device.serial)
        store.record_attempt(run_id, made, fence=self._lease_of(made, fence))

    def _opened(self) -> Store:
        if self._store is None:
            # Processes that only list tests load the plugin, too: they do without SQLAlchemy.
            from farm.store.store import open_store

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

"""The controller's half of a run: devices to workers, jobs to devices, and what the progress listener receives."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

import pytest
from xdist.dsession import DSession

from farm.errors import FarmError
from farm.results.attempt import Attempt, Cause, Stage, Verdict
from farm.run.plugin import OUTVOTED_KEY, REPEAT_KEY, REPORT_KEY, RETURNED_KEY, shown
from farm.run.scheduler import IDLE, DeviceScheduling
from farm.run.workers import Workers, WorkerSession
from farm.system.text import bounded_log, reason_line

if TYPE_CHECKING:
    from pathlib import Path

    from farm.pool.device_pool import DevicePool
    from farm.request.plan import RunPlan
    from farm.run.fork_server import ForkServer
    from farm.run.progress import ProgressListener
    from farm.store.store import Store

# A job whose worker process died is tried once more; dying again, it is not a third worker's turn.
_WORKER_DEATHS = 2
_INTERNAL_CHARS = 2000
# What xdist calls the phase of its own report of a worker that died: that is dealt with already.
_CRASHED = "???"


# What execnet runs in a worker process.
_REMOTE = """\
import sys
settings, _, _, sys.path[:] = channel.receive()
from farm.run.remote import serve
serve(channel, settings)
"""


class Controller:
    """A pytest plugin for the controller process only."""

    def __init__(
        self, plan: RunPlan, listener: ProgressListener, store: Store, pool: DevicePool, forks: ForkServer | None = None
    ) -> None:
        self._plan, self._listener, self._store, self._pool = plan, listener, store, pool
        self._forks, self._own_pytest, self._most_failures = forks, False, 0
        self._number = {device.serial: number for number, device in enumerate(plan.devices)}
        self._repeated: dict[str, dict[str, Any]] = {}
        """What is known of jobs that another device is to try."""
        self._workers = Workers(
            [device.serial for device in plan.devices],
            is_wanted=self._is_wanted,
            retire=pool.retire,
            note=listener.note,
            sign_of=lambda number: _changed_ns(plan.workers / str(number)),
            most_silence_s=plan.most_silence_s,
        )
        self._soc_of = {planned.job.id: planned.job.target.soc for planned in plan.jobs}
        self._deaths: dict[str, int] = {}
        self._sched: DeviceScheduling | None = None
        self.interrupted = False
        """Ctrl-C, or a signal that asks the same; not pytest's own -x."""
        self.abandoned: set[str] = set()
        """Jobs for which no device was left."""

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """Distinguish Ctrl-C from pytest's Interrupted, which derives from KeyboardInterrupt."""
        self.interrupted = self.interrupted or excinfo.type is KeyboardInterrupt
        if self.interrupted:
            self._workers.interrupt()

    def pytest_configure(self, config: pytest.Config) -> None:
        """Note whether workers need a session of pytest's, and after how many failures nothing else begins."""
        self._own_pytest = bool(config.getoption("farm_sessions"))
        self._most_failures = int(config.getoption("maxfail") or 0)

    def pytest_plugin_registered(self, plugin: object, manager: pytest.PytestPluginManager) -> None:
        """Take the place of xdist's session, which ends with the first worker that does not start."""
        if isinstance(plugin, DSession) and not isinstance(plugin, WorkerSession):
            manager.unregister(plugin)
            items = [*(planned.job.id for planned in self._plan.jobs), IDLE]
            session = WorkerSession(plugin.config, self._workers, items, self._forks)
            manager.register(session, "dsession")
            self._pool.watch_with(lambda: self._workers.watch(session.nodes))

    def _is_wanted(self, number: int) -> bool:
        """Return whether a device may need a worker."""
        return not self._pool.is_retired(number) and (self._sched is None or self._sched.has_work_for(number))

    def pytest_xdist_make_scheduler(self) -> DeviceScheduling:
        """Hand jobs to devices of their SoC."""
        self._sched = DeviceScheduling(
            self._soc_of.__getitem__,
            self._workers.device_of,
            [device.soc for device in self._plan.devices],
            self._give_up,
        )
        self._pool.schedule_with(self._sched)
        return self._sched

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Give a new worker a device that no other has."""
        node.workerinput["farm_device"] = self._workers.assign(node)
        io = getattr(node.gateway, "_io", None)
        node.workerinput["farm_controller"] = getattr(io, "parent", os.getpid())
        node.workerinput["farm_plan"] = str(self._plan.path)
        node.workerinput["farm_maxfail"] = self._most_failures

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_getremotemodule(self) -> str | None:
        """Return what workers run where the user has named none of pytest's options; else they have its session."""
        return None if self._own_pytest else _REMOTE

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        """Take the device back."""
        if error:
            self._workers.died(node, str(error))
        else:
            # There is nothing left to do for it: others may have the device.
            self._pool.retire(self._workers.ended(node))

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, crashitem: str, report: pytest.TestReport, sched: DeviceScheduling) -> None:
        """Try a job whose worker died once more; the second time it is the farm's fault, with a record."""
        finished = self._finished(crashitem)
        if finished is not None:
            # It died between writing the result down and telling of it.
            report.outcome = "rerun"  # type: ignore[assignment]
            self._listener.job_ended(shown(finished))
            return
        self._deaths[crashitem] = self._deaths.get(crashitem, 0) + 1
        if self._deaths[crashitem] < _WORKER_DEATHS:
            report.outcome = "rerun"  # type: ignore[assignment]
            sched.mark_test_pending(crashitem)
            return
        reason = f"the worker process died {_WORKER_DEATHS} times while it ran this job"
        self._record_own_fault(crashitem, reason, self._workers.last_words_of(getattr(report, "node", None)))

    def _record_own_fault(self, job_id: str, reason: str, log: str) -> None:
        """Record a job that farm itself could not run, with what its worker said last."""
        attempt = Attempt(
            job_id, Verdict.INFRA, Stage.EXECUTE, reason_line(reason), cause=Cause.WORKER, log=bounded_log(log)
        )
        try:
            self._store.record_attempt(self._plan.run_id, attempt)
        except FarmError as error:
            self._listener.note(f"{job_id} has no result: {error}")
            return
        self._listener.job_ended(shown(attempt))

    def _finished(self, job_id: str) -> Attempt | None:
        """Return the attempt that decides a job, where it has a verdict about its code."""
        try:
            jobs = self._store.runs.view(self._plan.run_id).jobs
        except FarmError:
            return None
        decisive = next((job.decisive for job in jobs if job.id == job_id), None)
        return None if decisive is None or decisive.verdict is Verdict.INFRA else decisive

    def pytest_runtest_logstart(self) -> None:
        """Report what every device does."""
        if self._sched is not None:
            running = {
                self._plan.devices[self._workers.device_of(node)].called: job
                for node in self._sched.nodes
                if (job := self._sched.running(node)) is not None
            }
            self._listener.devices(running)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Report how a job ended, or let another device try it."""
        properties = dict(report.user_properties)
        if report.when == "call" and self._sched is not None:
            returned = properties.get(RETURNED_KEY)
            if isinstance(returned, dict):
                self._take_back(report.nodeid, returned)
                return
            shown_attempt = properties.get(REPORT_KEY)
            if isinstance(shown_attempt, dict):
                self._workers.job_done(report.node)
                outvoted = properties.get(OUTVOTED_KEY)
                for serial in outvoted if isinstance(outvoted, list) else ():
                    self._pool.outvote(self._number[serial], report.nodeid)
                avoid = properties.get(REPEAT_KEY)
                if isinstance(avoid, list) and not self._pool.stopped:
                    self._repeated[report.nodeid] = shown_attempt
                    self._listener.job_repeated(shown_attempt)
                    self._sched.repeat(report.nodeid, [self._number[serial] for serial in avoid])
                    return
                self._listener.job_ended(shown_attempt)
                return
        if report.failed and report.when == "call" and report.nodeid in self._soc_of:
            # Nothing was recorded: the store refused, or farm itself is wrong.
            crash = getattr(report.longrepr, "reprcrash", None)
            what = crash.message.partition("\n")[0] if crash else _last_line(report.longreprtext)
            reason = f"the worker broke down over this job: {what}"
            self._record_own_fault(report.nodeid, reason, report.longreprtext)
        elif report.failed and report.when != _CRASHED:
            self._listener.note(f"{report.nodeid} has no result: {_last_line(report.longreprtext)}")

    def _take_back(self, job_id: str, returned: dict[str, Any]) -> None:
        number = self._number[returned["device"]]
        if returned["halt"]:
            resume = f"'farm run --resume {self._plan.run_id}' does what is missing"
            self._pool.halt(f"{returned['halt']}; once that is mended, {resume}")
        elif returned["given_up"]:
            self._pool.retire(number, returned["given_up"])
        elif returned["unfit"]:
            self._pool.suspend(number, returned["unfit"])
        elif returned["recovered"]:
            self._pool.recovered(number)
        elif returned["off"]:
            self._pool.let_go(number, returned["fence"])
        if job_id != IDLE and self._sched is not None:
            self._sched.repeat(job_id)

    def _give_up(self, job_id: str) -> None:
        """Report how a job ended that no device is left for, when one tried it."""
        self.abandoned.add(job_id)
        shown_attempt = self._repeated.pop(job_id, None)
        if shown_attempt is not None:
            self._listener.job_ended(shown_attempt)

    def pytest_internalerror(self, excrepr: object) -> bool:
        """Note what broke the session, in a line: pytest would print where in its own code that was."""
        log = self._plan.folder / "session.log"
        with contextlib.suppress(OSError):
            log.write_text(str(excrepr))
        self._listener.note(f"the test session broke down: {_last_line(str(excrepr))} (all of it is in {log})")
        return True


def _changed_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1][:_INTERNAL_CHARS] if lines else "it did not say why"

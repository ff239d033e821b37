"""The loop of a worker process: xdist's messages, without a pytest session of its own.

A job needs nothing of pytest's where the user has handed nothing to it, and every hook, item and report would be paid
for by every job: two messages a job are left, that it begins and how it ended. Where the user names pytest's options or
plugins, a worker is xdist's own, and `farm.run.plugin` runs the jobs as items.
"""

from __future__ import annotations

import time
import traceback
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import msgspec
from xdist.remote import getinfodict

from farm.errors import StoreError
from farm.request.plan import read_plan
from farm.results.attempt import Verdict
from farm.run.plugin import SHORT_KEY, JobReport, prepare_process, properties_of, text_of
from farm.run.worker import Done, Returned, Worker

if TYPE_CHECKING:
    from farm.request.plan import PlannedJob

# pytest's exit codes.
_OK, _FAILED, _INTERRUPTED, _BROKEN = range(4)


def serve(channel: Any, settings: dict[str, Any]) -> None:
    """Run what the other end of an execnet channel asks for, until it says that nothing else comes, or is gone.

    `settings` are xdist's of this worker, and those of `Controller.pytest_configure_node`.
    """
    loop = _Loop(channel, settings)
    status = _BROKEN
    try:
        channel.setcallback(loop.command, endmarker=None)
        status = loop.run()
    except KeyboardInterrupt:
        status = _INTERRUPTED
    except Exception:  # noqa: BLE001 - the controller has to know why this worker ends
        loop.send("internal_error", formatted_error=traceback.format_exc())
    finally:
        loop.close()
    output = {"exitstatus": status, "shouldfail": loop.should_fail, "shouldstop": False}
    loop.send("workerfinished", workeroutput=output)


class _Loop:
    """What a worker does between its first message and its last."""

    def __init__(self, channel: Any, settings: dict[str, Any]) -> None:
        self._channel = channel
        self._number, self._controller = int(settings["farm_device"]), int(settings["farm_controller"])
        self._path, self._most_failures = Path(settings["farm_plan"]), int(settings["farm_maxfail"])
        self._indices: SimpleQueue[int | None] = SimpleQueue()
        self._worker: Worker | None = None
        self._failures = 0
        self.should_fail: str | bool = False
        """Why nothing else is begun, as in pytest's session."""

    def send(self, name: str, **facts: object) -> None:
        """Send one of xdist's messages."""
        self._channel.send((name, facts))

    def command(self, command: tuple[str, dict[str, Any]] | None) -> None:
        """Take a message of the controller's; None when there is none any more. Called in execnet's thread."""
        if command is not None and command[0] == "runtests":
            for index in command[1]["indices"]:
                self._indices.put(index)
        else:
            self._indices.put(None)

    def run(self) -> int:
        """Run items until nothing else comes, and return pytest's exit code."""
        self.send("workerready", workerinfo=getinfodict())
        self._plan = read_plan(self._path)
        prepare_process(self._plan, self._number)
        # All are in the plan, in its order: the controller knows their names.
        self.send("collectionfinish", topdir=str(self._plan.folder), ids=[])
        index = self._indices.get()
        while index is not None and not self.should_fail:
            # As in xdist, an item begins when it is known what follows, or that nothing does.
            following = self._indices.get()
            self._run_item(index, self._job(following))
            index = following
        return _FAILED if self._failures else _OK

    def close(self) -> None:
        """Give the device back."""
        if self._worker is not None:
            self._worker.close()

    def _job(self, index: int | None) -> PlannedJob | None:
        return self._plan.jobs[index] if index is not None and index < len(self._plan.jobs) else None

    def _run_item(self, index: int, following: PlannedJob | None) -> None:
        planned, started = self._job(index), time.perf_counter()
        report = JobReport(index, planned.job.id if planned else "", 0.0)
        if planned is not None:
            self.send("logstart", nodeid=planned.job.id, location=("", None, planned.job.id))
        try:
            if done := self._done(planned, following):
                report.properties = properties_of(done)
                _add_outcome(report, done)
        except Exception:  # noqa: BLE001 - this item has no result; others may have one
            report.outcome, report.text = "failed", traceback.format_exc()
        report.seconds = time.perf_counter() - started
        if report.outcome == "failed":
            self._failures += 1
            if 0 < self._most_failures <= self._failures:
                self.should_fail = f"stopping after {self._failures} failures"
        if not report.properties and not report.text:
            self.send("runtest_protocol_complete", item_index=index, duration=report.seconds)
        else:
            self.send("testreport", data={SHORT_KEY: msgspec.json.encode(report).decode()})

    def _done(self, planned: PlannedJob | None, following: PlannedJob | None) -> Done | Returned | None:
        """Run a job; the idle item, None, only looks whether the device is still the worker's."""
        if self._worker is None:
            try:
                self._worker = Worker(self._plan, self._number, self._controller)
            except StoreError as error:
                return Returned(self._plan.devices[self._number].serial, halt=f"the store: {error}")
        return self._worker.look() if planned is None else self._worker.run(planned, following)


def _add_outcome(report: JobReport, done: Done | Returned) -> None:
    """Note pytest's word for how a job ended."""
    if isinstance(done, Returned) or done.attempt.verdict is Verdict.PASSED:
        return
    report.text = text_of(done.attempt)
    if done.attempt.verdict is Verdict.SKIPPED:
        report.outcome = "skipped"
    elif done.avoid:
        # Neither passed nor failed yet: -x waits for the last word.
        report.outcome = "rerun"
    elif done.attempt.known_issue:
        report.outcome, report.known_issue = "skipped", done.attempt.known_issue
    else:
        report.outcome = "failed"

"""Steps of a nightly cell after its run, within a time.

`debug_failures`: the first wrong layer of each new numeric failure.
`confirm_suspected`: suspected regressions by interleaved pairs.
"""

from __future__ import annotations

import logging
import math
import shlex
import time
import traceback
from pathlib import Path

import msgspec

from farm.base.config.settings import Config
from farm.base.errors import FarmError, NoDeviceError
from farm.base.interrupts import INTERRUPTED
from farm.base.log_setup import only_warnings
from farm.base.text import one_line
from farm.dispatch.nightly.nightly_run import write_page
from farm.dispatch.nightly.record import CellResult, DebuggedJob, Findings, JobNote
from farm.dispatch.request.records import config_of_run
from farm.dispatch.request.request import RunRequest
from farm.replay.debug import DebugOutcome, DebugRequest, debug, describe, with_layers
from farm.report.model.status import Standing, standing
from farm.results.attempt import Cause
from farm.store.records import RunView
from farm.store.store import open_store
from farm.suites.suite import Job

logger = logging.getLogger(__name__)

FOLDER = "debug"
"""Folder of pages, in the folder of a nightly run."""
_REASON_CHARS = 300
# A shorter time is over before the compiler process has started.
_LEAST_SECONDS = 1.0


def debug_failures(
    config: Config, request: RunRequest, most: int, folder: Path, cell: CellResult, end_s: float | None
) -> tuple[DebuggedJob, ...]:
    """Return a line for each job of a cell's run that newly fails by numerics; the first `most` are debugged.

    `request` is the cell's, `end_s` the end of the time on the clock of `time.monotonic`; pages go into
    `folder`. Raises KeyboardInterrupt, StoreError, InfraError for a page that cannot be written.
    """
    with open_store(config.store_url, readonly=True) as store:
        view = store.runs.view(cell.run_id)
        new = {one.job_id for one in store.status.of_run(cell.run_id).jobs if standing(one) is Standing.NEW_FAILURE}
    failed = [one.id for one in view.jobs if one.decisive is not None and one.decisive.cause is Cause.NUMERICS]
    known = {one.job_id for one in cell.debugged}
    jobs = [job for job in failed if job in new and job not in known]
    found = list(cell.debugged)
    for number, job_id in enumerate(jobs):
        left_s = math.inf if end_s is None else end_s - time.monotonic()
        if number >= most or left_s < _LEAST_SECONDS:
            why = "the budget left no time" if number < most else f"at most {most} of a run ([nightly] debug)"
            left = len(jobs) - number
            name, command = (job_id, job_id) if left == 1 else (f"{left} jobs", "JOB")
            found.append(DebuggedJob(name, f"not debugged: {why}; {_command(command, virtual=False)}"))
            break
        logger.info("%s: debugging %s", cell.name, job_id)
        found.append(_debugged(config, request, view, job_id, folder, f"{cell.name}-{len(found) + 1}", left_s))
        logger.info("%s: %s", job_id, found[-1].reason)
    return tuple(found)


def _command(job_id: str, *, virtual: bool) -> str:
    return shlex.join(["farm", "debug", job_id, *(["--virtual"] if virtual else [])])


def _debugged(
    config: Config, request: RunRequest, view: RunView, job_id: str, folder: Path, name: str, left_s: float
) -> DebuggedJob:
    """Debug one job, and return the first wrong layer, or in one line the reason why there is none."""
    from farm.dispatch.request.choose import jobs_of

    virtual = request.virtual > 0
    end_s = time.monotonic() + left_s
    found, prefix = DebuggedJob(job_id, ""), ""
    try:
        with only_warnings():
            of_run = config_of_run(config, view, "")
        job = with_layers(next(job for job in jobs_of(of_run, request) if job.id == job_id))
        wait_s = math.inf if request.wait_s is None else request.wait_s
        try:
            outcome = _debug(of_run, job, virtual=virtual, until_s=end_s, wait_s=wait_s)
        except NoDeviceError as error:
            if virtual:
                raise
            # On a shared farm the devices may all be on other machines.
            prefix = f"on the simulator alone ({error}): "
            outcome = _debug(of_run, job, virtual=True, until_s=end_s, wait_s=0.0)
    except FarmError as error:
        problem = str(error)
    except OSError as error:
        problem = f"{error.filename or 'the system'}: {error.strerror or error}"
    except Exception as error:  # noqa: BLE001 - a bug that one job meets does not end the nightly run
        traceback.print_exc()
        problem = f"this is a bug in farm: {type(error).__name__}: {error}"
    else:
        if outcome.exit_code == INTERRUPTED:
            raise KeyboardInterrupt
        found, problem = _outcome(config, outcome, job, folder, name)
    if problem:
        over = "the budget was over: " if time.monotonic() >= end_s else ""
        problem = f"not debugged: {over}{problem}; {_command(job_id, virtual=virtual)}"
    return msgspec.structs.replace(found, reason=one_line(prefix + (problem or found.reason), _REASON_CHARS))


def _debug(config: Config, job: Job, *, virtual: bool, until_s: float, wait_s: float) -> DebugOutcome:
    from farm.policy.situation import Priority

    request = DebugRequest(
        job=job,
        virtual=virtual,
        command=_command(job.id, virtual=virtual),
        priority=Priority.NIGHTLY,
        until_s=until_s,
        wait_until_s=min(until_s, time.monotonic() + wait_s),
    )
    # The nightly run shows its own line of the job.
    with only_warnings():
        return debug(config, request)


def _outcome(config: Config, outcome: DebugOutcome, job: Job, folder: Path, name: str) -> tuple[DebuggedJob, str]:
    """Write the page of a debug session; return its finding, and the problem of a session without one."""
    page = folder / FOLDER / f"{name}.html"
    write_page(config, outcome.run_id, page)
    found = DebuggedJob(job.id, "", run_id=outcome.run_id, report=f"{FOLDER}/{page.name}")
    first, attempt = outcome.diagnosis.first, outcome.attempt
    if first is None:
        sample = f" in sample 0 of {job.case.samples}" if job.case.samples > 1 else ""
        problem = attempt.reason if attempt is not None else "nothing was recorded"
        return msgspec.structs.replace(found, reason=f"no layer diverges{sample}"), problem
    layer = next(one for one in outcome.layers if one.name == first.layer)
    places = [text for text in (f"module {layer.module}" if layer.module else "", layer.source) if text]
    reason = f"{describe(first)}; in {', '.join(places)}" if places else describe(first)
    return msgspec.structs.replace(found, reason=reason, layer=first.layer), ""


def confirm_suspected(config: Config, run_id: str, budget_s: float | None) -> Findings:
    """Return the regressions of a run after measuring its suspected changes within `budget_s`; None: no limit."""
    from farm.numbers.regressions.confirm_run import confirm_run
    from farm.numbers.regressions.stored_pairs import PairsRequest
    from farm.report.model.status import change_line
    from farm.store.records import AlertState

    with open_store(config.store_url) as store:
        try:
            config = config_of_run(config, store.runs.view(run_id), "")
        except FarmError as error:
            # Results of another toolchain must not be recorded for this run, so it is judged without a measurement.
            logger.warning(
                "suspected changes of run %s are not measured, its toolchain cannot be used: %s", run_id, error
            )
            budget_s = 0.0
        found = confirm_run(config, store, run_id, PairsRequest(command="farm nightly"), budget_s=budget_s)
    for line in found.left_out:
        logger.info(line)
    states = [one.state for one in found.alerts]
    return Findings(
        tuple(JobNote(one.job_id, change_line(one)) for one in found.regressions),
        confirmed=states.count(AlertState.CONFIRMED),
        unknown=states.count(AlertState.UNKNOWN),
        not_measured=found.not_measured,
    )

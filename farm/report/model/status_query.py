"""Queries for `farm status` and `farm history`, and for the same pages of `farm serve`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from farm.store.records import STEPS, AlertRecord, HistoryPoint, RunStatus

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from farm.report.model.status import RunStanding, SickDevice, Status
    from farm.results.analysis.flakiness import Record
    from farm.store.store import Store


def read_status(store: Store, branch: str | None = None, *, run_ids: Sequence[str] = ()) -> Status:
    """Return the status of `run_ids`, else of the runs of `runs_to_show`. Raises UnknownNameError."""
    from farm.report.model.status import run_standing, status_of

    runs = list(map(store.status.of_run, run_ids)) if run_ids else runs_to_show(store, branch)
    branches = sorted({_branch_of(run) for run in runs})
    if branch is not None or not runs:
        branches = [store.status.branch_to_show(branch)]
    regressions = [one for name in branches for one in store.alerts.open(branch=name)]

    def stands(run: RunStatus) -> RunStanding:
        jobs, of_branch = [job.job_id for job in run.jobs], branches[0] if len(branches) == 1 else _branch_of(run)
        reliability = store.history.reliability(
            jobs, run.device_kind, run.run_id, failed_of_late=True, branch=of_branch
        )
        return run_standing(run, reliability, regressions=regressions, found=store.alerts.of_run(run.run_id))

    return status_of(
        [stands(run) for run in runs],
        _sick(store),
        [one for name in branches for one in store.status.unfinished_runs(name)],
        regressions=regressions,
        remarks=store.alerts.remarks_of_jobs({job.job_id for run in runs for job in run.jobs}),
        branch=branches[0] if len(branches) == 1 else "",
    )


def runs_to_show(store: Store, branch: str | None = None) -> list[RunStatus]:
    """Return the cells of the newest nightly run, cells that never began included; without a nightly run another run.

    The nightly run is of `branch`, with the meaning of `StatusReader.branch_to_show`, or of all branches for None. The
    other run is the newest of the branch; for None it may be a local run of the user. Raises UnknownNameError.
    """
    nightly_run = store.status.nightly_run(None if branch is None else store.status.branch_to_show(branch))
    run_ids = nightly_run or filter(
        None, [store.status.run_to_show(store.status.branch_to_show(branch), own=branch is None)]
    )
    return list(map(store.status.of_run, run_ids))


def _branch_of(run: RunStatus) -> str:
    return run.toolchain.branch if run.toolchain else ""


def records_of(store: Store, points: Sequence[HistoryPoint], branch: str = "") -> dict[tuple[str, str], Record]:
    """Return the reliability of the jobs of a branch's history on each kind of device, by job id and kind."""
    found: dict[tuple[str, str], Record] = {}
    for kind in sorted({point.device_kind for point in points}):
        jobs = {point.job_id for point in points if point.device_kind == kind}
        found |= {(job, kind): one for job, one in store.history.reliability(jobs, kind, branch=branch).items()}
    return found


def steps_of(
    store: Store, points: Iterable[HistoryPoint], metrics: Collection[str] = (), branch: str = ""
) -> list[AlertRecord]:
    """Return known level changes in a branch's histories of jobs; only of `metrics` if given."""
    found = store.alerts.of_jobs({point.job_id for point in points}, branch)
    return [one for one in found if one.state in STEPS and (not metrics or one.metric in metrics)]


def history_answer(
    points: Sequence[HistoryPoint],
    records: Mapping[tuple[str, str], Record],
    steps: Sequence[AlertRecord],
    branch: str = "",
) -> dict[str, object]:
    """Return histories as `--json` prints them, with the branch if it has a name."""
    listed = [{"job_id": job, "device_kind": kind, "record": one} for (job, kind), one in records.items()]
    answer: dict[str, object] = {"schema": 2, "points": points, "reliability": listed, "alerts": steps}
    return {**answer, "branch": branch} if branch else answer


def _sick(store: Store) -> list[SickDevice]:
    from farm.report.model.status import SickDevice

    found = []
    for device in store.devices.all():
        name = device.name or device.id
        if not device.in_service:
            found.append(SickDevice(name, "out of service", device.service_note))
        elif device.health != "healthy":
            found.append(SickDevice(name, device.health, device.health_reason))
    return found

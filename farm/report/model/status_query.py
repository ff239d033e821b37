"""Queries for `farm status` and `farm history`, and for the same pages of `farm serve`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from farm.store.records import STEPS, AlertRecord, HistoryPoint, RunStatus

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from farm.report.model.status import RunStanding, SickDevice, Status
    from farm.results.analysis.flakiness import Record
    from farm.store.store import Store


def read_status(store: Store, line: str | None = None, *, run_ids: Sequence[str] = ()) -> Status:
    """Return the status of `run_ids`, else of the runs of `runs_to_show`. Raises UnknownNameError."""
    from farm.report.model.status import run_standing, status_of

    runs = list(map(store.status.of_run, run_ids)) if run_ids else runs_to_show(store, line)
    lines = sorted({_line_of(run) for run in runs})
    if line is not None or not runs:
        lines = [store.status.line_to_show(line)]
    regressions = [one for name in lines for one in store.alerts.open(line=name)]

    def stands(run: RunStatus) -> RunStanding:
        jobs, of_line = [job.job_id for job in run.jobs], lines[0] if len(lines) == 1 else _line_of(run)
        reliability = store.history.reliability(jobs, run.device_kind, run.run_id, failed_of_late=True, line=of_line)
        return run_standing(run, reliability, regressions=regressions, found=store.alerts.of_run(run.run_id))

    return status_of(
        [stands(run) for run in runs],
        _sick(store),
        [one for name in lines for one in store.status.unfinished_runs(name)],
        regressions=regressions,
        remarks=store.alerts.remarks_of_jobs({job.job_id for run in runs for job in run.jobs}),
        line=lines[0] if len(lines) == 1 else "",
    )


def runs_to_show(store: Store, line: str | None = None) -> list[RunStatus]:
    """Return the cells of the newest nightly run, cells that never began included; without a nightly run another run.

    The nightly run is of `line`, with the meaning of `StatusReader.line_to_show`, or of all branches for None. The
    other run is the newest of the branch; for None it may be a local run of the user. Raises UnknownNameError.
    """
    night = store.status.night(None if line is None else store.status.line_to_show(line))
    run_ids = night or filter(None, [store.status.run_to_show(store.status.line_to_show(line), own=line is None)])
    return list(map(store.status.of_run, run_ids))


def _line_of(run: RunStatus) -> str:
    return run.toolchain.line if run.toolchain else ""


def records_of(store: Store, points: Sequence[HistoryPoint], line: str = "") -> dict[tuple[str, str], Record]:
    """Return the reliability of the jobs of a branch's history on each kind of device, by job id and kind."""
    found: dict[tuple[str, str], Record] = {}
    for kind in sorted({point.device_kind for point in points}):
        jobs = {point.job_id for point in points if point.device_kind == kind}
        found |= {(job, kind): one for job, one in store.history.reliability(jobs, kind, line=line).items()}
    return found


def steps_of(
    store: Store, points: Iterable[HistoryPoint], metrics: Collection[str] = (), line: str = ""
) -> list[AlertRecord]:
    """Return known level changes in a branch's histories of jobs; only of `metrics` if given."""
    found = store.alerts.of_jobs({point.job_id for point in points}, line)
    return [one for one in found if one.state in STEPS and (not metrics or one.metric in metrics)]


def history_answer(
    points: Sequence[HistoryPoint],
    records: Mapping[tuple[str, str], Record],
    steps: Sequence[AlertRecord],
    line: str = "",
) -> dict[str, object]:
    """Return histories as `--json` prints them, with the branch if it has a name."""
    listed = [{"job_id": job, "device_kind": kind, "record": one} for (job, kind), one in records.items()]
    answer: dict[str, object] = {"schema": 2, "points": points, "reliability": listed, "alerts": steps}
    return {**answer, "branch": line} if line else answer


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

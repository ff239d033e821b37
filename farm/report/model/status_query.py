"""What `farm status` and `farm history` show, and the same pages of `farm serve`, read from the store."""

from __future__ import annotations

from typing import TYPE_CHECKING

from farm.store.records import STEPS

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from farm.analysis.flakiness import Record
    from farm.report.model.status import SickDevice, Status
    from farm.store.records import AlertRecord, HistoryPoint
    from farm.store.store import Store


def read_status(store: Store, ref: str | None = None) -> Status:
    """Return the status of run `ref`, else in `StatusReader.run_to_show`. Raises UnknownNameError."""
    from farm.report.model.status import status_of

    run_id = store.runs.resolve(ref) if ref else store.status.run_to_show()
    run = store.status.of_run(run_id) if run_id else None
    jobs = [job.job_id for job in run.jobs] if run else []
    return status_of(
        run,
        _sick(store),
        store.status.unfinished_runs(),
        store.history.reliability(jobs, run.device_kind, run.run_id, failed_of_late=True) if run else None,
        regressions=store.alerts.open(),
        found=store.alerts.of_run(run.run_id) if run else (),
        remarks=store.alerts.remarks_of_jobs(jobs),
    )


def records_of(store: Store, points: Sequence[HistoryPoint]) -> dict[tuple[str, str], Record]:
    """Return how the jobs of a history did on each kind of device, by job id and kind."""
    found: dict[tuple[str, str], Record] = {}
    for kind in sorted({point.device_kind for point in points}):
        jobs = {point.job_id for point in points if point.device_kind == kind}
        found |= {(job, kind): one for job, one in store.history.reliability(jobs, kind).items()}
    return found


def steps_of(store: Store, points: Iterable[HistoryPoint], metrics: Collection[str] = ()) -> list[AlertRecord]:
    """Return what is known to have moved a level in the histories of jobs; of `metrics` alone where given."""
    jobs = {point.job_id for point in points}
    return [one for one in store.alerts.of_jobs(jobs) if one.state in STEPS and (not metrics or one.metric in metrics)]


def history_answer(
    points: Sequence[HistoryPoint], records: Mapping[tuple[str, str], Record], steps: Sequence[AlertRecord]
) -> dict[str, object]:
    """Return histories as `--json` has them."""
    listed = [{"job_id": job, "device_kind": kind, "record": one} for (job, kind), one in records.items()]
    return {"points": points, "reliability": listed, "alerts": steps}


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

"""Jobs of runs in short, and the runs of a job: `store.jobs`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from farm.base.errors import UnknownNameError
from farm.store import values
from farm.store.statements import chunks, statement

if TYPE_CHECKING:
    from collections.abc import Collection

    from sqlalchemy import Connection

    from farm.store.database import Database


class JobRun(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a job in a run."""

    run_id: str
    nightly_run: str
    """Id of the nightly run; empty for other runs."""
    name: str
    """Name of the run."""
    started_ms: int
    commit: str
    branch: str
    private: bool
    """True for a local run, which was only compared with the branch."""
    outcome: str
    """`passed`, `failed`, `known`, `infra`, `skipped` or `not_run`."""
    reason: str
    device: str
    """Serial; empty without a device."""
    kind: str
    latency_ns: float | None
    """Median latency."""


class RunJob(msgspec.Struct, frozen=True, kw_only=True):
    """Job of a run without its attempts."""

    job_id: str
    outcome: str
    """As in `JobRun`."""
    stage: str
    reason: str
    device: str
    kind: str
    seconds: float
    """Wall time of the deciding attempt on its device."""
    latency_ns: float | None


class JobReader:
    """Every method is one transaction and raises StoreError if the database refuses."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def has(self, job_id: str) -> bool:
        """Return True for the id of a job in the store."""
        with self._database.reading() as connection:
            of = {"name": values.clean(job_id, values.JOB_LIMIT)}
            return connection.scalar(statement("jobs.row"), of) is not None

    def runs(self, job_id: str, most: int) -> list[JobRun]:
        """Return the newest `most` runs of a job, newest first. Raises UnknownNameError."""
        with self._database.reading() as connection:
            of = {"job": _row(connection, job_id), "most": most}
            rows = connection.execute(statement("jobs.runs"), of).all()
            latencies = latencies_of(connection, [row.decisive_attempt_id for row in rows])
        return [
            JobRun(
                run_id=row.run_id,
                nightly_run=row.run_nightly,
                name=row.run_name,
                started_ms=row.started_ms,
                commit=row.run_commit,
                branch=row.run_branch,
                private=row.run_private,
                outcome=_outcome(row),
                reason=_reason(row),
                device=row.device,
                kind=row.kind,
                latency_ns=latencies.get(row.decisive_attempt_id),
            )
            for row in rows
        ]

    def run_of_nightly(self, job_id: str, nightly_run: str) -> str:
        """Return the newest run of a nightly run that has a job. Raises UnknownNameError."""
        with self._database.reading() as connection:
            of = {"job": _row(connection, job_id), "nightly_run": values.clean(nightly_run)}
            found: str | None = connection.scalar(statement("jobs.run_of_nightly"), of)
        if found is None:
            raise UnknownNameError("nightly run", nightly_run, (), f"(none with this id has the job {job_id})")
        return found

    def of_run(self, run_id: str) -> list[RunJob]:
        """Return the jobs of a run, in their order."""
        with self._database.reading() as connection:
            rows = connection.execute(statement("jobs.of_run"), {"run": run_id}).all()
            latencies = latencies_of(connection, [row.decisive_attempt_id for row in rows])
        return [
            RunJob(
                job_id=row.job_id,
                outcome=_outcome(row),
                stage=row.stage,
                reason=_reason(row),
                device=row.device,
                kind=row.kind,
                seconds=row.seconds,
                latency_ns=latencies.get(row.decisive_attempt_id),
            )
            for row in rows
        ]


def _row(connection: Connection, job_id: str) -> int:
    found: int | None = connection.scalar(statement("jobs.row"), {"name": values.clean(job_id, values.JOB_LIMIT)})
    if found is None:
        raise UnknownNameError("job", job_id, (), "(its id is SUITE/CASE[SOC-BACKEND-PRECISION])")
    return found


def _outcome(row: Any) -> str:
    if not row.verdict:
        return "skipped" if row.skipped else "not_run"
    return "known" if row.verdict == "failed" and row.known_issue else str(row.verdict)


def _reason(row: Any) -> str:
    return str(row.reason or (row.skipped or {}).get("reason", ""))


def latencies_of(connection: Connection, attempts: Collection[int | None]) -> dict[int, float]:
    """Return the median latencies of these attempts, by attempt id."""
    found: dict[int, float] = {}
    for part in chunks([one for one in attempts if one is not None]):
        found.update({row[0]: row[1] for row in connection.execute(statement("browse.latencies"), {"attempts": part})})
    return found

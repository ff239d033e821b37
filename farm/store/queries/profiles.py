"""Profiles of jobs: `store.profiles`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from farm.base.errors import UsageError
from farm.store.details import artifact_of, operators_of
from farm.store.queries.history import matching_jobs
from farm.store.records import ArtifactRecord, ProfileRecord
from farm.store.statements import chunks, statement

if TYPE_CHECKING:
    from farm.results.attempt import OperatorProfile
    from farm.store.database import Database

# Attempts of a statement: each of them may have thousands of rows.
_PART = 500
_COLUMNS = ("job_id", "backend", "run_id", "time_ms", "facts", "case_version", "device", "device_kind", "verdict")


class ProfileReader:
    """Profiles of jobs."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def newest(self, job_pattern: str, run_id: str | None = None) -> list[ProfileRecord]:
        """Return the newest profile of each job that a pattern means (`HistoryReader`), of `run_id` where given.

        Raises UnknownNameError for a job that the store has never seen, UsageError where none has a profile.
        """
        operators: dict[int, tuple[OperatorProfile, ...]] = {}
        files: dict[int, list[ArtifactRecord]] = {}
        with self._database.reading() as connection:
            jobs = matching_jobs(connection, job_pattern, run_id=run_id)
            of = {"jobs": list(jobs), "run": run_id or ""}
            found = connection.execute(statement("profiles.newest"), of).all() if jobs else []
            for attempts in chunks([row.attempt_id for row in found], _PART):
                of_attempts = {"attempts": attempts}
                operators |= operators_of(connection.execute(statement("profiles.operators"), of_attempts))
                for row in connection.execute(statement("profiles.artifacts"), of_attempts):
                    files.setdefault(row.attempt_id, []).append(artifact_of(row))
        if not found:
            where = f"run {run_id}" if run_id else "the store"
            what = "any job" if job_pattern == "*" else job_pattern
            raise UsageError(
                f"{where} has no profile of {what}: a run with --profile detailed keeps one "
                f"({len(jobs)} job{'' if len(jobs) == 1 else 's'} looked at)"
            )
        return [
            ProfileRecord(
                **{name: getattr(row, name) for name in _COLUMNS},
                operators=operators.get(row.attempt_id, ()),
                artifacts=tuple(files.get(row.attempt_id, ())),
            )
            for row in found
        ]

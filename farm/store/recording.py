"""Recording of a run in the store: each method is one transaction."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from sqlalchemy import Connection, bindparam, update

from farm.base.exit_codes import ENDED_EARLY
from farm.store import rows, schema, values
from farm.store.details import bounded
from farm.store.records import BuildRecord
from farm.store.statements import statement
from farm.store.toolchains import toolchain_columns

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from farm.devices.device import Device
    from farm.results.attempt import Attempt
    from farm.store.clock import Clock
    from farm.store.database import Database
    from farm.store.records import ArtifactRecord, RunRecord
    from farm.store.view import SkipReason
    from farm.suites.suite import Job


_UPDATE_BUILD = update(schema.run_job).where(schema.run_job.c.id == bindparam("of"))


class Recording:
    """Part of the store that runs write to."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database, self._clock = database, clock

    def begin_run(self, record: RunRecord, prepare: Callable[[str], object] = lambda _: None) -> str:
        """Record a new run, and return its id: UTC time and a random part, `20261121-014501-4f7a12`.

        `prepare` is called with the id before the run is visible to others, and again with another id after a conflict.
        """
        started_ms = record.started_ms if record.started_ms is not None else rows.now_ms()
        facts = {values.clean(name): values.clean(value) for name, value in record.fingerprint.items()}
        row = {
            "command": values.clean(record.command, values.LOG_LIMIT),
            "user_name": values.clean(record.user),
            "host": values.clean(record.host),
            "fingerprint_hash": values.fingerprint_hash(facts),
            "started_ms": started_ms,
            "priority": values.clean(record.priority, values.KIND_LIMIT),
            **rows.run_kinds(record.command, facts),
            **toolchain_columns(record.toolchain),
            "run_name": values.clean(record.name, values.NAME_LIMIT),
            "run_nightly": values.clean(record.nightly_run, values.SOC_LIMIT),
        }

        def insert(connection: Connection) -> str:
            rows.insert_missing(connection, schema.fingerprint, [{"hash": row["fingerprint_hash"], "facts": facts}])
            while True:
                run_id = rows.new_run_id(started_ms)
                if rows.insert_new(connection, schema.run, {"id": run_id, **row}) is not None:
                    prepare(run_id)
                    return run_id

        return self._database.write(insert)

    def plan_jobs(self, run_id: str, jobs: Sequence[Job]) -> None:
        """Record the planned jobs of a run before their execution; a job planned before stays as it is.

        The run counts as begun from now on.
        """
        versions = case_versions(jobs)

        self._database.write(lambda connection: plan_rows(connection, run_id, jobs, versions))

    def record_device(self, run_id: str, device: Device, runtime: Mapping[str, str] | None = None) -> None:
        """Record a device of a run, with the versions of its runtime: `Runtime.versions`."""

        def insert(connection: Connection) -> None:
            rows.require_run(connection, run_id)
            rows.insert_device(connection, run_id, device, runtime)

        self._database.write(insert)

    def record_build(
        self,
        run_id: str,
        job_id: str,
        *,
        seconds: float,
        cached: bool,
        bundle_key: str,
        fallback_ops: Mapping[str, int] | None = None,
        operators: Mapping[str, int] | None = None,
        program: str = "",
    ) -> None:
        """Record the build of a planned job's bundle, with the fields of `BuildRecord`."""
        build = BuildRecord(job_id, seconds, cached, bundle_key, fallback_ops, operators, program)
        self.record_builds(run_id, [build])

    def record_builds(self, run_id: str, builds: Sequence[BuildRecord]) -> None:
        """Record the builds of bundles of planned jobs; a second record of a job replaces the first."""

        def change(connection: Connection) -> None:
            planned = rows.planned_jobs(connection, run_id, [build.job_id for build in builds])
            # Builds with the same columns share a statement.
            alike: dict[frozenset[str], list[dict[str, Any]]] = {}
            for build in builds:
                row = build_columns(
                    build.seconds, build.bundle_key, build.fallback_ops, build.operators, build.program
                ) | {"cached": build.cached}
                alike.setdefault(frozenset(row), []).append({"of": planned[build.job_id], **row})
            for changes in alike.values():
                connection.execute(_UPDATE_BUILD, changes)

        self._database.write(change)

    def record_attempt(
        self,
        run_id: str,
        attempt: Attempt,
        device: Device | None = None,
        *,
        artifacts: Sequence[ArtifactRecord] = (),
        fence: tuple[str, int] | None = None,
    ) -> None:
        """Record an attempt of a planned job with all its numbers, durably: a kill after the return loses nothing.

        `device` may be omitted after `record_device`. An attempt with a start time is recorded once, also if offered
        again. With `fence`, the id of the leased device and the lease's fence, the lease has to be alive: raises
        LeaseLostError without a record if it is not.
        """
        attempt = bounded(attempt)

        def insert(connection: Connection) -> None:
            if fence is not None:
                from farm.store.leases.rows import require_live

                require_live(connection, *fence, self._clock(connection))
            rows.insert_attempt(connection, run_id, attempt, device, artifacts)

        self._database.write(insert)

    def mark_skipped(self, run_id: str, skipped: Mapping[str, SkipReason | None]) -> None:
        """Record the reasons of skipped planned jobs of a run, by job id; None takes a reason back."""

        self._database.write(lambda connection: mark_skipped_rows(connection, run_id, skipped))

    def finish_run(self, run_id: str, exit_code: int, *, once: bool = False) -> None:
        """Record the end of a run with its exit code; a run that ended early without an attempt never began.

        With `once`, an earlier recorded end stays.
        """

        def change(connection: Connection) -> None:
            rows.require_run(connection, run_id)
            # A run that ended early without an attempt never began.
            began = exit_code not in ENDED_EARLY or connection.scalar(statement("recording.tried"), {"run": run_id})
            row = {"finished_ms": rows.now_ms(), "exit_code": exit_code, "run_began": bool(began)}
            run = schema.run.c
            of_run = (run.id == run_id, run.finished_ms.is_(None)) if once else (run.id == run_id,)
            connection.execute(update(schema.run).where(*of_run).values(row))

        self._database.write(change)


def plan_rows(connection: Connection, run_id: str, jobs: Sequence[Job], versions: Mapping[str, str]) -> None:
    """Write the rows of `Recording.plan_jobs`; `versions` has the version of each job's case, by job id."""
    rows.require_run(connection, run_id)
    job_ids, case_ids = rows.insert_jobs(connection, jobs, versions)
    planned = [
        {
            "run_id": run_id,
            "job_id": job_ids[job.id],
            "case_id": case_ids[job.id],
            "position": position,
            "judged_by": values.judged_by(job),
        }
        for position, job in enumerate(jobs)
    ]
    rows.insert_missing(connection, schema.run_job, planned)
    run = schema.run.c
    connection.execute(update(schema.run).where(run.id == run_id, ~run.run_began).values(run_began=True))


def mark_skipped_rows(connection: Connection, run_id: str, skipped: Mapping[str, SkipReason | None]) -> None:
    """Write the columns of `Recording.mark_skipped`."""
    for job_id, why in skipped.items():
        run_job_id, *_ = rows.find_planned(connection, run_id, job_id)
        kept = None if why is None else msgspec.structs.replace(why, reason=values.clean(why.reason))
        row = update(schema.run_job).where(schema.run_job.c.id == run_job_id)
        connection.execute(row.values(skipped=msgspec.to_builtins(kept)))


def build_columns(
    seconds: float,
    bundle_key: str,
    fallback_ops: Mapping[str, int] | None,
    operators: Mapping[str, int] | None,
    program: str,
) -> dict[str, Any]:
    """Return the columns of a planned job about the build of its bundle; unknown ones are left out."""
    row: dict[str, Any] = {
        "build_seconds": seconds,
        "bundle_key": values.clean(bundle_key, values.KEY_LIMIT),
        "program_hash": values.clean(program, values.SOC_LIMIT) or None,
    }
    for column, counts in (("fallback_ops", fallback_ops), ("operators", operators)):
        if counts is not None:
            row[column] = {values.clean(name): count for name, count in counts.items()}
    return row


def case_versions(jobs: Sequence[Job]) -> dict[str, str]:
    """Return the version of the case of each job, by job id; code and files are read once, not per job."""
    from farm.builds.bundles.source import source_digest, source_place

    sources: dict[tuple[str, ...], str] = {}
    versions = {}
    for job in jobs:
        where = source_place(job.case)
        if where not in sources:
            sources[where] = source_digest(job.case)
        versions[job.id] = values.case_version(job.case, sources[where])
    return versions

"""The store: recording, and readers grouped by subject.

A group is imported at its first use: a command needs few of them and starts sooner.
"""

from __future__ import annotations

from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, bindparam, update

from farm.base.errors import ENDED_EARLY
from farm.store import rows, schema
from farm.store.database import Database
from farm.store.rows import bounded
from farm.store.statements import Group, statement

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from pathlib import Path

    from farm.devices.device import Device
    from farm.results.attempt import Attempt
    from farm.store.accounts import Accounts
    from farm.store.cluster.cluster import Cluster
    from farm.store.cluster.roles import Roles
    from farm.store.leases.leasing import Leases
    from farm.store.leases.registry import Quarantines, Registry
    from farm.store.leases.situations import Quotas
    from farm.store.messages.messages import Messages
    from farm.store.objects.named import NamedFiles
    from farm.store.pruning import Pruning
    from farm.store.queries.alerts import Alerts
    from farm.store.queries.browse import Browse
    from farm.store.queries.grid import GridReader
    from farm.store.queries.history import HistoryReader
    from farm.store.queries.runs import RunReader
    from farm.store.queries.status import SelectionReader, StatusReader
    from farm.store.records import ArtifactRecord, BuildRecord, RunRecord, SkipReason
    from farm.store.transfer.runs import Transfer
    from farm.suites.suite import Job

_UPDATE_BUILD = update(schema.run_job).where(schema.run_job.c.id == bindparam("of"))


def _group(module: str, name: str) -> Any:
    """Return the attribute for a group of methods."""

    def made(self: Store) -> Any:
        return getattr(import_module(f"farm.store.{module}"), name)(self._database, self._clock)

    return cached_property(made)


def open_store(
    url_or_path: str | Path, *, readonly: bool = False, existing: bool = False, connections: int | None = None
) -> Store:
    """Return the store at a path, `sqlite:///` or `postgresql://` URL; made or migrated if needed.

    With `existing`, a missing file is an error. `connections` limits the open connections to PostgreSQL, beside one
    for heartbeats.
    Raises StoreError for a place without write access, a missing store to read, a missing database, a newer schema or
    a full disk; UsageError for an invalid address; MissingToolError without the driver.
    """
    return Store(Database(url_or_path, readonly=readonly, existing=existing, connections=connections))


class Store(Group):
    """Store of a process; usable from several threads, not across a fork.

    Every method, also of its groups, is one transaction and raises StoreError if the database refuses.
    """

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close every connection."""
        self._database.close()

    @property
    def user(self) -> str:
        """User of this process by the name that others see: the signed-in role on PostgreSQL, else $LOGNAME.

        Raises StoreError.
        """
        return self._database.user

    @property
    def is_shared(self) -> bool:
        """True for PostgreSQL, which has submitted runs and agents; False for a file."""
        return not self._database.is_sqlite

    def of_user(self, name: str) -> Store:
        """Return the same store for the reads of another user: `latest` and local runs. It shares the connections."""
        return Store(self._database.of_user(name))

    def connection_arguments(self) -> dict[str, Any]:
        """Return the arguments of psycopg's `connect` for the same PostgreSQL, with the password of the address."""
        return self._database.connection_arguments()

    def without_secrets(self, text: str) -> str:
        """Return an error text of that connection without the passwords of the address."""
        return self._database.without_secrets(text)

    def begin_run(self, record: RunRecord, prepare: Callable[[str], object] = lambda _: None) -> str:
        """Record a new run, and return its id: UTC time and a random part, `20261121-014501-4f7a12`.

        `prepare` is called with the id before the run is visible to others, and again with another id after a conflict.
        """
        started_ms = record.started_ms if record.started_ms is not None else rows.now_ms()

        def insert(connection: Connection) -> str:
            row = {**rows.run_columns(connection, record), "started_ms": started_ms}
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
        versions = rows.case_versions(jobs)

        self._database.write(lambda connection: rows.plan_rows(connection, run_id, jobs, versions))

    def record_device(self, run_id: str, device: Device, runtime: Mapping[str, str] | None = None) -> None:
        """Record a device of a run, with the versions of its runtime: `Runtime.versions`."""

        def insert(connection: Connection) -> None:
            rows.require_run(connection, run_id)
            rows.insert_device(connection, run_id, device, runtime)

        self._database.write(insert)

    def record_builds(self, run_id: str, builds: Sequence[BuildRecord]) -> None:
        """Record the builds of bundles of planned jobs; a second record of a job replaces the first."""

        def change(connection: Connection) -> None:
            planned = rows.planned_jobs(connection, run_id, [build.job_id for build in builds])
            # Builds with the same columns share a statement.
            alike: dict[frozenset[str], list[dict[str, Any]]] = {}
            for build in builds:
                row = rows.build_columns(build)
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
        self.record_attempts(run_id, [(attempt, artifacts)], device, fences=() if fence is None else (fence,))

    def record_attempts(
        self,
        run_id: str,
        attempts: Sequence[tuple[Attempt, Sequence[ArtifactRecord]]],
        device: Device | None = None,
        *,
        fences: Collection[tuple[str, int]] = (),
    ) -> None:
        """Record attempts with their artifacts, as `record_attempt` records one: all of them, or none.

        `device` is the device of every attempt. Every lease of `fences` has to be alive.
        """
        attempts = [(bounded(attempt), artifacts) for attempt, artifacts in attempts]

        def insert(connection: Connection) -> None:
            if fences:
                from farm.store.leases.rows import require_live

                now_ms = self._clock(connection)
                for fence in sorted(fences):
                    require_live(connection, *fence, now_ms)
            known: dict[str, int] = {}
            if device is not None:
                rows.require_run(connection, run_id)
                row_id = rows.insert_device(connection, run_id, device)
                known = {attempt.device: row_id for attempt, _ in attempts}
            rows.insert_attempts(connection, run_id, attempts, known)

        self._database.write(insert)

    def mark_skipped(self, run_id: str, skipped: Mapping[str, SkipReason | None]) -> None:
        """Record the reasons of skipped planned jobs of a run, by job id; None takes a reason back."""

        self._database.write(lambda connection: rows.mark_skipped_rows(connection, run_id, skipped))

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

    runs: RunReader = _group("queries.runs", "RunReader")
    """Runs, their jobs and attempts."""
    status: StatusReader = _group("queries.status", "StatusReader")
    """Newest results."""
    grid: GridReader = _group("queries.grid", "GridReader")
    """Results of jobs in nightly runs."""
    history: HistoryReader = _group("queries.history", "HistoryReader")
    """Numbers, verdicts and profiles of jobs, run by run."""
    selection: SelectionReader = _group("queries.status", "SelectionReader")
    """Earlier results of the jobs of a new run."""
    browse: Browse = _group("queries.browse", "Browse")
    """Lists for the web page, `farm runs list` and a monitoring system."""
    accounts: Accounts = _group("accounts", "Accounts")
    """Accounts of `farm serve`, and their actions."""
    alerts: Alerts = _group("queries.alerts", "Alerts")
    """Alerts with their states and remarks."""
    devices: Registry = _group("leases.registry", "Registry")
    """Facts about devices that outlive a run."""
    quarantines: Quarantines = _group("leases.registry", "Quarantines")
    """Quarantines to notify users about."""
    leases: Leases = _group("leases.leasing", "Leases")
    """Leases of devices, and processes that wait for one."""
    quotas: Quotas = _group("leases.situations", "Quotas")
    """Quotas of users and labels."""
    messages: Messages = _group("messages.messages", "Messages")
    """Notifications that wake the agents of a shared farm; only on PostgreSQL."""
    files: NamedFiles = _group("objects.named", "NamedFiles")
    """Files of a shared farm that a row names."""
    cluster: Cluster = _group("cluster.cluster", "Cluster")
    """Shared farm: submitted runs, agents and their work. Raises UsageError for a store other than PostgreSQL."""
    roles: Roles = _group("cluster.roles", "Roles")
    """Roles with their rights, on PostgreSQL."""
    pruning: Pruning = _group("pruning", "Pruning")
    """Pruning of old runs."""
    transfer: Transfer = _group("transfer.runs", "Transfer")
    """Export and import of runs as lines."""

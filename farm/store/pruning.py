"""Pruning of old runs: the choice of runs, their size, and the removal of their rows, one run per transaction."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import msgspec
from sqlalchemy import Column, ColumnElement, Connection, Select, Table, delete, func, select, text

from farm.base.config.runs import KeepReason, Rules, RunFacts, decide
from farm.store import schema
from farm.store.queries.alerts import not_remarked, open_alerts
from farm.store.records import STEPS
from farm.store.statements import KEYS, Group, chunks, in_parts, statement

# A run without a new record for so long is not going on.
_QUIET_MS = 86_400_000
# Share of free pages below which shrinking the file is not worth its time.
_WORTH_SHRINKING = 0.1
# Writers wait a minute for others: a slow disk rewrites about so many bytes in that time.
_QUICKLY_WRITTEN = 2 * 10**9
# Removing a case scans all planned jobs: a transaction takes few cases.
_ORPHANS_AT_ONCE = 100

_OF_ATTEMPT = tuple(
    table
    for table in schema.metadata.sorted_tables
    if any(key.column.table is schema.attempt for key in table.foreign_keys)
)
_OF_RUN = (schema.run_job, schema.run_device)
# Tables whose rows several runs share; referring tables come before the tables that they refer to.
_NAMED = (schema.series, schema.job, schema.suite_case, schema.device, schema.fingerprint)


class Holding(msgspec.Struct, frozen=True):
    """Size of some runs in the store."""

    rows: int
    database_bytes: int
    """Estimated bytes in the database: its size times the runs' share of its rows."""
    artifacts: dict[str, int]
    """Artifacts of no other run: size in bytes by SHA-256."""


class Pruning(Group):
    """Store access of `farm runs prune`; every method is one transaction, except `sweep` and `shrink`."""

    def decide(self, rules: Rules) -> dict[str, KeepReason | None]:
        """Return the reason to keep each run, None for a removable run, newest first."""
        run = schema.run.c
        facts = (run.id, run.started_ms, run.priority, run.run_branch, run.run_private)
        query = select(*facts).order_by(run.started_ms.desc(), run.id.desc())
        with self._database.reading() as connection:
            now_ms = self._clock(connection)
            runs = [RunFacts(*row) for row in connection.execute(query)]
            newest = connection.scalars(statement("pruning.with_newest_results"), {"count": rules.keep_results})
            protected = dict.fromkeys(newest, KeepReason.RESULTS)
            old = [run_id for run_id, why in decide(runs, rules, now_ms, protected).items() if why is None]
            for part in chunks(old):
                protected |= dict.fromkeys(_going_on(connection, part, now_ms), KeepReason.GOING_ON)
            protected |= dict.fromkeys(protected_runs(connection), KeepReason.ALERT)
            return decide(runs, rules, now_ms, protected)

    def holding(self, run_ids: Collection[str]) -> Holding:
        """Return the rows and artifacts that are removed together with runs."""
        with self._database.reading() as connection:
            tables = (schema.attempt, *_OF_ATTEMPT, *_OF_RUN)
            counts = (_of_runs(table, part, func.count()) for table in tables for part in chunks(run_ids))
            rows = sum(connection.scalar(query) or 0 for query in counts)
            all_rows = sum(connection.scalar(select(func.count()).select_from(table)) or 0 for table in tables)
            nbytes = _database_bytes(connection) * rows // max(all_rows, 1)
            return Holding(rows + len(run_ids), nbytes, _own_artifacts(connection, set(run_ids)))

    def remove(self, run_id: str, *, named: bool = False) -> list[str] | None:
        """Remove a run with all its rows; return the SHA-256 of artifacts that no row names afterwards.

        Return None without a change if the run is gone, may still be going on, or an open alert names it. A run that
        the user `named` is removed also if it may be going on, together with its private alerts. Rows shared with
        other runs stay for `sweep`.
        """

        def once(connection: Connection) -> list[str] | None:
            run_job, attempt, artifact = schema.run_job.c, schema.attempt.c, schema.artifact.c
            # A process that records an attempt waits for this lock, and then finds that the run is gone.
            lock = select(schema.run.c.id).where(schema.run.c.id == run_id).with_for_update()
            if connection.scalar(lock) is None:
                return None
            connection.execute(select(run_job.id).where(run_job.run_id == run_id).with_for_update()).all()
            now_ms = self._clock(connection)
            is_young = not named and _going_on(connection, [run_id], now_ms)
            if is_young or run_id in protected_runs(connection):
                return None
            attempts = select(attempt.id).join(schema.run_job).where(run_job.run_id == run_id)
            files = set(connection.scalars(select(artifact.sha256).where(artifact.attempt_id.in_(attempts))))
            for table in _OF_ATTEMPT:
                connection.execute(delete(table).where(table.c.attempt_id.in_(attempts)))
            planned = select(run_job.id).where(run_job.run_id == run_id)
            connection.execute(delete(schema.attempt).where(attempt.run_job_id.in_(planned)))
            for table in _OF_RUN:
                connection.execute(delete(table).where(table.c.run_id == run_id))
            _remove_order(connection, run_id)
            # Steps stay, accepted ones as well: they divide the history into the levels of later judgements.
            alert = schema.alert.c
            looks = alert.state.not_in(STEPS) & not_remarked()
            gone = looks | alert.alert_private if named else looks
            connection.execute(delete(schema.alert).where(alert.run_id == run_id, gone))
            connection.execute(delete(schema.run).where(schema.run.c.id == run_id))
            return sorted(files - _named(connection, files))

        return self._database.write(once)

    def named(self, sha256s: Collection[str]) -> set[str]:
        """Return the artifacts that a row names."""
        with self._database.reading() as connection:
            return _named(connection, sha256s)

    def run_ids(self) -> set[str]:
        """Return the ids of all runs."""
        return {row.id for row in self._rows(select(schema.run.c.id))}

    def sweep(self) -> int:
        """Remove series, jobs, versions of cases, devices and fingerprints without a reference; return their number."""
        count = 0
        for table in _NAMED:
            with self._database.reading() as connection:
                # Each table is scanned once: some referring columns have no index.
                orphans = select(_key(table)).except_(*(select(parent) for parent in _parents(table)))
                found = sorted(connection.scalars(orphans))
            for start in range(0, len(found), _ORPHANS_AT_ONCE):
                count += self._sweep(table, found[start : start + _ORPHANS_AT_ONCE])
        return count

    def _sweep(self, table: Table, keys: list[Any]) -> int:
        key = _key(table)

        def once(connection: Connection) -> int:
            if connection.dialect.name == "postgresql":
                # A process writes to some of these tables before it looks for a row to refer to: the lock stops it.
                names = ", ".join(one.name for one in (schema.attempt, *reversed(_NAMED)))
                connection.execute(text(f"LOCK TABLE {names} IN SHARE ROW EXCLUSIVE MODE"))
            unnamed = (~select(one).where(one == key).correlate(table).exists() for one in _parents(table))
            gone = delete(table).where(key.in_(keys), *unnamed).returning(key)
            return len(connection.execute(gone).all())

        return self._database.write(once)

    def shrink(self) -> str:
        """Give the space of removed rows back to the disk; return the reason against it, empty if done or not needed.

        Raises StoreError if the disk has too little space for it.
        """
        with self._database.reading() as connection:
            if connection.dialect.name != "sqlite":
                return ""
            pages, free, size = _pragmas(connection, "page_count", "freelist_count", "page_size")
            run = schema.run.c
            since = self._clock(connection) - _QUIET_MS
            writing = select(run.id).where(run.finished_ms.is_(None), run.started_ms > since).limit(1)
            written = connection.scalar(writing)
        if free < _WORTH_SHRINKING * pages:
            return ""
        if written is not None:
            return f"run {written} may be going on, and would have to wait: prune again after it"
        if (pages - free) * size > _QUICKLY_WRITTEN:
            return "writing it anew takes more than a minute: do it while no command runs, with sqlite3 FILE VACUUM"
        self._database.vacuum()
        return ""


def protected_runs(connection: Connection) -> set[str]:
    """Return the runs that open alerts name: their bundles will be measured again."""
    named = ((one.run_id, one.last_good, one.first_bad) for one in open_alerts(connection))
    return {run_id for runs in named for run_id in runs}


def _going_on(connection: Connection, run_ids: Collection[str], now_ms: int) -> set[str]:
    """Return the runs that started today and have no end, or recorded an attempt today, or have an open order."""
    run, run_job, attempt = schema.run.c, schema.run_job.c, schema.attempt.c
    since = now_ms - _QUIET_MS
    unfinished = select(run.id).where(run.id.in_(run_ids), run.finished_ms.is_(None), run.started_ms > since)
    recorded = (
        select(run_job.run_id).join(schema.attempt).where(run_job.run_id.in_(run_ids), attempt.recorded_ms > since)
    )
    order = schema.run_order.c
    # An open order may wait for a device without a time limit.
    waiting = select(order.run_id).where(order.run_id.in_(run_ids), order.state == "open")
    return set(connection.scalars(unfinished.union(recorded, waiting)))


def _remove_order(connection: Connection, run_id: str) -> None:
    """Remove the order of a run on a shared farm, with its shards."""
    shards = select(schema.shard.c.id).where(schema.shard.c.run_id == run_id)
    connection.execute(delete(schema.build_wanted).where(schema.build_wanted.c.shard.in_(shards)))
    connection.execute(delete(schema.shard_jobs).where(schema.shard_jobs.c.shard.in_(shards)))
    connection.execute(delete(schema.shard).where(schema.shard.c.run_id == run_id))
    connection.execute(delete(schema.run_order).where(schema.run_order.c.run_id == run_id))


def _of_runs(table: Table, run_ids: Collection[str], *columns: ColumnElement[Any]) -> Select[Any]:
    source: Any = table
    if table in _OF_ATTEMPT:
        source = table.join(schema.attempt).join(schema.run_job)
    elif table is schema.attempt:
        source = table.join(schema.run_job)
    of_run = table.c.run_id if table is schema.run_device else schema.run_job.c.run_id
    return select(*columns).select_from(source).where(of_run.in_(run_ids))


def _own_artifacts(connection: Connection, run_ids: set[str]) -> dict[str, int]:
    artifact = schema.artifact.c
    found: dict[str, int] = {}
    for part in chunks(run_ids):
        query = _of_runs(schema.artifact, part, artifact.sha256, artifact.size)
        found.update(tuple(row) for row in connection.execute(query))
    of_runs = (
        select(artifact.sha256, schema.run_job.c.run_id)
        .select_from(schema.artifact.join(schema.attempt).join(schema.run_job))
        .where(artifact.sha256.in_(KEYS))
        .distinct()
    )
    for row in in_parts(connection, of_runs, found.copy()):
        if row.run_id not in run_ids:
            found.pop(row.sha256, None)
    return found


def _named(connection: Connection, sha256s: Collection[str]) -> set[str]:
    artifact = schema.artifact.c
    query = select(artifact.sha256).where(artifact.sha256.in_(KEYS)).distinct()
    return {row.sha256 for row in in_parts(connection, query, sha256s)}


def _key(table: Table) -> Column[Any]:
    [key] = table.primary_key.columns
    return key


def _parents(table: Table) -> list[Column[Any]]:
    """Return the columns that refer to `table`."""
    return [
        key.parent for other in schema.metadata.sorted_tables for key in other.foreign_keys if key.column.table is table
    ]


def _pragmas(connection: Connection, *names: str) -> list[int]:
    return [int(connection.exec_driver_sql(f"PRAGMA {name}").scalar_one()) for name in names]


def _database_bytes(connection: Connection) -> int:
    if connection.dialect.name == "sqlite":
        pages, size = _pragmas(connection, "page_count", "page_size")
        return pages * size
    sizes = " + ".join(f"pg_total_relation_size('{table.name}')" for table in schema.metadata.sorted_tables)
    return int(connection.scalar(text(f"SELECT {sizes}")) or 0)

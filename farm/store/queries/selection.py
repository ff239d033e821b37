"""What selecting jobs asks of the store, each a function of a connection; `Store` says what they return."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from sqlalchemy import bindparam, case, delete, func, select, update

from farm.results.attempt import Verdict
from farm.store import schema, values
from farm.store.queries.history import not_debugged
from farm.store.records import ExpectedJob, LastVerdict
from farm.store.rows import chunks, find_planned, insert_missing

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from typing import Any

    from sqlalchemy import ColumnElement, Connection, Row

    from farm.store.clock import Clock
    from farm.store.database import Database
    from farm.store.view import Stale

# Enough for a median that one slow attempt does not move, few enough that the newest toolchain is heard.
_RECENT_RUNS = 15
_ABOUT_THE_CODE = (Verdict.PASSED, Verdict.FAILED)
# Longer than a shard takes, so that one that begins when another has ended divides as that did; a day later it is over.
_AGREED_MS = 12 * 3_600_000
_FORGOTTEN_MS = 30 * 86_400_000


def expected(connection: Connection, job_ids: Sequence[str], kind: str) -> dict[str, ExpectedJob]:
    """Return what is known of jobs that have a verdict."""
    recent: dict[str, list[Row[Any]]] = {}
    for part in chunks(job_ids):
        for row in _recent(connection, part, kind):
            recent.setdefault(row.name, []).append(row)
    return {name: _expected(found) for name, found in recent.items()}


def failed_last(connection: Connection, job_ids: Sequence[str], kind: str, user: str) -> set[str]:
    """Return the jobs that did not pass in the newest run of `user` that tried them."""
    job, run_job, run, attempt = schema.job.c, schema.run_job.c, schema.run.c, schema.attempt.c
    # In the order of farm.report.model.summary.final_attempt: trouble takes no verdict back.
    order = (
        run.started_ms.desc(),
        run_job.id.desc(),
        case((attempt.verdict == Verdict.INFRA, 1), else_=0),
        attempt.id.desc(),
    )
    failed: set[str] = set()
    for part in chunks(job_ids):
        ranked = (
            select(
                job.name,
                attempt.verdict,
                attempt.known_issue,
                func.row_number().over(partition_by=run_job.job_id, order_by=order).label("age"),
            )
            .select_from(schema.attempt.join(schema.run_job).join(schema.job).join(schema.run))
            .where(job.name.in_(part), run.user_name == values.clean(user), not_debugged(), _of_kind(kind))
            .subquery()
        )
        query = select(ranked.c.name).where(
            ranked.c.age == 1,
            (ranked.c.verdict == Verdict.INFRA) | ((ranked.c.verdict == Verdict.FAILED) & (ranked.c.known_issue == "")),
        )
        failed.update(connection.scalars(query))
    return failed


def verdicts(connection: Connection, run_id: str) -> dict[str, LastVerdict]:
    """Return the verdicts of one run by job id, without jobs that have none about their code."""
    return {row.name: _verdict(row) for row in connection.execute(_decided(schema.run.c.id == run_id))}


def agree(connection: Connection, selection: str, seconds: Sequence[float], now_ms: int) -> list[float]:
    """Return what was said first of late for `selection`; that is `seconds` when nobody has said anything."""
    weights = schema.shard_weights.c
    connection.execute(delete(schema.shard_weights).where(weights.asked_ms < now_ms - _FORGOTTEN_MS))
    row = {"selection": selection, "asked_ms": now_ms, "seconds": list(seconds)}
    insert_missing(connection, schema.shard_weights, [row])
    # Two who come at once: the second waits here for what the first says.
    query = select(schema.shard_weights).where(weights.selection == selection).with_for_update()
    found = connection.execute(query).one()
    holds = found.asked_ms >= now_ms - _AGREED_MS and len(found.seconds) == len(seconds)
    agreed: list[float] = found.seconds if holds else list(seconds)
    row = {"asked_ms": now_ms, "seconds": agreed}
    connection.execute(update(schema.shard_weights).where(weights.selection == selection).values(row))
    return agreed


def mark_stale(connection: Connection, run_id: str, stale: Mapping[str, Stale | None]) -> None:
    """Note which planned jobs are left out, and why; None takes it back."""
    rows = []
    for job_id, why in stale.items():
        run_job_id, *_ = find_planned(connection, run_id, job_id)
        kept = None if why is None else msgspec.structs.replace(why, reason=values.clean(why.reason))
        rows.append({"of": run_job_id, "why": msgspec.to_builtins(kept)})
    if rows:
        run_job = schema.run_job
        connection.execute(update(run_job).where(run_job.c.id == bindparam("of")).values(stale=bindparam("why")), rows)


def _of_kind(kind: str) -> ColumnElement[bool]:
    fingerprint = schema.fingerprint.c
    of_kind = select(fingerprint.hash).where(fingerprint.facts["device_kind"].as_string() == kind)
    return schema.run.c.fingerprint_hash.in_(of_kind)


def _decided(*conditions: ColumnElement[bool]) -> Any:
    """Return the query for jobs of runs with a verdict about the code: what it was, what it is of, what it took."""
    job, run_job, attempt = schema.job.c, schema.run_job.c, schema.attempt.c
    tried = (
        select(attempt.run_job_id, func.max(attempt.id).label("last_id"), func.sum(attempt.seconds).label("seconds"))
        .select_from(schema.attempt.join(schema.run_job).join(schema.job).join(schema.run))
        .where(attempt.verdict.in_(_ABOUT_THE_CODE), *conditions)
        .group_by(attempt.run_job_id)
        .subquery()
    )
    return select(
        job.name,
        run_job.run_id,
        run_job.build_seconds,
        run_job.cached,
        run_job.bundle_key,
        run_job.judged_by,
        attempt.verdict,
        attempt.known_issue,
        attempt.recorded_ms,
        tried.c.seconds,
        func.row_number()
        .over(partition_by=run_job.job_id, order_by=(attempt.recorded_ms.desc(), attempt.id.desc()))
        .label("age"),
    ).select_from(
        schema.run_job.join(schema.job)
        .join(tried, tried.c.run_job_id == run_job.id)
        .join(schema.attempt, attempt.id == tried.c.last_id)
    )


def _recent(connection: Connection, job_ids: Sequence[str], kind: str) -> Iterable[Row[Any]]:
    """Return the recent runs of jobs, newest first."""
    ranked = _decided(schema.job.c.name.in_(job_ids), not_debugged(), _of_kind(kind)).subquery()
    return connection.execute(select(ranked).where(ranked.c.age <= _RECENT_RUNS).order_by(ranked.c.age))


def _expected(recent: Sequence[Row[Any]]) -> ExpectedJob:
    import statistics

    built = [row.build_seconds for row in recent if row.build_seconds and not row.cached]
    return ExpectedJob(
        last=_verdict(recent[0]),
        build_seconds=statistics.median(built) if built else None,
        run_seconds=statistics.median(row.seconds for row in recent),
        total_seconds=statistics.median(
            row.seconds + (0.0 if row.cached else row.build_seconds or 0.0) for row in recent
        ),
    )


def _verdict(row: Row[Any]) -> LastVerdict:
    known = row.verdict == Verdict.FAILED and row.known_issue
    return LastVerdict(
        run_id=row.run_id,
        time_ms=row.recorded_ms,
        outcome="known issue" if known else row.verdict,
        bundle_key=row.bundle_key or "",
        judged_by=row.judged_by or "",
    )


class SelectionReader:
    """What earlier runs say of the jobs of a new one; runs of `farm debug` are left out.

    A kind of device is `virtual` or `hardware`. Every method is one transaction and raises StoreError when the database
    refuses.
    """

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database, self._clock = database, clock

    def expected(self, job_ids: Sequence[str], kind: str) -> dict[str, ExpectedJob]:
        """Return what recent runs on devices of a kind let expect of jobs that have a verdict."""
        with self._database.reading() as connection:
            return expected(connection, job_ids, kind)

    def failed_last(self, job_ids: Sequence[str], kind: str, user: str) -> set[str]:
        """Return those of the jobs that did not pass when `user` last ran them on devices of this kind.

        That is failures that are no known issues, and jobs that the farm could not judge.
        """
        with self._database.reading() as connection:
            return failed_last(connection, job_ids, kind, user)

    def agree_on_seconds(self, seconds: Mapping[str, float], kind: str) -> dict[str, float]:
        """Return the seconds of jobs that whoever asked first for the same jobs and kind has given; else `seconds`.

        So all shards divide by the same numbers, although the first of them change what the store knows. It holds until
        nobody has asked for twelve hours.
        """
        names = sorted(seconds)
        key = values.selection_hash([kind, *names])
        agreed = self._database.write(
            lambda connection: agree(connection, key, [seconds[name] for name in names], self._clock(connection))
        )
        return dict(zip(names, agreed, strict=True))

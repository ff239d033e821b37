"""What earlier runs say of the jobs of a new one, and how shards divide them: `store.selection`."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Any

from sqlalchemy import delete, select, text, update

from farm.store import schema, values
from farm.store.details import verdict_of
from farm.store.records import ExpectedJob, LastVerdict
from farm.store.rows import insert_missing
from farm.store.statements import chunks, statement
from farm.store.toolchains import of_line

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sqlalchemy import Connection, Row

    from farm.store.clock import Clock
    from farm.store.database import Database

# Enough for a median that one slow attempt does not move, few enough that the newest toolchain counts.
_RECENT_RUNS = 15
# Longer than a shard takes, so that one that begins when another has ended divides as that did; a day later it is over.
_AGREED_MS = 12 * 3_600_000
_FORGOTTEN_MS = 30 * 86_400_000
_NEVER = LastVerdict("", 0, "", "", "")


class SelectionReader:
    """What earlier runs say of the jobs of a new one; runs of `farm debug` are left out.

    A kind of device is `virtual` or `hardware`. Every method is one transaction and raises StoreError when the database
    refuses.
    """

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database, self._clock = database, clock

    def expected(
        self, job_ids: Sequence[str], kind: str, line: str = "", *, trials_of: str = ""
    ) -> dict[str, ExpectedJob]:
        """Return what recent runs of a line, and trials of a user, on devices of a kind let expect of judged jobs.

        Of a job that the line has no verdict of, its times are those of any other run, and its last verdict is empty.
        """
        with self._database.reading() as connection:
            in_line = _recent(connection, job_ids, kind, line, trials_of)
            elsewhere = _recent(connection, [job for job in job_ids if job not in in_line], kind, None)
        found = {name: _expected(rows, verdict_of(rows[0])) for name, rows in in_line.items()}
        return found | {name: _expected(rows, _NEVER) for name, rows in elsewhere.items()}

    def failed_last(
        self, job_ids: Sequence[str], kind: str, user: str, line: str = "", *, private: bool = False
    ) -> set[str]:
        """Return those of the jobs that did not pass when `user` last ran them in a line on devices of this kind.

        That is failures that are no known issues, and jobs that the farm could not judge. With `private` also what was
        only compared with the line counts: who changes it wants to know what failed a moment ago.
        """
        failed: set[str] = set()
        with self._database.reading() as connection:
            for jobs in chunks(job_ids):
                of = {"jobs": jobs, "kind": kind, "user": values.clean(user), "line": line, "private": int(private)}
                failed.update(connection.scalars(statement("selection.failed_last"), of))
        return failed

    def agree_on_seconds(self, seconds: Mapping[str, float], kind: str) -> dict[str, float]:
        """Return the seconds that this login's first call for the same jobs and kind has given; else `seconds`.

        So all shards divide by the same numbers, although the first of them change what the store knows. It holds until
        no call has asked for twelve hours.
        """
        names = sorted(seconds)
        mine = [seconds[name] for name in names]
        key = values.selection_hash([kind, *names])

        def agree(connection: Connection) -> list[float]:
            now_ms, weights = self._clock(connection), schema.shard_weights
            user = "" if self._database.is_sqlite else connection.scalar(text("SELECT session_user"))
            connection.execute(delete(weights).where(weights.c.asked_ms < now_ms - _FORGOTTEN_MS))
            row = {"user_name": user, "selection": key, "asked_ms": now_ms, "seconds": mine}
            insert_missing(connection, weights, [row])
            # Of two who come at once, the second waits here for what the first gives.
            of_key = (weights.c.user_name == user, weights.c.selection == key)
            first = connection.execute(select(weights).where(*of_key).with_for_update()).one()
            holds = first.asked_ms >= now_ms - _AGREED_MS and len(first.seconds) == len(mine)
            agreed: list[float] = first.seconds if holds else mine
            connection.execute(update(weights).where(*of_key).values(asked_ms=now_ms, seconds=agreed))
            return agreed

        return dict(zip(names, self._database.write(agree), strict=True))


def _recent(
    connection: Connection, job_ids: Sequence[str], kind: str, line: str | None, trials_of: str = ""
) -> dict[str, list[Row[Any]]]:
    """Return the newest verdicts of jobs, by their ids, the newest first."""
    found: dict[str, list[Row[Any]]] = {}
    for jobs in chunks(job_ids):
        of = {"jobs": jobs, "kind": kind, "most": _RECENT_RUNS, "user": values.clean(trials_of), **of_line(line)}
        for row in connection.execute(statement("selection.expected"), of):
            found.setdefault(row.name, []).append(row)
    return found


def _expected(recent: Sequence[Row[Any]], last: LastVerdict) -> ExpectedJob:
    built = [row.build_seconds for row in recent if row.build_seconds and not row.cached]
    return ExpectedJob(
        last=last,
        build_seconds=median(built) if built else None,
        run_seconds=median(row.seconds for row in recent),
        total_seconds=median(row.seconds + (0.0 if row.cached else row.build_seconds or 0.0) for row in recent),
    )

"""Expected times and last verdicts of a new run's jobs, and equal times for all its shards: `store.selection`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from sqlalchemy import Connection, Row, delete, select, text, update

from farm.store import schema, values
from farm.store.records import ExpectedJob, LastVerdict
from farm.store.rows import insert_missing, verdict_of
from farm.store.statements import Group, in_parts, statement

# Runs behind an expected time: one slow attempt does not move the median, and the newest toolchain counts.
_RECENT_RUNS = 15
# Validity of the times that shards share: longer than shards that run one after the other, less than a day.
_AGREED_MS = 12 * 3_600_000
_FORGOTTEN_MS = 30 * 86_400_000
_NEVER = LastVerdict("", 0, "", "", "")


class SelectionReader(Group):
    """Reader of expectations from earlier runs, without runs of `farm debug`.

    A kind of device is `virtual` or `hardware`. Every method is one transaction and raises StoreError if the database
    refuses.
    """

    def expected(
        self, job_ids: Sequence[str], kind: str, branch: str = "", *, local_runs_of: str = ""
    ) -> dict[str, ExpectedJob]:
        """Return expectations of judged jobs from recent runs of a branch and a user's local runs, on a kind of device.

        A job without a verdict in the branch gets times of any other run and an empty last verdict.
        """
        with self._database.reading() as connection:
            on_branch = _recent(connection, job_ids, kind, branch, local_runs_of)
            elsewhere = _recent(connection, [job for job in job_ids if job not in on_branch], kind, None)
        found = {name: _expected(rows, verdict_of(rows[0])) for name, rows in on_branch.items()}
        return found | {name: _expected(rows, _NEVER) for name, rows in elsewhere.items()}

    def failed_last(
        self, job_ids: Sequence[str], kind: str, user: str, branch: str = "", *, private: bool = False
    ) -> set[str]:
        """Return the jobs that did not pass in `user`'s last runs of a branch on devices of this kind.

        These are failures without a known issue, and jobs without a verdict on the code. With `private` local runs
        count as well, for a user who works on the code.
        """
        of: dict[str, Any] = {"kind": kind, "user": values.clean(user), "branch": branch, "private": int(private)}
        with self._database.reading() as connection:
            return {row.name for row in in_parts(connection, statement("selection.failed_last"), job_ids, **of)}

    def agree_on_seconds(self, seconds: Mapping[str, float], kind: str) -> dict[str, float]:
        """Return the seconds of this login's first call for the same jobs and kind; for the first call `seconds`.

        All shards of a selection then divide the jobs alike, although results of the first shard change the history.
        The numbers hold until twelve hours pass without a call.
        """
        names = sorted(seconds)
        mine = [seconds[name] for name in names]
        key = values.hash_of([kind, *names])

        def agree(connection: Connection) -> list[float]:
            now_ms, weights = self._clock(connection), schema.shard_weights
            user = "" if self._database.is_sqlite else connection.scalar(text("SELECT session_user"))
            connection.execute(delete(weights).where(weights.c.asked_ms < now_ms - _FORGOTTEN_MS))
            row = {"user_name": user, "selection": key, "asked_ms": now_ms, "seconds": mine}
            insert_missing(connection, weights, [row])
            # The second of two simultaneous calls waits here for the first.
            of_key = (weights.c.user_name == user, weights.c.selection == key)
            first = connection.execute(select(weights).where(*of_key).with_for_update()).one()
            holds = first.asked_ms >= now_ms - _AGREED_MS and len(first.seconds) == len(mine)
            agreed: list[float] = first.seconds if holds else mine
            connection.execute(update(weights).where(*of_key).values(asked_ms=now_ms, seconds=agreed))
            return agreed

        return dict(zip(names, self._database.write(agree), strict=True))


def _recent(
    connection: Connection, job_ids: Sequence[str], kind: str, branch: str | None, local_runs_of: str = ""
) -> dict[str, list[Row[Any]]]:
    """Return the newest verdicts of jobs, by their ids, the newest first."""
    of: dict[str, Any] = {
        "kind": kind,
        "most_runs": _RECENT_RUNS,
        "user": values.clean(local_runs_of),
        **values.of_branch(branch),
    }
    found: dict[str, list[Row[Any]]] = {}
    for row in in_parts(connection, statement("selection.expected"), job_ids, **of):
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

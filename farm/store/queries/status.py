"""Nightly runs and what their jobs were before: `store.status`; expected times and last verdicts: `store.selection`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from statistics import median
from typing import Any

from sqlalchemy import Connection, Row, delete, select, text, update

from farm.base.grouping import grouped
from farm.store import schema, values
from farm.store.queries.runs import find_branch, find_run, newest_results
from farm.store.records import (
    Before,
    ExpectedJob,
    JobResult,
    JobStatus,
    LastVerdict,
    RunStatus,
    RunToolchain,
    UnfinishedRun,
)
from farm.store.rows import insert_missing, now_ms, verdict_of
from farm.store.statements import FEW, Group, chunks, in_parts, statement, struct_of

# Greatest age of a nightly run in the status: last week's counts, last month's does not.
_FRESH_MS = 8 * 86_400_000
# Longest span of cells that count as one nightly run, shorter than the time to the next.
_NIGHTLY_MS = 18 * 3_600_000
# Age from which a run without an end counts as killed.
_RUNNING_MS = 86_400_000


class StatusReader(Group):
    """Every method is one transaction and raises StoreError when the database refuses."""

    def branches(self) -> list[str]:
        """Return the branches that have a run, by name; the default one is empty."""
        return sorted(branch for (branch,) in self._rows("status.branches"))

    def newest_toolchain(self, branch: str) -> RunToolchain:
        """Return the toolchain of the newest run of a branch that has a commit; the default one where none has."""
        found = self._rows("status.newest_toolchain", branch=branch)
        return (values.toolchain_of(found[0]) if found else None) or RunToolchain()

    def branch_to_show(self, asked: str | None) -> str:
        """Return the branch `asked`; by default the default branch, or the newest run's if that has no runs.

        Raises UnknownNameError.
        """
        user = {"user": values.clean(self._database.user)}
        with self._database.reading() as connection:
            if asked is None:
                if connection.scalar(statement("status.has_default_branch"), user) is not None:
                    return ""
                return connection.scalar(statement("status.newest_branch"), user) or ""
            return find_branch(connection, asked)

    def nightly_run(self, branch: str | None = None) -> list[str]:
        """Return the newest nightly runs of a branch, of all branches for None, newest first.

        The runs are all cells of one `farm nightly`, and nightly runs that began within 18 hours. Of runs with an equal
        name, or command without a name, the newest counts. Empty if none began in the last eight days.
        """
        of = values.of_branch(branch)
        with self._database.reading() as connection:
            newest_ms = connection.scalar(statement("status.newest_nightly"), {**of, "since_ms": now_ms() - _FRESH_MS})
            if newest_ms is None:
                return []
            rows = connection.execute(statement("status.nightly"), {**of, "since_ms": newest_ms - _NIGHTLY_MS}).all()
        cells: dict[tuple[str, ...], str] = {}
        for row in rows:
            cells.setdefault((row.run_branch, row.run_name or row.command, row.user_name, row.host), row.id)
        return list(cells.values())

    def run_to_show(self, branch: str = "", *, own: bool = False) -> str | None:
        """Return the newest run that began of the branch's nightly run, without one its newest run; None without a run.

        With `own` local runs of one's own count as well. Runs of `farm debug` are left out.
        """
        nightly_run = self.nightly_run(branch)
        with self._database.reading() as connection:
            began = (one for one in nightly_run if find_run(connection, one).run_began)
            of = {"branch": branch, "user": values.clean(self._database.user) if own else ""}
            return next(began, None) or connection.scalar(statement("status.newest"), of)

    def unfinished_runs(self, branch: str = "") -> list[UnfinishedRun]:
        """Return the runs of a branch in the last day without an end, newest first: running or killed ones.

        Local runs of other users are left out.
        """
        user, since_ms = values.clean(self._database.user), now_ms() - _RUNNING_MS
        rows = self._rows("status.unfinished", since_ms=since_ms, branch=branch, user=user)
        return [UnfinishedRun(*row) for row in rows]

    def of_run(self, run_id: str) -> RunStatus:
        """Return how the jobs of a run ended, and how each did before it in its branch, without numbers.

        Raises UnknownNameError.
        """
        with self._database.reading() as connection:
            run = find_run(connection, run_id)
            of = {"run": run.id, "kind": run.run_device_kind, "branch": run.run_branch}
            rows = connection.execute(statement("status.jobs"), of).all()
            before = _before(connection, [row.earlier_id for row in rows if row.earlier_id is not None])
        return struct_of(
            RunStatus,
            run,
            **values.run_facts(run),
            device_kind=run.run_device_kind or "",
            jobs=tuple(_job_status(row, before.get(row.earlier_id)) for row in rows),
        )

    def job_results(
        self, job_ids: Collection[str], run_ids: Collection[str] | None = None, branch: str = ""
    ) -> list[JobResult]:
        """Return the newest result of each job in a branch, else in the user's local runs; of `run_ids` where given.

        Runs of `farm debug` are left out.
        """
        found: list[JobResult] = []
        user = self._database.user
        with self._database.reading() as connection:
            for names in chunks(job_ids):
                jobs = connection.scalars(statement("status.jobs_named"), {"names": names}).all()
                found += newest_results(connection, jobs, run_ids, branch, local_runs_of=user)
        return found


def _before(connection: Connection, run_job_ids: Collection[int]) -> dict[int, Before]:
    """Return the verdicts of rows of `run_job`, by their ids."""
    rows = in_parts(connection, statement("status.earlier"), run_job_ids, FEW)
    return {run_job_id: Before(*verdict) for run_job_id, *verdict in rows}


def _job_status(row: Row[Any], before: Before | None) -> JobStatus:
    if row.verdict is None:
        skipped = row.skipped or {}
        return JobStatus(row.name, "", "", "", skipped.get("reason", ""), skipped=bool(skipped), before=before)
    return JobStatus(row.name, row.verdict, row.known_issue, row.stage, row.reason, before=before)


# Expected times and last verdicts of a new run's jobs, and equal times for all its shards: `store.selection`.


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
    return grouped((row.name, row) for row in in_parts(connection, statement("selection.expected"), job_ids, **of))


def _expected(recent: Sequence[Row[Any]], last: LastVerdict) -> ExpectedJob:
    built = [row.build_seconds for row in recent if row.build_seconds and not row.cached]
    return ExpectedJob(
        last=last,
        build_seconds=median(built) if built else None,
        run_seconds=median(row.seconds for row in recent),
        total_seconds=median(row.seconds + (0.0 if row.cached else row.build_seconds or 0.0) for row in recent),
    )

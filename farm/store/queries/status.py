"""The runs of the nightly run, what each of their jobs was before, and newest results: `store.status`."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from sqlalchemy import Connection, Row

from farm.store import values
from farm.store.queries.runs import find_branch, find_run, newest_results
from farm.store.records import Before, JobResult, JobStatus, RunStatus, RunToolchain, UnfinishedRun
from farm.store.rows import now_ms
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

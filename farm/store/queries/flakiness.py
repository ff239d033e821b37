"""Recent verdicts of jobs with the identity of their code, for `HistoryReader.reliability`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from sqlalchemy import Connection

from farm.results.analysis.flakiness import LOOKED_AT, Record, Try, record_of
from farm.results.attempt import Verdict
from farm.store.statements import FEW, chunks, statement

# After every id of a run.
NO_END = "~"


def reliability(
    connection: Connection, job_names: Collection[str], kind: str, until: str, branch: str, *, failed_of_late: bool
) -> dict[str, Record]:
    """Return how jobs did in their last runs of a branch on a kind of device, by job id."""
    looked_at = statement("history.failed_since" if failed_of_late else "history.since")
    until = until or NO_END
    found: dict[str, Record] = {}
    for names in chunks(job_names):
        of = {"names": names, "kind": kind, "until": until, "branch": branch, "older": LOOKED_AT - 1}
        jobs = connection.execute(looked_at, of).all()
        tries = _tries(connection, {row.id: row.since for row in jobs}, kind, until, branch)
        found |= {row.name: record_of(tries[row.id]) for row in jobs if row.id in tries}
    return found


def _tries(
    connection: Connection, since: Mapping[int, str], kind: str, until: str, branch: str
) -> dict[int, list[Try]]:
    """Return the verdicts of jobs, each since a run of its own, oldest first."""
    if not since:
        return {}
    of = {"jobs": list(since), "since": min(since.values()), "until": until, "kind": kind, "branch": branch}
    planned = connection.execute(statement("history.planned"), of)
    rows = {row.id: row for row in planned if row.run_id >= since[row.job_id]}
    verdicts: list[Any] = []
    for part in chunks(rows, FEW):
        verdicts += connection.execute(statement("history.tries"), {"planned": part})
    found: dict[int, list[Try]] = {}
    for one in sorted(verdicts, key=lambda one: (rows[one.run_job_id].run_id, one.id)):
        row = rows[one.run_job_id]
        # Identity of the code: the three values that a verdict depends on apart from the device.
        code = f"{one.bundle_key} {row.fingerprint_hash} {row.judged_by}" if one.bundle_key else ""
        found.setdefault(row.job_id, []).append(Try(row.run_id, code, one.verdict == Verdict.PASSED))
    return found

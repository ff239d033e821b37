"""Results of jobs in nightly runs, as a grid: `store.grid`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from sqlalchemy import ColumnElement, Row, String, case, cast, func, select

from farm.store import schema, values
from farm.store.records import RunToolchain
from farm.store.rows import fingerprints
from farm.store.statements import KEYS, Group, in_parts, statement, struct_of

CELLS = "·pfkisn"
"""Letter of a cell: no row of the job, passed, failed, known issue, infra, skipped, not run."""
# Nightly runs have few runs each; the bound keeps a farm with thousands of them readable.
_MOST_RUNS = 4_000
_CODES = 8
_EMPTY = np.empty(0, np.int64)


class NightlyCell(msgspec.Struct, frozen=True):
    """Run of a nightly run, without its jobs."""

    run_id: str
    device_kind: str
    started_ms: int
    finished_ms: int | None
    fingerprint: str
    """Hash of its fingerprint."""
    toolchain: RunToolchain | msgspec.UnsetType = msgspec.UNSET


class NightlyRun(msgspec.Struct, frozen=True):
    """Nightly run: all its cells, oldest first."""

    id: str
    """Id of the nightly run; of a run outside of `farm nightly` the id of the run."""
    runs: tuple[NightlyCell, ...]
    facts: dict[str, str]
    """Fingerprint of its newest run, name to value."""

    @property
    def started_ms(self) -> int:
        """Start of its first run; epoch, milliseconds."""
        return self.runs[0].started_ms

    @property
    def toolchain(self) -> RunToolchain:
        """Toolchain of its newest run."""
        return self.runs[-1].toolchain or RunToolchain()


class JobFilter(msgspec.Struct, frozen=True):
    """Filter of jobs; empty fields select all."""

    suite: str = ""
    soc: str = ""
    backend: str = ""
    precision: str = ""
    text: str = ""
    """Words that a job's name has, all of them."""


class GridJob(msgspec.Struct, frozen=True):
    """Job with a letter of CELLS for each nightly run, in their order."""

    job_id: str
    suite: str
    case: str
    soc: str
    backend: str
    precision: str
    cells: str


class Targets(msgspec.Struct, frozen=True):
    """Values that jobs can be filtered by, sorted."""

    suites: tuple[str, ...]
    socs: tuple[str, ...]
    backends: tuple[str, ...]
    precisions: tuple[str, ...]


class GridReader(Group):
    """Every method is one transaction and raises StoreError if the database refuses."""

    def nightly_runs(self, branch: str | None, most: int, *, before_ms: int | None = None) -> list[NightlyRun]:
        """Return the newest `most` nightly runs of a branch, of all branches for None, newest first.

        With `before_ms` only nightly runs that began before.
        """
        of = {**values.of_branch(branch), "before_ms": before_ms or 2**62, "most": _MOST_RUNS}
        found: dict[str, list[NightlyCell]] = {}
        with self._database.reading() as connection:
            for row in connection.execute(statement("grid.runs"), of):
                nightly_run = row.run_nightly or row.run_id
                if nightly_run not in found and len(found) == most:
                    break
                found.setdefault(nightly_run, []).append(_cell(row))
            facts = fingerprints(connection, {runs[0].fingerprint for runs in found.values()})
        return [
            NightlyRun(nightly_run, tuple(reversed(runs)), facts[runs[0].fingerprint])
            for nightly_run, runs in found.items()
        ]

    def nightly_run(self, nightly_run: str) -> NightlyRun | None:
        """Return a nightly run by its id; None for an unknown one."""
        with self._database.reading() as connection:
            of = {"nightly_run": values.clean(nightly_run)}
            rows = connection.execute(statement("grid.runs_of_nightly"), of).all()
            if not rows:
                return None
            facts = fingerprints(connection, {rows[-1].fingerprint})
        return NightlyRun(nightly_run, tuple(map(_cell, rows)), facts[rows[-1].fingerprint])

    def targets(self) -> Targets:
        """Return the values that jobs can be filtered by."""
        job = schema.job.c
        with self._database.reading() as connection:
            columns = (job.suite, job.soc, job.backend, job.precision)
            return Targets(*(tuple(sorted(connection.scalars(select(one).distinct()))) for one in columns))

    def jobs(self, nightly_runs: Sequence[NightlyRun], wanted: JobFilter) -> list[GridJob]:
        """Return the jobs with a row in any of the nightly runs, by name.

        The newest of several runs of a job in a nightly run counts.
        """
        run_job, job = schema.run_job.c, schema.job.c
        conditions = _conditions(wanted)
        cell = cast(run_job.job_id * _CODES + _code(), String)
        query = (
            select(run_job.run_id, func.aggregate_strings(cell, ",").label("cells"))
            .where(run_job.run_id.in_([run.run_id for nightly_run in nightly_runs for run in nightly_run.runs]))
            .group_by(run_job.run_id)
        )
        if conditions:
            query = query.where(run_job.job_id.in_(select(job.id).where(*conditions)))
        columns = (job.id, job.name, job.suite, job.soc, job.backend, job.precision)
        with self._database.reading() as connection:
            listed = connection.execute(query).all() if nightly_runs else []
            of_run = {run_id: np.fromstring(cells, np.int64, sep=",") for run_id, cells in listed}
            known = np.unique(np.concatenate([_EMPTY, *(found // _CODES for found in of_run.values())]))
            jobs = list(in_parts(connection, select(*columns).where(job.id.in_(KEYS)), known.tolist()))
        table = np.zeros((len(known), len(nightly_runs)), np.uint8)
        for column, nightly_run in enumerate(nightly_runs):
            for run in nightly_run.runs:
                if (found := of_run.get(run.run_id)) is not None:
                    table[np.searchsorted(known, found // _CODES), column] = found % _CODES
        letters = np.frombuffer(CELLS.encode("latin-1"), np.uint8)[table] if len(nightly_runs) else table
        place = {number: at for at, number in enumerate(known.tolist())}
        rows = [
            GridJob(
                name,
                suite,
                values.case_of(name),
                soc,
                backend,
                precision,
                letters[place[number]].tobytes().decode("latin-1"),
            )
            for number, name, suite, soc, backend, precision in jobs
        ]
        return sorted(rows, key=lambda row: row.job_id)


def _cell(row: Row[Any]) -> NightlyCell:
    return struct_of(NightlyCell, row, toolchain=values.toolchain_of(row))


def _code() -> ColumnElement[int]:
    """Return the place of a row's letter in CELLS."""
    run_job, attempt = schema.run_job.c, schema.attempt.c
    # Only failed attempts are looked up.
    known = select(attempt.known_issue).where(attempt.id == run_job.decisive_attempt_id).scalar_subquery()
    return case(
        (run_job.decisive_verdict == "passed", 1),
        (run_job.decisive_verdict == "failed", case((known != "", 3), else_=2)),
        (run_job.decisive_verdict == "infra", 4),
        (run_job.decisive_verdict == "skipped", 5),
        (run_job.skipped.is_not(None), 5),
        else_=6,
    )


def _conditions(wanted: JobFilter) -> list[ColumnElement[bool]]:
    job = schema.job.c
    pairs = ((job.suite, wanted.suite), (job.soc, wanted.soc), (job.backend, wanted.backend))
    found = [column == values.clean(name) for column, name in (*pairs, (job.precision, wanted.precision)) if name]
    words = wanted.text.split()
    return [*found, *(job.name.icontains(values.clean(word), autoescape=True) for word in words)]

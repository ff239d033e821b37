"""Suites, and one with its cases on each target."""

from __future__ import annotations

from collections import Counter
from typing import ClassVar

import msgspec

from farm.base.errors import UnknownNameError
from farm.report.model import format as fmt
from farm.serve.page import Facts, Text
from farm.store.queries.grid import GridJob, JobFilter
from farm.store.store import Store
from farm.store.values import branch_text

# Nightly runs in which a job's newest result is looked for.
_NIGHTS = 14
_NOTHING = "\N{MIDDLE DOT}"


class SuitesQuery(msgspec.Struct, frozen=True):
    """Branch of the results."""

    branch: Text = ""


class SuiteRow(msgspec.Struct, frozen=True, kw_only=True):
    """Suite with the newest results of its jobs."""

    suite: str
    cases: int
    jobs: int
    socs: list[str]
    counts: dict[str, int]
    """Jobs by the letter of their newest result: `farm.store.queries.grid.CELLS`."""


class SuitesFacts(Facts, frozen=True, kw_only=True):
    """Suites with results in nightly runs."""

    path: ClassVar[str] = "/suites"
    template: ClassVar[str] = "suites.html.j2"
    schema: int = 2
    suites: list[SuiteRow]
    branches: list[str]
    branch: str


class SuiteQuery(msgspec.Struct, frozen=True):
    """A suite and the branch of its results."""

    suite: Text
    branch: Text = ""


class CaseRow(msgspec.Struct, frozen=True):
    """Case with the newest result on each target."""

    case: str
    results: dict[str, str]
    """Letter by target; no entry for a target without the case."""


class SuiteFacts(Facts, frozen=True, kw_only=True):
    """Suite with its cases."""

    path: ClassVar[str] = "/suites/{suite:str}"
    template: ClassVar[str] = "suite.html.j2"
    schema: int = 2
    suite: SuiteRow
    targets: list[str]
    """SoC and backend."""
    cases: list[CaseRow]
    jobs: dict[str, str]
    """Id of the job by case and target, separated by a blank."""
    branches: list[str]
    branch: str


def suites_page(store: Store, query: SuitesQuery) -> SuitesFacts:
    """Return the suites with the newest results of their jobs in nightly runs."""
    branch = store.status.branch_to_show(query.branch or None)
    jobs = store.grid.jobs(store.grid.nightly_runs(branch, _NIGHTS), JobFilter())
    suites = sorted({job.suite for job in jobs})
    return SuitesFacts(
        title=fmt.plural(len(suites), "suite"),
        suites=[_row(suite, [job for job in jobs if job.suite == suite]) for suite in suites],
        branches=list(map(branch_text, store.status.branches())),
        branch=branch_text(branch),
    )


def suite_page(store: Store, query: SuiteQuery) -> SuiteFacts:
    """Return a suite with the newest result of each case on each target."""
    branch = store.status.branch_to_show(query.branch or None)
    jobs = store.grid.jobs(store.grid.nightly_runs(branch, _NIGHTS), JobFilter(suite=query.suite))
    if not jobs:
        known = store.grid.targets().suites
        raise UnknownNameError("suite", query.suite, known, f"(with a result in the last {_NIGHTS} nightly runs)")
    row = _row(query.suite, jobs)
    cases: dict[str, dict[str, str]] = {}
    for job in jobs:
        cases.setdefault(f"{job.case} {job.precision}", {})[_target(job)] = newest(job.cells)
    failed = row.counts.get("f", 0)
    return SuiteFacts(
        title=f"{failed} failing of {fmt.plural(row.jobs, 'job')}: suite {query.suite}",
        suite=row,
        targets=sorted({_target(job) for job in jobs}),
        cases=[CaseRow(case, results) for case, results in sorted(cases.items(), key=_worst_first)],
        jobs={f"{job.case} {job.precision} {_target(job)}": job.job_id for job in jobs},
        branches=list(map(branch_text, store.status.branches())),
        branch=branch_text(branch),
    )


def newest(cells: str) -> str:
    """Return the newest letter that is a result; cells are newest first."""
    return next((letter for letter in cells if letter not in f"{_NOTHING}n"), _NOTHING)


def _row(suite: str, jobs: list[GridJob]) -> SuiteRow:
    return SuiteRow(
        suite=suite,
        cases=len({job.case for job in jobs}),
        jobs=len(jobs),
        socs=sorted({job.soc for job in jobs}),
        counts=dict(Counter(newest(job.cells) for job in jobs)),
    )


def _target(job: GridJob) -> str:
    return f"{job.soc} {job.backend}"


def _worst_first(one: tuple[str, dict[str, str]]) -> tuple[bool, bool, str]:
    letters = one[1].values()
    return "f" not in letters, "i" not in letters and "k" not in letters, one[0]

"""Operators x targets: the cell of the matrix for each job. Pure."""

from __future__ import annotations

from collections import Counter

import msgspec

from farm.report.model.summary import JobSummary, RunSummary


class MatrixColumn(msgspec.Struct, frozen=True):
    """Target of a matrix."""

    soc: str
    backend: str
    precision: str
    options: str
    kind: str
    """`virtual` or `hardware` when all its jobs ran on such devices, `mixed`, or "" when none ran."""


class MatrixRow(msgspec.Struct, frozen=True):
    """Case of a matrix; `cells` are in the order of the columns, and a target without a job has an empty cell."""

    case: str
    cells: tuple[tuple[JobSummary, ...], ...]


class Matrix(msgspec.Struct, frozen=True):
    """Matrix of one suite."""

    suite: str
    columns: tuple[MatrixColumn, ...]
    rows: tuple[MatrixRow, ...]

    @property
    def socs(self) -> tuple[tuple[str, int], ...]:
        """Return SoCs and the number of columns of each, in the order of the columns."""
        return tuple(Counter(column.soc for column in self.columns).items())


def matrices(summary: RunSummary) -> tuple[Matrix, ...]:
    """Return one matrix per suite, with only the targets of that suite; all in the order of the run."""
    suites: dict[str, list[JobSummary]] = {}
    for job in summary.jobs:
        suites.setdefault(job.job.suite, []).append(job)
    return tuple(_matrix(suite, jobs) for suite, jobs in suites.items())


def _matrix(suite: str, jobs: list[JobSummary]) -> Matrix:
    by_target: dict[tuple[str, str, str, str], list[JobSummary]] = {}
    cells: dict[str, dict[tuple[str, str, str, str], list[JobSummary]]] = {}
    for job in jobs:
        target = (job.job.soc, job.job.backend, job.job.precision, job.options)
        by_target.setdefault(target, []).append(job)
        cells.setdefault(job.job.case, {}).setdefault(target, []).append(job)
    soc_order = list(dict.fromkeys(target[0] for target in by_target))
    targets = sorted(by_target, key=lambda target: soc_order.index(target[0]))
    return Matrix(
        suite=suite,
        columns=tuple(MatrixColumn(*target, kind=_kind(by_target[target])) for target in targets),
        rows=tuple(
            MatrixRow(case, tuple(tuple(by_cell.get(target, ())) for target in targets))
            for case, by_cell in cells.items()
        ),
    )


def _kind(jobs: list[JobSummary]) -> str:
    kinds = {job.kind for job in jobs} - {""}
    return "mixed" if len(kinds) > 1 else next(iter(kinds), "")

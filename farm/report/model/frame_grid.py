"""Feasible and infeasible settings of a run's jobs: frame rate by clock, for each core selection. Pure."""

from __future__ import annotations

from collections import Counter

import msgspec

from farm.report.model.summary import JobSummary, RunSummary
from farm.results.attempt import Cause
from farm.suites.frame_settings import FrameSetting, frame_setting


class FrameColumn(msgspec.Struct, frozen=True):
    """Clock of a core selection."""

    cores: int
    ftrt_ratio: int


class FrameRow(msgspec.Struct, frozen=True):
    """Frame rate; `jobs` are in the order of the columns, None for a setting that is not part of the run."""

    fps: int
    jobs: tuple[JobSummary | None, ...]


class FrameGrid(msgspec.Struct, frozen=True):
    """Settings of one program: a case on a target, without the swept options."""

    name: str
    """`suite/case[SoC-backend-precision-option=value]`."""
    columns: tuple[FrameColumn, ...]
    rows: tuple[FrameRow, ...]

    @property
    def cores(self) -> tuple[tuple[int, int], ...]:
        """Return core selections and the number of columns of each, in the order of the columns."""
        return tuple(Counter(column.cores for column in self.columns).items())

    @property
    def infeasible(self) -> tuple[JobSummary, ...]:
        """Return the jobs that QNN refused for their setting."""
        return tuple(job for job in self._jobs if is_infeasible(job))

    @property
    def text(self) -> str:
        """Return the counts: `7 feasible, 2 infeasible`, and the number of jobs without an answer."""
        # A feasible setting was executed, with correct outputs or not.
        good, bad = sum(job.numbers.latency_ms is not None for job in self._jobs), len(self.infeasible)
        open_ = len(self._jobs) - good - bad
        return f"{good} feasible, {bad} infeasible" + (f", {open_} not known" if open_ else "")

    @property
    def _jobs(self) -> list[JobSummary]:
        return [job for row in self.rows for job in row.jobs if job is not None]


def is_infeasible(job: JobSummary) -> bool:
    """Return True for a job that QNN refused for its setting alone."""
    return job.attempt is not None and job.attempt.cause is Cause.INFEASIBLE


def frame_grids(summary: RunSummary) -> tuple[FrameGrid, ...]:
    """Return a grid for each program with several settings in a run, or with a setting that QNN refused."""
    programs: dict[tuple[str, ...], list[tuple[FrameSetting, JobSummary]]] = {}
    for job in summary.jobs:
        view = job.job
        setting = frame_setting(view.backend, view.options)
        if setting is not None:
            target = "-".join([view.soc, view.backend, view.precision, *(f"{k}={v}" for k, v in setting.others)])
            programs.setdefault((view.suite, view.case, target), []).append((setting, job))
    return tuple(
        _grid(f"{suite}/{case}[{target}]", jobs)
        for (suite, case, target), jobs in programs.items()
        if len(jobs) > 1 or is_infeasible(jobs[0][1])
    )


def _grid(name: str, jobs: list[tuple[FrameSetting, JobSummary]]) -> FrameGrid:
    placed = {(one.fps, one.cores, one.ftrt_ratio): job for one, job in jobs}
    columns = tuple(FrameColumn(*place) for place in sorted({(one.cores, one.ftrt_ratio) for one, _ in jobs}))
    rows = tuple(
        FrameRow(fps, tuple(placed.get((fps, column.cores, column.ftrt_ratio)) for column in columns))
        for fps in sorted({one.fps for one, _ in jobs})
    )
    return FrameGrid(name, columns, rows)

"""What is known of a night: plain data, kept after every cell, its exit code and what is shown of it. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from farm.base.interrupts import INTERRUPTED
from farm.dispatch.notify.delivery import Delivery

if TYPE_CHECKING:
    from collections.abc import Mapping

FAILED, REGRESSED, INFRA, NOTHING = 1, 3, 4, 5
# The first that any cell has is the night's; `passed` comes before `nothing`, as a budget is meant to leave some out.
_PRECEDENCE = (FAILED, REGRESSED, INFRA, 0)
_WORDS = {0: "passed", FAILED: "FAILED", REGRESSED: "REGRESSED", INFRA: "INFRA", NOTHING: "NOTHING RUN"}


class JobNote(msgspec.Struct, frozen=True):
    """A job, or a cell, and one line about it."""

    job_id: str
    reason: str = msgspec.field(name="said")


class DebuggedJob(JobNote, frozen=True):
    """A job that newly failed by numerics, and what `farm debug` found of it, or why it was not debugged."""

    layer: str = ""
    """The first wrong layer; empty where none was found."""
    run_id: str = ""
    """Run of `farm debug`; empty where nothing began."""
    report: str = ""
    """Path of its page, below the folder of the night."""
    picture: str = ""
    """Path of the picture of the first wrong layer and its neighbours, below the folder of the night."""


class Findings(msgspec.Struct, frozen=True):
    """What confirming the candidates of a run found."""

    regressions: tuple[JobNote, ...] = ()
    confirmed: int = 0
    unknown: int = 0
    """Candidates that are neither confirmed nor refuted."""
    not_measured: int = msgspec.field(default=0, name="not_asked")
    """Candidates for which there was no time or no device."""


class CellResult(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a night."""

    name: str
    socs: tuple[str, ...]
    suites: tuple[str, ...]
    backend: str
    virtual: bool
    run_id: str = ""
    """Empty where it never came to a run in the store."""
    code: int | None = None
    """As the exit code of `farm run`, regressions among them; None while it has not ended."""
    problem: str = ""
    """Why it has no run, or only a part of one."""
    counts: dict[str, int] = {}
    """Jobs by `farm.report.model.summary.Outcome`."""
    seconds: float = 0.0
    new_failures: tuple[JobNote, ...] = ()
    still_failing: tuple[JobNote, ...] = ()
    fixed: tuple[str, ...] = ()
    """Job ids."""
    infra: tuple[JobNote, ...] = ()
    not_tested: int = 0
    findings: Findings = Findings()
    debugged: tuple[DebuggedJob, ...] = ()
    report: str = ""
    """Name of the page of the run, beside that of the night."""
    exports: tuple[str, ...] = ()
    """Files."""

    @property
    def is_done(self) -> bool:
        """Whether it has come to its end."""
        return self.code is not None and self.code != INTERRUPTED

    @property
    def word(self) -> str:
        """How it ended, in a word or two."""
        if self.code is None:
            return "not begun" if not self.run_id else "unfinished"
        return _word(self.code)


class Night(msgspec.Struct, frozen=True, kw_only=True):
    """One night."""

    id: str
    name: str
    digest: str
    """Of what was to be run."""
    user: str
    host: str
    started_ms: int
    finished_ms: int | None = None
    code: int | None = None
    cells: tuple[CellResult, ...]
    deliveries: tuple[Delivery, ...] = ()
    report: str = ""
    """Its page."""
    report_url: str = ""
    schema: int = 1

    @property
    def is_done(self) -> bool:
        """Whether every cell has come to its end, so that there is nothing to resume."""
        return self.code is not None and self.code != INTERRUPTED

    @property
    def word(self) -> str:
        """How it ended, in a word or two."""
        return "unfinished" if self.code is None else _word(self.code)

    @property
    def counts(self) -> dict[str, int]:
        """Jobs of all cells by outcome; those that did not occur are left out."""
        found: dict[str, int] = {}
        for cell in self.cells:
            for outcome, count in cell.counts.items():
                found[outcome] = found.get(outcome, 0) + count
        return {outcome: count for outcome, count in found.items() if count}

    @property
    def seconds(self) -> float:
        """Wall time; 0 while it runs."""
        return 0.0 if self.finished_ms is None else (self.finished_ms - self.started_ms) / 1000

    @property
    def new_failures(self) -> tuple[JobNote, ...]:
        """Of all cells."""
        return tuple(one for cell in self.cells for one in cell.new_failures)

    @property
    def still_failing(self) -> tuple[JobNote, ...]:
        """Of all cells."""
        return tuple(one for cell in self.cells for one in cell.still_failing)

    @property
    def regressions(self) -> tuple[JobNote, ...]:
        """Of all cells."""
        return tuple(one for cell in self.cells for one in cell.findings.regressions)

    @property
    def debugged(self) -> tuple[DebuggedJob, ...]:
        """New numeric failures of all cells, as `farm debug` explains them."""
        return tuple(one for cell in self.cells for one in cell.debugged)

    @property
    def troubles(self) -> tuple[JobNote, ...]:
        """What the farm could not judge: cells without a whole run, and jobs."""
        cells = [JobNote(cell.name, cell.problem) for cell in self.cells if cell.problem]
        return (*cells, *(one for cell in self.cells for one in cell.infra))

    @property
    def sections(self) -> dict[str, tuple[JobNote, ...]]:
        """What is shown of jobs: title to notes, the most important first; sections without a note are left out."""
        found = {
            "New failures": self.new_failures,
            "First wrong layers": self.debugged,
            "Regressions": self.regressions,
            "Still failing": self.still_failing,
            "Infra": self.troubles,
        }
        return {title: notes for title, notes in found.items() if notes}

    @property
    def undelivered(self) -> tuple[Delivery, ...]:
        """Notifications that failed."""
        return tuple(one for one in self.deliveries if not one.ok)


def _word(code: int) -> str:
    return _WORDS.get(code, "interrupted" if code == INTERRUPTED else f"exit code {code}")


def cell_code(code: int, findings: Findings) -> int:
    """Return how a cell ended whose run returned `code`: a machine that is not set up (2) is trouble of the farm."""
    if code in (2, INFRA):
        code = INFRA
    return REGRESSED if findings.regressions and code in (0, INFRA, NOTHING) else code


def night_code(cells: tuple[CellResult, ...], *, interrupted: bool) -> int:
    """Return the exit code of a night."""
    if interrupted:
        return INTERRUPTED
    codes = {cell.code for cell in cells}
    return next((code for code in _PRECEDENCE if code in codes), NOTHING)


def counted(counts: Mapping[str, int]) -> str:
    """Return jobs by outcome in words."""
    words = {"stale": "NOT TESTED", "not_run": "NOT RUN", "known": "known issues"}
    order = ("failed", "infra", "passed", "known", "skipped", "stale", "not_run")
    return ", ".join(f"{counts[one]} {words.get(one, one)}" for one in order if counts.get(one)) or "no jobs"


def meaning(code: int | None) -> str:
    """Return what an exit code of a night says."""
    meanings: dict[int | None, str] = {
        None: "it has not finished",
        0: "nothing that ran failed",
        FAILED: "a job failed",
        REGRESSED: "nothing failed, but there are regressions",
        INFRA: "no device, or infrastructure trouble",
        NOTHING: "nothing was run",
        INTERRUPTED: "interrupted",
    }
    return meanings.get(code, "unknown")


def has_changed(night: Night, before: Night | None) -> bool:
    """Return whether a night found something else than the one before; the first night, whether it found anything."""
    return _findings(night) != (_findings(before) if before is not None else (0, frozenset(), frozenset()))


def _findings(night: Night) -> tuple[int | None, frozenset[str], frozenset[str]]:
    failing = frozenset(one.job_id for one in (*night.new_failures, *night.still_failing))
    return night.code, failing, frozenset(f"{one.job_id} {one.reason}" for one in night.regressions)

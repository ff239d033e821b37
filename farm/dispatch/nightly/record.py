"""Record of a nightly run: plain data, saved after every cell in a file, with exit code and shown sections."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec

from farm.base.errors import ENDED_EARLY, ExitCode, InfraError, UsageError
from farm.base.files import write_atomically
from farm.base.forms import is_run_id
from farm.base.interrupts import INTERRUPTED
from farm.dispatch.notify.delivery import Delivery

FAILED, REGRESSED, INFRA, NOTHING = ExitCode.FAILED, ExitCode.REGRESSION, ExitCode.INFRA, ExitCode.NOTHING
# The first code here that any cell has is the exit code; `passed` precedes `nothing`, as a budget may skip cells.
_PRECEDENCE = (FAILED, REGRESSED, INFRA, 0)
_WORDS = {0: "passed", FAILED: "FAILED", REGRESSED: "REGRESSED", INFRA: "INFRA", NOTHING: "NOTHING RUN"}


class JobNote(msgspec.Struct, frozen=True):
    """Note of one line about a job or a cell."""

    job_id: str
    reason: str


class DebuggedJob(JobNote, frozen=True):
    """Job with a new numeric failure, and the finding of `farm debug`, or the reason why it was not debugged."""

    layer: str = ""
    """First wrong layer; empty for none."""
    run_id: str = ""
    """Run of `farm debug`; empty if it did not begin."""
    report: str = ""
    """Path of its page, below the folder of the nightly run."""


class Findings(msgspec.Struct, frozen=True):
    """Findings of the confirmation of a run's suspected regressions."""

    regressions: tuple[JobNote, ...] = ()
    confirmed: int = 0
    unknown: int = 0
    """Number of suspected regressions that were measured and neither confirmed nor refuted."""
    not_measured: int = msgspec.field(default=0, name="not_asked")
    """Number of suspected regressions without time or a device for a measurement."""


class CellResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a cell of a nightly run."""

    name: str
    socs: tuple[str, ...]
    suites: tuple[str, ...]
    backend: str
    virtual: bool
    run_id: str = ""
    """Run of the cell; empty if none reached the store."""
    code: int | None = None
    """Exit code as of `farm run`, or 3 for regressions; None before the end."""
    problem: str = ""
    """Reason of a missing or partial run."""
    counts: dict[str, int] = {}
    """Jobs by `farm.report.model.summary.Outcome`."""
    seconds: float = 0.0
    new_failures: tuple[JobNote, ...] = ()
    still_failing: tuple[JobNote, ...] = ()
    fixed: tuple[str, ...] = ()
    """Ids of fixed jobs."""
    infra: tuple[JobNote, ...] = ()
    not_tested: int = 0
    findings: Findings = Findings()
    debugged: tuple[DebuggedJob, ...] = ()
    report: str = ""
    """Name of the run's page, in the folder of the nightly run's page."""
    exports: tuple[str, ...] = ()
    """Paths of exported files."""

    @property
    def is_done(self) -> bool:
        """True if the cell has ended."""
        return self.code is not None and self.code != INTERRUPTED

    @property
    def word(self) -> str:
        """Outcome in a word or two."""
        if self.code is None:
            return "not begun" if not self.run_id else "unfinished"
        return _word(self.code)


class NightlyRun(msgspec.Struct, frozen=True, kw_only=True):
    """Record of a nightly run."""

    id: str
    name: str
    digest: str
    """Hash of the requests of its cells."""
    user: str
    host: str
    started_ms: int
    finished_ms: int | None = None
    code: int | None = None
    cells: tuple[CellResult, ...]
    deliveries: tuple[Delivery, ...] = ()
    is_unnotified: bool = False
    """True from the end of the last cell until its notices are on their way: a killed process left them."""
    report: str = ""
    """Path of its page."""
    report_url: str = ""
    schema: int = 2

    @property
    def is_done(self) -> bool:
        """True if every cell has ended, so that no cell is left to resume."""
        return self.code is not None and self.code != INTERRUPTED

    @property
    def word(self) -> str:
        """Outcome in a word or two."""
        return "unfinished" if self.code is None else _word(self.code)

    @property
    def counts(self) -> dict[str, int]:
        """Number of jobs of all cells by outcome, without zeros."""
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
        """New failures of all cells."""
        return tuple(one for cell in self.cells for one in cell.new_failures)

    @property
    def still_failing(self) -> tuple[JobNote, ...]:
        """Failures of all cells that earlier runs had as well."""
        return tuple(one for cell in self.cells for one in cell.still_failing)

    @property
    def regressions(self) -> tuple[JobNote, ...]:
        """Regressions of all cells."""
        return tuple(one for cell in self.cells for one in cell.findings.regressions)

    @property
    def debugged(self) -> tuple[DebuggedJob, ...]:
        """New numeric failures of all cells, as `farm debug` explains them."""
        return tuple(one for cell in self.cells for one in cell.debugged)

    @property
    def troubles(self) -> tuple[JobNote, ...]:
        """Cells without a whole run, and jobs that the farm could not judge."""
        cells = [JobNote(cell.name, cell.problem) for cell in self.cells if cell.problem]
        return (*cells, *(one for cell in self.cells for one in cell.infra))

    @property
    def sections(self) -> dict[str, tuple[JobNote, ...]]:
        """Shown sections about jobs, title to notes, the most important first; empty sections are left out."""
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
    """Return the code of a cell whose run returned `code`: a machine that is not set up is trouble of the farm."""
    if code in ENDED_EARLY and code != INTERRUPTED:
        code = INFRA
    return REGRESSED if findings.regressions and code in (0, INFRA, NOTHING) else code


def nightly_code(cells: tuple[CellResult, ...], *, interrupted: bool) -> int:
    """Return the exit code of a nightly run."""
    if interrupted:
        return INTERRUPTED
    codes = {cell.code for cell in cells}
    return next((code for code in _PRECEDENCE if code in codes), NOTHING)


def counted(counts: Mapping[str, int]) -> str:
    """Return jobs by outcome in words."""
    words = {"not_run": "NOT RUN", "known": "known issues"}
    order = ("failed", "infra", "passed", "known", "skipped", "not_run")
    return ", ".join(f"{counts[one]} {words.get(one, one)}" for one in order if counts.get(one)) or "no jobs"


def meaning(code: int | None) -> str:
    """Return the meaning of an exit code of a nightly run."""
    meanings: dict[int | None, str] = {
        None: "it has not finished",
        0: "nothing that ran failed",
        **{one: one.meaning for one in (FAILED, REGRESSED, INFRA, INTERRUPTED)},
        NOTHING: "nothing was run",
    }
    return meanings.get(code, "unknown")


def has_changed(nightly_run: NightlyRun, before: NightlyRun | None) -> bool:
    """Return whether the findings differ from the previous nightly run's; for the first, whether there are any."""
    return _findings(nightly_run) != (_findings(before) if before is not None else (0, frozenset(), frozenset()))


def _findings(nightly_run: NightlyRun) -> tuple[int | None, frozenset[str], frozenset[str]]:
    failing = frozenset(one.job_id for one in (*nightly_run.new_failures, *nightly_run.still_failing))
    return nightly_run.code, failing, frozenset(f"{one.job_id} {one.reason}" for one in nightly_run.regressions)


def new_id() -> str:
    """Return the id of a nightly run that begins now, in the form of run ids: sorted by name is sorted by time."""
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(3)}"


def write_whole(path: Path, data: bytes) -> None:
    """Write a file atomically, and create its folder. Raises InfraError, for example for a full disk."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, data, durable=True)
    except OSError as error:
        raise InfraError(f"cannot write {path}: {error.strerror or error}") from None


class NightlyRuns:
    """Nightly runs of one name that are stored on this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Exclude other nightly runs of this name during the block. Raises UsageError while one runs."""
        with contextlib.ExitStack() as stack:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                file = stack.enter_context((self.folder / "lock").open("a+"))
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                file.truncate(0)
                file.write(str(os.getpid()))
                file.flush()
            except BlockingIOError:
                file.seek(0)
                raise UsageError(
                    f"the nightly run {self.folder.name!r} is running already (process {file.read(20) or 'unknown'}): "
                    "wait for it, or stop it with Ctrl-C or SIGTERM"
                ) from None
            except OSError as error:
                raise InfraError(f"cannot write {self.folder}: {error.strerror or error}") from None
            yield

    def save(self, nightly_run: NightlyRun) -> None:
        """Store the record of a nightly run. Raises InfraError."""
        write_whole(self.folder / f"{nightly_run.id}.json", msgspec.json.encode(nightly_run))

    def all(self) -> list[NightlyRun]:
        """Return all nightly runs, oldest first; unreadable files, as of another version of farm, are left out."""
        found = []
        for path in self.folder.glob("*.json"):
            try:
                found.append(msgspec.json.decode(path.read_bytes(), type=NightlyRun))
            except (OSError, msgspec.DecodeError):
                continue
        # Ids are not ordered within a second.
        return sorted(found, key=lambda nightly_run: nightly_run.started_ms)

    def unfinished(self, digest: str) -> NightlyRun:
        """Return the newest nightly run if it is unfinished.

        Raises UsageError without an unfinished one, or if its requests (`digest`) were others.
        """
        newest = next(reversed(self.all()), None)
        if newest is None or (newest.is_done and not newest.is_unnotified):
            what = "is finished" if newest else "there is none yet"
            raise UsageError(f"--resume: the last run of {self.folder.name!r} {what}: leave --resume out for a new one"
                             if newest else f"--resume: {what} called {self.folder.name!r}")  # fmt: skip
        if newest.digest != digest:
            raise UsageError(
                f"--resume: {newest.id} was to run something else, as the file has changed since: start anew"
            )
        return newest

    def forget(self, keep: int, reports: Path) -> None:
        """Remove all but the newest `keep` nightly runs, with their pages below `reports`."""
        for path in sorted(self.folder.glob("*.json"))[:-keep]:
            if is_run_id(path.stem):
                shutil.rmtree(reports / path.stem, ignore_errors=True)
                path.unlink(missing_ok=True)

"""Runs in pages, how far they are, the runs of a job and of a device, files, counts of attempts: `store.browse`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from sqlalchemy import ColumnElement, Connection, Row, func, select

from farm.base.errors import ExitCode, UnknownNameError
from farm.store import schema, values
from farm.store.queries.runs import find_run
from farm.store.records import Purpose, RunToolchain
from farm.store.statements import Group, in_parts, statement, struct_of

_DAY_MS = 86_400_000
# Age up to which an ended run is listed with running ones, as pages may still show it.
_JUST_ENDED_MS = 600_000
_KNOWN_LIMIT = 200
_PASSED, _FAILED = ExitCode.PASSED, ExitCode.FAILED

STATES = ("unfinished", "passed", "failed", "other")
"""States of a run: no end, exit code 0, exit code 1, any other exit code."""


class RunFilter(msgspec.Struct, frozen=True):
    """Filter of runs; empty fields select all."""

    user: str = ""
    purpose: str = ""
    """Value of `Purpose`."""
    soc: str = ""
    suite: str = ""
    state: str = ""
    """Value of `STATES`."""
    branch: str = ""
    """As `branch_text` has it; private runs belong to none."""
    host: str = ""
    commit: str | None = None
    """Commit of the toolchain, empty for runs without one; None for all."""
    toolchain: str | None = None
    """Name of the toolchain, empty for the default one; None for all."""


class Progress(msgspec.Struct, frozen=True):
    """How far a run is."""

    run_id: str
    planned: int
    """Jobs."""
    skipped: int
    """Jobs skipped for lack of time."""
    counts: dict[str, int]
    """Jobs that have an attempt, by the verdict that decides; `known` are failures that are understood."""
    last_ms: int
    """When the last attempt was recorded; epoch, milliseconds, 0 for none."""
    finished_ms: int | None
    exit_code: int | None

    @property
    def done(self) -> int:
        """Jobs that have an attempt."""
        return sum(self.counts.values())


class ListedRun(msgspec.Struct, frozen=True):
    """A run without its jobs."""

    run_id: str
    command: str
    user: str
    host: str
    priority: str
    started_ms: int
    socs: tuple[str, ...]
    suites: tuple[str, ...]
    files: int
    """Artifacts of its attempts."""
    progress: Progress
    toolchain: RunToolchain | msgspec.UnsetType = msgspec.UNSET
    """Not there where nothing is known but that it is the default one."""
    name: str = ""
    purpose: str = Purpose.MANUAL
    """Value of `Purpose`."""
    began: bool = True
    """True if a job was executed, or still may be."""


class Known(msgspec.Struct, frozen=True):
    """Known values of filters, in alphabetical order."""

    users: tuple[str, ...]
    socs: tuple[str, ...]
    suites: tuple[str, ...]


class DeviceAttempt(msgspec.Struct, frozen=True):
    """Attempt as a device's page shows it."""

    run_id: str
    job_id: str
    verdict: str
    known_issue: str
    stage: str
    cause: str
    reason: str
    recorded_ms: int
    seconds: float
    fingerprint: str
    """Hash of the run's."""
    case_version: str
    latency_ns: float | None
    """Median."""
    private: bool | msgspec.UnsetType = msgspec.UNSET
    """The run was only compared with a branch."""


class OneRun(msgspec.Struct, frozen=True):
    """Run with the conditions of its numbers."""

    run: ListedRun
    fingerprint: dict[str, str]
    nightly_run: str
    """Id of the nightly run that it is a cell of; empty without."""


class MetDevice(msgspec.Struct, frozen=True):
    """Device of runs, registered or not."""

    serial: str
    soc: str
    kind: str
    last_ms: int
    """Start of its newest run; epoch, milliseconds."""
    runs: int


class UsedToolchain(msgspec.Struct, frozen=True):
    """Toolchain with its runs."""

    name: str
    branch: str
    hash: str
    """Commit; empty if unknown."""
    runs: int
    last_ms: int
    first_ms: int
    newest: str
    """Id of its newest run."""
    passed: int
    """Runs with exit code 0."""
    failed: int
    """Runs with exit code 1."""


class UsedHost(msgspec.Struct, frozen=True):
    """Host that started runs."""

    name: str
    runs: int
    last_ms: int


class JobRun(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a job in a run."""

    run_id: str
    nightly_run: str
    """Id of the nightly run; empty for other runs."""
    name: str
    """Name of the run."""
    started_ms: int
    commit: str
    branch: str
    private: bool
    """True for a local run, which was only compared with the branch."""
    outcome: str
    """`passed`, `failed`, `known`, `infra`, `skipped` or `not_run`."""
    reason: str
    device: str
    """Serial; empty without a device."""
    kind: str
    latency_ns: float | None
    """Median latency."""


class RunJob(msgspec.Struct, frozen=True, kw_only=True):
    """Job of a run without its attempts."""

    job_id: str
    outcome: str
    """As in `JobRun`."""
    stage: str
    reason: str
    device: str
    kind: str
    seconds: float
    """Wall time of the deciding attempt on its device."""
    latency_ns: float | None


class AttemptCount(msgspec.Struct, frozen=True):
    """Attempts of recent runs with equal labels."""

    soc: str
    """SoC of the jobs."""
    kind: str | None
    """Kind of the device, `virtual` or `hardware`; None without a device."""
    serial: str | None
    device_soc: str | None
    """SoC of the device."""
    verdict: str
    cause: str
    decides: bool
    """True for the deciding attempts of their jobs."""
    attempts: int
    seconds: float
    """Wall time of the attempts."""


class Wear(msgspec.Struct, frozen=True):
    """Attempts on a device since it is known."""

    serial: str
    kind: str
    soc: str
    attempts: int


_Result = TypeVar("_Result", JobRun, RunJob)


class Browse(Group):
    """Every method is one transaction that reads, and raises StoreError when the database refuses."""

    def runs(self, wanted: RunFilter, limit: int, offset: int = 0) -> tuple[list[ListedRun], int]:
        """Return `limit` runs from `offset` on, newest first, and how many there are in all."""
        run = schema.run.c
        conditions = _conditions(wanted)
        with self._database.reading() as connection:
            total = connection.scalar(select(func.count()).select_from(schema.run).where(*conditions)) or 0
            newest = run.started_ms.desc(), run.id.desc()
            query = select(schema.run).where(*conditions).order_by(*newest).limit(limit).offset(offset)
            rows = connection.execute(query).all()
            return _listed(connection, rows), total

    def run(self, run_id: str) -> OneRun:
        """Return a run without its jobs. Raises UnknownNameError."""
        with self._database.reading() as connection:
            row = find_run(connection, run_id)
            [listed] = _listed(connection, [row])
            return OneRun(listed, row.facts, row.run_nightly)

    def progress(self) -> list[Progress]:
        """Return how far the runs of the last day are that have no end, or ended in the last minutes; newest first."""
        with self._database.reading() as connection:
            now_ms = self._clock(connection)
            of = {"since_ms": now_ms - _DAY_MS, "ended_ms": now_ms - _JUST_ENDED_MS, "most": _KNOWN_LIMIT}
            return _progress(connection, list(connection.scalars(statement("browse.live"), of)))

    def known(self) -> Known:
        """Return what runs can be filtered by: of each the first 200."""
        run, job = schema.run.c, schema.job.c
        with self._database.reading() as connection:
            columns = (run.user_name, job.soc, job.suite)
            found = [list(connection.scalars(select(one).distinct().limit(_KNOWN_LIMIT))) for one in columns]
        return Known(*(tuple(sorted(one)) for one in found))

    def cases(self, limit: int) -> list[str]:
        """Return the names of cases that have jobs, with their suites: `suite/case`."""
        return [f"{suite}/{name}" for suite, name in self._rows("browse.cases", most=limit)]

    def on_device(self, serial: str, kind: str, limit: int) -> list[DeviceAttempt]:
        """Return the newest attempts on the devices of a kind that have this serial, newest first."""
        of = {"serial": serial, "kind": kind, "most": limit}
        with self._database.reading() as connection:
            rows = connection.execute(statement("browse.on_device"), of).all()
            latencies = _latencies(connection, [row.id for row in rows])
        return [
            struct_of(DeviceAttempt, row, latency_ns=latencies.get(row.id), private=row.run_private or msgspec.UNSET)
            for row in rows
        ]

    def met_devices(self) -> list[MetDevice]:
        """Return the devices of runs, the newest first, also virtual devices, which no registry has."""
        return [MetDevice(*row) for row in self._rows("browse.met_devices", most=_KNOWN_LIMIT)]

    def toolchains(self, commit: str = "", most: int = _KNOWN_LIMIT) -> list[UsedToolchain]:
        """Return the toolchains of runs, the newest first; only of a commit where one is given."""
        rows = self._rows("browse.toolchains", hash=values.clean(commit, values.SOC_LIMIT), most=most)
        return [UsedToolchain(*row) for row in rows]

    def hosts(self) -> list[UsedHost]:
        """Return the hosts that started runs, the newest first."""
        return [UsedHost(*row) for row in self._rows("browse.hosts", most=_KNOWN_LIMIT)]

    def file_kind(self, sha256: str) -> str | None:
        """Return the kind of an artifact, such as `etdump`; None for an artifact without an attempt."""
        kind: str | None = self._value("browse.file_kind", sha256=values.clean(sha256))
        return kind

    def has_job(self, job_id: str) -> bool:
        """Return True for the id of a job in the store."""
        return self._value("jobs.row", name=values.clean(job_id, values.JOB_LIMIT)) is not None

    def job_runs(self, job_id: str, most: int) -> list[JobRun]:
        """Return the newest `most` runs of a job, newest first. Raises UnknownNameError."""
        with self._database.reading() as connection:
            of = {"job": _job_row(connection, job_id), "most": most}
            rows = connection.execute(statement("jobs.runs"), of).all()
            latencies = _latencies(connection, [row.decisive_attempt_id for row in rows])
        return [_job_result(JobRun, row, latencies) for row in rows]

    def run_of_nightly(self, job_id: str, nightly_run: str) -> str:
        """Return the newest run of a nightly run that has a job. Raises UnknownNameError."""
        with self._database.reading() as connection:
            of = {"job": _job_row(connection, job_id), "nightly_run": values.clean(nightly_run)}
            found: str | None = connection.scalar(statement("jobs.run_of_nightly"), of)
        if found is None:
            raise UnknownNameError("nightly run", nightly_run, (), f"(none with this id has the job {job_id})")
        return found

    def jobs_of_run(self, run_id: str) -> list[RunJob]:
        """Return the jobs of a run, in their order."""
        with self._database.reading() as connection:
            rows = connection.execute(statement("jobs.of_run"), {"run": run_id}).all()
            latencies = _latencies(connection, [row.decisive_attempt_id for row in rows])
        return [_job_result(RunJob, row, latencies) for row in rows]

    def attempt_counts(self, since_ms: int) -> list[AttemptCount]:
        """Return the attempts of runs that started at `since_ms` or later (epoch, milliseconds), by label."""
        return [struct_of(AttemptCount, row) for row in self._rows("metrics.attempts", since_ms=since_ms)]

    def wear(self) -> list[Wear]:
        """Return the number of attempts of each device."""
        return [Wear(*row) for row in self._rows("metrics.wear")]


def _listed(connection: Connection, rows: Sequence[Row[Any]]) -> list[ListedRun]:
    """Return runs of rows of `run`."""
    if not rows:
        return []
    of = {"runs": [row.id for row in rows]}
    progress = {one.run_id: one for one in _progress(connection, of["runs"])}
    targets: dict[str, set[tuple[str, str]]] = {}
    for run_id, soc, suite in connection.execute(statement("browse.targets"), of):
        targets.setdefault(run_id, set()).add((soc, suite))
    files = {row.run_id: row.files for row in connection.execute(statement("browse.file_counts"), of)}
    return [
        struct_of(
            ListedRun,
            row,
            **values.run_facts(row),
            socs=sorted({soc for soc, _ in targets.get(row.id, ())}),
            suites=sorted({suite for _, suite in targets.get(row.id, ())}),
            files=files.get(row.id, 0),
            progress=progress[row.id],
        )
        for row in rows
    ]


def _conditions(wanted: RunFilter) -> list[ColumnElement[bool]]:
    run, job = schema.run.c, schema.job.c
    named = (
        (run.run_commit, wanted.commit),
        (run.run_toolchain, wanted.toolchain),
        (run.host, wanted.host or None),
        (run.user_name, wanted.user or None),
    )
    found: list[ColumnElement[bool]] = [column == values.clean(name) for column, name in named if name is not None]
    if wanted.purpose:
        is_nightly = run.priority == Purpose.NIGHTLY
        others = {Purpose.LOCAL: run.run_private, Purpose.MANUAL: ~run.run_private}
        found.append(is_nightly if wanted.purpose == Purpose.NIGHTLY else ~is_nightly & others[Purpose(wanted.purpose)])
    if wanted.branch:
        names = [wanted.branch] if wanted.branch != values.branch_text("") else ["", wanted.branch]
        found.append(run.run_branch.in_(map(values.clean, names)) & ~run.run_private)
    if wanted.soc or wanted.suite:
        of = [
            column == values.clean(name) for column, name in ((job.soc, wanted.soc), (job.suite, wanted.suite)) if name
        ]
        planned = select(schema.run_job.c.id).join(schema.job).where(schema.run_job.c.run_id == run.id, *of)
        found.append(planned.exists())
    states = {
        "unfinished": run.finished_ms.is_(None),
        "passed": run.exit_code == _PASSED,
        "failed": run.exit_code == _FAILED,
        "other": run.exit_code.not_in((_PASSED, _FAILED)),
    }
    return [*found, states[wanted.state]] if wanted.state else found


def _progress(connection: Connection, run_ids: Sequence[str]) -> list[Progress]:
    """Return how far runs are, in their order."""
    if not run_ids:
        return []
    of = {"runs": run_ids}
    # Ends are read before results: a run that ends meanwhile must not have an end without its last results.
    planned = connection.execute(statement("browse.planned"), of).all()
    counts: dict[str, dict[str, int]] = {}
    last: dict[str, int] = {}
    for run_id, outcome, count, recorded_ms in connection.execute(statement("browse.outcomes"), of):
        counts.setdefault(run_id, {})[outcome] = count
        last[run_id] = max(last.get(run_id, 0), recorded_ms)
    found = {
        row.run_id: struct_of(
            Progress,
            row,
            skipped=row.skipped_jobs,
            counts=dict(sorted(counts.get(row.run_id, {}).items())),
            last_ms=last.get(row.run_id, 0),
        )
        for row in planned
    }
    return [found[run_id] for run_id in run_ids]


def _job_result(kind: type[_Result], row: Row[Any], latencies: Mapping[int, float]) -> _Result:
    latency_ns = latencies.get(row.decisive_attempt_id)
    return struct_of(kind, row, outcome=_outcome(row), reason=_reason(row), latency_ns=latency_ns)


def _job_row(connection: Connection, job_id: str) -> int:
    found: int | None = connection.scalar(statement("jobs.row"), {"name": values.clean(job_id, values.JOB_LIMIT)})
    if found is None:
        raise UnknownNameError("job", job_id, (), "(its id is SUITE/CASE[SOC-BACKEND-PRECISION])")
    return found


def _outcome(row: Any) -> str:
    if not row.verdict:
        return "skipped" if row.skipped else "not_run"
    return "known" if row.verdict == "failed" and row.known_issue else str(row.verdict)


def _reason(row: Any) -> str:
    return str(row.reason or (row.skipped or {}).get("reason", ""))


def _latencies(connection: Connection, attempts: Collection[int | None]) -> dict[int, float]:
    """Return the median latencies of these attempts, by attempt id."""
    known = [one for one in attempts if one is not None]
    return {row.attempt_id: row.p50 for row in in_parts(connection, statement("browse.latencies"), known)}

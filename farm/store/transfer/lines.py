"""The layout of runs as lines of JSON (docs/reference/exports.md): bytes <-> what a line says. Pure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from farm.base.text import plain_json, reason_line
from farm.results.attempt import Attempt, Comparison, LayerComparison, OperatorProfile
from farm.store import values
from farm.store.attempt_fields import ATTEMPT_FIELDS, attempt_of
from farm.store.records import ArtifactRecord
from farm.store.transfer.line_parts import (
    FACTS_LIMIT,
    ArtifactLine,
    Code,
    ComparisonLine,
    Counts,
    DeviceLine,
    JobName,
    Kind,
    LayerLine,
    MeasurementLine,
    Name,
    OperatorLine,
    Row,
    RunId,
    Sha256,
    ShortWord,
    StaleLine,
    ToolchainLine,
    Word,
    all_of,
    require_printable,
)
from farm.store.values import Count, Key, LongText, Seconds, Text, Time
from farm.suites.suite import Case, Job, Target

if TYPE_CHECKING:
    from collections.abc import Mapping

LAYOUT = 3
"""Version of the layout: a greater one is refused. The first with names of outputs."""
SECOND_LAYOUT = 2
"""First layout with toolchains, names and nights of runs, hashes of programs, and counters without a direction."""
FIRST_LAYOUT = 1
"""That of runs of which nothing is said that it has no words for: an older farm reads them."""
LINE_LIMIT = 2**26
"""Greatest length of a line in bytes: of an attempt with all that the store keeps of one, and three million samples."""
_MOST_COMMAS = 2**22
"""In a line, which bounds its values: one takes up to 40 bytes of memory for each that it has in the file."""


class Head(Row, frozen=True, tag_field="kind", tag="farm-export"):
    """What an export begins with."""

    layout: Annotated[int, Meta(ge=1, le=LAYOUT)]
    farm: Word
    """Version of the farm that wrote it."""


class RunLine(Row, frozen=True, tag_field="kind", tag="run"):
    """A run; its jobs follow, then its attempts."""

    id: RunId
    command: LongText
    user: Text
    host: Text
    priority: Annotated[str, Meta(pattern=r"\A[a-z]{1,16}\Z")]
    started_ms: Time
    finished_ms: Time | None
    exit_code: Code | None
    fingerprint: Annotated[dict[Text, Text], Meta(max_length=FACTS_LIMIT)]
    devices: Annotated[tuple[DeviceLine, ...], Meta(max_length=100_000)]
    jobs: Count
    """Lines of jobs that follow."""
    attempts: Count
    """Lines of attempts that follow those."""
    toolchain: ToolchainLine | None = None
    name: Name | None = None
    night: Word | None = None
    """The id of the night that it is a cell of."""

    def __post_init__(self) -> None:
        require_printable(self.user, self.host, self.name or "", self.night or "")
        if not self.id.startswith(values.run_id_time(self.started_ms)):
            raise ValueError(f"the id {self.id} does not name the time at which it began")


class JobLine(Row, frozen=True, tag_field="kind", tag="job"):
    """A job that a run was to do."""

    id: JobName
    suite: Word
    case: JobName
    module: LongText
    version: Sha256
    """Of the case."""
    soc: Word
    backend: Kind
    precision: ShortWord
    options: Annotated[dict[Name, Name], Meta(max_length=FACTS_LIMIT)]
    position: Count
    build_seconds: Seconds | None
    cached: bool | None
    bundle_key: Key | None
    fallback_ops: Counts | None
    operators: Counts | None
    judged_by: Sha256 | None
    stale: StaleLine | None
    program_hash: Sha256 | None = None

    def __post_init__(self) -> None:
        require_printable(self.id, self.module, *(self.fallback_ops or ()), *(self.operators or ()))
        if self.job.id != self.id:
            raise ValueError(f"suite, case and target make the job {self.job.id!r}, not {self.id!r}")

    @property
    def job(self) -> Job:
        """The job, as far as the store knows it."""
        target = Target(self.soc, self.backend, self.precision, tuple(self.options.items()))
        return Job(Case(self.suite, self.case, module=self.module, inputs=()), target)

    @property
    def row(self) -> dict[str, Any]:
        """What a row of `run_job` has of it and need not have."""
        names = ("build_seconds", "cached", "bundle_key", "fallback_ops", "operators", "judged_by", "program_hash")
        stale = None if self.stale is None else msgspec.to_builtins(self.stale)
        # A column that is left out is NULL; None in a column of JSON would be JSON's null.
        row = {**{name: getattr(self, name) for name in names}, "stale": stale}
        return {name: value for name, value in row.items() if value is not None}


class _Executed(Row, frozen=True):
    """Job of an attempt, and its device."""

    job: JobName
    device: Count | None
    """Place among the devices of the run, from 0."""


if TYPE_CHECKING:
    _AttemptColumns = _Executed
else:
    _columns = [field.line for field in ATTEMPT_FIELDS.values()]
    _AttemptColumns = msgspec.defstruct("_AttemptColumns", _columns, bases=(_Executed,), frozen=True)


class AttemptLine(_AttemptColumns, kw_only=True, frozen=True, tag_field="kind", tag="attempt"):
    """One execution of a job."""

    recorded_ms: Time
    digest: Sha256 | None
    """By which an attempt that is offered twice is known."""
    comparisons: Annotated[tuple[ComparisonLine, ...], Meta(max_length=100_000)]
    measurements: Annotated[tuple[MeasurementLine, ...], Meta(max_length=100_000)]
    operators: Annotated[tuple[OperatorLine, ...], Meta(max_length=values.OPERATORS_LIMIT)]
    layers: Annotated[tuple[LayerLine, ...], Meta(max_length=values.LAYERS_LIMIT)]
    artifacts: Annotated[tuple[ArtifactLine, ...], Meta(max_length=100_000)]

    def attempt(self, devices: tuple[DeviceLine, ...]) -> Attempt:
        """Return the attempt, on one of the devices of its run."""
        return attempt_of(
            msgspec.structs.asdict(self),
            self.job,
            None if self.device is None else devices[self.device].serial,
            comparisons=all_of(Comparison, self.comparisons),
            measurements=tuple(line.measurement for line in self.measurements),
            operators=all_of(OperatorProfile, self.operators),
            layers=all_of(LayerComparison, self.layers),
        )

    @property
    def kept(self) -> tuple[ArtifactRecord, ...]:
        """The files that were kept of it."""
        return all_of(ArtifactRecord, self.artifacts)


_NEWER = frozenset({"toolchain", "program_hash", "name", "night"})
"""What lines have since layout 2, where there is something to say."""

Line = Head | RunLine | JobLine | AttemptLine


def encode(kind: type[msgspec.Struct], facts: Mapping[str, Any]) -> bytes:
    """Return the line of a kind that tells `facts`, without its end. Floats have as many digits as tell them apart."""
    builtins = msgspec.to_builtins({name: facts[name] for name in kind.__struct_fields__})
    # An older farm does not know them.
    builtins = {name: value for name, value in builtins.items() if name not in _NEWER or value is not None}
    for comparison in builtins.get("comparisons", ()):
        if not comparison["name"]:
            del comparison["name"]
    row = {
        name: _column(value) if name != "measurements" else values.jsonable(value) for name, value in builtins.items()
    }
    if "fingerprint" in row:
        row["fingerprint"] = dict(sorted(row["fingerprint"].items()))
    # Somebody may look at it in a terminal.
    return plain_json(msgspec.json.encode({"kind": kind.__struct_config__.tag, **row}))


def decode(data: bytes) -> Line:
    """Return what a line says. Raises ValueError, in one line, for what is none, or says what cannot be."""
    if len(data) > LINE_LIMIT:
        raise ValueError(
            f"has more than {LINE_LIMIT >> 20} MiB, more than any line of an export: is a line end missing?"
        )
    if data.count(b",") > _MOST_COMMAS:
        raise ValueError(f"has more than {_MOST_COMMAS:,} values, more than any line of an export")
    try:
        line: Line = msgspec.json.decode(data, type=Line)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        _refuse_newer(data)
        hint = ": update farm if a newer one wrote it" if "unknown field" in str(error) else ""
        raise ValueError(reason_line(f"{error}{hint}")) from None
    return line


def canonical(line: Line) -> bytes:
    """Return a line as an export has it, however it was written."""
    facts = msgspec.structs.asdict(line)
    if isinstance(line, AttemptLine):
        facts["measurements"] = [measured.measurement for measured in line.measurements]
    return encode(type(line), facts)


class _AnyHead(msgspec.Struct, frozen=True, tag_field="kind", tag="farm-export"):
    layout: int


def _refuse_newer(data: bytes) -> None:
    # A newer head may say more than this one knows.
    try:
        layout = msgspec.json.decode(data, type=_AnyHead).layout
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return
    if layout > LAYOUT:
        raise ValueError(f"is of a newer farm (layout {layout}, this one knows {LAYOUT}): update farm")


def _column(value: Any) -> Any:
    """Return what columns hold as JSON. SQLite knows one zero, and two stores have to say the same of a run."""
    if isinstance(value, float):
        return value + 0.0 if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {name: _column(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_column(item) for item in value]
    return value

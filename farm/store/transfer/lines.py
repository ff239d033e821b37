"""Layout of runs as lines of JSON (docs/reference/exports.md): bytes <-> decoded lines. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
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
    SkippedLine,
    ToolchainLine,
    Word,
    all_of,
    require_printable,
)
from farm.store.values import Count, Key, LongText, Seconds, Text, Time
from farm.suites.suite import Case, Job, Target

LAYOUT = 4
"""Version of the layout. Newer versions are refused; lines of older ones have other names of members, in `_RENAMED`."""
_RENAMED_IN = 4
LINE_LIMIT = 2**26
"""Most bytes of a line: room for an attempt at all limits of the store, with three million samples."""
_MOST_COMMAS = 2**22
"""Most commas of a line, a bound on its values: each byte of a value in the file takes up to 40 bytes of memory."""


class Head(Row, frozen=True, tag_field="kind", tag="farm-export"):
    """First line of an export."""

    layout: Annotated[int, Meta(ge=1, le=LAYOUT)]
    farm: Word
    """Version of the farm that wrote the export."""


class RunLine(Row, frozen=True, tag_field="kind", tag="run"):
    """Run; the lines of its jobs follow, then of its attempts."""

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
    """Number of following lines of jobs."""
    attempts: Count
    """Number of following lines of attempts, after the jobs."""
    toolchain: ToolchainLine | None = None
    name: Name | None = None
    nightly_run: Word | None = None
    """Id of the nightly run of which this run is a cell."""

    def __post_init__(self) -> None:
        require_printable(self.user, self.host, self.name or "", self.nightly_run or "")
        if not self.id.startswith(values.run_id_time(self.started_ms)):
            raise ValueError(f"the id {self.id} does not name the time at which it began")


class JobLine(Row, frozen=True, tag_field="kind", tag="job"):
    """Planned job of a run."""

    id: JobName
    suite: Word
    case: JobName
    module: LongText
    version: Sha256
    """Version of the case."""
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
    skipped: SkippedLine | None
    program_hash: Sha256 | None = None

    def __post_init__(self) -> None:
        require_printable(self.id, self.module, *(self.fallback_ops or ()), *(self.operators or ()))
        if self.job.id != self.id:
            raise ValueError(f"suite, case and target make the job {self.job.id!r}, not {self.id!r}")

    @property
    def job(self) -> Job:
        """Job with the fields that the store has."""
        target = Target(self.soc, self.backend, self.precision, tuple(self.options.items()))
        return Job(Case(self.suite, self.case, module=self.module, inputs=()), target)

    @property
    def row(self) -> dict[str, Any]:
        """Nullable columns of `run_job` with a value."""
        names = ("build_seconds", "cached", "bundle_key", "fallback_ops", "operators", "judged_by", "program_hash")
        skipped = None if self.skipped is None else msgspec.to_builtins(self.skipped)
        # An omitted column is NULL; None in a column of JSON would be JSON's null.
        row = {**{name: getattr(self, name) for name in names}, "skipped": skipped}
        return {name: value for name, value in row.items() if value is not None}


class _Executed(Row, frozen=True):
    """Job of an attempt, and its device."""

    job: JobName
    device: Count | None
    """Index of the device in the run's devices, from 0."""


if TYPE_CHECKING:
    _AttemptColumns = _Executed
else:
    _columns = [field.line for field in ATTEMPT_FIELDS.values()]
    _AttemptColumns = msgspec.defstruct("_AttemptColumns", _columns, bases=(_Executed,), frozen=True)


class AttemptLine(_AttemptColumns, kw_only=True, frozen=True, tag_field="kind", tag="attempt"):
    """Attempt: one execution of a job."""

    recorded_ms: Time
    digest: Sha256 | None
    """Hash of the attempt, by which the store recognizes a second copy."""
    comparisons: Annotated[tuple[ComparisonLine, ...], Meta(max_length=100_000)]
    measurements: Annotated[tuple[MeasurementLine, ...], Meta(max_length=100_000)]
    operators: Annotated[tuple[OperatorLine, ...], Meta(max_length=values.OPERATORS_LIMIT)]
    layers: Annotated[tuple[LayerLine, ...], Meta(max_length=values.LAYERS_LIMIT)]
    artifacts: Annotated[tuple[ArtifactLine, ...], Meta(max_length=100_000)]

    def attempt(self, devices: tuple[DeviceLine, ...]) -> Attempt:
        """Return the attempt on its device among `devices`, the devices of its run."""
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
        """Artifacts of the attempt."""
        return all_of(ArtifactRecord, self.artifacts)


_OPTIONAL = frozenset({"toolchain", "program_hash", "name", "nightly_run"})
"""Members that lines without a value leave out."""
_RENAMED = {"night": "nightly_run", "stale": "skipped"}
"""Members of runs and jobs in layouts before `_RENAMED_IN`."""
_RENAMED_OF_TOOLCHAIN = {"branch": "git_branch", "line": "branch"}
"""Members of a run's toolchain in these layouts."""

Line = Head | RunLine | JobLine | AttemptLine


def encode(kind: type[msgspec.Struct], facts: Mapping[str, Any]) -> bytes:
    """Return `facts` as a line of a kind, without the line end. Floats keep all their significant digits."""
    builtins = msgspec.to_builtins({name: facts[name] for name in kind.__struct_fields__})
    builtins = {name: value for name, value in builtins.items() if name not in _OPTIONAL or value is not None}
    for comparison in builtins.get("comparisons", ()):
        if not comparison["name"]:
            del comparison["name"]
    row = {
        name: _column(value) if name != "measurements" else values.jsonable(value) for name, value in builtins.items()
    }
    if "fingerprint" in row:
        row["fingerprint"] = dict(sorted(row["fingerprint"].items()))
    # Control characters are escaped, because users look at exports in a terminal.
    return plain_json(msgspec.json.encode({"kind": kind.__struct_config__.tag, **row}))


def decode(data: bytes, layout: int = LAYOUT) -> Line:
    """Return a decoded line of a layout. Raises ValueError, with a message of one line, for an invalid line."""
    if len(data) > LINE_LIMIT:
        raise ValueError(
            f"has more than {LINE_LIMIT >> 20} MiB, more than any line of an export: is a line end missing?"
        )
    if data.count(b",") > _MOST_COMMAS:
        raise ValueError(f"has more than {_MOST_COMMAS:,} values, more than any line of an export")
    try:
        line: Line = msgspec.json.decode(data if layout >= _RENAMED_IN else _renamed(data), type=Line)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        _refuse_newer(data)
        hint = ": update farm if a newer one wrote it" if "unknown field" in str(error) else ""
        raise ValueError(reason_line(f"{error}{hint}")) from None
    return line


def canonical(line: Line) -> bytes:
    """Return a line in the form of an export, independent of its spelling in the file."""
    facts = msgspec.structs.asdict(line)
    if isinstance(line, AttemptLine):
        facts["measurements"] = [measured.measurement for measured in line.measurements]
    return encode(type(line), facts)


class _AnyLine(msgspec.Struct, frozen=True):
    kind: Any = None


def _renamed(data: bytes) -> bytes:
    """Return a line of an older layout with the names of today. Lines of attempts, the long ones, stay as they are."""
    if msgspec.json.decode(data, type=_AnyLine).kind not in {"run", "job"}:
        return data
    row = {_RENAMED.get(name, name): value for name, value in msgspec.json.decode(data).items()}
    if isinstance(toolchain := row.get("toolchain"), dict):
        row["toolchain"] = {_RENAMED_OF_TOOLCHAIN.get(name, name): value for name, value in toolchain.items()}
    return msgspec.json.encode(row)


class _AnyHead(msgspec.Struct, frozen=True, tag_field="kind", tag="farm-export"):
    layout: int


def _refuse_newer(data: bytes) -> None:
    # A newer head may have further fields: only its layout is decoded.
    try:
        layout = msgspec.json.decode(data, type=_AnyHead).layout
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return
    if layout > LAYOUT:
        raise ValueError(f"is of a newer farm (layout {layout}, this one knows {LAYOUT}): update farm")


def _column(value: Any) -> Any:
    """Return a column's value for JSON. Negative zero becomes zero, as in SQLite: all stores export a run alike."""
    if isinstance(value, float):
        return value + 0.0 if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {name: _column(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_column(item) for item in value]
    return value

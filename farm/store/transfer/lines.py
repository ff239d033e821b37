"""Layout of runs as lines of JSON (docs/reference/exports.md): bytes <-> decoded lines. Pure.

The types have the bounds of the store, so that no other content gets in.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from farm.base.forms import RUN_ID
from farm.base.text import plain_json, reason_line
from farm.results.attempt import Attempt, Comparison, Direction, LayerComparison, Measurement, OperatorProfile
from farm.store import values
from farm.store.attempt_fields import ATTEMPT_FIELDS, DETAIL_FIELDS, attempt_of
from farm.store.records import ArtifactRecord, RunRecord, RunToolchain
from farm.store.values import COMMITS_LIMIT, Count, Int64, Key, LongText, NotFinite, Seconds, Text, Time
from farm.suites.figures import counter_of
from farm.suites.suite import Case, Job, Target

_T = TypeVar("_T")

Name = Annotated[str, Meta(max_length=values.NAME_LIMIT)]
Word = Annotated[str, Meta(max_length=values.SOC_LIMIT)]
ShortWord = Annotated[str, Meta(max_length=values.UNIT_LIMIT)]
Kind = Annotated[str, Meta(max_length=values.KIND_LIMIT)]
Metric = Annotated[str, Meta(max_length=values.METRIC_LIMIT)]
JobName = Annotated[str, Meta(max_length=values.JOB_LIMIT)]
RunId = Annotated[str, Meta(pattern=rf"\A{RUN_ID}\Z")]
Sha256 = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
Code = Annotated[int, Meta(ge=-(2**31), lt=2**31)]
# Bound far beyond the operators of a program and the facts of a toolchain.
FACTS_LIMIT = 10_000
Counts = Annotated[dict[Text, Count], Meta(max_length=FACTS_LIMIT)]
Size = Annotated[int, Meta(ge=0, le=2**63 - 1)]


# Members with text of programs and people, which may have any characters.
_FREE_TEXTS = frozenset({"command", "commit_url", "known_issue", "log", "reason"})


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Part of a line; unknown fields are refused, and names that cannot be printed."""

    def __post_init__(self) -> None:
        texts = (getattr(self, name) for name in self.__struct_fields__ if name not in _FREE_TEXTS)
        require_printable(*(text for text in texts if isinstance(text, str)))


class DeviceLine(Row, frozen=True):
    """Device of a run."""

    serial: Name
    soc: Word
    kind: Literal["virtual", "hardware", "unknown"]
    build: Name
    runtime: Annotated[dict[Word, Text], Meta(max_length=100)] = {}
    """Versions of its runtime."""

    def __post_init__(self) -> None:
        Row.__post_init__(self)
        require_printable(*self.runtime, *self.runtime.values())


class CommitLine(Row, frozen=True):
    """Commit with its subject."""

    hash: Word
    subject: Name


class ToolchainLine(Row, frozen=True, omit_defaults=True):
    """Toolchain of a run, as `farm.store.records.RunToolchain`."""

    name: Name = ""
    branch: Name = ""
    private: bool = False
    commit: Word = ""
    dirty: bool = False
    git_branch: Name = ""
    subject: Name = ""
    committed_ms: Time = 0
    before: Word = ""
    since: Annotated[tuple[CommitLine, ...], Meta(max_length=COMMITS_LIMIT)] = ()
    more: Count = 0
    commit_url: Text = ""

    @property
    def toolchain(self) -> RunToolchain:
        """Toolchain in the form of the store."""
        return msgspec.convert(msgspec.to_builtins(self), RunToolchain)


class SkippedLine(Row, frozen=True):
    """Reason to skip a job, as `farm.store.records.SkipReason`."""

    reason: Text
    last_ms: Time
    last_outcome: Word
    last_run_id: Word


class MeasurementLine(Row, frozen=True):
    """Metric with all its samples."""

    metric: Metric
    unit: ShortWord
    direction: Direction
    samples: tuple[Int64 | float | NotFinite, ...]
    exact: bool

    @property
    def measurement(self) -> Measurement:
        """Measurement with integer samples for the store's integer columns, else with floats."""
        samples = tuple(number(sample) for sample in self.samples)
        # Older farms recorded some counters with a direction, or as exact: the definition of today keeps one series.
        counter = counter_of(self.metric) if self.exact else None
        exact = self.exact and (counter is None or counter.exact)
        integers = values.as_integers(samples) if exact else None
        kept = tuple(map(float, samples)) if integers is None else tuple(integers)
        direction = counter.direction if counter is not None else self.direction
        return Measurement(self.metric, self.unit, direction, kept, exact)


class ArtifactLine(Row, frozen=True):
    """Artifact without its content."""

    sha256: Sha256
    size: Size
    kind: Word


def number(value: Any) -> Any:
    """Return the float of a `NotFinite` string; any other value unchanged."""
    return float(value) if isinstance(value, NotFinite) else value


def all_of(kind: type[_T], lines: Iterable[msgspec.Struct]) -> tuple[_T, ...]:
    """Return lines converted to `kind`, which has the same fields."""
    return tuple(
        kind(**{name: number(value) for name, value in msgspec.structs.asdict(line).items()}) for line in lines
    )


def require_printable(*names: str) -> None:
    """Raise ValueError for a name with control characters for terminals or characters that change the reading order.

    This is no pattern of a constraint because `re` has no class for Unicode's printable characters.
    """
    for name in names:
        if not name.isprintable():
            raise ValueError(f"{ascii(name)[:80]} has characters that cannot be printed")


def _line_of(kind: type[msgspec.Struct]) -> type[msgspec.Struct]:
    """Return the type of the part of a line with the fields of a struct of details."""
    return msgspec.defstruct(
        f"{kind.__name__}Line",
        [field.line for field in DETAIL_FIELDS[kind].values()],
        bases=(Row,),
        frozen=True,
        omit_defaults=kind.__struct_config__.omit_defaults,
    )


if TYPE_CHECKING:
    ComparisonLine = Row
    OperatorLine = Row
    LayerLine = Row
else:
    ComparisonLine, OperatorLine, LayerLine = map(_line_of, (Comparison, OperatorProfile, LayerComparison))


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
        Row.__post_init__(self)
        if not self.id.startswith(values.run_id_time(self.started_ms)):
            raise ValueError(f"the id {self.id} does not name the time at which it began")

    @property
    def record(self) -> RunRecord:
        """Run in the form of the store, without its end."""
        texts = ("command", "user", "host", "priority", "name", "nightly_run")
        facts = {name: getattr(self, name) or "" for name in texts}
        toolchain = RunToolchain() if self.toolchain is None else self.toolchain.toolchain
        return RunRecord(fingerprint=self.fingerprint, started_ms=self.started_ms, toolchain=toolchain, **facts)


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
        Row.__post_init__(self)
        require_printable(*(self.fallback_ops or ()), *(self.operators or ()))
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
    # Columns have one zero, as in SQLite: all stores export a run alike. Samples are bytes there.
    row = {name: values.jsonable(value, one_zero=name != "measurements") for name, value in builtins.items()}
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

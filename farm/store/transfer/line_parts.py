"""Parts of the lines of a run: types with the bounds of the store, so that no other content gets in. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from farm.base.ids import RUN_ID
from farm.results.attempt import Comparison, Direction, LayerComparison, Measurement, OperatorProfile
from farm.store import values
from farm.store.attempt_fields import DETAIL_FIELDS
from farm.store.toolchains import COMMITS_LIMIT
from farm.store.values import Count, Int64, NotFinite, Text, Time
from farm.store.view import RunToolchain
from farm.suites.figures import counter_of

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


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Part of a line; unknown fields are refused."""


class DeviceLine(Row, frozen=True):
    """Device of a run."""

    serial: Name
    soc: Word
    kind: Literal["virtual", "hardware", "unknown"]
    build: Name
    runtime: Annotated[dict[Word, Text], Meta(max_length=100)] = {}
    """Versions of its runtime."""

    def __post_init__(self) -> None:
        require_printable(self.serial, self.soc, self.build, *self.runtime, *self.runtime.values())


class CommitLine(Row, frozen=True):
    """Commit with its subject."""

    hash: Word
    subject: Name


class ToolchainLine(Row, frozen=True, omit_defaults=True):
    """Toolchain of a run, as `farm.store.view.RunToolchain`."""

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

    def __post_init__(self) -> None:
        texts = (one.subject for one in self.since)
        hashes = (one.hash for one in self.since)
        require_printable(
            self.name, self.branch, self.commit, self.git_branch, self.subject, self.before, *texts, *hashes
        )

    @property
    def toolchain(self) -> RunToolchain:
        """Toolchain in the form of the store."""
        return msgspec.convert(msgspec.to_builtins(self), RunToolchain)


class SkippedLine(Row, frozen=True):
    """Reason to skip a job, as `farm.store.view.SkipReason`."""

    reason: Text
    last_ms: Time
    last_outcome: Word
    last_run_id: Word

    def __post_init__(self) -> None:
        require_printable(self.last_outcome, self.last_run_id)


class MeasurementLine(Row, frozen=True):
    """Metric with all its samples."""

    metric: Metric
    unit: ShortWord
    direction: Direction
    samples: tuple[Int64 | float | NotFinite, ...]
    exact: bool

    def __post_init__(self) -> None:
        require_printable(self.metric, self.unit)

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

    def __post_init__(self) -> None:
        require_printable(self.kind)


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


def _require_printable_texts(line: msgspec.Struct) -> None:
    require_printable(*(text for text in msgspec.structs.astuple(line) if isinstance(text, str)))


def _line_of(kind: type[msgspec.Struct]) -> type[msgspec.Struct]:
    """Return the type of the part of a line with the fields of a struct of details."""
    return msgspec.defstruct(
        f"{kind.__name__}Line",
        [field.line for field in DETAIL_FIELDS[kind].values()],
        bases=(Row,),
        namespace={"__post_init__": _require_printable_texts},
        frozen=True,
        omit_defaults=kind.__struct_config__.omit_defaults,
    )


if TYPE_CHECKING:
    ComparisonLine = Row
    OperatorLine = Row
    LayerLine = Row
else:
    ComparisonLine, OperatorLine, LayerLine = map(_line_of, (Comparison, OperatorProfile, LayerComparison))

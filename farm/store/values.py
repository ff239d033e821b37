"""Conversion of values for columns and back: text, samples, statistics, hashes, toolchains of runs. Pure."""

from __future__ import annotations

import hashlib
import math
import struct
import time
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import UNSET, Meta

from farm.store.records import Purpose, RunCommit, RunToolchain
from farm.suites.figures import figure_of, series_value

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sqlalchemy import Row

    from farm.results.attempt import Attempt
    from farm.suites.suite import Case, Job


# Conversion of values for columns and back: bounded text, samples as bytes, statistics, hashes. Pure.


# Bounds against long texts from devices and users, far beyond the texts of farm itself.
REASON_LIMIT = 4_000
LOG_LIMIT = 256 * 1024
NOTES_LIMIT = 200
OPERATORS_LIMIT = 10_000
LAYERS_LIMIT = 30_000
# Widths of the columns: PostgreSQL refuses longer texts.
NAME_LIMIT = 256
JOB_LIMIT = 512
KEY_LIMIT = 128
METRIC_LIMIT = 128
CASE_LIMIT = 64
SOC_LIMIT = 64
UNIT_LIMIT = 32
KIND_LIMIT = 16

# Types of lines of exports. PostgreSQL has no NUL in text. Each character of a log may be spelled out with six.
_NO_NUL = r"\A[^\0]*\Z"
Text = Annotated[str, Meta(max_length=REASON_LIMIT, pattern=_NO_NUL)]
LongText = Annotated[str, Meta(max_length=6 * LOG_LIMIT + 100, pattern=_NO_NUL)]
# Part of the path of a bundle.
Key = Annotated[str, Meta(max_length=KEY_LIMIT, pattern=r"\A[0-9A-Za-z_-]*\Z")]
Count = Annotated[int, Meta(ge=0, lt=2**31)]
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
# The bound is the end of the year 9999, which every calendar library can represent.
Time = Annotated[int, Meta(ge=0, lt=253_402_300_800_000)]
Seconds = Annotated[float, Meta(ge=0, le=1e12)]


class NotFinite(StrEnum):
    """Numbers that JSON cannot represent, as strings."""

    INF = "inf"
    MINUS_INF = "-inf"
    NAN = "nan"


Number = float | NotFinite

_INT64 = range(-(2**63), 2**63)


def clean(text: str, limit: int = REASON_LIMIT) -> str:
    """Return `text` in characters that both databases hold, cut off after `limit` characters.

    PostgreSQL has no NUL in text, and UTF-8 no lone surrogates: both are spelled out.
    """
    text = storable(text[: limit + 1])
    return text if len(text) <= limit else text[: limit - 3] + "..."


def run_id_time(started_ms: int) -> str:
    """Return the first part of the id of a run: its start in UTC, to the second, so that ids sort by time."""
    return time.strftime("%Y%m%d-%H%M%S-", time.gmtime(started_ms // 1000))


def case_column(name: str) -> str:
    """Return the name of a case for its column; a longer name, for example of a test, is cut off and ends in its hash.

    The names of its jobs have it in full.
    """
    if len(name) <= CASE_LIMIT:
        return name
    return f"{name[: CASE_LIMIT - 17]}~{hashlib.sha256(name.encode()).hexdigest()[:16]}"


def case_of(job_name: str) -> str:
    """Return the name of the case from the name of a job, `suite/case[target]`."""
    return job_name.partition("/")[2].rpartition("[")[0]


def clean_log(text: str) -> str:
    """Return the end of a log, which usually has the reason, after a line with the number of omitted characters."""
    kept = storable(text[-LOG_LIMIT:])
    left_out = len(text) - LOG_LIMIT
    return f"[{left_out} characters left out]\n{kept}" if left_out > 0 else kept


def storable(text: str) -> str:
    """Return `text` without NUL and lone surrogates, in any length."""
    return text.replace("\0", "\u2400").encode("utf-8", "backslashreplace").decode()


def jsonable(value: Any, *, one_zero: bool = False) -> Any:
    """Return builtins for JSON: numbers that are not finite become the strings `inf`, `-inf` and `nan`.

    Lone surrogates are spelled out. With `one_zero` negative zero becomes zero.
    """
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, float) and one_zero:
        return value + 0.0
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {jsonable(key): jsonable(item, one_zero=one_zero) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(item, one_zero=one_zero) for item in value]
    return value


def pack_floats(samples: Sequence[float]) -> bytes:
    """Return samples as little-endian float64, which holds NaN and infinity in both databases."""
    return struct.pack(f"<{len(samples)}d", *samples)


def unpack_floats(blob: bytes) -> tuple[float, ...]:
    """Return the samples packed by `pack_floats`."""
    return struct.unpack(f"<{len(blob) // 8}d", blob)


def level_of(metric: str, median: float | None, samples: bytes | None) -> float | None:
    """Return the value of a row in its series: the deciding sample of a figure, else the median; None for NaN."""
    if samples is None or figure_of(metric) is None:
        return median
    value = series_value(metric, unpack_floats(samples))
    return None if value is None or math.isnan(value) else value


def as_integers(samples: Sequence[float]) -> list[int] | None:
    """Return samples as int64 values, so that a count keeps its last digit; None for no samples or other numbers."""
    if not samples or not all(isinstance(value, int) or value.is_integer() for value in samples):
        return None
    integers = [int(value) for value in samples]
    return integers if all(value in _INT64 for value in integers) else None


def pack_integers(samples: Sequence[int]) -> bytes:
    """Return samples as little-endian int64."""
    return struct.pack(f"<{len(samples)}q", *samples)


def unpack_integers(blob: bytes) -> tuple[int, ...]:
    """Return the samples packed by `pack_integers`."""
    return struct.unpack(f"<{len(blob) // 8}q", blob)


STATISTICS = ("min", "p10", "p50", "p90", "p99", "mean", "mad")
"""Columns of a measurement about its samples; mad is their median absolute deviation."""


def statistics_of(samples: Sequence[float]) -> dict[str, float | None]:
    """Return the STATISTICS of `samples`, by column.

    Percentiles are interpolated linearly, as in numpy. A statistic is None if it would be NaN, for lack of samples, a
    NaN sample or cancelling infinities: SQLite has no NaN.
    """
    if not samples or any(math.isnan(value) for value in samples):
        return dict.fromkeys(STATISTICS)
    ordered = sorted(map(float, samples))
    median = _percentile(ordered, 0.5)
    deviations = [abs(value - median) for value in ordered]
    percentiles = (_percentile(ordered, share) for share in (0.1, 0.5, 0.9, 0.99))
    mad = math.nan if any(map(math.isnan, deviations)) else _percentile(sorted(deviations), 0.5)
    found = zip(STATISTICS, (ordered[0], *percentiles, _mean(ordered), mad), strict=True)
    return {name: None if math.isnan(value) else value for name, value in found}


def _percentile(ordered: Sequence[float], share: float) -> float:
    position = share * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    if position == below or ordered[below] == ordered[above]:
        # The formula below would make NaN of 0 times infinity.
        return ordered[below]
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def _mean(ordered: Sequence[float]) -> float:
    if math.isinf(ordered[0]) or math.isinf(ordered[-1]):
        # fsum refuses infinities of both signs.
        return sum(ordered)
    try:
        return math.fsum(value / len(ordered) for value in ordered)
    except OverflowError:
        # All samples are within rounding of the largest float.
        return ordered[len(ordered) // 2]


def fingerprint_hash(facts: Mapping[str, str]) -> str:
    """Return a hash of a fingerprint, equal for equal fingerprints."""
    return hash_of(dict(facts))


def case_version(case: Case, source: str) -> str:
    """Return a hash of the inputs of a case's numbers: its definition, and its code and files (`source`).

    Tolerances and known issues are left out: they change the verdict on a number, not the number. A case that has to
    be deterministic is executed differently, and has another hash.
    """
    repeats = ("repeats",) if case.deterministic is True else ()
    return hash_of((case.definition, source, *repeats))


def judged_by(job: Job) -> str:
    """Return a hash of the inputs of a job's verdict besides its bundle, from limits to known issues."""
    case, target = job.case, job.target
    usual = (case.tolerance(target.precision), case.expectation_of_text(target), case.metrics, job.known_issue)
    # Named, and only where a case has them: hashes of other cases stay as in older farms.
    rare = {
        "deterministic": None if case.deterministic is None else str(case.deterministic),
        "on hardware": issue if (issue := case.known_issue(target, virtual=False)) != job.known_issue else None,
    }
    return hash_of((*usual, *((name, value) for name, value in rare.items() if value is not None)))


def attempt_digest(attempt: Attempt) -> str:
    """Return a hash of an attempt with all its numbers, infinite ones and NaN among them."""
    return hashlib.sha256(msgspec.msgpack.encode(attempt)).hexdigest()


def hash_of(value: Any) -> str:
    """Return a hash of anything that JSON can represent; the order of members does not count."""
    return hashlib.sha256(msgspec.json.encode(value, order="sorted")).hexdigest()


# Toolchain of a run <-> its columns, and the branch of a query. Pure.


COMMITS_LIMIT = 50
"""Most commits stored with a run; further ones are only counted."""
DEFAULT_BRANCH = "default"
"""Name of the branch without a name, in texts that need one."""

# Fields with a column of their own; the others are in `run_source`.
_COLUMNS = {
    "name": "run_toolchain",
    "branch": "run_branch",
    "private": "run_private",
    "commit": "run_commit",
    "dirty": "run_dirty",
}
_TEXTS = {
    **dict.fromkeys(("name", "branch", "git_branch", "subject"), NAME_LIMIT),
    **dict.fromkeys(("commit", "before"), SOC_LIMIT),
    "commit_url": REASON_LIMIT,
}


def toolchain_columns(toolchain: RunToolchain) -> dict[str, Any]:
    """Return the columns of a run's toolchain, with texts within the store's limits."""
    bounded = bounded_toolchain(toolchain)
    row = {column: getattr(bounded, name) for name, column in _COLUMNS.items()}
    rest = msgspec.to_builtins(bounded)
    return {**row, "run_source": {name: value for name, value in rest.items() if name not in _COLUMNS} or None}


def toolchain_of(row: Row[Any]) -> RunToolchain | msgspec.UnsetType:
    """Return the toolchain of a row of `run`, UNSET for the default one without further facts."""
    known = {name: getattr(row, column) for name, column in _COLUMNS.items()}
    found = msgspec.convert({**(row.run_source or {}), **known}, RunToolchain)
    return UNSET if found == RunToolchain() else found


def bounded_toolchain(toolchain: RunToolchain) -> RunToolchain:
    """Return `toolchain` with its texts and number of commits within the store's limits."""
    kept = toolchain.since[:COMMITS_LIMIT]
    return msgspec.structs.replace(
        toolchain,
        **{name: clean(getattr(toolchain, name), limit) for name, limit in _TEXTS.items()},
        since=tuple(RunCommit(clean(one.hash, SOC_LIMIT), clean(one.subject, NAME_LIMIT)) for one in kept),
        more=toolchain.more + len(toolchain.since) - len(kept),
    )


def run_facts(row: Row[Any]) -> dict[str, Any]:
    """Return the facts of a row of `run` that its records call otherwise, by the names of their fields."""
    by_hand = Purpose.LOCAL if row.run_private else Purpose.MANUAL
    return {
        "run_id": row.id,
        "user": row.user_name,
        "toolchain": toolchain_of(row),
        "name": row.run_name,
        "purpose": Purpose.NIGHTLY if row.priority == Purpose.NIGHTLY else by_hand,
        "began": row.run_began,
    }


def of_branch(branch: str | None) -> dict[str, Any]:
    """Return the parameters of a statement for one branch; None for every run, local runs as well."""
    return {"branch": branch or "", "any_branch": int(branch is None)}


def branch_text(branch: str) -> str:
    """Return the name of a branch for texts."""
    return branch or DEFAULT_BRANCH

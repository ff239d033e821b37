"""result.json, which the native runner writes on a device -> RunnerReport. Hostile: sizes and numbers are bounded."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

REPORT_LIMIT = 16 * 2**20
"""Greatest size of result.json, in bytes: a million iterations take about 10 MiB."""

_TEN_DAYS_NS = 10 * 24 * 3600 * 10**9

UNSUPPORTED: Final = "unsupported"
"""Stage of an error that farm found before it started a runner, which no other device would do either."""
ErrorStage = Literal["flags", "options", "load", "inputs", "execute", "outputs", "etdump", "unsupported"]
Duration = Annotated[int, Meta(gt=0, le=_TEN_DAYS_NS)]
"""Nanoseconds. A zero is refused as well: no clock that runs shows it, and it would be the best latency ever."""
Durations = Annotated[tuple[Duration, ...], Meta(max_length=1_000_000)]
Word = Annotated[str, Meta(max_length=256)]
Size = Annotated[int, Meta(ge=0, le=2**40)]


class ReportError(ValueError):
    """A result.json that cannot be believed."""


class RunnerError(msgspec.Struct, frozen=True):
    """Error that ended the runner."""

    stage: ErrorStage
    message: Annotated[str, Meta(max_length=65_536)]
    code: Annotated[int, Meta(ge=-(2**31), lt=2**32)] | None = None
    """ExecuTorch's error code, where one led to this."""
    line: Annotated[int, Meta(ge=0, le=2**31)] | None = None
    """Inference that failed, counted from 0."""


class RunnerTensor(msgspec.Struct, frozen=True):
    """Input or output of the loaded method."""

    shape: Annotated[tuple[Size, ...], Meta(max_length=32)]
    dtype: Word
    nbytes: Size

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


class Differing(msgspec.Struct, frozen=True):
    """Executions of a line whose outputs differ from its last ones, which are written."""

    count: Annotated[int, Meta(ge=0, le=2**31)]
    executions: Annotated[tuple[Annotated[int, Meta(ge=0, le=2**31)], ...], Meta(max_length=1024)]
    """First differing executions, from 0 and in order; warm-up comes first."""


class Inference(msgspec.Struct, frozen=True):
    """The durations of one line of the input list, and whether its executions agree."""

    line: Annotated[int, Meta(ge=0, le=2**31)]
    iterations_ns: Durations
    warm_up_ns: Durations = ()
    differing: Differing | None = None
    """None of a runner that is older than this."""
    untimed: Annotated[int, Meta(ge=0, le=2**31)] = 0
    """Executions without a reported time."""

    @property
    def executions(self) -> int:
        """How often it was executed, warm-up included."""
        return len(self.warm_up_ns) + len(self.iterations_ns) + self.untimed


class Generated(msgspec.Struct, frozen=True):
    """Prompt of a generating program, with times in nanoseconds."""

    line: Annotated[int, Meta(ge=0, le=2**31)]
    prompt_tokens: Size
    tokens: Annotated[tuple[Annotated[int, Meta(ge=0, lt=2**31)], ...], Meta(max_length=1_000_000)] = ()
    """Chosen tokens, the first of them by the call that ended the prompt."""
    prefill_ns: Durations = ()
    """Time of each call with tokens of the prompt."""
    steps_ns: Durations = ()
    """Time of each later call, which gives one token, or more for several positions."""
    first_token_ns: Duration | None = None
    """From the first call for the prompt until the first token is chosen."""
    total_ns: Duration | None = None
    """Time from the first call to the choice of the last token, including the runner's work between calls."""
    ended: Literal["new", "stop", "context", "seconds"] = "new"
    """Cause of its end: all requested tokens, a stop token, a full context, or the time."""


class RunnerReport(msgspec.Struct, frozen=True):
    """result.json, schema 1. Fields that are not listed are ignored."""

    schema: Literal[1]
    ok: bool
    exit_code: Annotated[int, Meta(ge=-255, le=255)]
    error: RunnerError | None = None
    method: Word = ""
    load_ns: Annotated[int, Meta(ge=0, le=_TEN_DAYS_NS)] | None = 0
    """Time of the load; 0 without a load, None if unreported."""
    verification_ns: Annotated[int, Meta(ge=0, le=_TEN_DAYS_NS)] | None = None
    """Verification of the whole program before its load; None if it is part of `load_ns` or unreported."""
    mean_ns: Duration | None = None
    """Mean of all executions, from a runner without single times."""
    warm: bool = False
    """The backend was up already when the program was loaded: its start is not in `load_ns`."""
    inputs: Annotated[tuple[RunnerTensor, ...], Meta(max_length=4096)] = ()
    outputs: Annotated[tuple[RunnerTensor, ...], Meta(max_length=4096)] = ()
    inferences: Annotated[tuple[Inference, ...], Meta(max_length=100_000)] = ()
    generated: Annotated[tuple[Generated, ...], Meta(max_length=100_000)] = ()
    """Entries of a generating program: one per prompt; with a time to fill, one per prompt and round."""
    method_loads_ns: dict[Word, Duration] = {}
    """Load time of each method in a generating program."""
    versions: dict[Word, Word] = {}
    peak_memory_bytes: Annotated[int, Meta(gt=0, le=2**50)] | None = None
    """Greatest resident memory of the runner's process so far, on its own processor; None where it is not known."""


def parse_report(data: bytes) -> RunnerReport:
    """Return the report in `data`. Raises ReportError when it is none, or contradicts itself."""
    if len(data) > REPORT_LIMIT:
        raise ReportError(f"has {len(data)} bytes, more than {REPORT_LIMIT}")
    try:
        report = msgspec.json.decode(data, type=RunnerReport)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise ReportError(str(error)) from None
    if report.ok != (report.error is None) or report.ok != (report.exit_code == 0):
        raise ReportError(
            f"contradicts itself: ok is {report.ok}, exit_code {report.exit_code}, "
            f"error {'missing' if report.error is None else 'set'}"
        )
    if report.ok and 0 in (report.load_ns, report.verification_ns):
        raise ReportError("load_ns or verification_ns is 0 although inferences ran")
    for line, inference in enumerate(report.inferences):
        if inference.line != line:
            raise ReportError(f"inferences[{line}].line is {inference.line}")
        if report.ok and not inference.iterations_ns and not inference.untimed:
            raise ReportError(f"inferences[{line}].iterations_ns is empty")
        if inference.differing and not _is_possible(inference.differing, inference.executions):
            raise ReportError(f"inferences[{line}].differing contradicts itself")
    for kind, tensors in (("inputs", report.inputs), ("outputs", report.outputs)):
        for index, tensor in enumerate(tensors):
            elements = math.prod(tensor.shape)
            if tensor.nbytes % elements if elements else tensor.nbytes:
                raise ReportError(f"{kind}[{index}] has {tensor.nbytes} bytes for {tensor}")
    return report


def _is_possible(differing: Differing, executions: int) -> bool:
    """Return whether `differing` is possible for so many executions, of which the last is not among them."""
    listed = differing.executions
    ascending = all(one < other for one, other in itertools.pairwise((*listed, executions - 1)))
    return ascending and len(listed) <= differing.count < max(1, executions) and bool(listed) == bool(differing.count)


def read_report(path: Path) -> RunnerReport | None:
    """Return the report in the file at `path`; None when there is no such file. Raises ReportError as parse_report."""
    try:
        with path.open("rb") as file:
            return parse_report(file.read(REPORT_LIMIT + 1))
    except FileNotFoundError:
        return None

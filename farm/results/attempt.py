"""Attempt: one judged execution of a job on a device, with verdict, comparisons and measurements as plain data."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from farm.builds.program.layers import LayerStep
from farm.suites.figures import Direction as Direction  # noqa: PLC0414 - one imports it with Measurement
from farm.suites.figures import series_value


class Verdict(StrEnum):
    """Verdict of an attempt on the code under test."""

    PASSED = "passed"
    FAILED = "failed"
    """The thing under test is at fault."""
    INFRA = "infra"
    """The farm or the device is at fault: never counted against the code."""
    SKIPPED = "skipped"


class Stage(StrEnum):
    """Stage at which an attempt ended, in order."""

    BUILD = "build"
    PUSH = "push"
    LOAD = "load"
    EXECUTE = "execute"
    PULL = "pull"
    NUMERICS = "numerics"
    DONE = "done"


class Cause(StrEnum):
    """Cause of a failed attempt, as far as one device shows; the verdict has the classification."""

    NONE = ""
    """No cause, or an unnamed cause that the reason describes."""
    COMPILE = "compile"
    NUMERICS = "numerics"
    REFUSED = "refused"
    """The runner answered with an error: it could not load or execute the program."""
    UNSUPPORTED = "unsupported"
    """No device of this SoC and runtime executes the program, for a known reason."""
    RUNTIME = "runtime"
    """Libraries beside the program are missing, do not fit together, or are not visible to the DSP."""
    SESSION = "session"
    """The DSP was restarted, and every handle of the session was lost."""
    CRASH = "crash"
    """A signal or an exit code ended the runner, in company and alone."""
    HANG = "hang"
    """The runner did not end in its time, and the device could be reached."""
    CONNECTION = "connection"
    """A transfer or a stream broke, and the device was there again."""
    GONE = "gone"
    """The device was absent or had rebooted."""
    ADB_SERVER = "adb_server"
    SPACE = "space"
    DAMAGE = "damage"
    """Files on the device differed from the pushed ones."""
    DEVICE = "device"
    """Firmware or access rights of the device, for a known reason; or its health check failed just after the job."""
    DISK = "disk"
    """A disk of this machine was full, or failed."""
    LOCAL = "local"
    """Something else of this machine failed: its memory, a file that could not be read or written."""
    BUILDER = "builder"
    REQUEST = "request"
    """The runtime has no such option or measurement: no fault of the device or of the program."""
    INFEASIBLE = "infeasible"
    """QNN refuses the program for its frame rate alone: no fault of the device or of the program."""
    LEASE = "lease"
    """The lease of the device had ended."""
    WORKER = "worker"
    """The process of the farm that ran it died."""


class Measurement(msgspec.Struct, frozen=True):
    """Metric of an attempt with all samples."""

    metric: str
    """For example `latency`, `model_load_time`, `htp_cycles`, `pte_size`, `partitions`, `sqnr_fp32[0]`."""
    unit: str
    """`ns`, `cycles`, `bytes`, `count`, `dB`, `1`."""
    direction: Direction
    samples: tuple[float, ...]
    exact: bool = False
    """Repeats exactly on the same device kind: compared by equality, as integers."""

    @property
    def value(self) -> float | None:
        """Value that stands for all samples: of a figure what decides, else the median; None without samples."""
        return series_value(self.metric, self.samples)


class Comparison(msgspec.Struct, frozen=True):
    """Output against a reference, worst over the samples. None: does not apply to the dtype."""

    output: int
    reference: str
    """`fp32` or `quantized`."""
    sqnr_db: float | None
    """inf where the outputs are equal."""
    cosine: float | None
    max_abs: float | None
    mismatch: float | None
    """Share of elements that differ; integer and boolean outputs only."""
    violations: tuple[str, ...] = ()
    """Broken limits of the case as text: `sqnr 12.3 dB < 20 dB`."""
    peak: float | None = None
    """The greatest difference as a share of the reference's greatest value."""
    steps: float | None = None
    """The greatest difference in quantization steps; where the output is quantized."""
    loss_db: float | None = None
    """Loss of SQNR compared with the quantized reference; against fp32 only."""
    name: str = ""
    """Path of the output in the module's return value, or `input x as written`; empty for a mere number."""

    @property
    def title(self) -> str:
        """Name of the output in a table, else its number."""
        return self.name or str(self.output)

    @property
    def label(self) -> str:
        """Name of the output in a sentence: `output 0`, `output aux`, `input x as written`."""
        return self.name if self.name.startswith("input ") else f"output {self.title}"


class OperatorProfile(msgspec.Struct, frozen=True, omit_defaults=True):
    """Cost of a node in a profiled program, over the timed inferences of an attempt."""

    node: str
    """As the backend calls it, without its unit: `aten_relu_default:OpId_80`."""
    delegate: str
    """Delegate call with the node: `QnnBackend[0]`; empty outside of delegates."""
    unit: str
    """`cycles`, `us`, `ns`."""
    n: int
    """Inferences that it was seen in."""
    p50: float
    least: float
    greatest: float
    share: float
    """Part of the sum of all rows in this unit, 0 to 1, by medians."""
    module: str = ""
    """The path in the model of the module that it comes from: `layers.3.conv`; empty for the model itself, and where
    that is not known."""
    source: str = ""
    """The line of the model's code: `models/text.py:42`; empty where it is not known."""


class LayerComparison(msgspec.Struct, frozen=True):
    """Output of a layer, computed in two ways. None: does not apply."""

    layer: str
    """Node of the edge graph: `aten_convolution_default_1`."""
    operator: str
    """Operator of the layer: `aten.convolution.default`."""
    step: LayerStep
    mse: float | None
    sqnr_db: float | None
    """inf where both are equal."""
    cosine: float | None
    diverges: bool = False
    """The first layer in the order of execution at which this step goes wrong."""


class Attempt(msgspec.Struct, frozen=True):
    """Judged execution of a job on a device."""

    job_id: str
    verdict: Verdict
    stage: Stage
    reason: str
    """Reason in one line; empty when passed."""
    device: str = ""
    """Serial of the device; empty when none was needed (a compile error)."""
    started_ms: int = 0
    """Epoch, milliseconds."""
    seconds: float = 0.0
    """Wall time of the attempt on the device, staging included."""
    bundle_key: str = ""
    known_issue: str = ""
    """Reason of the known issue that covers this failure; empty when none does."""
    comparisons: tuple[Comparison, ...] = ()
    measurements: tuple[Measurement, ...] = ()
    log: str = ""
    """Log with the reason, cut to a bounded size: build log or the runner's standard error."""
    notes: tuple[str, ...] = ()
    """Remarks for readers: a known issue that no longer appears, a fallback to the CPU."""
    operators: tuple[OperatorProfile, ...] = ()
    """In the order of execution; only where a detailed profile was asked for."""
    layers: tuple[LayerComparison, ...] = ()
    """In the order of execution; only of `farm debug`."""
    cause: Cause = Cause.NONE


class Ending(msgspec.Struct, frozen=True):
    """The part of an Attempt that judging finds out."""

    verdict: Verdict
    stage: Stage
    reason: str = ""
    comparisons: tuple[Comparison, ...] = ()
    measurements: tuple[Measurement, ...] = ()
    notes: tuple[str, ...] = ()
    operators: tuple[OperatorProfile, ...] = ()
    cause: Cause = Cause.NONE

    def ended_as(self, other: Ending) -> Ending:
        """Return all that was found out, as it ended otherwise after all."""
        return msgspec.structs.replace(
            self, verdict=other.verdict, stage=other.stage, reason=other.reason, cause=other.cause
        )


def infra(stage: Stage, reason: str, cause: Cause = Cause.NONE) -> Ending:
    """Return an ending of the farm or the device."""
    return Ending(Verdict.INFRA, stage, reason, cause=cause)


def failed(stage: Stage, reason: str, cause: Cause) -> Ending:
    """Return an ending of the code under test, as far as one device shows."""
    return Ending(Verdict.FAILED, stage, reason, cause=cause)

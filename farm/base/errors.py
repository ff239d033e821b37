"""Every error that farm raises on purpose, and the exit codes of every command."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Self

# Exit codes of every command: one table, from which the page of the documentation is made.


class ExitCode(IntEnum):
    """Exit code of a command, with its meaning for users.

    Codes up to 5 and 130 are also ends of runs in the store, and their numbers stay.
    """

    meaning: str

    def __new__(cls, code: int, meaning: str) -> Self:
        """Return the code, with its meaning as an attribute."""
        one = int.__new__(cls, code)
        one._value_ = code
        one.meaning = meaning
        return one

    PASSED = 0, "all passed"
    FAILED = 1, "a job failed"
    USAGE = 2, "usage or configuration error"
    REGRESSION = 3, "nothing failed, but there are regressions"
    INFRA = 4, "no device, or infrastructure trouble"
    NOTHING = 5, "nothing was selected, or all jobs were skipped"
    MISSING_TOOL = 6, "a library, compiler, tool or file of the setup is missing"
    NO_HISTORY = 7, "too little history: no result, or its bundle is gone"
    REFUSED = 8, "refused: a file that another user could write, a run that no host can read, a login that only reads"
    NO_STORE = 9, "there is no store, or no store is possible at the named place"
    STORE_UNREACHABLE = 10, "the server of the store cannot be reached"
    AGENT_REFUSED = 11, "another agent has the name, or the agent is of another farm"
    INTERRUPTED = 130, "interrupted"


ENDED_EARLY = frozenset(ExitCode) - {ExitCode.PASSED, ExitCode.FAILED, ExitCode.REGRESSION, ExitCode.NOTHING}
"""Exit codes of commands that ended before their work was done."""


# FarmError
# ├── UsageError                 an impossible request: no change
# │   ├── ConfigError            an invalid value in a file; names file, key and expectation
# │   ├── UnknownNameError       no such SoC, suite, case, backend or run; names the nearest
# │   ├── IllegalTargetError     an SoC, backend and precision that do not fit, with the reason
# │   ├── NeedsDeviceError       a program for real devices on a virtual device, with the reason
# │   ├── MissingPackageError    a program whose op packages have no library for the device
# │   └── NoHistoryError         no result or number to work with, or a result whose bundle is gone
# ├── NothingSelectedError       the selection is empty
# ├── DelegationError            a graph cannot be lowered without the operators that a backend did not take
# ├── MisreadCodesError          quantized operators do not reach the backend with this toolchain
# ├── ProgramError               a test's program did not compile, load or run
# ├── NativeBuildError           the native parts of a commit cannot be built: it cannot be tried
# └── InfraError                 the farm or a device, never the code under test
#     ├── MissingToolError       a missing library, compiler or tool, with the places searched and the next step
#     │   └── UntrustedError     another user could have written a file to execute
#     ├── NoDeviceError          no attached device can run the target
#     ├── DeviceError            a device failed; carries serial, command, stderr
#     │   ├── DeviceTimeoutError no answer in time
#     │   ├── DeviceGoneError    an absent device: cable, reboot, network
#     │   ├── DeviceSpaceError   full storage of a device
#     │   └── AdbServerError     not the device, but the adb server before it, does not answer
#     ├── LocalError             this machine, not a device: a full disk, no memory, a file that cannot be written
#     ├── LeaseLostError         the lease of a device is missing or has ended
#     ├── AgentRefusedError      the shared farm does not take this agent: its name is taken, or its farm another
#     ├── BundleError            a compiled bundle is damaged or is for another SoC
#     └── StoreError             the database refuses: newer schema, read-only, full disk
#         ├── NoRightError       the database login lacks a right: users act through 'farm serve'
#         ├── RowRefusedError    a row that the database refuses; other rows are unaffected
#         ├── ArtifactsError     the place where a shared farm keeps its files does not answer, or refuses
#         │   └── ArtifactLostError  a missing or changed file; other files are unaffected
#         ├── StoreUnreachableError  the server of the database does not answer
#         └── StoreLostError     deleted, replaced, damaged or dropped: waiting does not help
#             └── NoStoreError   no store yet, or no store possible at the named place


FIRST_RUN = "farm run --soc SM8650 --suite smoke --virtual"
"""Command that makes a run on any machine, for hints of a farm without runs."""


class FarmError(Exception):
    """Root of farm's errors; `exit_code` is the exit code of a command that fails with it."""

    exit_code: int = ExitCode.FAILED


class UsageError(FarmError):
    """Impossible request of the user."""

    exit_code = ExitCode.USAGE


class ConfigError(UsageError):
    """Invalid value in a file.

    `path` is the file, `key` the dotted key in it ("" for the whole file).
    """

    def __init__(self, path: Path | str, key: str, problem: str) -> None:
        self.path, self.key, self.problem = path, key, problem
        super().__init__(f"{path}: {key}: {problem}" if key else f"{path}: {problem}")


class UnknownNameError(UsageError):
    """Unknown `name` of a `kind`: the message offers the nearest of `known`, else the first of `shown` or `known`."""

    def __init__(
        self, kind: str, name: str, known: Iterable[str], hint: str = "", shown: Sequence[str] | None = None
    ) -> None:
        import difflib

        self.kind, self.name = kind, name
        names = sorted(known)
        folded = {n.casefold(): n for n in names}
        near = [folded[n] for n in difflib.get_close_matches(name.casefold(), folded, n=1, cutoff=0.5)]
        message = f"unknown {kind} {name!r}"
        if near:
            message += f": did you mean {near[0]!r}?"
        elif names:
            shown = names if shown is None else shown
            message += f": known are {', '.join(shown[:8])}{', ...' if len(shown) > 8 else ''}"
        super().__init__(f"{message}{' ' + hint if hint else ''}")


class IllegalTargetError(UsageError):
    """An SoC, backend and precision that do not go together."""


class NeedsDeviceError(UsageError):
    """Program for real devices on a virtual device; `why` names the missing part of the simulator."""

    def __init__(self, why: str, soc: str) -> None:
        super().__init__(f"no virtual device runs it: {why}; attach a {soc}")


class MissingPackageError(UsageError):
    """A program whose op packages have no library for the device."""

    def __init__(self, problem: str, serial: str) -> None:
        super().__init__(f"{serial} cannot run it: {problem}")


class NoHistoryError(UsageError):
    """The store has too little for the request: no result, no number, or a result whose bundle is gone."""

    exit_code = ExitCode.NO_HISTORY


class NothingSelectedError(FarmError):
    """The selection is empty."""

    exit_code = ExitCode.NOTHING


class DelegationError(FarmError):
    """A graph cannot be lowered without the operators that a backend did not take: the case is at fault, not the farm.

    `operators` counts them; `weighted` is true if an operator has weights, which the CPU cannot get.
    """

    def __init__(self, backend: str, operators: Mapping[str, int], *, weighted: bool) -> None:
        self.backend, self.operators, self.weighted = backend, dict(operators), weighted
        shown = [name if count == 1 else f"{name} ({count} times)" for name, count in sorted(operators.items())]
        left = ", ".join(shown[:6]) + (f" and {len(shown) - 6} more" if len(shown) > 6 else "")
        why = "ExecuTorch leaves no operator with weights to the CPU" if weighted else "without it lowering fails"
        super().__init__(
            f"the {backend} backend does not take {left}, and {why} (the build log has more): replace the refused part "
            "or run the case on another backend"
        )


class MisreadCodesError(FarmError):
    """Quantized operators do not reach the backend with this toolchain: the case is at fault, not the farm."""

    def __init__(self, backend: str, precision: str, on_cpu: str, in_qnn: str) -> None:
        self.backend, self.precision = backend, precision
        super().__init__(
            f"activations of {precision} do not reach the {backend} backend with this ExecuTorch: the CPU has them in "
            f"{on_cpu}, and QNN reads and writes {in_qnn}: name a precision with 8-bit activations or another backend"
        )


class ProgramError(FarmError):
    """A test's program did not compile, load or run: the code is at fault, as far as one device shows.

    `stage` and `cause` are values of `farm.results.attempt.Stage` and `Cause`, `log` is the compiler's or the runner's.
    """

    def __init__(self, problem: str, *, stage: str, cause: str = "", log: str = "") -> None:
        self.problem, self.stage, self.cause, self.log = problem, stage, cause, log
        super().__init__(f"{problem}\n{log}" if log.strip() else problem)


class NativeBuildError(FarmError):
    """The native parts of a commit cannot be built, so that it cannot be tried."""


class InfraError(FarmError):
    """The farm or a device is at fault, never the code under test."""

    exit_code = ExitCode.INFRA


class MissingToolError(InfraError):
    """Missing library, compiler or tool: the machine is not set up for the request."""

    exit_code = ExitCode.MISSING_TOOL


class UntrustedError(MissingToolError):
    """Another user could have written `folder`, so that no file in it is executed; `problem` names the user."""

    exit_code = ExitCode.REFUSED

    def __init__(self, folder: Path, problem: str) -> None:
        self.folder, self.problem = folder, problem
        super().__init__(
            f"{folder} is not used, as another user could have written its files: {problem}: set FARM_CACHE_DIR "
            "to a folder that only you can write, or make this one so (docs/reference/configuration.md has the rule)"
        )


class NoDeviceError(InfraError):
    """No attached device can run the target."""


class DeviceError(InfraError):
    """Failure of a device, with serial, problem, command, exit code and standard error."""

    def __init__(
        self, serial: str, problem: str, *, argv: Sequence[str] = (), code: int | None = None, stderr: str | bytes = ""
    ) -> None:
        stderr = stderr.decode(errors="replace") if isinstance(stderr, bytes) else stderr
        self.serial, self.problem, self.argv, self.code, self.stderr = serial, problem, tuple(argv), code, stderr
        message = f"{serial}: {problem}"
        if argv:
            message += f" (command: {' '.join(argv)[:400]}"
            message += f", exit code {code})" if code is not None else ")"
        if stderr.strip():
            message += f": {stderr.strip()[-400:]}"
        super().__init__(message)


class DeviceTimeoutError(DeviceError):
    """A device did not answer in time."""


class DeviceGoneError(DeviceError):
    """Absent device: cable, network or reboot."""


class DeviceSpaceError(DeviceError):
    """A device's storage is full."""


class AdbServerError(DeviceError):
    """Not the device, but the adb server before it, does not answer."""


class LocalError(InfraError):
    """This machine failed, not a device: a full disk, no memory, a file that cannot be read or written.

    `cause` is a value of `farm.results.attempt.Cause`: `disk` or `local`. `is_general`: every job would meet it, not
    only the one whose files it is about.
    """

    def __init__(self, problem: str, *, cause: str, is_general: bool) -> None:
        self.cause, self.is_general = cause, is_general
        super().__init__(problem)


class LeaseLostError(InfraError):
    """Missing or ended lease of a device: it expired and another process took it, or its owner released it."""


class AgentRefusedError(InfraError):
    """Refusal of an agent by the shared farm: an agent of its name is alive, or it belongs to another farm."""

    exit_code = ExitCode.AGENT_REFUSED

    def __init__(self, message: str, *, may_pass: bool = False) -> None:
        super().__init__(message)
        self.may_pass = may_pass
        """True if the agent with this name may be dead, which is not known yet."""


class BundleError(InfraError):
    """A compiled bundle is damaged, or compiled for another SoC."""

    @classmethod
    def damaged(cls, key: str, error: Exception) -> Self:
        """Return the error for an unreadable file of the bundle `key`."""
        return cls(f"bundle {key[:12]} is damaged: {error}: run 'farm setup cache prune --all --yes' and build again")


class StoreError(InfraError):
    """The database refuses."""


class NoRightError(StoreError):
    """The database login lacks a right: users act through `farm serve`."""

    exit_code = ExitCode.REFUSED


class RowRefusedError(StoreError):
    """Row that the database refuses: waiting does not help, and other rows are unaffected."""


class UnreadableRowError(StoreError):
    """Unreadable row of the store: from another version, or written by hand."""

    def __init__(self, table: str, key: str | int, why: str) -> None:
        super().__init__(f"row {key} of {table} cannot be read: {why}")
        self.table, self.key = table, key


class ArtifactsError(StoreError):
    """The place where a shared farm keeps its files does not answer, or refuses: no device and no code is at fault."""


class ArtifactLostError(ArtifactsError):
    """Missing file of a shared farm, or one unlike its hash: waiting does not help, other files may work."""


class StoreUnreachableError(StoreError):
    """The server of the database does not answer: waiting may help."""

    exit_code = ExitCode.STORE_UNREACHABLE


class StoreLostError(StoreError):
    """Deleted, replaced, damaged or dropped store: waiting does not help, and records may be lost."""


class NoStoreError(StoreLostError):
    """Missing store, or a named place that cannot hold one; no device is at fault."""

    exit_code = ExitCode.NO_STORE

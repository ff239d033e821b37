"""Every error that farm raises on purpose.

FarmError
├── UsageError                 what the user asked for cannot be: exit 2, nothing was changed
│   ├── ConfigError            a file says something impossible; names file, key and expectation
│   ├── UnknownNameError       no such SoC, suite, case, backend or run; names the nearest
│   ├── IllegalTargetError     an SoC, backend and precision that do not go together; says why
│   ├── NeedsDeviceError       a program that only a device runs, and the device is virtual; says why
│   └── MissingPackageError    a program whose op packages have no library for the device
├── NothingSelectedError       the selection is empty: exit 5
├── DelegationError            a graph cannot be lowered without the operators that a backend did not take
├── MisreadCodesError          what is quantized does not reach the backend with this toolchain
├── ProgramError               a program that a test wanted did not compile, load or run
├── NativeBuildError           the native parts of a commit cannot be built: it cannot be tried
└── InfraError                 the farm or a device, never the code under test: exit 4
    ├── MissingToolError       a library, compiler or tool; which, where it was looked for, how to get it: exit 2
    │   └── UntrustedError     somebody else could have written what would be executed: exit 2
    ├── NoDeviceError          no attached device can run the target
    ├── DeviceError            a device did not do what was asked; carries serial, command, stderr
    │   ├── DeviceTimeoutError it did not answer in time
    │   ├── DeviceGoneError    it is not there any more: cable, reboot, network
    │   ├── DeviceSpaceError   its storage is full
    │   └── AdbServerError     not the device, but the adb server before it, does not answer
    ├── LocalError             this machine, not a device: a full disk, no memory, a file that cannot be written
    ├── LeaseLostError         a device is not, or no more, ours to use
    ├── AgentRefusedError      the shared farm does not take this agent: its name is taken, or its farm another
    ├── BundleError            a compiled bundle is damaged or is for another SoC
    └── StoreError             the database refuses: newer schema, read-only, full disk
        ├── RowRefusedError    what is to be written, and nothing else: others may go on
        ├── ArtifactsError     the place where a shared farm keeps its files does not answer, or refuses
        │   └── ArtifactLostError  one file is not there, or not what it was: others may be
        └── StoreLostError     deleted, replaced, damaged or dropped: waiting does not help
            └── NoStoreError   there is none yet, or none can be where one is named: exit 2
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path


FIRST_RUN = "farm run --soc SM8650 --suite smoke --virtual"
"""Command that makes a run on every machine, for hints where there is none yet."""


class FarmError(Exception):
    """The root; `exit_code` is what the command line returns for it."""

    exit_code = 1


class UsageError(FarmError):
    """What the user asked for cannot be."""

    exit_code = 2


class ConfigError(UsageError):
    """A file says something impossible.

    `path` is the file, `key` the dotted key in it ("" for the whole file).
    """

    def __init__(self, path: Path | str, key: str, problem: str) -> None:
        self.path, self.key, self.problem = path, key, problem
        super().__init__(f"{path}: {key}: {problem}" if key else f"{path}: {problem}")


class UnknownNameError(UsageError):
    """No `kind` is called `name`; the nearest of `known` is offered, or else the first of `shown`: `known`, sorted."""

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
    """A program that only a device runs, and the device is virtual; `why` is what the simulator lacks."""

    def __init__(self, why: str, soc: str) -> None:
        super().__init__(f"no virtual device runs it: {why}; attach a {soc}")


class MissingPackageError(UsageError):
    """A program whose op packages have no library for the device."""

    def __init__(self, problem: str, serial: str) -> None:
        super().__init__(f"{serial} cannot run it: {problem}")


class NothingSelectedError(FarmError):
    """The selection is empty."""

    exit_code = 5


class DelegationError(FarmError):
    """A graph cannot be lowered without the operators that a backend did not take: the case is at fault, not the farm.

    `operators` are those, and how often; `weighted` says that the CPU cannot have one of them because of its weights.
    """

    def __init__(self, backend: str, operators: Mapping[str, int], *, weighted: bool) -> None:
        self.backend, self.operators, self.weighted = backend, dict(operators), weighted
        shown = [name if count == 1 else f"{name} ({count} times)" for name, count in sorted(operators.items())]
        left = ", ".join(shown[:6]) + (f" and {len(shown) - 6} more" if len(shown) > 6 else "")
        why = "ExecuTorch leaves no operator with weights to the CPU" if weighted else "without it lowering fails"
        super().__init__(
            f"the {backend} backend does not take {left}, and {why} (the build log has more): replace what it does not "
            "take, or run the case on another backend"
        )


class MisreadCodesError(FarmError):
    """What is quantized does not reach the backend with this toolchain: the case is at fault, not the farm."""

    def __init__(self, backend: str, precision: str, on_cpu: str, in_qnn: str) -> None:
        self.backend, self.precision = backend, precision
        super().__init__(
            f"activations of {precision} do not reach the {backend} backend with this ExecuTorch: the CPU has them in "
            f"{on_cpu}, and QNN reads and writes {in_qnn}: name a precision with 8-bit activations or another backend"
        )


class ProgramError(FarmError):
    """A program that a test wanted did not compile, load or run: the code is at fault, as far as one device can tell.

    `stage` and `cause` are values of `farm.results.attempt.Stage` and `Cause`, `log` is what the compiler or the runner
    wrote.
    """

    def __init__(self, problem: str, *, stage: str, cause: str = "", log: str = "") -> None:
        self.problem, self.stage, self.cause, self.log = problem, stage, cause, log
        super().__init__(f"{problem}\n{log}" if log.strip() else problem)


class NativeBuildError(FarmError):
    """The native parts of a commit cannot be built, so that it cannot be tried."""


class InfraError(FarmError):
    """The farm or a device is at fault, never the code under test."""

    exit_code = 4


class MissingToolError(InfraError):
    """A library, compiler or tool is not there: the machine is not set up for what was asked."""

    exit_code = 2


class UntrustedError(MissingToolError):
    """Somebody else could have written `folder`, so that nothing in it is executed; `problem` says who."""

    def __init__(self, folder: Path, problem: str) -> None:
        self.folder, self.problem = folder, problem
        super().__init__(
            f"{folder} is not used, as somebody else could have written what is in it: {problem}: set FARM_CACHE_DIR "
            "to a folder that only you can write, or make this one so (docs/reference/configuration.md has the rule)"
        )


class NoDeviceError(InfraError):
    """No attached device can run the target."""


class DeviceError(InfraError):
    """A device did not do what was asked; carries all that tells why."""

    def __init__(
        self, serial: str, problem: str, *, argv: Sequence[str] = (), code: int | None = None, stderr: str = ""
    ) -> None:
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
    """A device is not there any more: its cable, its network or a reboot."""


class DeviceSpaceError(DeviceError):
    """A device's storage is full."""


class AdbServerError(DeviceError):
    """Not the device, but the adb server before it, does not answer."""


class LocalError(InfraError):
    """This machine failed, no device: a full disk, no memory, a file that cannot be read or written.

    `cause` is a value of `farm.results.attempt.Cause`: `disk` or `local`. `is_general`: every job would meet it, not
    only the one whose files it is about.
    """

    def __init__(self, problem: str, *, cause: str, is_general: bool) -> None:
        self.cause, self.is_general = cause, is_general
        super().__init__(problem)


class LeaseLostError(InfraError):
    """A device is not, or no more, ours to use: its lease expired and another took it, or an owner released it."""


class AgentRefusedError(InfraError):
    """The shared farm does not take this agent: one of its name lives, or it is of another farm than the others."""

    # A service manager that starts it again would hear the same.
    exit_code = 2

    def __init__(self, message: str, *, may_pass: bool = False) -> None:
        super().__init__(message)
        self.may_pass = may_pass
        """The one that has its name may be dead, which nobody knows yet."""


class BundleError(InfraError):
    """A compiled bundle is damaged, or compiled for another SoC."""


class StoreError(InfraError):
    """The database refuses."""


class RowRefusedError(StoreError):
    """The database refuses what is to be written, and nothing else: waiting does not help, and others may go on."""


class UnreadableRowError(StoreError):
    """One row of the store cannot be read: it is of another version, or a user wrote it by hand."""

    def __init__(self, table: str, key: str | int, why: str) -> None:
        super().__init__(f"row {key} of {table} cannot be read: {why}")
        self.table, self.key = table, key


class ArtifactsError(StoreError):
    """The place where a shared farm keeps its files does not answer, or refuses: no device and no code is at fault."""


class ArtifactLostError(ArtifactsError):
    """One file of a shared farm is not there, or is not what its hash says: waiting does not help, others may do."""


class StoreLostError(StoreError):
    """The store is deleted, replaced, damaged or dropped: waiting does not help, and what was recorded may be gone."""


class NoStoreError(StoreLostError):
    """There is no store yet, or none can be where one is named: nothing of a device is at fault."""

    exit_code = 2

"""Recovery of a device that does not answer, step by step up to a power cycle: docs/explanation/health.md."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import msgspec

from farm.base.config.devices import POWER_SERIAL
from farm.base.errors import DeviceError, DeviceGoneError, DeviceTimeoutError, InfraError
from farm.base.processes import ending, ready_of
from farm.base.text import clean_text
from farm.devices.connect import open_transport
from farm.devices.device import Device
from farm.devices.facts import PRINT_BOOT, identify
from farm.devices.transport import ANSWER_BYTES, ASK_SECONDS, Transport

if TYPE_CHECKING:
    from farm.devices.device import PowerCommand


# Power cycle of a device, by a command of its owner for a hub's port or a power strip.


# Bytes that are kept from the end of the command's output.
_KEPT_BYTES = 4096
_LOOK_SECONDS = 0.1


def cycle_power(device: Device, command: PowerCommand) -> str:
    """Run the command without a shell, and return the end of its output as safe text.

    The command gets `device`'s serial for `{serial}`, and serial, name and SoC in $FARM_DEVICE_SERIAL,
    $FARM_DEVICE_NAME and $FARM_DEVICE_SOC. Only its own time limit ends the command, because an early end could leave
    the power off.
    Raises DeviceError for a failing command, DeviceTimeoutError at the limit.
    """
    if device.serial.startswith("-"):
        raise DeviceError(device.serial, "its serial begins with '-': the power command could take it for an option")
    argv = [word.replace(POWER_SERIAL, device.serial) for word in command.argv]
    facts = {"SERIAL": device.serial, "NAME": device.name, "SOC": device.soc}
    try:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **{f"FARM_DEVICE_{name}": value for name, value in facts.items()}},
            cwd="/",
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        problem = f"its power command {argv[0]} cannot be started: {reason or error}"
        raise DeviceError(device.serial, problem) from None
    with process:
        try:
            printed = clean_text(_read(process, time.monotonic() + command.timeout_s), _KEPT_BYTES, lines=True)
        finally:
            # Children of the command may keep its streams open.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    detail = f": {' '.join(printed.split())}" if printed.strip() else ""
    if process.returncode is None or process.returncode == -signal.SIGKILL:
        problem = f"its power command did not end in {command.timeout_s:g} s{detail}"
        raise DeviceTimeoutError(device.serial, problem)
    if process.returncode:
        raise DeviceError(device.serial, f"its power command ended with {ending(process.returncode)}{detail}")
    return printed


def _read(process: subprocess.Popen[bytes], deadline: float) -> bytes:
    """Return the end of the output until the process ends, or until `deadline`."""
    assert process.stdout is not None  # noqa: S101 - it was started with a pipe
    pipe, printed, open_ = process.stdout.fileno(), b"", True
    while process.poll() is None and time.monotonic() < deadline:
        if not open_:
            time.sleep(_LOOK_SECONDS)
        elif ready_of([pipe], _LOOK_SECONDS):
            data = os.read(pipe, 1 << 16)
            printed, open_ = (printed + data)[-_KEPT_BYTES:], bool(data)
    while open_ and ready_of([pipe], 0) and (data := os.read(pipe, 1 << 16)):
        printed = (printed + data)[-_KEPT_BYTES:]
        if time.monotonic() >= deadline:
            break
    return printed


# Recovery, step by step.


class Step(StrEnum):
    """Recovery steps, the mildest first."""

    RECONNECT = "reconnect"
    RESTART = "restart the transport"
    REBOOT = "reboot"
    POWER = "power cycle"
    """Step for devices whose owner has set a power command."""


# Seconds for a device to answer after a step: a phone starts in one or two minutes.
STEP_SECONDS = {Step.RECONNECT: 15.0, Step.RESTART: 30.0, Step.REBOOT: 240.0, Step.POWER: 240.0}

_POLL_SECONDS = 0.2
# Pauses before the second and the third call of `find_problem` after a step.
_RECHECK_PAUSES_S = (1.0, 3.0)

# The second line is 1 if the system is up. A system without getprop is up as soon as its shell answers.
PRINT_STATE = f"{PRINT_BOOT}\nif type getprop >/dev/null 2>&1; then getprop sys.boot_completed; else echo 1; fi"


class StepResult(msgspec.Struct, frozen=True):
    """Result of one recovery step."""

    step: Step
    problem: str
    """Remaining problem of the device in one line; empty for none."""
    seconds: float
    output: str = ""
    """End of the power command's output."""


class Recovery(msgspec.Struct, frozen=True):
    """Result of a recovery."""

    steps: tuple[StepResult, ...]
    problem: str
    """Reason of a failed recovery; empty if the same device answers."""

    @property
    def ok(self) -> bool:
        """True if the device is back."""
        return not self.problem


class OtherDeviceError(DeviceError):
    """Another device answers at the address of the device under recovery."""


def recover(
    device: Device,
    *,
    max_step: Step = Step.POWER,
    log: Callable[[StepResult], None] = lambda _: None,
    timeout_s: float = STEP_SECONDS[Step.REBOOT],
    stop: Callable[[], bool] = lambda: False,
    find_problem: Callable[[], str] = lambda: "",
    is_unrecoverable: Callable[[], bool] = lambda: False,
) -> Recovery:
    """Take recovery steps in order, up to `max_step`, until the same `device` answers; never raises for the device.

    Each step lasts STEP_SECONDS, at most `timeout_s`, ends early when `stop` is true, and is passed to `log`. The last
    step, a power cycle, needs a power command, which has its own time limit. `find_problem` returns the problem of an
    answering device, empty for none, and is called up to three times after each step. No further step is taken once
    `is_unrecoverable` returns True: no step can fix the problem, such as full storage.
    """
    steps: list[StepResult] = []
    with contextlib.closing(open_transport(device)) as transport:
        steps_up = list(Step)[: list(Step).index(max_step) + 1]
        available = [step for step in steps_up if step is not Step.POWER or device.power is not None]
        for step in available:
            if stop():
                return Recovery(tuple(steps), "stopped before it answered")
            started = time.monotonic()
            attempt = _StepAttempt(device, transport, min(timeout_s, STEP_SECONDS[step]), stop)
            problem = attempt.take(step)
            is_last = step is available[-1]
            if not problem:
                problem = attempt.check(find_problem, is_unrecoverable)
                is_last = is_last or is_unrecoverable()
            steps.append(StepResult(step, problem, time.monotonic() - started, attempt.output))
            log(steps[-1])
            # A device of another owner must not be rebooted.
            if not problem or is_last or (attempt.is_other and step is not Step.RECONNECT):
                return Recovery(tuple(steps), problem)
    raise AssertionError(max_step)


@dataclass
class _StepAttempt:
    """Attempt of one step, with its deadline."""

    device: Device
    transport: Transport
    seconds: float
    """Longest duration of the step."""
    stop: Callable[[], bool]
    is_other: bool = False
    """True if another device gave the last answer at the address."""
    output: str = ""
    """Output of the power command."""

    def __post_init__(self) -> None:
        self.deadline = time.monotonic() + self.seconds

    def take(self, step: Step) -> str:
        """Take a step; return the reason if the device does not answer afterwards, else an empty text."""
        before = ""
        try:
            if step is Step.RECONNECT:
                self.transport.reconnect()
            elif step is Step.RESTART:
                self.transport.restart()
            elif step is Step.POWER:
                return self._cycle_power()
            elif self.transport.no_reboot:
                raise InfraError(self.transport.no_reboot)
            else:
                # Another device may answer at the address by now.
                _check_identity(self.device)
                before, _ = self._state()
                self.transport.reboot()
        except InfraError as error:
            # An unreachable device may be booting by itself and return nevertheless.
            if step is Step.REBOOT:
                problem = f"it cannot be rebooted: {_reason(self.device, error)}"
                is_away = isinstance(error, DeviceGoneError | DeviceTimeoutError)
                return problem if not is_away or self._wait() else ""
        return self._wait(before)

    def _cycle_power(self) -> str:
        """Cut the power of the device unless another device answers at its address; wait for the device."""
        command = self.device.power
        assert command is not None  # noqa: S101 - the ladder has no such step without
        try:
            _check_identity(self.device)
        except OtherDeviceError as error:
            self.is_other = True
            return _reason(self.device, error)
        except InfraError as error:
            # A dead adb server is no fault of the device; a power cycle would not change it.
            if not self.transport.server_answers():
                return f"its power is not cut: {_reason(self.device, error)}"
        try:
            self.output = cycle_power(self.device, command)
        except DeviceError as error:
            return _reason(self.device, error)
        # The time of the power command does not count.
        self.deadline = time.monotonic() + self.seconds
        with contextlib.suppress(InfraError):
            self.transport.reconnect()
        return self._wait()

    def check(self, find_problem: Callable[[], str], is_unrecoverable: Callable[[], bool]) -> str:
        """Return the problem of an answering device after some tries.

        A passing problem may strike once more; a stronger step would not change that.
        """
        problem = find_problem()
        for pause_s in _RECHECK_PAUSES_S:
            if not problem or is_unrecoverable() or self._is_over():
                break
            end = time.monotonic() + pause_s
            while time.monotonic() < end and not self._is_over():
                time.sleep(_POLL_SECONDS)
            problem = self._wait() or find_problem()
        return problem

    def _is_over(self) -> bool:
        return self.stop() or self.is_other or time.monotonic() >= self.deadline

    def _wait(self, before: str = "") -> str:
        """Wait until the device answers, after another start than `before` where that is known."""
        problem = "it did not answer"
        while True:
            try:
                _check_identity(self.device)
                boot, up = self._state()
                if up and not (before and boot == before):
                    return ""
                self.is_other = False
                problem = "its system is not up" if not up else "it did not restart"
            except InfraError as error:
                self.is_other = isinstance(error, OtherDeviceError)
                problem = _reason(self.device, error)
            if self.stop():
                return f"stopped: {problem}"
            if time.monotonic() >= self.deadline:
                return problem
            time.sleep(_POLL_SECONDS)
            try:
                self.transport.nudge()
            except InfraError as error:
                problem = _reason(self.device, error)

    def _state(self) -> tuple[str, bool]:
        """Return which start of the device this is, and whether its system is up."""
        with contextlib.closing(open_transport(self.device)) as transport:
            done = transport.run(["sh", "-c", PRINT_STATE], timeout_s=ASK_SECONDS, max_output=ANSWER_BYTES)
        boot, _, up = done.stdout.partition(b"\n")
        return clean_text(boot), clean_text(up) == "1"


def _check_identity(device: Device) -> None:
    """Raise OtherDeviceError when another device answers than `device`, DeviceError when none does."""
    found = identify(device.serial, device.address, host=device.host)
    # The serial may be an address that another device has by now.
    is_other = bool(device.serialno) and found.serialno != device.serialno
    if is_other or (found.soc, found.kind, found.serial) != (device.soc, device.kind, device.serial):
        problem = f"another device answers in its place: {_described(found)}, it was {_described(device)}"
        raise OtherDeviceError(device.serial, problem)


def _described(device: Device) -> str:
    own = f", serial {device.serialno}" if device.serialno not in ("", device.serial) else ""
    return f"{device.serial} ({device.kind} {device.soc}{own})"


def _reason(device: Device, error: InfraError) -> str:
    # Without the command, which is a script of ours.
    problem = error.problem if isinstance(error, DeviceError) else str(error)
    return clean_text(" ".join(problem.removeprefix(f"{device.serial}: ").split()))

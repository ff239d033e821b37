"""Brings a device back that does not answer, step by step: docs/health.md."""

from __future__ import annotations

import time
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

import msgspec

from farm.devices.device import AdbAddress, LocalAddress, SshAddress
from farm.devices.text import clean_text
from farm.errors import DeviceError, DeviceGoneError, DeviceTimeoutError, InfraError

if TYPE_CHECKING:
    from collections.abc import Callable

    from farm.devices.adb.host import AdbHost
    from farm.devices.device import Device


class Step(StrEnum):
    """The steps, from the mildest on."""

    RECONNECT = "reconnect"
    RESTART = "restart the transport"
    REBOOT = "reboot"


# How long a device may take to answer after a step: a phone starts in one or two minutes.
STEP_SECONDS = {Step.RECONNECT: 15.0, Step.RESTART: 30.0, Step.REBOOT: 240.0}

_ASK_SECONDS = 10.0
_POLL_SECONDS = 0.2
# So long after the first try, and after the second.
_WORK_PAUSES_S = (1.0, 3.0)
_ANSWER_BYTES = 4096

# Prints which start of a device this is. A virtual device has starts of its own; the kernel's is this machine's. Some
# builds of Android show nobody the kernel's.
TELL_BOOT = """
id=$(getprop farm.boot_id 2>/dev/null)
[ -n "$id" ] || id=$(cat /proc/sys/kernel/random/boot_id 2>/dev/null)
[ -n "$id" ] || id=$(getprop ro.boottime.init 2>/dev/null)
echo "$id"
"""
# The second line is 1 where the system is up; where there is no getprop, it is as soon as a shell answers.
_TELL_STATE = f"{TELL_BOOT}\nif type getprop >/dev/null 2>&1; then getprop sys.boot_completed; else echo 1; fi"


class StepResult(msgspec.Struct, frozen=True):
    """One step that was taken."""

    step: Step
    problem: str
    """Why the device is still not well, in one line; empty when it is."""
    seconds: float


class Recovery(msgspec.Struct, frozen=True):
    """What came of it."""

    steps: tuple[StepResult, ...]
    problem: str
    """Why the device was given up; empty when it answers, as the same device."""

    @property
    def ok(self) -> bool:
        """Whether the device is back."""
        return not self.problem


class OtherDeviceError(DeviceError):
    """Another device answers in the place of the one that is to be brought back."""


def recover(
    device: Device,
    *,
    max_step: Step = Step.REBOOT,
    log: Callable[[StepResult], None] = lambda _: None,
    timeout_s: float = STEP_SECONDS[Step.REBOOT],
    stop: Callable[[], bool] = lambda: False,
    start_server: Callable[[], None] | None = None,
    works: Callable[[], str] = lambda: "",
) -> Recovery:
    """Take one step after the other, up to `max_step`, until `device` answers and is who it was; never raises for it.

    Each step has as long as STEP_SECONDS says, at most `timeout_s`, ends when `stop` says so, and is told to `log`.
    `start_server` starts the device's adb server where none listens, and returns when one does. `works` returns what
    is still wrong with a device that answers, empty when nothing is; it is asked up to three times after each step.
    """
    way = _way(device, start_server)
    steps: list[StepResult] = []
    for step in Step:
        if stop():
            return Recovery(tuple(steps), "stopped before it answered")
        attempt = _Attempt(device, way, time.monotonic() + min(timeout_s, STEP_SECONDS[step]), stop)
        started = time.monotonic()
        problem = attempt.take(step) or _ask(works, attempt)
        steps.append(StepResult(step, problem, time.monotonic() - started))
        log(steps[-1])
        # Who is not ours to use is not ours to reboot.
        if not problem or step is max_step or (attempt.is_other and step is Step.RESTART):
            return Recovery(tuple(steps), problem)
    raise AssertionError(max_step)


def _ask(works: Callable[[], str], attempt: _Attempt) -> str:
    """Return what is wrong with a device that answers, after some tries.

    What ailed it may strike once more before it is over: a stronger step would not change that.
    """
    problem = works()
    for pause_s in _WORK_PAUSES_S:
        if not problem or attempt.is_over:
            break
        attempt.pause(pause_s)
        problem = attempt.wait() or works()
    return problem


class _Way(Protocol):
    """How a kind of device is reached. Every method raises InfraError."""

    def reconnect(self) -> None: ...

    def restart(self) -> None: ...

    def reboot(self) -> None: ...

    def nudge(self) -> None:
        """Help a device that is coming back to be found."""


class _Attempt:
    """One step, with its deadline."""

    def __init__(self, device: Device, way: _Way, deadline: float, stop: Callable[[], bool]) -> None:
        self._device, self._way, self._deadline, self._stop = device, way, deadline, stop
        self.is_other = False
        """Another device answered in its place, last of all."""

    @property
    def is_over(self) -> bool:
        """Whether nobody waits for this step any more."""
        return self._stop() or self.is_other or time.monotonic() >= self._deadline

    def take(self, step: Step) -> str:
        """Return why the device is not back, empty when it is."""
        try:
            if step is Step.RECONNECT:
                self._way.reconnect()
            elif step is Step.RESTART:
                self._way.restart()
            else:
                # What answers at an address may be another one by now, or none of ours.
                if not isinstance(self._device.address, LocalAddress):
                    _check_identity(self._device)
                before, _ = self._state()
                self._way.reboot()
                return self.wait(before)
        except InfraError as error:
            # One that cannot be reached may be starting by itself, and come back nevertheless.
            if step is Step.REBOOT:
                told = f"it cannot be rebooted: {_said(self._device, error)}"
                is_away = isinstance(error, DeviceGoneError | DeviceTimeoutError)
                return told if not is_away or self.wait() else ""
        return self.wait()

    def wait(self, before: str = "") -> str:
        """Wait until the device answers, after another start than `before` where that is known."""
        problem = "it did not answer"
        while True:
            try:
                _check_identity(self._device)
                boot, up = self._state()
                if up and not (before and boot == before):
                    return ""
                self.is_other = False
                problem = "its system is not up" if not up else "it did not restart"
            except InfraError as error:
                self.is_other = isinstance(error, OtherDeviceError)
                problem = _said(self._device, error)
            if self._stop():
                return f"stopped: {problem}"
            if time.monotonic() >= self._deadline:
                return problem
            time.sleep(_POLL_SECONDS)
            try:
                self._way.nudge()
            except InfraError as error:
                problem = _said(self._device, error)

    def pause(self, seconds: float) -> None:
        """Let some time pass, unless nobody waits for this step any more."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self.is_over:
            time.sleep(_POLL_SECONDS)

    def _state(self) -> tuple[str, bool]:
        """Return which start of the device this is, and whether its system is up."""
        from farm.devices.connect import open_transport

        transport = open_transport(self._device)
        try:
            done = transport.run(["sh", "-c", _TELL_STATE], timeout_s=_ASK_SECONDS, max_output=_ANSWER_BYTES)
        finally:
            transport.close()
        boot, _, up = done.stdout.partition(b"\n")
        return clean_text(boot), clean_text(up) == "1"


class _Network:
    """An Android device that was attached by `adb connect`."""

    def __init__(self, host: AdbHost, serial: str, address: str) -> None:
        self._host, self._serial, self._address = host, serial, address

    def reconnect(self) -> None:
        self.nudge()

    def restart(self) -> None:
        try:
            self._host.query(f"host:disconnect:{self._address}")
        finally:
            self.nudge()

    def reboot(self) -> None:
        self._host.open(self._serial, "reboot:", timeout_s=_ASK_SECONDS, argv=["reboot"]).close()

    def nudge(self) -> None:
        # The server looks for a device on a network every ten seconds only.
        self._host.query(f"host:connect:{self._address}")


class _Usb:
    """An Android device on a cable."""

    def __init__(self, host: AdbHost, serial: str) -> None:
        self._host, self._serial = host, serial

    def reconnect(self) -> None:
        self._host.query(f"host-serial:{self._serial}:reconnect")

    def restart(self) -> None:
        self._host.open(self._serial, "reconnect", timeout_s=_ASK_SECONDS, argv=["reconnect"]).close()

    def reboot(self) -> None:
        self._host.open(self._serial, "reboot:", timeout_s=_ASK_SECONDS, argv=["reboot"]).close()

    def nudge(self) -> None:
        """Nothing: the server sees it when it is plugged in."""


class _Adb:
    """An Android device behind an adb server that may have to be started first, which tells how it is attached."""

    def __init__(self, device: Device, server: AdbAddress, start_server: Callable[[], None] | None) -> None:
        from farm.devices.adb.host import AdbHost

        self._serial, self._start_server, self._address = device.serial, start_server, server.attached_at
        self._host = AdbHost(server.port, server.host)

    def reconnect(self) -> None:
        self._find().reconnect()

    def restart(self) -> None:
        self._find().restart()

    def reboot(self) -> None:
        self._find().reboot()

    def nudge(self) -> None:
        self._find().nudge()

    def _find(self) -> _Way:
        try:
            found = self._host.network_address(self._serial)
        except InfraError:
            if self._start_server is None:
                raise
            self._start_server()
            found = self._host.network_address(self._serial)
        # Another adb may have attached it anew, at another port.
        self._address = found or self._address
        if self._address:
            return _Network(self._host, self._serial, self._address)
        return _Usb(self._host, self._serial)


class _Ssh:
    """A Linux device: every question makes a connection of its own."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def reconnect(self) -> None:
        """Nothing: asking is connecting."""

    def restart(self) -> None:
        """Nothing: as above."""

    def reboot(self) -> None:
        from farm.devices.connect import open_transport

        transport = open_transport(self._device)
        try:
            # From the background, so that the answer comes before the end.
            script = '[ "$(id -u)" = 0 ] || exit 77; (sleep 1; reboot) >/dev/null 2>&1 </dev/null &'
            done = transport.run(["sh", "-c", script], timeout_s=_ASK_SECONDS, max_output=_ANSWER_BYTES)
        finally:
            transport.close()
        if done.code:
            raise DeviceError(self._device.serial, "only root may reboot it: use root in its address, or restart it")

    def nudge(self) -> None:
        """Nothing."""


class _Local:
    """This machine."""

    def reconnect(self) -> None:
        """Nothing."""

    def restart(self) -> None:
        """Nothing."""

    def reboot(self) -> None:
        raise InfraError("it is this machine")

    def nudge(self) -> None:
        """Nothing."""


def _way(device: Device, start_server: Callable[[], None] | None) -> _Way:
    if isinstance(device.address, AdbAddress):
        return _Adb(device, device.address, start_server)
    return _Ssh(device) if isinstance(device.address, SshAddress) else _Local()


def _check_identity(device: Device) -> None:
    """Raise OtherDeviceError when another device answers than `device`, DeviceError when none does."""
    from farm.devices.discovery import identify_again

    found = identify_again(device)
    # Its serial may be no more than an address, which another device has by now.
    is_other = bool(device.serialno) and found.serialno != device.serialno
    if is_other or (found.soc, found.kind, found.serial) != (device.soc, device.kind, device.serial):
        problem = f"another device answers in its place: {_described(found)}, it was {_described(device)}"
        raise OtherDeviceError(device.serial, problem)


def _described(device: Device) -> str:
    own = f", serial {device.serialno}" if device.serialno not in ("", device.serial) else ""
    return f"{device.serial} ({device.kind} {device.soc}{own})"


def _said(device: Device, error: InfraError) -> str:
    # Without the command, which is a script of ours.
    said = error.problem if isinstance(error, DeviceError) else str(error)
    return clean_text(" ".join(said.removeprefix(f"{device.serial}: ").split()))

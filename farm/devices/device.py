"""Devices, their addresses, unusable devices with their reasons, and health: plain data for every package."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Literal

import msgspec

LOOPBACK = "127.0.0.1"
MIXED = "mixed"
"""Kind of a run that had devices of both: it is compared with its like."""


class DeviceAddress:
    """Address of a device for one kind of transport: a frozen struct with its own tag.

    A new kind is registered in `farm.devices.connect`.
    """

    __slots__ = ()

    @property
    def place(self) -> str:
        """Name of the device before its identification."""
        raise NotImplementedError


class AdbAddress(msgspec.Struct, DeviceAddress, frozen=True, tag="adb"):
    """Behind an adb server."""

    port: int
    """Port of the adb server."""
    host: str = LOOPBACK
    """Host of the adb server."""
    attached_at: str = ""
    """HOST:PORT that it was attached at by `adb connect`, for a server that has forgotten it."""
    name: str = ""
    """Name of the device at the server; empty if the server knows it by serial or product."""
    tunnel: str = ""
    """Name of the `[[host]]` whose tunnel has the port; empty for a server that is reached directly."""
    also: tuple[AdbAddress, ...] = ()
    """Other addresses of the same device, for use when this one is gone."""

    @property
    def is_cable(self) -> bool:
        """True for a device on a cable: neither attached by `adb connect` nor found by mDNS."""
        return not self.attached_at and "._adb" not in self.name

    @property
    def place(self) -> str:
        """Address of the adb server for messages."""
        return f"{self.host}:{self.port}"


class SshAddress(msgspec.Struct, DeviceAddress, frozen=True, tag="ssh"):
    """A Linux device with an SSH server."""

    host: str
    user: str
    port: int = 22
    key_file: str = ""
    """A private key; the agent's keys, and the user's usual ones, when empty."""
    known_hosts: str = ""
    """File with its host key; ~/.ssh/known_hosts if empty."""
    storage: str = ""
    """Folder of farm on the device; /var/tmp/farm-USER when empty."""
    alias: str = ""
    """Name in farm.toml that `~/.ssh/config` resolves; the fields below come from that file as well."""
    host_key_alias: str = ""
    """Name of its key in known hosts."""
    identity_files: tuple[str, ...] = ()
    """Private keys to try without a `key_file`; missing files are skipped."""
    known_hosts_files: tuple[str, ...] = ()
    """Files of host keys in place of the usual ones, if `known_hosts` is empty."""
    jumps: tuple[SshAddress, ...] = ()
    """Machines on the way, beginning with the one nearest to this machine."""

    @property
    def place(self) -> str:
        """Name of the machine, with a port other than 22."""
        if self.alias and self.alias != self.host:
            return self.alias
        return self.host if self.port == 22 else f"{self.host}:{self.port}"

    def no_shell(self, ended: str, text: str) -> str:
        """Return the problem of an account without a shell; `ended` names the exit code, `text` is its output."""
        return (
            f"the account {self.user} at {self.place} runs no commands: its login shell, or a ForceCommand of its SSH "
            f"server, ended with {ended}{f' ({text})' if text else ''}: give it a shell there (chsh -s /bin/sh), "
            "remove the ForceCommand, or name another user in farm.toml"
        )


class LocalAddress(msgspec.Struct, DeviceAddress, frozen=True, tag="local"):
    """Address of this machine, if it is the device itself."""

    storage: str
    """Folder of farm, an absolute path."""

    @property
    def place(self) -> str:
        """This machine."""
        return "localhost"


class PowerCommand(msgspec.Struct, frozen=True):
    """Command that cuts the power of a device and restores it."""

    argv: tuple[str, ...]
    """`{serial}` in a word is the device's serial; no shell reads it."""
    timeout_s: float


class Device(msgspec.Struct, frozen=True):
    """A device that can be used."""

    serial: str
    """Name for farm and the transport: adb's serial of a phone, the name of a virtual device."""
    soc: str
    """As device profiles name it, `SM8650`; farm may have no profile for it."""
    kind: Literal["virtual", "hardware"]
    build: str
    """Fingerprint of its system."""
    address: DeviceAddress
    product: str
    """Model of the device for messages."""
    os: Literal["android", "linux"] = "android"
    host: str = ""
    """Name of the machine with the device; empty for a virtual device of a run."""
    name: str = ""
    """Name by its owner, in farm.toml or by `farm devices name`."""
    labels: tuple[str, ...] = ()
    serialno: str = ""
    """Serial that the device itself reports, empty for none. Another serial means another device."""
    power: PowerCommand | None = None
    """Power command of farm.toml: the last step of recovery."""
    soc_reported: str = ""
    """Name of the SoC as the device reports it, `QCS6490`; empty if it equals the profile's."""
    until_s: float = 0.0
    """End of its rented session, epoch seconds; 0 for a device without an end."""
    boot_id: str = ""
    """Start of its system: two addresses with the same serial and the same start are one device."""

    @property
    def called(self) -> str:
        """Name of the device in messages."""
        return self.name or self.serial

    @property
    def is_over(self) -> bool:
        """True after the end of its rented session."""
        return 0 < self.until_s <= time.time()

    @property
    def known_as(self) -> frozenset[str]:
        """Names that commands accept for the device, including its addresses."""
        address = self.address
        addresses = (address, *address.also) if isinstance(address, AdbAddress) else ()
        names = (name for one in addresses for name in (one.name, one.attached_at))
        return frozenset({self.serial, self.id, self.name, *names} - {""})

    @property
    def id(self) -> str:
        """Id in the store, equal on every host; the host is part, as virtual serials repeat."""
        return f"{self.serial}@{self.host}" if self.kind == "virtual" and self.host else self.serial


class Unusable(msgspec.Struct, frozen=True):
    """A device that is attached and cannot be used."""

    serial: str
    state: str
    """State by adb: `unauthorized`, `offline`; `device` for a device without a usable answer."""
    reason: str
    """Reason and next step."""
    host: str = ""
    """Name of the host of the device."""


def common_kind(kinds: Iterable[str]) -> str:
    """Return the kind that devices have in common, MIXED for several; empty where none is known."""
    known = {kind for kind in kinds if kind in ("virtual", "hardware")}
    return known.pop() if len(known) == 1 else MIXED if known else ""


# Events of a device -> its health. Pure: docs/explanation/health.md.


FAILURES_IN_A_ROW = 8
"""So many, with no job finished in between, put a device into quarantine."""


class Health(StrEnum):
    """Health of a device, which decides whether it gets jobs."""

    HEALTHY = "healthy"
    SUSPECT = "suspect"
    """Something went wrong on it: it has to pass a health check before the next job."""
    QUARANTINED = "quarantined"
    """The device gets no job until a person releases it."""


class Event(StrEnum):
    """Event of a device that concerns its health."""

    JOB_DONE = "job_done"
    """A job came to a verdict on it that is not infra, passed or failed: the device did its part."""
    INFRA = "infra"
    """An attempt on it was infra."""
    OUTVOTED = "outvoted"
    """A job that had ended the runner here, or given wrong numbers, passed on another device."""
    CHECK_PASSED = "check_passed"
    CHECK_FAILED = "check_failed"
    RECOVERED = "recovered"
    """The recovery ladder ended with a device that answers."""
    GAVE_UP = "gave_up"
    """The recovery ladder ended without."""
    RELEASED = "released"
    """A person took it out of quarantine."""


class HealthEvent(msgspec.Struct, frozen=True):
    """A recorded event in the health of a device."""

    device: str
    """Id of the device."""
    event: str
    """`health_check`, a cause of `farm.results.attempt`, or a step of recovery."""
    state: str
    """Health of the device from this event on."""
    reason: str
    detail: dict[str, str | float] = {}
    latency_ns: tuple[float, ...] = ()
    """Measured by a health check."""
    time_ms: int = 0
    """0 is now, on the database's clock."""


class HealthMark(msgspec.Struct, frozen=True):
    """Event of a device with its cause."""

    event: Event
    cause: str = ""
    """Cause of a failure: a value of `farm.results.attempt.Cause`."""
    reason: str = ""


RECOVERY = "recovery"
"""Event of one recovery step: it is recorded and has no effect on health by itself."""

# Causes of failures that are no device's fault.
NOT_DEVICE_CAUSES = frozenset(
    {"adb_server", "lease", "worker", "builder", "compile", "disk", "local", "request", "infeasible"}
)
# Cause for space taken by other files: no fault of the device, and no recovery step frees it. No job runs without
# space, so that the device has to show free space again.
FULL = "space"
# Causes that may be the job's, until another device has tried it: a suite full of programs that crash, are refused or
# compute wrong numbers must not put every device into quarantine.
OPEN_CAUSES = frozenset({"crash", "hang", "numerics", "refused"})
RUNTIME = "runtime"
"""Libraries that farm pushed do not fit: no fault of the device, and no recovery changes it; but no job runs with them,
so that a health check has to pass."""
_NEVER_QUARANTINE = frozenset({FULL, RUNTIME})


def is_doubtful(mark: HealthMark) -> bool:
    """Tell whether a device has to show by a health check, after this event, that it works."""
    return mark.event is Event.OUTVOTED or (mark.event is Event.INFRA and mark.cause not in NOT_DEVICE_CAUSES)


def counts(mark: HealthMark) -> bool:
    """Tell whether an event brings the device nearer to quarantine."""
    return is_doubtful(mark) and not (mark.event is Event.INFRA and mark.cause in OPEN_CAUSES | _NEVER_QUARANTINE)


def next_health(state: Health, recent: Sequence[HealthMark], mark: HealthMark) -> tuple[Health, str]:
    """Return the health of a device after `mark` and the reason in one line, empty for a healthy device.

    `recent` has its events before, oldest first; a dozen is enough. The reason is empty also for an unchanged state,
    whose earlier reason holds.
    """
    if mark.event is Event.RELEASED:
        return Health.SUSPECT, "released from quarantine: a health check has to pass first"
    if state is not Health.QUARANTINED:
        if problem := _quarantine(recent, mark):
            return Health.QUARANTINED, _because(problem, mark)
        if problem := _doubt(mark):
            return Health.SUSPECT, _because(problem, mark)
        if mark.event in {Event.CHECK_PASSED, Event.JOB_DONE}:
            return Health.HEALTHY, ""
    return state, ""


def _quarantine(recent: Sequence[HealthMark], mark: HealthMark) -> str:
    """Return why `mark` puts a device into quarantine, empty when it does not."""
    if mark.cause in NOT_DEVICE_CAUSES | _NEVER_QUARANTINE:
        return ""
    if mark.event is Event.GAVE_UP:
        return "it could not be brought back"
    if mark.event is Event.CHECK_FAILED and _ladder_was_climbed(recent):
        return "its health check fails, also after recovery"
    row = _failures_in_a_row((*recent, mark))
    if counts(mark) and row >= FAILURES_IN_A_ROW:
        return f"{row} failures in a row, no job finished in between; the last"
    return ""


def _doubt(mark: HealthMark) -> str:
    """Return why `mark` makes a device suspect, empty when it does not."""
    if mark.cause == FULL:
        return "its storage is full"
    if mark.cause == RUNTIME:
        return "its runtime does not fit"
    if mark.event is Event.CHECK_FAILED:
        return "" if mark.cause in NOT_DEVICE_CAUSES else "its health check fails"
    if mark.event is Event.OUTVOTED:
        return "other devices did what failed here"
    if mark.event is Event.INFRA and mark.cause in OPEN_CAUSES:
        return "a job that failed here is tried on another device"
    return "a job did not come to its end" if is_doubtful(mark) else ""


def _failures_in_a_row(marks: Sequence[HealthMark]) -> int:
    """Return the number of failures since the last finished job or release by a person.

    A passed health check proves too little to reset the count.
    """
    row = 0
    for mark in reversed(marks):
        if mark.event in {Event.JOB_DONE, Event.RELEASED}:
            break
        row += counts(mark)
    return row


def _ladder_was_climbed(recent: Sequence[HealthMark]) -> bool:
    """Tell whether a recovery has come since the device was last known to be well, or was released."""
    for mark in reversed(recent):
        if mark.event is Event.RECOVERED:
            return True
        if mark.event in {Event.CHECK_PASSED, Event.JOB_DONE, Event.RELEASED}:
            return False
    return False


def _because(what: str, mark: HealthMark) -> str:
    detail = " ".join(part for part in (f"({mark.cause})" if mark.cause else "", mark.reason) if part)
    return f"{what}: {detail}" if detail else what

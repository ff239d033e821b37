"""Input of a scheduling decision (devices, leases and waiters of one SoC), and its result, a `Share`. Plain data."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import IntEnum

import msgspec

USER, LABEL = "user:", "label:"
"""Prefixes of the keys of quotas: `user:ada`, `label:camera`."""


class Priority(IntEnum):
    """Priority of a request. A holder hands its device over to a waiter of greater priority."""

    NIGHTLY = 0
    """Priority of `farm nightly` and `farm run --purpose nightly`."""
    PERSON = 1
    """Priority of all other commands."""

    @classmethod
    def _missing_(cls, value: object) -> Priority | None:
        """Return the lowest priority for a number that another version, or a user, wrote into a row."""
        return cls.NIGHTLY if isinstance(value, int) else None


class Request(msgspec.Struct, frozen=True):
    """Request of a process that waits for devices. Times are on the store's clock: epoch, milliseconds."""

    id: str
    """Token of the process."""
    devices: tuple[str, ...]
    """Ids of the devices that the process can use, best first."""
    count: int
    """Number of devices that the process still wants."""
    user: str
    priority: Priority
    since_ms: int


class Waiting(msgspec.Struct, frozen=True):
    """Request of a waiting process, as people see it. Times are on the store's clock: epoch, milliseconds."""

    devices: tuple[str, ...]
    """Ids of the devices that the process can use."""
    count: int
    """Number of devices that the process still wants."""
    user: str
    host: str
    pid: int
    purpose: str
    """Command that would use the devices."""
    priority: Priority
    since_ms: int
    why: str = ""
    """Reason for the wait."""


class Lease(msgspec.Struct, frozen=True):
    """Lease of a device. Times are on the store's clock: epoch, milliseconds."""

    device: str
    """Id of the device."""
    fence: int
    """Number that grows with every lease of the device; a result with a smaller fence is refused."""
    token: str
    """Token of the process that holds the lease; empty for a free device."""
    user: str
    host: str
    pid: int
    purpose: str
    """Command of the holder, for people."""
    priority: Priority
    acquired_ms: int
    expires_ms: int
    reserved_for: str = ""
    """The only user whose processes may lease the device from `reserved_from_ms` until `reserved_until_ms`."""
    reserved_until_ms: int = 0
    reserved_from_ms: int = 0

    def is_held(self, now_ms: int) -> bool:
        """Return whether a process holds the lease."""
        return bool(self.token) and self.expires_ms > now_ms

    def reserved_by(self, now_ms: int) -> str:
        """Return the user that the device is reserved for; empty without a reservation."""
        return self.reserved_for if self.reserved_from_ms <= now_ms < self.reserved_until_ms else ""


class LivingDevice(msgspec.Struct, frozen=True):
    """Device that is in service and fit for work."""

    id: str
    labels: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    """Other names of the device for `--device`: name, serial."""
    kind: str = ""
    """Key of the runtime that fits it: `SM8650/hardware/android`."""
    runs_shards: bool = True
    """False for a device without a living agent: only commands use it, no submitted runs."""


class Retry(msgspec.Struct, frozen=True):
    """Shard (part of a run) whose next device differs from the devices that tried it."""

    shard: int
    avoid: tuple[str, ...]
    """Ids of the devices that tried the shard."""


class OpenOrder(msgspec.Struct, frozen=True):
    """Submitted run with waiting shards for this SoC."""

    run_id: str
    user: str
    priority: Priority
    since_ms: int
    ready: int
    """Number of shards that any device may begin now: all bundles exist, and no device is avoided."""
    retries: tuple[Retry, ...] = ()
    """Shards that may begin now on some of the devices."""
    devices: tuple[str, ...] = ()
    """Ids, names or serials of the devices that the run may use; empty for all."""
    labels: tuple[str, ...] = ()
    """Labels of which a device needs every one."""
    kinds: tuple[str, ...] = ()
    """Kinds of devices for which the run has a runtime; empty for all."""
    most_devices: int | None = None
    """Greatest number of devices of this SoC at once; None for no limit."""
    held: int = 0
    """Number of devices of this SoC that run its shards now."""
    lacking: int = 0
    """Number of bundles that its shards for this SoC wait for."""


class Situation(msgspec.Struct, frozen=True, kw_only=True):
    """Input of a decision about the devices of one SoC."""

    soc: str
    now_ms: int
    devices: Sequence[LivingDevice]
    leases: Sequence[Lease]
    """Leases of `devices` that are held or reserved, or that expired before a release.

    Leases of other devices count only against the quotas of their users.
    """
    orders: Sequence[OpenOrder]
    requests: Sequence[Request] = ()
    """Requests of waiting processes."""
    quotas: Mapping[str, int] = {}
    """Greatest number of devices at once: of a user (`user:ada`), or of each user among a label (`label:camera`)."""
    here: Mapping[str, int] = {}
    """Number of held devices of this SoC that `leases` lacks, by user."""
    elsewhere: Mapping[str, int] = {}
    """Number of held devices of other SoCs by user, for quotas."""
    elsewhere_labelled: Mapping[tuple[str, str], int] = {}
    """Number of held devices with a label under quota that `leases` lacks, by user and label."""
    asking: Collection[str] = ()
    """Ids of devices whose agent asks for work now: they are given away before others."""
    running: Collection[str] = ()
    """Ids of devices that run shards of a submitted run: they are handed over before devices of commands."""


class Share(msgspec.Struct, frozen=True):
    """Waiter that gets a free device: a submitted run or a process."""

    user: str
    run_id: str = ""
    """Submitted run that gets the device; empty if a process gets it."""
    shard: int | None = None
    """Shard to try again on the device; None for the run's first shard that avoids no device."""
    request: str = ""
    """Token of the process that gets the device; empty if a run gets it."""


def usable(order: OpenOrder, devices: Iterable[LivingDevice]) -> list[str]:
    """Return the ids of the devices that a submitted run may use at all."""
    choice, labels, kinds = set(order.devices), set(order.labels), set(order.kinds)
    return [
        device.id
        for device in devices
        if device.runs_shards
        and (not choice or device.id in choice or not choice.isdisjoint(device.names))
        and labels.issubset(device.labels)
        and (not kinds or device.kind in kinds)
    ]

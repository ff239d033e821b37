"""Values of the policy: devices, leases and waiters of one SoC, and the waiter that gets a free device."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import IntEnum

import msgspec

USER, LABEL = "user:", "label:"
"""Prefixes of quota subjects."""


class Priority(IntEnum):
    """How urgent a request is; a greater one makes a smaller one hand over."""

    NIGHTLY = 0
    """Priority of `farm nightly` and `farm run --purpose nightly`."""
    PERSON = 1


class Request(msgspec.Struct, frozen=True):
    """A process that waits for devices."""

    id: str
    """Token of the process."""
    devices: tuple[str, ...]
    """Ids of those it can use, best first."""
    count: int
    """How many more it wants."""
    user: str
    priority: Priority
    since_ms: int


class Waiting(msgspec.Struct, frozen=True):
    """A process that waits for devices, as people see it. Times are on the store's clock: epoch, milliseconds."""

    devices: tuple[str, ...]
    """Ids of those it can use."""
    count: int
    """How many more it wants."""
    user: str
    host: str
    pid: int
    purpose: str
    """Command that would use them."""
    priority: Priority
    since_ms: int
    why: str = ""
    """Reason for the wait."""


class Lease(msgspec.Struct, frozen=True):
    """Lease of a device. Times are on the store's clock: epoch, milliseconds."""

    device: str
    """Id of the device."""
    fence: int
    """Greater with every lease of the device: what carries an older one comes too late."""
    token: str
    """Token of the process that holds it; empty when it is free."""
    user: str
    host: str
    pid: int
    purpose: str
    """Command of the holder, for people."""
    priority: Priority
    acquired_ms: int
    expires_ms: int
    reserved_for: str = ""
    """The only user whose processes may lease it from `reserved_from_ms` until `reserved_until_ms`."""
    reserved_until_ms: int = 0
    reserved_from_ms: int = 0

    def is_held(self, now_ms: int) -> bool:
        """Tell whether a process has it."""
        return bool(self.token) and self.expires_ms > now_ms

    def reserved_by(self, now_ms: int) -> str:
        """Return the user that it is reserved for, empty when there is none."""
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
    """False for a device without a living agent: only processes use it."""


class Retry(msgspec.Struct, frozen=True):
    """Shard whose next device differs from the devices that tried it."""

    shard: int
    avoid: tuple[str, ...]
    """Ids of devices."""


class OpenOrder(msgspec.Struct, frozen=True):
    """A submitted run of which shards of this SoC wait."""

    run_id: str
    user: str
    priority: Priority
    since_ms: int
    ready: int
    """Shards that any device may begin now: nothing is lacking, and they avoid no device."""
    retries: tuple[Retry, ...] = ()
    """Shards that could begin now, but not on every device."""
    devices: tuple[str, ...] = ()
    """Ids, names or serials of the devices that it may use; empty for all."""
    labels: tuple[str, ...] = ()
    """Labels that a device needs, all of them."""
    kinds: tuple[str, ...] = ()
    """Kinds of the devices that it has a runtime for; empty for all."""
    most_devices: int | None = None
    """Most devices of this SoC at once; None for all."""
    held: int = 0
    """How many devices of this SoC run its shards now."""
    lacking: int = 0
    """Bundles that its shards of this SoC wait for."""


class Situation(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a decision about the devices of one SoC looks at."""

    soc: str
    now_ms: int
    devices: Sequence[LivingDevice]
    leases: Sequence[Lease]
    """Leases of these devices that are held or reserved, or that expired before a release.

    Leases of other devices only count for their users.
    """
    orders: Sequence[OpenOrder]
    requests: Sequence[Request] = ()
    """Requests of waiting processes."""
    quotas: Mapping[str, int] = {}
    """The most devices that a user has at once (`user:ada`), and that any one user has of a label (`label:camera`)."""
    here: Mapping[str, int] = {}
    """Devices of this SoC beside `leases`, counted by user."""
    elsewhere: Mapping[str, int] = {}
    """Devices of other SoCs, counted by user, for quotas."""
    elsewhere_labelled: Mapping[tuple[str, str], int] = {}
    """Devices with a label under quota beside `leases`, counted by user and label."""
    asking: Collection[str] = ()
    """Ids of devices whose agent asks: they are given away before others."""
    running: Collection[str] = ()
    """Ids of devices that run shards of a submitted run: they are handed over before devices of processes."""


class Share(msgspec.Struct, frozen=True):
    """Waiter that gets a free device."""

    user: str
    run_id: str = ""
    """Empty where a process that waits gets it."""
    shard: int | None = None
    """The shard that is to be tried again on it; None for the first of the run that avoids no device."""
    request: str = ""
    """Token of the process that waits."""


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

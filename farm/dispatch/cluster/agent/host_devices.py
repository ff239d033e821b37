"""Devices of an agent's host, and the device runners that work on them."""

from __future__ import annotations

import contextlib
import logging
import time
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from farm.base.errors import FarmError
from farm.base.socs import load_socs, no_profile
from farm.devices.device import Event
from farm.dispatch.device_runner import DeviceRunner
from farm.dispatch.pool.fleet import out_of_use
from farm.store.cluster.records import AgentDevice
from farm.store.leases.registry import Registered, Seen

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from farm.base.config.settings import Config
    from farm.base.processes import Supervisor
    from farm.devices.device import Device
    from farm.devices.discovery import Scan
    from farm.dispatch.dispatcher import Dispatcher, JobSource
    from farm.store.cluster.records import HeartbeatReply, HeldShard
    from farm.store.store import Store


# Devices of an agent's host: their coming and going, and the reasons of devices without work.


_IDLE_SCAN_SECONDS = 30.0
"""Seconds between two scans while all devices are idle: a scan asks every device for its identity."""

_BUSY_SCAN_SECONDS = 300.0
"""Seconds between two scans beside jobs, which a scan disturbs; a change at the adb server starts one sooner."""

_SEEN_SECONDS = 60.0
_REGISTRY_SECONDS = 20.0
"""Seconds between two reads of the registry's entries for the devices; decisions about leases always read them."""

_EVENTS = 20


class HostDevice(NamedTuple):
    """Device of this host, for the agent's own use and as facts for the store."""

    device: Device
    facts: AgentDevice


class Attachments(NamedTuple):
    """Attached devices of the host."""

    devices: tuple[HostDevice, ...]
    others: tuple[AgentDevice, ...]
    """Attached devices that cannot be used."""
    outvoted: dict[str, int]
    """Number of times that others outvoted a device since the last look, by id."""


class HostDevices:
    """Search for the devices of a host. Belongs to one thread."""

    def __init__(
        self, config: Config, store: Store, supervisor: Supervisor, find: Callable[[], Sequence[Device]] | None = None
    ) -> None:
        """`find` returns devices that replace the attached ones; no scan is made then."""
        self._config, self._store, self._supervisor, self._find = config, store, supervisor, find
        self._scan: Scan | None = None
        self._scanned_s = self._seen_s = float("-inf")
        self._listing: object = None
        self._known: dict[str, Registered] = {}
        self._found: Scan | None = None
        self._asked_s = float("-inf")
        self._counted_ms: dict[str, int] = {}
        """Time of the last health event that was counted, by device."""
        self._reasons: dict[str, str] = {}

    def look(self, busy: Collection[str]) -> Attachments:
        """Return the attached devices; `busy` holds the ids of devices with running jobs. Raises FarmError."""
        found = self._attached(busy)
        if time.monotonic() > self._seen_s + _SEEN_SECONDS:
            self._store.devices.see([Seen(device, "device", None) for device in found.devices])
            self._seen_s = time.monotonic()
        if found != self._found or time.monotonic() > self._asked_s + _REGISTRY_SECONDS:
            self._known = {one.id: one for one in self._store.devices.all()}
            self._asked_s, self._found = time.monotonic(), found
        known = self._known
        devices = tuple(described(device, known.get(device.id), load_socs()) for device in found.devices)
        others = tuple(
            AgentDevice(one.serial, one.serial, "", "", "", refused=f"{one.state}: {one.reason}")
            for one in found.unusable
        )
        return Attachments(devices, others, self._outvoted(devices, known))

    def _attached(self, busy: Collection[str]) -> Scan:
        from farm.devices.discovery import Scan, scan_all
        from farm.devices.hosts import revive_tunnels

        if self._find is not None:
            return Scan(tuple(self._find()), ())
        revive_tunnels(self._supervisor)
        listing = _listing()
        age_s = time.monotonic() - self._scanned_s
        is_due = age_s > (_BUSY_SCAN_SECONDS if busy else _IDLE_SCAN_SECONDS)
        if self._scan is None or listing != self._listing or is_due:
            before = self._scan
            self._scan = keep_busy(scan_all(self._config, self._supervisor, rented=False).narrowed, before, busy)
            self._scanned_s, self._listing = time.monotonic(), listing
            if before is None or before.devices != self._scan.devices:
                self._seen_s = float("-inf")
        return self._scan

    def _outvoted(self, devices: Iterable[HostDevice], known: dict[str, Registered]) -> dict[str, int]:
        """Return how often devices were outvoted since the last call: jobs that failed on them passed elsewhere.

        Only devices that are suspect for another reason than at the last call need a query.
        """
        found = {}
        for id_ in (one.device.id for one in devices):
            now = known.get(id_)
            if now is None or now.health != "suspect" or now.health_reason == self._reasons.get(id_):
                continue
            is_first = id_ not in self._reasons
            self._reasons[id_] = now.health_reason
            events = self._store.devices.health_events(id_, _EVENTS)
            since_ms = self._counted_ms.get(id_, 0)
            new = [one for one in events if one.event == Event.OUTVOTED and one.time_ms > since_ms]
            self._counted_ms[id_] = max([since_ms, *(one.time_ms for one in events)])
            # Events before this agent's start do not count: its first health check decides.
            if new and not is_first:
                found[id_] = len(new)
        return found


def described(device: Device, known: Registered | None, socs: Collection[str]) -> HostDevice:
    """Return a device with its registry entry (labels, name), and the reason if it gets no work. Pure."""
    labels = device.labels
    refused = ""
    if known is not None:
        labels = tuple(dict.fromkeys((*device.labels, *known.labels)))
        device = msgspec.structs.replace(device, name=device.name or known.name)
        refused = out_of_use(known, device.called)
    if device.soc not in socs:
        refused = no_profile(device.soc)
    facts = AgentDevice(device.id, device.serial, device.soc, device.kind, device.os, labels, device.name, refused)
    return HostDevice(device, facts)


def keep_busy(scan: Scan, before: Scan | None, busy: Collection[str]) -> Scan:
    """Return a scan with the busy devices of the scan `before` added. Pure.

    A busy device may be missing while it reboots, or while its job keeps it from answering; its run handles both.
    """
    if before is None:
        return scan
    there = {device.id for device in scan.devices}
    kept = [device for device in before.devices if device.id in busy and device.id not in there]
    serials = {device.serial for device in kept}
    unusable = tuple(one for one in scan.unusable if one.serial not in serials)
    return msgspec.structs.replace(scan, devices=(*scan.devices, *kept), unusable=unusable)


def _listing() -> object:
    """Return the list of attached devices of the ordinary adb server: this query disturbs no device."""
    from farm.devices.adb.server import ordinary_server

    with contextlib.suppress(FarmError):
        return ordinary_server().attached()
    return None


# Set of all devices of an agent, and events for all of them. Belongs to the thread of decisions.


logger = logging.getLogger(__name__)


class DeviceRunners:
    """Device runners of an agent, by device. Other threads may call `facts`, `busy` and `has`."""

    def __init__(
        self, source: JobSource, host: Dispatcher, closing: Callable[[DeviceRunner], None], rest_s: float
    ) -> None:
        """`closing` ends the process of a detached device, in another thread.

        A device on which a shard could not begin rests for `rest_s`.
        """
        self._source, self._host, self._closing, self._rest_s = source, host, closing, rest_s
        self._runners: dict[str, DeviceRunner] = {}
        self._facts: dict[str, AgentDevice] = {}
        self._others: tuple[AgentDevice, ...] = ()
        self._is_open = False

    def __len__(self) -> int:
        return len(self._runners)

    def all(self) -> list[DeviceRunner]:
        """Return the runners of all devices."""
        return list(self._runners.values())

    def get(self, device: str) -> DeviceRunner:
        """Return the runner of a device. Raises KeyError."""
        return self._runners[device]

    def facts(self) -> tuple[AgentDevice, ...]:
        """Return the facts of the devices for the store, unusable attached devices included."""
        runners = dict(self._runners)
        found = [
            msgspec.structs.replace(one, refused=one.refused or runners[id_].resting)
            for id_, one in sorted(self._facts.items())
            if id_ in runners
        ]
        return (*found, *self._others)

    def busy(self) -> list[str]:
        """Return the ids of devices that may be running a job."""
        return [id_ for id_, runner in dict(self._runners).items() if not runner.is_free]

    def has(self, soc: str) -> bool:
        """Return whether the host has a device of an SoC."""
        return any(runner.device.soc == soc for runner in self.all())

    def open(self) -> None:
        """Use all usable devices from now on."""
        self._is_open = True
        for id_ in self._runners:
            self._use(id_)

    def drain(self, why: str) -> None:
        """Take no further work on any device; running shards are finished."""
        self._is_open = False
        for runner in self.all():
            runner.drain(why)

    @property
    def are_free(self) -> bool:
        """True if no device has work of the agent."""
        return all(runner.is_free for runner in self.all())

    def update(self, look: Attachments) -> bool:
        """Update the devices from a scan; return whether the facts for the store have changed."""
        before = self.facts()
        self._others = look.others
        found = {one.device.id: one for one in look.devices}
        for id_ in [id_ for id_ in self._runners if id_ not in found]:
            self._runners[id_].drain("it is no longer attached")
            if self._runners[id_].is_free:
                self._forget(id_)
        for id_, one in found.items():
            self._with(id_, one)
        for id_, times in look.outvoted.items():
            self._runners[id_].outvoted(times)
        return self.facts() != before

    def apply(self, reply: HeartbeatReply, until_s: float) -> None:
        """Apply the answer to a heartbeat; the leases that the agent still has end at `until_s`."""
        for id_, runner in self._runners.items():
            if id_ in reply.lost:
                if runner.lease is not None:
                    name = runner.device.called
                    logger.warning("%s: its lease was lost", name, extra={"device": name})
                runner.lease_lost()
            elif runner.lease is not None:
                runner.renewed(until_s)
        for id_, who in reply.wanted.items():
            if id_ in self._runners:
                self._runners[id_].wanted(who)
        for run_id in reply.stopped:
            for runner in self.all():
                runner.stopped(run_id)
        for run_id in reply.cancelled:
            for runner in self.all():
                runner.cancelled(run_id)

    def claimed(self, held: HeldShard, until_s: float) -> None:
        """Pass a claimed shard to its device."""
        self._runners[held.lease.device].claimed(held, until_s)

    def forget_run(self, run_id: str) -> bool:
        """Forget a run that is over; return False while a device still works for it."""
        if any(run_id in runner.runs for runner in self.all()):
            return False
        for runner in self.all():
            runner.forget(run_id)
        return True

    def _with(self, id_: str, one: HostDevice) -> None:
        self._facts[id_] = one.facts
        runner = self._runners.get(id_)
        if runner is not None and runner.device != one.device and runner.is_free:
            # The device has another address or another system: replace its runner.
            self._forget(id_)
            self._facts[id_], runner = one.facts, None
        if runner is None:
            self._runners[id_] = DeviceRunner(one.device, self._source, self._host, rest_s=self._rest_s)
        self._use(id_)

    def _use(self, id_: str) -> None:
        refused = self._facts[id_].refused
        if refused or not self._is_open:
            self._runners[id_].drain(refused or "its agent takes no further work")
        else:
            self._runners[id_].open()

    def _forget(self, id_: str) -> None:
        self._facts.pop(id_, None)
        runner = self._runners.pop(id_)
        runner.drain("it is no longer attached")
        self._closing(runner)

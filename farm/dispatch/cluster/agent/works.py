"""Set of all devices of an agent, and events for all of them. Belongs to the thread of decisions."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import msgspec

from farm.dispatch.device_runner import DeviceRunner

if TYPE_CHECKING:
    from collections.abc import Callable

    from farm.dispatch.cluster.agent.host_devices import Attachments, HostDevice
    from farm.dispatch.cluster.agent.timing import Timing
    from farm.dispatch.job_source import Host, JobSource
    from farm.store.cluster.records import AgentDevice, HeldShard, Minded

logger = logging.getLogger(__name__)


class Works:
    """Device runners of an agent, by device. Other threads may call `facts`, `busy` and `has`."""

    def __init__(self, source: JobSource, host: Host, closing: Callable[[DeviceRunner], None], timing: Timing) -> None:
        """`closing` ends the process of a detached device, in another thread."""
        self._source, self._host, self._closing, self._timing = source, host, closing, timing
        self._works: dict[str, DeviceRunner] = {}
        self._facts: dict[str, AgentDevice] = {}
        self._others: tuple[AgentDevice, ...] = ()
        self._is_open = False

    def __len__(self) -> int:
        return len(self._works)

    def all(self) -> list[DeviceRunner]:
        """Return the runners of all devices."""
        return list(self._works.values())

    def get(self, device: str) -> DeviceRunner:
        """Return the runner of a device. Raises KeyError."""
        return self._works[device]

    def facts(self) -> tuple[AgentDevice, ...]:
        """Return the facts of the devices for the store, unusable attached devices included."""
        works = dict(self._works)
        found = [
            msgspec.structs.replace(one, refused=one.refused or works[id_].resting)
            for id_, one in sorted(self._facts.items())
            if id_ in works
        ]
        return (*found, *self._others)

    def busy(self) -> list[str]:
        """Return the ids of devices that may be running a job."""
        return [id_ for id_, work in dict(self._works).items() if not work.is_free]

    def has(self, soc: str) -> bool:
        """Return whether the host has a device of an SoC."""
        return any(work.device.soc == soc for work in self.all())

    def open(self) -> None:
        """Use all usable devices from now on."""
        self._is_open = True
        for id_ in self._works:
            self._use(id_)

    def shut(self, why: str) -> None:
        """Take no further work on any device; running shards are finished."""
        self._is_open = False
        for work in self.all():
            work.shut(why)

    @property
    def are_free(self) -> bool:
        """True if no device has work of the agent."""
        return all(work.is_free for work in self.all())

    def looked(self, look: Attachments) -> bool:
        """Update the devices from a scan; return whether the facts for the store have changed."""
        before = self.facts()
        self._others = look.others
        found = {one.device.id: one for one in look.devices}
        for id_ in [id_ for id_ in self._works if id_ not in found]:
            self._works[id_].shut("it is not attached any more")
            if self._works[id_].is_free:
                self._forget(id_)
        for id_, one in found.items():
            self._with(id_, one)
        for id_, times in look.outvoted.items():
            self._works[id_].outvoted(times)
        return self.facts() != before

    def minded(self, minded: Minded, until_s: float) -> None:
        """Apply the answer to a heartbeat; the leases that the agent still has end at `until_s`."""
        for id_, work in self._works.items():
            if id_ in minded.lost:
                if work.lease is not None:
                    name = work.device.called
                    logger.warning("%s is not ours any more: its lease was lost", name, extra={"device": name})
                work.lost()
            elif work.lease is not None:
                work.renewed(until_s)
        for id_, who in minded.wanted.items():
            if id_ in self._works:
                self._works[id_].wanted(who)
        for run_id in minded.stopped:
            for work in self.all():
                work.stopped(run_id)
        for run_id in minded.cancelled:
            for work in self.all():
                work.cancelled(run_id)

    def claimed(self, held: HeldShard, until_s: float) -> None:
        """Pass a claimed shard to its device."""
        self._works[held.lease.device].claimed(held, until_s)

    def forget_run(self, run_id: str) -> bool:
        """Forget a run that is over; return False while a device still works for it."""
        if any(run_id in work.runs for work in self.all()):
            return False
        for work in self.all():
            work.forget(run_id)
        return True

    def _with(self, id_: str, one: HostDevice) -> None:
        self._facts[id_] = one.facts
        work = self._works.get(id_)
        if work is not None and work.device != one.device and work.is_free:
            # The device has another address or another system: replace its runner.
            self._forget(id_)
            self._facts[id_], work = one.facts, None
        if work is None:
            timing = self._timing
            self._works[id_] = DeviceRunner(
                one.device, self._source, self._host, linger_s=timing.linger_s, rest_s=timing.rest_s
            )
        self._use(id_)

    def _use(self, id_: str) -> None:
        refused = self._facts[id_].refused
        if refused or not self._is_open:
            self._works[id_].shut(refused or "its agent takes no more work")
        else:
            self._works[id_].open()

    def _forget(self, id_: str) -> None:
        self._facts.pop(id_, None)
        work = self._works.pop(id_)
        work.shut("it is not attached any more")
        self._closing(work)

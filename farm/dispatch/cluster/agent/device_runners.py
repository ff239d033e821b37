"""Set of all devices of an agent, and events for all of them. Belongs to the thread of decisions."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import msgspec

from farm.dispatch.device_runner import DeviceRunner

if TYPE_CHECKING:
    from collections.abc import Callable

    from farm.dispatch.cluster.agent.host_devices import Attachments, HostDevice
    from farm.dispatch.dispatcher import Dispatcher
    from farm.dispatch.job_source import JobSource
    from farm.store.cluster.records import AgentDevice, HeartbeatReply, HeldShard

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

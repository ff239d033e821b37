"""Choice of a run's devices on a shared farm, from the facts of its agents."""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from typing import TYPE_CHECKING

from msgspec.structs import replace

from farm.base.errors import NoDeviceError, UsageError
from farm.base.socs import find_soc, load_socs
from farm.devices.adb.protocol import SERIAL_VARIABLE, named_device
from farm.devices.device import common_kind
from farm.dispatch.pool.fleet import NO_HEAP, Choice, hardware_first, refusal, require_known
from farm.dispatch.request.choose import device_kind_of
from farm.report.model.format import duration
from farm.store.records import PROTOCOL

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from farm.base.config.settings import Config
    from farm.dispatch.request.request import RunRequest
    from farm.store.cluster.records import Agent, AgentDevice
    from farm.store.leases.registry import Registered
    from farm.store.store import Store

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 3.0


def pinned(request: RunRequest) -> RunRequest:
    """Return `request` with the device of ANDROID_SERIAL, if that is set and the request names no device."""
    name = named_device(os.environ)
    if not name or request.choice.devices:
        return request
    return replace(request, choice=replace(request.choice, devices=(name,)))


def choose(
    agents: Iterable[Agent], registered: Mapping[str, Registered], socs: Collection[str], choice: Choice
) -> tuple[list[AgentDevice], list[str]]:
    """Return the usable devices of living hosts, and a description with reason of each refused device. Pure.

    Raises as `hardware_first`.
    """
    usable: list[AgentDevice] = []
    refused: list[str] = []
    without_heap: list[str] = []
    for agent in agents:
        for device in agent.facts.devices:
            if device.soc not in socs:
                if device.soc and device.soc not in load_socs():
                    # The run may be for this device: its host has no profile for the reported name.
                    refused.append(f"{device.called} ({device.soc} of {agent.name}: {device.refused})")
                continue
            names, known = (device.id, device.serial, device.name), registered.get(device.id)
            reason = agent_refusal(agent) or refusal(device, names, known, choice) or device.refused
            without_heap += [device.called] if reason == NO_HEAP else []
            if reason:
                refused.append(f"{device.called} ({device.soc} of {agent.name}: {reason})")
            else:
                usable.append(device)
    return hardware_first(usable, without_heap, choice), refused


def agent_refusal(agent: Agent) -> str:
    """Return the reason if no device of an agent can be used now; empty if they can. Pure."""
    if not agent.alive:
        return "its agent does not answer"
    if agent.facts.protocol != PROTOCOL:
        return f"its farm {agent.facts.version} has another protocol: upgrade it, or this one"
    return "its agent is being stopped" if agent.facts.draining or agent.is_draining else ""


class Wanted:
    """Devices of a run on a shared farm."""

    def __init__(self, store: Store, socs: Sequence[str], choice: Choice) -> None:
        self._store, self._choice = store, choice
        self.socs = list(dict.fromkeys(socs))
        self.devices: list[AgentDevice] = []
        """Usable devices of living hosts."""
        self.expected: list[AgentDevice] = []
        """Expected devices of SoCs without a living host, as last seen: the run is prepared for them."""

    @property
    def kind(self) -> str:
        """`virtual`, `hardware` or `mixed`; empty for unknown."""
        return common_kind(device.kind for device in (*self.devices, *self.expected))

    @property
    def classes(self) -> tuple[str, ...]:
        """Classes of devices for which the run has a runtime, as `NewOrder.classes`."""
        return tuple(sorted({f"{one.soc}/{one.kind}/{one.os}" for one in (*self.devices, *self.expected)}))

    @property
    def per_soc(self) -> Counter[str]:
        """Number of devices of living hosts, by SoC."""
        return Counter(device.soc for device in self.devices)

    def find(self, *, wait: bool, wait_s: float | None = None) -> list[str]:
        """Look for the devices, and return the SoCs that had none after `wait_s`; always empty without `wait_s`.

        With `wait`, an SoC without a living host is no error. Raises NoDeviceError, UnknownNameError.
        """
        end_s = time.monotonic() + (wait_s or 0.0)
        logged = False
        while True:
            lacking, refused = self._look()
            if not lacking or wait:
                if lacking:
                    self._expect(lacking, refused)
                return []
            left = end_s - time.monotonic()
            if left <= 0:
                if wait_s is not None and len(lacking) < len(self.socs):
                    names = " and no ".join(lacking)
                    logger.warning("no %s came within %s: their jobs are left out", names, duration(wait_s))
                    return lacking
                raise NoDeviceError(_words(lacking, refused))
            if not logged:
                logged = True
                logger.info("waiting up to %s: %s", duration(wait_s or 0.0), _words(lacking, refused))
            time.sleep(min(_LOOK_SECONDS, left))

    def _look(self) -> tuple[list[str], list[str]]:
        agents = self._store.cluster.agents()
        registered = {one.id: one for one in self._store.devices.all()}
        self._require_known(agents, registered)
        self.devices, refused = choose(agents, registered, self.socs, self._choice)
        return [soc for soc in self.socs if all(device.soc != soc for device in self.devices)], refused

    def _require_known(self, agents: Sequence[Agent], registered: Mapping[str, Registered]) -> None:
        """Raise UnknownNameError for a device or label that neither an agent nor the registry has."""
        devices = [device for agent in agents for device in agent.facts.devices]
        names = {name for one in devices for name in (one.id, one.serial, one.name)}
        labels = {label for one in devices for label in one.labels}
        step = f"({SERIAL_VARIABLE} names it: unset it, or name another with --device)"
        require_known(self._choice, registered.values(), names, labels, {named_device(os.environ): step})

    def _expect(self, lacking: Sequence[str], refused: Sequence[str]) -> None:
        from farm.store.cluster.records import AgentDevice

        logger.warning("%s: their jobs wait", _words(lacking, refused, hint=False))
        known = [one for one in self._store.devices.all() if one.soc in lacking]
        for soc in lacking:
            kinds = sorted({(one.kind, one.os) for one in known if one.soc == soc}) or [("hardware", "android")]
            # As in `choose`, hardware comes first, if any was ever registered.
            kind, os = kinds[0]
            self.expected.append(AgentDevice(id="", serial=soc, soc=soc, kind=kind, os=os))


def _words(lacking: Sequence[str], refused: Sequence[str], *, hint: bool = True) -> str:
    found = f": there are {', '.join(refused)}" if refused else ""
    words = f"no living host has a {' or a '.join(lacking)} that can be used{found}"
    return f"{words}; '--wait-for-hosts' waits for one, 'farm lab agent list' shows the hosts" if hint else words


def kind_of(config: Config, request: RunRequest, store: Store) -> str:
    """Return the kind of the devices that `request` would use now: devices of agents on a shared farm."""
    if not config.is_shared or request.virtual:
        return device_kind_of(config, request, store)
    socs = [find_soc(name).name for name in request.socs]
    registered = {one.id: one for one in store.devices.all()}
    devices, _ = choose(store.cluster.agents(), registered, socs, pinned(request).choice)
    return common_kind(device.kind for device in devices) or "hardware"


def require_shared(shared: bool) -> None:
    """Raise UsageError without a shared farm."""
    if not shared:
        raise UsageError(
            'this is of a shared farm, and farm.toml names none: it has store = "postgresql://..." and artifacts = '
            '"s3://...", "sftp://..." or "file:///..." (docs/guides/three_hosts.md)'
        )

"""A virtual device whose daemon is Android's own: the way between an adb server and a real adbd in namespaces."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from farm.errors import InfraError
from farm.virtual.android.namespaces import INIT, SHELL_USER, AdbdProcesses
from farm.virtual.android.namespaces import VERSION as ADBD_VERSION
from farm.virtual.daemon import Daemon
from farm.virtual.faults import FaultKind
from farm.virtual.injection import Injection
from farm.virtual.streams import HostConnection, until_one_ends
from farm.virtual.wire import CNXN, OPEN, VERSION, LinkThrottle, PacketLink, ProtocolError

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterable, Mapping

    from farm.virtual.faults import Fault
    from farm.virtual.streams import FindService
    from farm.virtual.tree import DeviceTree
    from farm.virtual.wire import Packet

BUILD = "user"
"""What such a device is: Debian's adbd never becomes root."""

POSSIBLE = frozenset(
    {
        FaultKind.STALL,
        FaultKind.RESET,
        FaultKind.OFFLINE,
        FaultKind.REBOOT,
        FaultKind.SLOW_LINK,
        FaultKind.WRONG_SOC,
        FaultKind.OVERHEATED,
        FaultKind.LOW_BATTERY,
    }
)
"""Faults of the link, and states of the device: what happens inside of a real adbd is its own."""

# Debian's adbd closes these, as no Android is behind it.
_ANSWERED_HERE = frozenset({"root", "unroot", "reboot"})
# adbd counts its streams from 1.
_OWN_STREAMS = 1 << 31


def adbd_properties(properties: Mapping[str, str], system: Path) -> dict[str, str]:
    """Return the properties of a device of BUILD whose daemon is the adbd in `system`. Raises OSError."""
    version = (system / ADBD_VERSION).read_text(encoding="utf-8").strip()
    fingerprint = properties["ro.build.fingerprint"].replace("/1:", f"/adbd.{version}:")
    model = f"{properties['ro.product.model']} adbd {version}"
    named = {"ro.build.fingerprint": fingerprint, "ro.product.model": model, "ro.farm.daemon": f"adbd {version}"}
    return {**properties, **named}


class AdbdFaults(Injection):
    """The faults that a device with a real adbd can have."""

    async def add(self, fault: Fault) -> None:
        """Let a fault be in force: see Injection. Raises ValueError for one that a real adbd does not have."""
        kind = FaultKind(fault.kind)
        if kind not in POSSIBLE or fault.after_bytes or fault.match:
            possible = ", ".join(sorted(POSSIBLE))
            what = str(kind) if kind not in POSSIBLE else f"{kind} with after_bytes or match"
            raise ValueError(
                f"it is served by a real adbd, which cannot be made to do {what}: at once it can do {possible}; "
                "start it with --daemon built-in for all others"
            )
        await super().add(fault)

    def randomize(self, rate: float, seed: int, kinds: Iterable[str]) -> None:
        """Refuse, unless the rate is 0. Raises ValueError."""
        if rate:
            raise ValueError("it is served by a real adbd, which no faults at random strike: use --daemon built-in")
        super().randomize(rate, seed, kinds)


class AdbdDaemon(Daemon):
    """Serves one device tree by the adbd in the folder `system`."""

    def __init__(self, tree: DeviceTree, properties: Mapping[str, str], system: Path) -> None:
        super().__init__(tree, properties)
        self.faults = AdbdFaults(tree, self._throttle, self, properties["ro.serialno"])
        self._processes = _TreeProcesses(tree, system)

    async def start(self) -> None:
        """Start adbd. Raises InfraError."""
        await self._processes.start()

    async def _end_commands(self) -> None:
        await self._processes.end()

    def _connect(self, accepted: socket.socket) -> HostConnection:
        return _AdbdConnection(PacketLink(accepted, self._throttle), self._banner, self._find, self._processes)


class _TreeProcesses(AdbdProcesses):
    """The processes of a device whose files are a tree."""

    def __init__(self, tree: DeviceTree, system: Path) -> None:
        super().__init__(system, Path(os.fsdecode(tree.root)), INIT)

    def _begin(self) -> None:
        # On Android's PATH before /system/bin: for programs that are not in the device's root folder.
        for name in ("product", "product/bin"):
            (self._files / name).mkdir(mode=0o755, exist_ok=True)
        _give_to_shell(self._files / "data")
        _give_to_shell(self._files / "sdcard")
        super()._begin()


def _give_to_shell(folder: Path) -> None:
    """Let Android's user `shell` own what root has made: also what an earlier life under the built-in daemon has."""
    for place, folders, files in os.walk(folder):
        for path in (Path(place, name) for name in (".", *folders, *files)):
            with contextlib.suppress(FileNotFoundError):
                if path.lstat().st_uid != SHELL_USER:
                    os.lchown(path, SHELL_USER, SHELL_USER)


class _AdbdConnection(HostConnection):
    """One adb server that is connected, and a connection to adbd: packets of the one are the other's.

    adbd does not know what the device is called, as it finds no properties on Linux: that is put into its banner.
    """

    def __init__(self, link: PacketLink, names: Mapping[str, str], find: FindService, processes: AdbdProcesses) -> None:
        super().__init__(link, {}, "", find)
        self._names, self._processes = names, processes
        self._online, self._last = True, _OWN_STREAMS
        self._adbd: PacketLink | None = None

    async def serve(self) -> None:
        """Return when either side is gone."""
        try:
            self._adbd = PacketLink(await self._processes.connect(), LinkThrottle())
        except (InfraError, OSError) as error:
            sys.stderr.write(f"an adb server was hung up on: {error}\n")
            self._link.close()
            return
        with contextlib.closing(self._adbd):
            await until_one_ends(super().serve(), self._answer(self._adbd))

    async def _handle(self, packet: Packet) -> None:
        if packet.command == OPEN:
            name = bytes(packet.payload).rstrip(b"\0").decode(errors="replace")
            ours = name.partition(":")[0] in _ANSWERED_HERE
        else:
            ours = packet.command != CNXN and packet.arg1 >= _OWN_STREAMS
        if ours:
            await super()._handle(packet)
        elif self._adbd is not None:
            await self._adbd.write(packet.command, packet.arg0, packet.arg1, memoryview(packet.payload))
            if packet.command == CNXN:
                self._link.sums = self._adbd.sums = packet.arg0 < VERSION

    async def _answer(self, adbd: PacketLink) -> None:
        """Hand on what adbd sends."""
        with contextlib.suppress(OSError, ProtocolError):
            while (packet := await adbd.read()) is not None:
                if packet.command == CNXN:
                    names = "".join(f"{name}={value};" for name, value in self._names.items())
                    features = bytes(packet.payload).rpartition(b"features=")[2]
                    banner = f"device::{names}features=".encode() + features
                    await self._link.write(CNXN, packet.arg0, packet.arg1, banner)
                else:
                    await self._link.write(packet.command, packet.arg0, packet.arg1, memoryview(packet.payload))

"""The adb daemon of one virtual device: it listens on loopback and serves processes of the same user."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import socket
from collections.abc import Mapping
from functools import partial
from typing import Any

from farm.base.peer import accept_own_async
from farm.devices.adb.protocol import LinkThrottle, PacketLink
from farm.devices.virtual.faults import Fault, control_address
from farm.devices.virtual.injection import Injection
from farm.devices.virtual.shell import Commands, serve_shell
from farm.devices.virtual.streams import HostConnection, Service, Stream, cancelled, carry
from farm.devices.virtual.sync import SyncSession
from farm.devices.virtual.tree import ROOT_PROPERTY, DeviceTree

# Features that adb 36 uses; sendrecv_v2 is left out, as compression has no use on loopback.
FEATURES = "shell_v2,stat_v2,ls_v2,fixed_push_mkdir"
_BANNER = ("ro.product.name", "ro.product.model", "ro.product.device")
_LOOPBACK = "127.0.0.1"
_BACKLOG, _CONTROL_BACKLOG = 16, 4
# Sockets of the device that `adb forward` reaches: ports of this machine.
_PORT = re.compile(r"tcp:(?:localhost:)?([0-9]{1,5})")
# A phone needs a minute; a virtual reboot need not wait as long.
_REBOOT_SECONDS = 1.0
# Modes of `adb reboot MODE` without a virtual counterpart. Other texts are reasons of an ordinary boot, as on Android.
_NO_MODES = {"bootloader", "recovery", "sideload", "sideload-auto-reboot", "fastboot", "edl", "download"}


def listen() -> socket.socket:
    """Return a listener on loopback, whose port stays its own while it does not listen. Raises OSError.

    Only a listener of this user may share the port: with SO_REUSEADDR, any local user could listen there during a
    reboot, and the adb server would use that listener as the device. Linux releases a port that it has chosen itself.
    """
    listener = socket.socket()
    with socket.socket() as chosen:
        for one in (chosen, listener):
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        chosen.bind((_LOOPBACK, 0))
        listener.bind(chosen.getsockname())
    listener.listen(_BACKLOG)
    listener.setblocking(False)
    return listener


class Control:
    """Socket in a device's folder for requests of faults by its owner.

    Each line is one JSON request or one answer.
    """

    def __init__(self, root: bytes, injection: Injection) -> None:
        """Listen in the folder `root`, which has no other listener. Raises OSError."""
        self._injection = injection
        self._listener = socket.socket(socket.AF_UNIX)
        folder = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._listener.bind(control_address(folder))
        finally:
            os.close(folder)
        self._listener.listen(_CONTROL_BACKLOG)

    async def serve(self) -> None:
        """Answer until cancelled."""
        server = await asyncio.start_unix_server(self._answer, sock=self._listener)
        async with server:
            await server.serve_forever()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while line := await reader.readline():
                answer: dict[str, object] = {}
                try:
                    await self._do(json.loads(line))
                except (ValueError, KeyError, TypeError, AttributeError) as error:
                    answer["error"] = str(error)
                except OSError as error:
                    answer["error"] = error.strerror or type(error).__name__
                writer.write(json.dumps(answer).encode() + b"\n")
                await writer.drain()
        writer.close()

    async def _do(self, request: dict[str, object]) -> None:
        match request:
            case {"do": "inject", "fault": dict(fields)}:
                await self._injection.add(Fault(**fields))
            case {"do": "clear"}:
                self._injection.clear()
            case {"do": "randomize", "rate": int() | float() as rate, "seed": int() as seed}:
                self._injection.randomize(rate, seed)
            case _:
                raise ValueError(f"{request!r} is no request")


class Daemon:
    """Serves one device tree."""

    def __init__(self, tree: DeviceTree, properties: Mapping[str, str], listener: socket.socket) -> None:
        self._tree, self._listener = tree, listener
        self._banner = {name: properties[name] for name in _BANNER}
        self._connections: dict[asyncio.Task[None], HostConnection] = {}
        self._throttle = LinkThrottle()
        self.faults = Injection(tree, self._throttle, self, properties["ro.serialno"])
        """Faults of the device."""
        self._commands = Commands(tree)
        self._ending = asyncio.Lock()
        self._leaving: asyncio.Future[None] | None = None
        """Absence of the device: done once the device is gone, None while it is there."""
        self._there, self._back = asyncio.Event(), asyncio.Event()
        self._changes = asyncio.TaskGroup()
        """Control socket, restarts and absences; a failure of one ends the device."""

    async def serve(self) -> None:
        """Serve connections until cancelled; then everything ends. Raises OSError for a broken listener."""
        control = Control(self._tree.root, self.faults)
        async with self._changes:
            self._changes.create_task(control.serve())
            try:
                await self._accept()
            finally:
                await self._end_all()

    async def _accept(self) -> None:
        self._there.set()
        while True:
            await self._there.wait()
            try:
                accepted = await accept_own_async(self._listener)
            except OSError:
                if self._there.is_set():
                    raise
                continue
            link = await PacketLink.over(accepted, self._throttle)
            # Clients that connect while other connections end wait.
            async with self._ending:
                if self._leaving is not None:
                    link.close()
                    continue
                connection = HostConnection(link, self._banner, FEATURES, self._find, self._trusts)
                task = asyncio.create_task(connection.serve())
                self._connections[task] = connection
                task.add_done_callback(self._connections.pop)

    async def _end_all(self) -> None:
        """Close all connections and kill all commands."""
        async with self._ending:
            await cancelled(self._connections)
            await self._commands.end()

    async def _be_away(self, leaving: asyncio.Future[None], seconds: float, reason: str) -> None:
        """Return when the device is back; with a `reason` it has rebooted. Its port refuses connections meanwhile."""
        self._there.clear()
        self._listener.shutdown(socket.SHUT_RDWR)
        await self._end_all()
        if reason:
            self._tree.begin_life(reason)
        leaving.set_result(None)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds or None):
                await self._back.wait()
        self._listener.listen(_BACKLOG)
        self._leaving = None
        self._there.set()

    def reset(self) -> asyncio.Future[Any]:
        """Reset every connection: see FaultyMachine."""
        for connection in self._connections.values():
            connection.reset_on_close()
        return cancelled(self._connections)

    def leave(self, seconds: float, *, reboot: bool, reason: str = "reboot") -> asyncio.Future[Any]:
        """Go away: see FaultyMachine."""
        if self._leaving is None:
            self._leaving = asyncio.get_running_loop().create_future()
            self._back.clear()
            absence = seconds or (_REBOOT_SECONDS if reboot else 0.0)
            self._changes.create_task(self._be_away(self._leaving, absence, reason if reboot else ""))
        return self._leaving

    def come_back(self) -> None:
        """Be there again: see FaultyMachine."""
        self._back.set()

    def trust(self) -> None:
        """Let in who waits for it: see FaultyMachine."""
        for connection in self._connections.values():
            connection.trust()

    def _trusts(self) -> bool:
        return not self.faults.unauthorized

    def _find(self, name: str) -> Service | None:
        kind, _, rest = name.partition(":")
        if found := _PORT.fullmatch(name):
            return partial(self._forward, number=int(found[1]))
        if name.startswith(("shell:", "shell,", "exec:")):
            return partial(serve_shell, commands=self._commands, faults=self.faults, service=name)
        if kind == "reboot" and rest in _NO_MODES:
            # adbd accepts the stream and writes the error on it, so that adb ends with exit code 0.
            return None
        services: dict[str, Service] = {
            "sync": lambda stream: SyncSession(stream, self._tree, self.faults).serve(),
            "root": partial(self._switch_root, wanted=True),
            "unroot": partial(self._switch_root, wanted=False),
            "reboot": partial(self._reboot, mode=rest),
        }
        return services.get(kind)

    async def _switch_root(self, stream: Stream, *, wanted: bool) -> None:
        """Answer, and begin anew as adbd does: every connection is cut, and what ran is killed."""
        answer, restarts = _switched_root(self._tree.properties, wanted=wanted)
        await stream.write(answer.encode())
        await stream.finish()
        if restarts:
            # Both in one step, so that no earlier command sees the new value.
            self._tree.set_property(ROOT_PROPERTY, "1" if wanted else "0")
            self._tree.log("adbd", answer)
            self._changes.create_task(self._end_all())

    async def _reboot(self, stream: Stream, mode: str) -> None:
        try:
            await stream.finish()
        finally:
            # As Android, also for a host that has hung up.
            self.leave(0.0, reboot=True, reason=f"reboot,{mode or 'adb'}")

    async def _forward(self, stream: Stream, number: int) -> None:
        try:
            reader, writer = await asyncio.open_connection(_LOOPBACK, number)
        except (OSError, OverflowError):
            # The end of the stream reports the failure.
            return
        await carry(stream, reader, writer)


def _switched_root(properties: Mapping[str, str], *, wanted: bool) -> tuple[str, bool]:
    """Return adbd's answer to `root:` or `unroot:`, and whether the daemon restarts with the new user.

    Commands run as this machine's user in both states: root on a virtual device is a property. The answers are the
    texts of AOSP's daemon/restart_service.cpp, which tools compare.
    """
    is_root = properties[ROOT_PROPERTY] == "1"
    if wanted and is_root:
        return "adbd is already running as root\n", False
    if wanted and properties["ro.debuggable"] != "1":
        return "adbd cannot run as root in production builds\n", False
    if not wanted and not is_root:
        return "adbd not running as root\n", False
    return ("restarting adbd as root\n" if wanted else "restarting adbd as non root\n"), True

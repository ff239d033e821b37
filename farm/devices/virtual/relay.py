"""A port of this machine that is, to an adb server, the adb daemon of a device behind another adb server.

So one device of a farm comes under the user's own adb, and nothing else that hangs where it hangs.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import threading
from functools import partial

from farm.base.errors import InfraError
from farm.base.peer import accept_own_async
from farm.devices.adb.host import AdbHost
from farm.devices.adb.protocol import RELAYED_PRODUCT, LinkThrottle, PacketLink, adb_target
from farm.devices.device import LOOPBACK
from farm.devices.virtual.streams import CHUNK_BYTES, HostConnection, Service, Stream, cancelled, carry

_BACKLOG = 16
_MOST_LISTING = 1 << 16
# Seconds to open a stream, as long as adb itself waits for a device over a bad link.
_OPEN_SECONDS = 30.0
# Seconds between two looks for an absent adb server or device.
_RETRY_SECONDS = 0.5
# Features of streams, in adb's words. Features of the packet transport (delayed_ack, libusb) are left out, as they
# concern the two adb servers and the device. Source: transport.cpp of AOSP's packages/modules/adb.
_FEATURES = {
    "shell_v2",
    "cmd",
    "stat_v2",
    "ls_v2",
    "fixed_push_mkdir",
    "fixed_push_symlink_timestamp",
    "apex",
    "abb",
    "abb_exec",
    "remount_shell",
    "track_app",
    "sendrecv_v2",
    "sendrecv_v2_brotli",
    "sendrecv_v2_lz4",
    "sendrecv_v2_zstd",
    "sendrecv_v2_dry_run_send",
    "devraw",
    "app_info",
}


class Relay:
    """Serves one device until `close`; leaving `with` does that."""

    def __init__(self, server: AdbHost, serial: str, *, model: str, reverse: bool) -> None:
        """`model` is what `adb devices -l` shows. `reverse` allows `adb reverse`, which ends where `server` runs."""
        self._server, self._serial, self._reverse = server, serial, reverse
        clean = re.sub(r"[^A-Za-z0-9_.-]", "_", model)
        self._properties = {"ro.product.name": RELAYED_PRODUCT, "ro.product.model": clean, "ro.product.device": clean}
        self._there = threading.Event()
        self._features = ""
        self._connections: dict[asyncio.Task[None], HostConnection] = {}
        self._listener = socket.create_server((LOOPBACK, 0), backlog=_BACKLOG)
        self._listener.setblocking(False)
        self.port = int(self._listener.getsockname()[1])
        """Port of the relay, for connections of this user alone."""
        self._loop = asyncio.new_event_loop()
        self._serving: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._run, name="relay", daemon=True)

    def __enter__(self) -> Relay:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait_ready(self, timeout_s: float) -> bool:
        """Wait for the device at most `timeout_s`, and return whether it is present."""
        return self._there.wait(timeout_s)

    def close(self) -> None:
        """Close all connections. May be called again."""
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):
                # The loop may have ended meanwhile.
                self._loop.call_soon_threadsafe(self._cancel)
            self._thread.join()
        self._listener.close()

    def _cancel(self) -> None:
        if self._serving is not None:
            self._serving.cancel()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner, contextlib.suppress(asyncio.CancelledError):
            runner.run(self._serve())

    async def _serve(self) -> None:
        self._serving = asyncio.current_task()
        accepting = asyncio.create_task(self._accept())
        try:
            while True:
                with contextlib.suppress(OSError, EOFError, InfraError, ValueError):
                    await self._follow()
                await self._set_there(there=False)
                await asyncio.sleep(_RETRY_SECONDS)
        finally:
            await cancelled((accepting, *self._connections))

    async def _follow(self) -> None:
        """Follow the state of the device on the other adb server, until the server or the device is gone.

        Raises OSError, EOFError, InfraError.
        """
        async with asyncio.timeout(_OPEN_SECONDS):
            # A virtual device is found by its product, and is listed by its port.
            name = await self._ask(f"host-serial:{adb_target(self._serial)}:get-serialno")
            features = await self._ask(f"host-serial:{adb_target(self._serial)}:features")
            reader, writer = await self._connect("host:track-devices")
        self._features = ",".join(one for one in features.split(",") if one in _FEATURES)
        try:
            while True:
                states = dict(line.partition("\t")[::2] for line in (await _text(reader)).splitlines())
                await self._set_there(there=states.get(name) == "device")
                if name not in states:
                    return
        finally:
            writer.close()

    async def _set_there(self, *, there: bool) -> None:
        if there:
            self._there.set()
            return
        self._there.clear()
        await cancelled(self._connections)

    async def _accept(self) -> None:
        while True:
            accepted = await accept_own_async(self._listener)
            if not self._there.is_set():
                # As a device that is away; the adb server tries again.
                accepted.close()
                continue
            link = await PacketLink.over(accepted, LinkThrottle())
            connection = HostConnection(link, self._properties, self._features, self._find)
            task = asyncio.create_task(connection.serve())
            self._connections[task] = connection
            task.add_done_callback(self._connections.pop)

    def _find(self, name: str) -> Service | None:
        # The other server takes what begins so as a request to itself, also behind the choice of a device.
        if name.startswith("host") or (name.startswith("reverse:") and not self._reverse):
            return None
        return partial(self._carry, name=name)

    async def _carry(self, stream: Stream, name: str) -> None:
        """Carry one stream. It ends where either side does, as adb's streams have no half."""
        try:
            async with asyncio.timeout(_OPEN_SECONDS):
                reader, writer = await self._connect(f"host:transport:{adb_target(self._serial)}", name)
        except (OSError, EOFError, InfraError):
            # The stream can only end; `farm devices connect` prints the state of the device.
            return
        await carry(stream, reader, writer)

    async def _ask(self, request: str) -> str:
        reader, writer = await self._connect(request)
        try:
            return await _text(reader)
        finally:
            writer.close()

    async def _connect(self, *requests: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Return a connection to the other adb server that has accepted `requests`.

        Raises OSError, EOFError, and InfraError for a refusal.
        """
        reader, writer = await asyncio.open_connection(self._server.host, self._server.port, limit=CHUNK_BYTES)
        try:
            for request in requests:
                data = request.encode(errors="surrogateescape")
                writer.write(b"%04x%s" % (len(data), data))
                if await reader.readexactly(4) != b"OKAY":
                    raise InfraError(f"the adb server on {self._server.place} refuses {request!r}")
        except BaseException:
            writer.transport.abort()
            raise
        return reader, writer


async def _text(reader: asyncio.StreamReader) -> str:
    """Return the text after its length in four hexadecimal digits. Raises ValueError for another form."""
    size = int(await reader.readexactly(4), 16)
    return (await reader.readexactly(min(size, _MOST_LISTING))).decode(errors="replace")

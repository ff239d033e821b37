"""Streams of adb over one link."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import traceback
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from typing import Any

from farm.devices.adb import protocol
from farm.devices.adb.protocol import Packet, PacketLink, ProtocolError, acknowledge

# Many streams over one link, each with one unacknowledged packet in either direction: adb's flow control.


# adb itself opens a handful at a time.
_MOST_STREAMS = 512
# The protocol allows one. adb 36 sends the rest of a stream that it closes, about one more, without waiting.
_MOST_UNREAD = 8
_MOST_SERVICE_BYTES = 1 << 16
# Kinds of AUTH packets, and the size of the token that the host signs.
_AUTH_TOKEN, _AUTH_SIGNATURE = 1, 2
_TOKEN_BYTES = 20

CHUNK_BYTES = 1 << 18
"""Most bytes of one read from a socket behind a stream."""


class StreamClosedError(Exception):
    """The host closed the stream."""


def cancelled(tasks: Iterable[asyncio.Task[None]]) -> asyncio.Future[Any]:
    """Cancel tasks, and return a future that ends with the last of them."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    return asyncio.gather(*tasks, return_exceptions=True)


class Stream:
    """Stream to the host."""

    def __init__(self, link: PacketLink, number: int, peer: int) -> None:
        """Take the host's number of the stream as `peer`."""
        self._link, self._number, self.peer = link, number, peer
        self._received: deque[bytes] = deque()
        self._changed = asyncio.Event()
        self._may_write = True
        self._closed = asyncio.Event()

    async def read(self) -> bytes | None:
        """Return what came next, None when the host has closed. The host may send more once this returns."""
        while not self._received:
            if self._closed.is_set():
                return None
            await self._wait()
        data = self._received.popleft()
        if not self._closed.is_set():
            await self._link.write(protocol.OKAY, self._number, self.peer)
        return data

    async def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send `data` once the host has acknowledged the data before. Raises StreamClosedError."""
        view = memoryview(data)
        while view:
            await self.wait_writable()
            if self._closed.is_set():
                raise StreamClosedError
            piece, view = view[: self._link.max_payload], view[self._link.max_payload :]
            self._may_write = False
            await self._link.write(protocol.WRTE, self._number, self.peer, piece)

    async def wait_writable(self) -> None:
        """Return once the host has acknowledged the data before, or has closed the stream."""
        while not self._may_write and not self._closed.is_set():
            await self._wait()

    async def wait_closed(self) -> None:
        """Return when the host has closed the stream."""
        await self._closed.wait()

    async def _wait(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def deliver(self, data: bytes) -> None:
        """Take data of the host. Raises ProtocolError for data before an acknowledgement."""
        if len(self._received) >= _MOST_UNREAD:
            raise ProtocolError("packets on a stream that did not wait for an acknowledgement")
        self._received.append(data)
        self._changed.set()

    def acknowledge(self) -> None:
        """Record that the host took the written data."""
        self._may_write = True
        self._changed.set()

    def hang_up(self) -> None:
        """End the stream after the loss of its connection."""
        self._closed.set()
        self._changed.set()

    async def closed_by_host(self) -> None:
        """Answer, as adbd does at once; what came before is still to be read. Once it is closed here, there is none."""
        if not self._closed.is_set():
            self.hang_up()
            await self._link.write(protocol.CLSE, self._number, self.peer)

    async def finish(self) -> None:
        """Tell the host that the service is done, once it has taken everything."""
        await self.wait_writable()
        if not self._closed.is_set():
            self._closed.set()
            await self._link.write(protocol.CLSE, self._number, self.peer)


Service = Callable[[Stream], Awaitable[None]]
FindService = Callable[[str], Service | None]


class HostConnection:
    """Connection of one adb server: its streams and their services."""

    def __init__(
        self,
        link: PacketLink,
        properties: Mapping[str, str],
        features: str,
        find: FindService,
        trusts: Callable[[], bool] = lambda: True,
    ) -> None:
        banner = "".join(f"{name}={value};" for name, value in properties.items())
        self._banner = f"device::{banner}features={features}".encode()
        self._link, self._find, self._trusts = link, find, trusts
        self._online = False
        self._asked = False
        self._streams: dict[int, Stream] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._last = 0

    async def serve(self) -> None:
        """Return when the adb server is gone and every service of it has ended."""
        try:
            while (packet := await self._link.read()) is not None:
                await self._handle(packet)
        except (OSError, ProtocolError) as error:
            sys.stderr.write(f"an adb server was hung up on: {error!r}\n")
        finally:
            self._link.close()
            for stream in self._streams.values():
                stream.hang_up()
            # A cancelled task that has not begun would never see its stream: `reboot` acts in either case.
            await asyncio.sleep(0)
            await cancelled(self._tasks)

    def reset_on_close(self) -> None:
        """Let its end reach the adb server as a reset."""
        self._link.reset_on_close()

    def trust(self) -> None:
        """Let in the adb server, if it was kept out: its user has accepted it."""
        if self._asked and not self._online:
            self._start(self._welcome())

    def _start(self, work: Coroutine[None, None, None]) -> None:
        """Do something that is cancelled when the connection ends."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _welcome(self) -> None:
        self._online = True
        await self._link.write(protocol.CNXN, protocol.VERSION, protocol.MAX_PAYLOAD, self._banner)

    async def _handle(self, packet: Packet) -> None:
        if packet.command == protocol.CNXN:
            if packet.arg0 < protocol.OLDEST_VERSION:
                raise ProtocolError("the adb server is too old")
            self._link.sums = packet.arg0 < protocol.VERSION
            self._link.max_payload = max(1, min(packet.arg1, protocol.MAX_PAYLOAD))
            self._asked = True
            if self._trusts():
                await self._welcome()
            else:
                await self._link.write(protocol.AUTH, _AUTH_TOKEN, 0, os.urandom(_TOKEN_BYTES))
        elif packet.command == protocol.AUTH and packet.arg0 == _AUTH_SIGNATURE and not self._online:
            # Not by a key that it knows. The host tries its next one; its public key, after the last, waits for a user.
            await self._link.write(protocol.AUTH, _AUTH_TOKEN, 0, os.urandom(_TOKEN_BYTES))
        elif packet.command == protocol.OPEN and self._online:
            await self._open(packet)
        elif stream := self._streams.get(packet.arg1):
            if packet.command == protocol.CLSE:
                await stream.closed_by_host()
            elif stream.peer != packet.arg0:
                raise ProtocolError("a packet for a stream of another")
            elif packet.command == protocol.WRTE:
                stream.deliver(packet.payload)
            elif packet.command == protocol.OKAY:
                stream.acknowledge()

    async def _open(self, packet: Packet) -> None:
        name = bytes(packet.payload[:_MOST_SERVICE_BYTES]).rstrip(b"\0").decode(errors="surrogateescape")
        service = self._find(name)
        if service is None or len(self._streams) >= _MOST_STREAMS or not packet.arg0:
            await self._link.write(protocol.CLSE, 0, packet.arg0)
            return
        self._last += 1
        number = self._last
        stream = self._streams[number] = Stream(self._link, number, packet.arg0)
        await self._link.write(protocol.OKAY, number, packet.arg0)
        self._start(self._run(number, stream, service))

    async def _run(self, number: int, stream: Stream, service: Service) -> None:
        try:
            try:
                await service(stream)
            except StreamClosedError:
                pass
            except Exception:  # noqa: BLE001 - one service that fails is no reason for the others to; the log has it
                traceback.print_exc()
            with contextlib.suppress(OSError):
                await stream.finish()
        finally:
            del self._streams[number]


async def carry(stream: Stream, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Carry bytes both ways until either end closes, as adb's streams have no half. Closes the connection."""
    ways = [asyncio.create_task(way) for way in (_to_device(stream, writer), _to_host(reader, stream, writer))]
    # Data that the host sent before closing is still delivered.
    with contextlib.closing(writer):
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await cancelled(ways)


async def _to_device(stream: Stream, writer: asyncio.StreamWriter) -> None:
    while (data := await stream.read()) is not None:
        writer.write(data)
        await writer.drain()


async def _to_host(reader: asyncio.StreamReader, stream: Stream, writer: asyncio.StreamWriter) -> None:
    connection = writer.get_extra_info("socket")
    while data := await reader.read(CHUNK_BYTES):
        acknowledge(connection)
        await stream.write(data)

"""Streams of adb over one link, and the sockets of this machine that they lead to."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
import struct
import sys
import traceback
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from farm.base.peer import accept_own_async
from farm.devices.adb import protocol
from farm.devices.adb.protocol import Packet, PacketLink, ProtocolError

if TYPE_CHECKING:
    from farm.devices.virtual.tree import DeviceTree


# Many streams over one link, each with one unacknowledged packet in either direction: adb's flow control.


# adb itself opens a handful at a time.
_MOST_STREAMS = 512
# The protocol allows one. adb 36 sends the rest of a stream that it closes, about one more, without waiting.
_MOST_UNREAD = 8
_MOST_SERVICE_BYTES = 1 << 16
# Kinds of AUTH packets, and the size of the token that the host signs.
_AUTH_TOKEN, _AUTH_SIGNATURE = 1, 2
_TOKEN_BYTES = 20


class StreamClosedError(Exception):
    """The host closed the stream."""


def cancelled(tasks: Iterable[asyncio.Task[None]]) -> asyncio.Future[Any]:
    """Cancel tasks, and return a future that ends with the last of them."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    return asyncio.gather(*tasks, return_exceptions=True)


async def until_one_ends(*ways: Coroutine[None, None, None]) -> None:
    """Run `ways` concurrently until the first one ends or fails, and cancel the others."""
    tasks = [asyncio.create_task(way) for way in ways]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await cancelled(tasks)


class Stream:
    """Stream to the host."""

    def __init__(self, connection: HostConnection, link: PacketLink, number: int, peer: int = 0) -> None:
        """Take the host's number of the stream as `peer`; 0 before the host has accepted it."""
        self.connection = connection
        """Connection of the stream."""
        self._link, self._number, self.peer = link, number, peer
        self._received: deque[bytes] = deque()
        self._changed = asyncio.Event()
        self._may_write = peer != 0
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

    def acknowledge(self, peer: int) -> None:
        """Record that the host took the written data, or accepted the stream under its number `peer`."""
        self.peer = peer
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
            if self.peer:
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
            self.start(self._welcome())

    def start(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Do something that is cancelled when the connection ends."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

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
            elif stream.peer not in {packet.arg0, 0}:
                raise ProtocolError("a packet for a stream of another")
            elif packet.command == protocol.WRTE:
                stream.deliver(packet.payload)
            elif packet.command == protocol.OKAY:
                stream.acknowledge(packet.arg0)

    async def call(self, name: str, service: Service) -> None:
        """Open a stream to the host's service `name`, and have `service` use it until it ends.

        A host that refuses closes it at once.
        """
        number, stream = self._new_stream(0)
        await self._link.write(protocol.OPEN, number, 0, name.encode(errors="surrogateescape") + b"\0")
        await self._run(number, stream, service)

    def _new_stream(self, peer: int) -> tuple[int, Stream]:
        self._last += 1
        stream = self._streams[self._last] = Stream(self, self._link, self._last, peer)
        return self._last, stream

    async def _open(self, packet: Packet) -> None:
        name = bytes(packet.payload[:_MOST_SERVICE_BYTES]).rstrip(b"\0").decode(errors="surrogateescape")
        service = self._find(name)
        if service is None or len(self._streams) >= _MOST_STREAMS or not packet.arg0:
            await self._link.write(protocol.CLSE, 0, packet.arg0)
            return
        number, stream = self._new_stream(packet.arg0)
        await self._link.write(protocol.OKAY, number, packet.arg0)
        self.start(self._run(number, stream, service))

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


# Targets of `adb forward` and `adb reverse` on a virtual device: sockets of this machine.


_Address = str | tuple[str, int]

_LOOPBACK = "127.0.0.1"
_READ_BYTES = 256 * 1024
_BACKLOG = 16
_MOST_LISTENERS = 64
_TCP = re.compile(r"tcp:(?:localhost:)?([0-9]{1,5})")
_ABSTRACT, _FILESYSTEM = "localabstract:", "localfilesystem:"
_UCRED = struct.Struct("=iii")


def is_socket(name: str) -> bool:
    """Return whether a service's name means a socket of the device."""
    return name.startswith(("tcp:", _ABSTRACT, _FILESYSTEM))


async def connect(name: str, tree: DeviceTree) -> socket.socket:
    """Return a connection to a socket of the device. Raises OSError, also for names that adbd refuses."""
    address: _Address
    if name.startswith(_FILESYSTEM):
        path = name.removeprefix(_FILESYSTEM).encode(errors="surrogateescape")
        family, address = socket.AF_UNIX, os.fsdecode(tree.resolve(path))
    else:
        family, address = _resolve(name)
    connection = socket.socket(family)
    try:
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, address)
    except BaseException:
        connection.close()
        raise
    return connection


async def carry(stream: Stream, connection: socket.socket) -> None:
    """Carry bytes both ways until either end closes; adb's streams have no half. Closes the connection."""
    loop = asyncio.get_running_loop()

    async def to_device() -> None:
        while (data := await stream.read()) is not None:
            await loop.sock_sendall(connection, data)

    async def to_host() -> None:
        while data := await loop.sock_recv(connection, _READ_BYTES):
            await stream.write(data)

    with contextlib.closing(connection):
        await until_one_ends(to_device(), to_host())


class _ReverseSocket(NamedTuple):
    connection: HostConnection
    remote: str
    socket: socket.socket
    task: asyncio.Task[None]


class _NotForwardedError(Exception):
    """A request for `reverse` that cannot be, and why in adbd's words."""


class Reverse:
    """The sockets of one device that adb servers listen on: adb_listeners.cpp of AOSP's packages/modules/adb."""

    def __init__(self) -> None:
        self._listeners: dict[str, _ReverseSocket] = {}

    def find(self, request: str) -> Service:
        """Return the service `reverse:REQUEST`."""
        return partial(self._serve, request=request)

    async def _serve(self, stream: Stream, request: str) -> None:
        try:
            answer = b"OKAY" + self._do(request, stream.connection)
        except _NotForwardedError as error:
            answer = b"FAIL" + _text(str(error))
        if request == "list-forward":
            # Without a status, alone of all.
            answer = answer.removeprefix(b"OKAY")
        await stream.write(answer)

    def _do(self, request: str, connection: HostConnection) -> bytes:
        """Execute a request and return the text after its status. Raises _NotForwardedError."""
        what, _, rest = request.partition(":")
        if request == "list-forward":
            return _text("".join(f"(reverse) {local} {one.remote}\n" for local, one in self._listeners.items()))
        if request == "killforward-all":
            for local in list(self._listeners):
                self._remove(local)
            return b""
        if what == "killforward":
            if rest not in self._listeners:
                raise _NotForwardedError(f"listener '{rest}' not found")
            self._remove(rest)
            return b""
        if what == "forward":
            return self._add(rest, connection)
        raise _NotForwardedError("not a reverse forwarding command")

    def _add(self, rest: str, connection: HostConnection) -> bytes:
        may_replace = not rest.startswith("norebind:")
        pieces = rest.removeprefix("norebind:").split(";")
        if len(pieces) != 2 or not all(pieces) or pieces[1].startswith("*"):
            raise _NotForwardedError(f"bad forward: {rest}")
        local, remote = pieces
        if local in self._listeners:
            if not may_replace:
                raise _NotForwardedError("cannot rebind existing socket")
            self._remove(local)
        if len(self._listeners) >= _MOST_LISTENERS:
            raise _NotForwardedError("cannot bind listener: too many are open")
        try:
            listener = listening(*_resolve(local))
        except OSError as error:
            raise _NotForwardedError(f"cannot bind listener: {error.strerror or error}") from None
        resolved = b""
        if local == "tcp:0":
            port = int(listener.getsockname()[1])
            local, resolved = f"tcp:{port}", _text(str(port))
        task = connection.start(self._listen(local, listener, connection, remote))
        self._listeners[local] = _ReverseSocket(connection, remote, listener, task)
        return resolved

    async def _listen(self, local: str, listener: socket.socket, connection: HostConnection, remote: str) -> None:
        try:
            while True:
                accepted = await _accept(listener)
                connection.start(connection.call(remote, partial(carry, connection=accepted)))
        finally:
            listener.close()
            if (there := self._listeners.get(local)) is not None and there.socket is listener:
                del self._listeners[local]

    def _remove(self, local: str) -> None:
        removed = self._listeners.pop(local)
        removed.socket.close()
        removed.task.cancel()


def listening(family: socket.AddressFamily, address: _Address, *options: int) -> socket.socket:
    """Return a socket that listens, without blocking; `options` are switched on. Raises OSError."""
    listener = socket.socket(family)
    try:
        for option in (socket.SO_REUSEADDR, *options):
            listener.setsockopt(socket.SOL_SOCKET, option, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


async def _accept(listener: socket.socket) -> socket.socket:
    """Return the next connection of this user."""
    if listener.family == socket.AF_INET:
        return await accept_own_async(listener)
    while True:
        accepted, _ = await asyncio.get_running_loop().sock_accept(listener)
        with contextlib.suppress(OSError):
            if _UCRED.unpack(accepted.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))[1] == os.getuid():
                return accepted
        accepted.close()


def _resolve(name: str) -> tuple[socket.AddressFamily, _Address]:
    """Return where `tcp:PORT` or `localabstract:NAME` is. Raises OSError for any other, and for other machines."""
    if (found := _TCP.fullmatch(name)) and int(found[1]) <= 0xFFFF:
        return socket.AF_INET, (_LOOPBACK, int(found[1]))
    if name.startswith(_ABSTRACT):
        return socket.AF_UNIX, "\0" + name.removeprefix(_ABSTRACT)
    raise OSError(f"unknown socket specification: {name}")


def _text(text: str) -> bytes:
    data = text.encode(errors="surrogateescape")
    return b"%04x%s" % (len(data), data)

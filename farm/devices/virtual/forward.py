"""Targets of `adb forward` and `adb reverse` on a virtual device: sockets of this machine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
import struct
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from farm.base.peer import accept_own_async
from farm.devices.virtual.streams import HostConnection, Service, Stream, until_one_ends

if TYPE_CHECKING:
    from farm.devices.virtual.tree import DeviceTree

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
            listener = _listen(local)
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


def _listen(name: str) -> socket.socket:
    """Return a socket of the device that listens, for this user alone. Raises OSError."""
    family, address = _resolve(name)
    listener = socket.socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
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

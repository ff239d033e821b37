"""adb's protocols, as both ends share them: serials, packets, and the messages of sync."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Iterator, Mapping, MutableMapping
from typing import NamedTuple

# How farm's names of devices and adb's go together.


# The name that a virtual device has as serial and as product.
VIRTUAL_PREFIX = "virtual-"

# Product of devices that `farm devices connect` relays from another adb server: discovery skips them here.
RELAYED_PRODUCT = "farm-connect"

SERIAL_VARIABLE = "ANDROID_SERIAL"
# Variables by which programs of adb choose a server and a device. ADB_SERVER_SOCKET wins over the two after it.
_CHOOSING = ("ADB_SERVER_SOCKET", "ANDROID_ADB_SERVER_ADDRESS", "ANDROID_ADB_SERVER_PORT", SERIAL_VARIABLE)


def adb_target(serial: str) -> str:
    """Return what an adb server, and `adb -s`, finds the device `serial` by.

    adb calls a device behind `adb connect` by its port, which changes with every start; it can also find it by its
    product, and a virtual device's product is its serial.
    """
    return f"product:{serial}" if serial.startswith(VIRTUAL_PREFIX) else serial


def choose_server(environment: MutableMapping[str, str], variables: Mapping[str, str]) -> None:
    """Make `variables` the only ones of an environment that choose an adb server and a device."""
    for name in _CHOOSING:
        environment.pop(name, None)
    environment.update(variables)


def named_device(environment: Mapping[str, str]) -> str:
    """Return the device that ANDROID_SERIAL names; empty where adb would take any, as for an empty value."""
    return environment.get(SERIAL_VARIABLE, "")


def environment_with(variables: Mapping[str, str]) -> dict[str, str]:
    """Return this environment for programs that call adb, with `variables` that choose server and device."""
    environment = dict(os.environ)
    choose_server(environment, variables)
    return environment


# Linux alone has it; elsewhere an option that does no harm.
_QUICKACK = getattr(socket, "TCP_QUICKACK", socket.TCP_NODELAY)


def acknowledge(stream: socket.socket) -> None:
    """Acknowledge data of an adb server at once.

    The server holds a second small write back until the first is acknowledged, which Linux delays by 40 ms. Linux
    drops the option after a while, so that each read needs this call.
    """
    stream.setsockopt(socket.IPPROTO_TCP, _QUICKACK, 1)


# adb's sync protocol, version 1 and the v2 stat records: what both ends of it share.
#
# A message is a 4-byte id and a little-endian u32. Source: SYNC.TXT and file_sync_protocol.h of AOSP's
# packages/modules/adb. Only the standard library: the daemon of a virtual device imports this at its start.


MESSAGE = struct.Struct("<4sI")
# mode, size, mtime
STAT_V1 = struct.Struct("<4s3I")
# mode, size, mtime, length of the name
ENTRY_V1 = struct.Struct("<4s4I")
# error, device, inode, mode, links, uid, gid, size, atime, mtime, ctime
STAT_V2 = struct.Struct("<4sI2Q4IQ3q")
# the same, and the length of the name
ENTRY_V2 = struct.Struct("<4sI2Q4IQ3qI")

# SYNC_DATA_MAX: a peer may hang up on more.
DATA_BYTES = 64 * 1024
# adbd refuses longer ones.
PATH_BYTES = 1024


def data_messages(file: int) -> Iterator[bytes]:
    """Yield the rest of a file as DATA messages."""
    while data := os.read(file, DATA_BYTES):
        yield MESSAGE.pack(b"DATA", len(data)) + data


# Packets of adb's transport protocol over one socket.
#
# A packet is six little-endian u32 (command, two arguments, length and checksum of the payload, and the command's
# complement) and the payload. Source: protocol.txt of AOSP's packages/modules/adb.


# From this version on (2017) payloads have no checksum; with an older peer both ends compute it.
VERSION = 0x01000001
OLDEST_VERSION = 0x01000000
MAX_PAYLOAD = 1 << 20

_HEADER = struct.Struct("<6I")

CNXN, AUTH, OPEN, OKAY, WRTE, CLSE = (
    int.from_bytes(name, "little") for name in (b"CNXN", b"AUTH", b"OPEN", b"OKAY", b"WRTE", b"CLSE")
)


class ProtocolError(Exception):
    """Violation of the protocol by the peer; the connection ends."""


# Frames of shell protocol v2, standard streams and the exit code over one stream: a byte for the kind, a length, and
# the payload. Source: shell_protocol.h of AOSP's packages/modules/adb.

FRAME = struct.Struct("<BI")
STDIN, STDOUT, STDERR, EXIT, CLOSE_STDIN, WINDOW_SIZE = range(6)


def take_frames(received: bytearray) -> list[tuple[int, bytes]]:
    """Remove the whole frames from the received bytes; return their kinds and payloads. Raises ProtocolError."""
    frames, position = [], 0
    while len(received) - position >= FRAME.size:
        kind, size = FRAME.unpack_from(received, position)
        if size > MAX_PAYLOAD:
            raise ProtocolError(f"announced a frame of {size} bytes: it does not speak adb's shell protocol v2")
        start = position + FRAME.size
        if len(received) < start + size:
            break
        position = start + size
        frames.append((kind, bytes(memoryview(received)[start:position])))
    del received[:position]
    return frames


class Packet(NamedTuple):
    """Packet."""

    command: int
    arg0: int
    arg1: int
    payload: bytes


class LinkThrottle:
    """Speed limit or stop of a device's links."""

    def __init__(self) -> None:
        self.busy = False
        """True if writers have to wait."""
        self._bytes_per_s = 0
        self._moving = asyncio.Event()
        self._moving.set()

    def stall(self) -> None:
        """Let nothing pass."""
        self._moving.clear()
        self.busy = True

    def resume(self) -> None:
        """Let what waits pass."""
        self._moving.set()
        self.busy = self._bytes_per_s > 0

    def limit(self, bytes_per_s: int) -> None:
        """Let so much pass, 0 for everything."""
        self._bytes_per_s = bytes_per_s
        self.busy = bytes_per_s > 0 or not self._moving.is_set()

    async def wait(self, size: int) -> None:
        """Return when `size` bytes may have passed."""
        if self._bytes_per_s:
            await asyncio.sleep(size / self._bytes_per_s)
        await self._moving.wait()


class PacketLink:
    """Reader and writer of whole packets, for all traffic of a device."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, throttle: LinkThrottle) -> None:
        self._reader, self._writer, self._throttle = reader, writer, throttle
        self._writing = asyncio.Lock()
        self.max_payload = MAX_PAYLOAD
        """Most bytes of a written payload; the peer may lower it when it connects."""
        self.sums = True
        """True if written packets carry a checksum, until the peer's version is known. Received checksums are not
        checked, as in adbd."""

    @classmethod
    async def over(cls, connection: socket.socket, throttle: LinkThrottle) -> PacketLink:
        """Return the link over an accepted connection. Raises OSError."""
        return cls(*await asyncio.open_connection(sock=connection, limit=MAX_PAYLOAD), throttle)

    async def read(self) -> Packet | None:
        """Return the next packet, None when the peer is gone. Raises ProtocolError."""
        try:
            header = await self._reader.readexactly(_HEADER.size)
            command, arg0, arg1, size, _, magic = _HEADER.unpack(header)
            if magic != command ^ 0xFFFFFFFF or size > MAX_PAYLOAD:
                raise ProtocolError(f"not a packet of adb's protocol: {header.hex()}")
            payload = await self._reader.readexactly(size)
        except asyncio.IncompleteReadError:
            return None
        if self._throttle.busy:
            await self._throttle.wait(size)
        return Packet(command, arg0, arg1, payload)

    async def write(self, command: int, arg0: int, arg1: int, payload: bytes | memoryview = b"") -> None:
        """Send one packet. Raises OSError when the peer is gone."""
        checksum = sum(payload) & 0xFFFFFFFF if self.sums else 0
        header = _HEADER.pack(command, arg0, arg1, len(payload), checksum, command ^ 0xFFFFFFFF)
        async with self._writing:
            if self._throttle.busy:
                await self._throttle.wait(len(payload))
            # In one call, so that a caller that is cancelled leaves no half packet. Not by `writelines`, which does not
            # pause a writer in Python 3.12 and spins after an empty payload.
            self._writer.write(b"".join((header, payload)))
            await self._writer.drain()

    def close(self) -> None:
        """Hang up. A packet that was being sent stays half."""
        self._writer.transport.abort()

    def reset_on_close(self) -> None:
        """Let the end of this link reach the peer as a reset, and not as an end in order."""
        connection = self._writer.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

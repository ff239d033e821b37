"""Packets of adb's transport protocol over one socket.

A packet is six little-endian u32 (command, two arguments, length and checksum of the payload, and the command's
complement) and the payload. Source: protocol.txt of AOSP's packages/modules/adb.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import NamedTuple

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

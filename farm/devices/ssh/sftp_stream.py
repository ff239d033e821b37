"""SFTP with many concurrent requests; docs/evidence/devices.md compares it with paramiko's own client.

Version 3, as OpenSSH speaks it: https://datatracker.ietf.org/doc/html/draft-ietf-secsh-filexfer-02.
"""

from __future__ import annotations

import contextlib
import stat
import struct
from typing import TYPE_CHECKING, NamedTuple

import paramiko
from paramiko.sftp import (
    CMD_ATTRS,
    CMD_CLOSE,
    CMD_DATA,
    CMD_EXTENDED,
    CMD_EXTENDED_REPLY,
    CMD_FSETSTAT,
    CMD_HANDLE,
    CMD_INIT,
    CMD_MKDIR,
    CMD_OPEN,
    CMD_READ,
    CMD_REMOVE,
    CMD_STAT,
    CMD_STATUS,
    CMD_SYMLINK,
    CMD_VERSION,
    CMD_WRITE,
    SFTP_DESC,
    SFTP_FLAG_CREATE,
    SFTP_FLAG_EXCL,
    SFTP_FLAG_READ,
    SFTP_FLAG_WRITE,
    SFTP_OK,
)

from farm.base.errors import DeviceError
from farm.devices import min_throughput
from farm.devices.text import clean_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import TypeVar

    from farm.devices.ssh.link import SshLink

    Item = TypeVar("Item")

DATA_BYTES = 32 * 1024
"""Bytes of a file in one request or answer, accepted by every server."""
WINDOW = 64
"""Requests on their way before an answer is waited for: with full ones, what SSH lets be on its way of a stream."""

_VERSION = 3
# Seconds for the exit code of an ended server.
_STATUS_SECONDS = 1.0
# OpenSSH's own limit for a packet.
_PACKET_BYTES = 256 * 1024
_RECEIVE_BYTES = 256 * 1024
# Requests are gathered up to it.
_SEND_BYTES = 64 * 1024
# Attributes: which are there.
_HAS_SIZE, _HAS_OWNER, _HAS_MODE = 1, 2, 4
# The flag of a file system that is read-only, and how the answer of statvfs@openssh.com is made up.
_READ_ONLY = 1
_STATVFS = struct.Struct(">11Q")


class SftpStatus(NamedTuple):
    """How a request ended."""

    code: int
    text: str


class Attributes(NamedTuple):
    """Attributes of a path; the size is the device's claim."""

    size: int
    is_file: bool
    is_folder: bool


class Room(NamedTuple):
    """Free space of a file system."""

    free_bytes: int
    has_inodes: bool
    read_only: bool


Answer = SftpStatus | Attributes | Room | bytes
"""To a request; bytes are a handle, or data of a file."""


class SftpStream:
    """SFTP session: send any number of requests, then take each answer with `answer`. Belongs to one thread.

    Every method raises DeviceError; after an error the stream is unusable.
    """

    def __init__(self, link: SshLink, serial: str, stall_s: float, files: int) -> None:
        """`stall_s` is how long nothing may move; `files` is how many have to keep to the least throughput."""
        self._link, self._serial, self._stall_s = link, serial, stall_s
        self._number = 0
        self._out, self._in = bytearray(), bytearray()
        self._asked: set[int] = set()
        self._unwanted: set[int] = set()
        self._answers: dict[int, Answer] = {}
        link.take(stall_s)
        try:
            self._channel = link.sftp(timeout_s=stall_s)
            self._throughput = min_throughput.MinThroughput(serial, files, stall_s)
            try:
                self._greet()
            except BaseException:
                link.release(self._channel)
                raise
        except BaseException:
            link.give_back()
            raise

    def close(self) -> None:
        """Hang up. To be called once."""
        # The server over there ends by itself when there is nothing more to read.
        with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
            self._channel.shutdown_write()
        self._link.release(self._channel)
        self._link.give_back()

    def stat(self, path: bytes) -> int:
        """Request the Attributes of a path or of its link's target."""
        return self._ask(CMD_STAT, _string(path))

    def room(self, path: bytes) -> int:
        """Request the free space at a path: Room, or an SftpStatus from a server without this request."""
        return self._ask(CMD_EXTENDED, _string(b"statvfs@openssh.com"), _string(path))

    def open(self, path: bytes) -> int:
        """Ask to read a file: its handle."""
        return self._ask(CMD_OPEN, _string(path), struct.pack(">II", SFTP_FLAG_READ, 0))

    def create(self, path: bytes, mode: int) -> int:
        """Request a new file, which must not exist yet; the answer is its handle."""
        flags = SFTP_FLAG_WRITE | SFTP_FLAG_CREATE | SFTP_FLAG_EXCL
        return self._ask(CMD_OPEN, _string(path), struct.pack(">III", flags, _HAS_MODE, mode))

    def read(self, handle: bytes, offset: int, size: int) -> int:
        """Ask for at most `size` bytes of a file: data, or a SftpStatus at its end."""
        return self._ask(CMD_READ, _string(handle), struct.pack(">QI", offset, size))

    def write(self, handle: bytes, offset: int, data: bytes) -> int:
        """Ask to write into a file: SftpStatus."""
        return self._ask(CMD_WRITE, _string(handle), struct.pack(">QI", offset, len(data)), data)

    def set_mode(self, handle: bytes, mode: int) -> int:
        """Request a mode regardless of the server's umask: SftpStatus."""
        return self._ask(CMD_FSETSTAT, _string(handle), struct.pack(">II", _HAS_MODE, mode))

    def shut(self, handle: bytes) -> int:
        """Ask to close a file: SftpStatus."""
        return self._ask(CMD_CLOSE, _string(handle))

    def remove(self, path: bytes) -> int:
        """Ask to remove a file or a link: SftpStatus."""
        return self._ask(CMD_REMOVE, _string(path))

    def link(self, path: bytes, target: bytes) -> int:
        """Ask for a symbolic link: SftpStatus. In OpenSSH's order, which is not the draft's."""
        return self._ask(CMD_SYMLINK, _string(target), _string(path))

    def make_folder(self, path: bytes, mode: int) -> int:
        """Ask for a folder: SftpStatus."""
        return self._ask(CMD_MKDIR, _string(path), struct.pack(">II", _HAS_MODE, mode))

    def forget(self, number: int) -> None:
        """Do not keep the answer of a request."""
        if self._answers.pop(number, None) is None:
            self._unwanted.add(number)

    def answer(self, number: int) -> Answer:
        """Wait for the answer to a request. DeviceTimeoutError when no byte comes or goes for `stall_s`."""
        while number not in self._answers:
            self._receive_one()
        return self._answers.pop(number)

    def ahead(self, items: Iterable[Item], ask: Callable[[Item], int], window: int) -> Iterator[tuple[Item, Answer]]:
        """Ask for each item, `window` of them before the first answer is waited for."""
        for item, number in min_throughput.ahead(items, ask, window):
            yield item, self.answer(number)

    def _greet(self) -> None:
        self._channel.settimeout(self._stall_s)
        self._out += struct.pack(">IBI", 5, CMD_INIT, _VERSION)
        packet = self._packet()
        if len(packet) < 5 or packet[0] != CMD_VERSION or packet[1:5] != struct.pack(">I", _VERSION):
            raise self._nonsense("it does not greet as SFTP does; does a login script there print something?")

    def _ask(self, kind: int, *fields: bytes) -> int:
        self._number += 1
        size = 5 + sum(map(len, fields))
        self._out += struct.pack(">IBI", size, kind, self._number)
        for field in fields:
            self._out += field
        self._asked.add(self._number)
        if len(self._out) >= _SEND_BYTES:
            self._flush()
        return self._number

    def _receive_one(self) -> None:
        packet = self._packet()
        try:
            kind, number = struct.unpack_from(">BI", packet)
            answer = _decode(kind, packet[5:])
        except (struct.error, ValueError) as error:
            raise self._nonsense(f"its answer cannot be read: {error}") from None
        if number not in self._asked:
            raise self._nonsense("it answers what was not asked")
        self._asked.remove(number)
        if number in self._unwanted:
            self._unwanted.remove(number)
        else:
            self._answers[number] = answer

    def _packet(self) -> bytes:
        self._flush()
        self._fill(4)
        size = int.from_bytes(self._in[:4], "big")
        if not 0 < size <= _PACKET_BYTES:
            raise self._nonsense(f"a packet of {size} bytes; does a login script there print something?")
        self._fill(4 + size)
        packet = bytes(memoryview(self._in)[4 : 4 + size])
        del self._in[: 4 + size]
        return packet

    def _flush(self) -> None:
        left = bytes(self._out)
        self._out.clear()
        while left:
            try:
                sent = self._channel.send(left)
            except (OSError, EOFError, paramiko.SSHException) as error:
                raise self._broken(error) from None
            self._moved(sent)
            left = left[sent:]

    def _fill(self, size: int) -> None:
        while len(self._in) < size:
            try:
                data = self._channel.recv(_RECEIVE_BYTES)
            except (OSError, EOFError, paramiko.SSHException) as error:
                raise self._broken(error) from None
            self._moved(len(data))
            self._in += data

    def _moved(self, size: int) -> None:
        if not size:
            raise self._ended()
        self._throughput.moved(size)

    def _broken(self, error: Exception) -> DeviceError:
        if isinstance(error, TimeoutError):
            return self._throughput.stalled()
        if not self._number and self._channel.exit_status >= 0:
            # The server ended before its greeting.
            return self._ended()
        return self._link.classify(f"the connection broke while files moved: {clean_text(str(error)) or 'it ended'}")

    def _ended(self) -> DeviceError:
        if self._number:
            return self._link.classify("its SFTP server ended while files moved")
        channel = self._channel
        channel.status_event.wait(_STATUS_SECONDS)
        stderr = clean_text(channel.recv_stderr(_PACKET_BYTES)) if channel.recv_stderr_ready() else ""
        code = channel.exit_status if channel.exit_status >= 0 else None
        problem = "its SFTP server ended at once: install openssh-sftp-server there"
        return self._link.classify(problem, argv=("sftp",), code=code, stderr=stderr)

    def _nonsense(self, problem: str) -> DeviceError:
        return DeviceError(self._serial, f"its SFTP server cannot be understood: {problem}")


def _string(data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + data


def _decode(kind: int, body: bytes) -> Answer:
    """Raises struct.error or ValueError."""
    if kind == CMD_STATUS:
        (code,) = struct.unpack_from(">I", body)
        # Servers older than version 3 send no text.
        text = clean_text(_first_string(body[4:])) if len(body) >= 8 else ""
        return SftpStatus(code, text or (SFTP_DESC[code] if code < len(SFTP_DESC) else f"error {code}"))
    if kind in {CMD_HANDLE, CMD_DATA}:
        return _first_string(body)
    if kind == CMD_ATTRS:
        return _attributes(body)
    if kind == CMD_EXTENDED_REPLY:
        _, fragment, _, _, available, files, _, inodes, _, flags, _ = _STATVFS.unpack_from(body)
        # A file system without a fixed number of inodes reports 0.
        return Room(available * fragment, inodes > 0 or files == 0, bool(flags & _READ_ONLY))
    raise ValueError(f"kind {kind}")


def _attributes(body: bytes) -> Attributes:
    (flags,) = struct.unpack_from(">I", body)
    if flags & (_HAS_SIZE | _HAS_MODE) != _HAS_SIZE | _HAS_MODE:
        raise ValueError("attributes without size or mode")
    (size,) = struct.unpack_from(">Q", body, 4)
    (mode,) = struct.unpack_from(">I", body, 20 if flags & _HAS_OWNER else 12)
    return Attributes(size, stat.S_ISREG(mode), stat.S_ISDIR(mode))


def _first_string(body: bytes) -> bytes:
    (size,) = struct.unpack_from(">I", body)
    if size > len(body) - 4:
        raise ValueError("a string longer than its packet")
    return body[4 : 4 + size]


def succeeded(status: SftpStatus) -> bool:
    """Return whether a request succeeded."""
    return status.code == SFTP_OK

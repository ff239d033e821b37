"""User at the other end of a loopback connection, and acceptance of this user's connections alone."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import struct
import time
from pathlib import Path
from typing import Any

_ESTABLISHED = "01"
_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")

# linux/netlink.h, linux/sock_diag.h, linux/inet_diag.h. A message begins with its length, type, flags, number, sender;
# in the answer the owner follows family, state, timer, retransmissions, addresses (48 bytes), expiry and two queues.
_SOCK_DIAG, _BY_FAMILY = 4, 20
_MESSAGE = struct.Struct("=IHHII")
_UID = 4 + 48 + 3 * 4
_DIAG_ESTABLISHED = 1
_ANY = 0xFFFFFFFF

# Errors of accept() without free descriptors or memory: the listener waits.
_SHORTAGES = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_SHORTAGE_S = 0.25
# accept(2): these are about the connection that was to be accepted, not about the listener.
_OF_THE_CONNECTION = {
    errno.ECONNABORTED,
    errno.ECONNRESET,
    errno.EPERM,
    errno.EPROTO,
    errno.ENOPROTOOPT,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.ENETDOWN,
    errno.ENETUNREACH,
    errno.ENONET,
    errno.EOPNOTSUPP,
    errno.ETIMEDOUT,
}


def peer_uid(connection: socket.socket) -> int | None:
    """Return the user whose process holds the other end, None when it is gone or the kernel does not list it.

    Linux knows the owner of every socket of the network namespace; both ends of a loopback connection are there.
    """
    try:
        theirs, ours = connection.getpeername(), connection.getsockname()
    except OSError:
        # The connection was reset before its acceptance and has no other end.
        return None
    try:
        return _asked(connection.family, theirs, ours)
    except OSError:
        # A sandbox without this kind of netlink.
        return _listed(theirs, ours)


def _asked(family: int, theirs: Any, ours: Any) -> int | None:
    """Return the owner of one socket, looked up by its addresses: sock_diag(7). Raises OSError where it cannot be."""
    hosts = b"".join(socket.inet_pton(family, host).ljust(16, b"\0") for host in (theirs[0], ours[0]))
    wanted = struct.pack("!HH", theirs[1], ours[1]) + hosts + struct.pack("=III", 0, _ANY, _ANY)
    request = struct.pack("=BBBBI", family, socket.IPPROTO_TCP, 0, 0, _ANY) + wanted
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC, _SOCK_DIAG) as kernel:
        kernel.settimeout(1.0)
        kernel.sendto(_MESSAGE.pack(_MESSAGE.size + len(request), _BY_FAMILY, 1, 1, 0) + request, (0, 0))
        answer = kernel.recv(4096)
    if _MESSAGE.unpack_from(answer)[1] != _BY_FAMILY:
        number = -int(struct.unpack_from("=i", answer, _MESSAGE.size)[0])
        if number == errno.ENOENT:
            return None
        raise OSError(number, os.strerror(number))
    # A closed socket belongs to root.
    state, uid = answer[_MESSAGE.size + 1], int(struct.unpack_from("=I", answer, _MESSAGE.size + _UID)[0])
    return uid if state == _DIAG_ESTABLISHED else None


def _listed(theirs: Any, ours: Any) -> int | None:
    """Return the owner of an IPv4 socket from the list of all, which takes 7 ms where there are 1,500."""
    try:
        their_entry, our_entry = _entry(theirs), _entry(ours)
    except OSError:
        return None
    for table in _TABLES:
        try:
            lines = Path(table).read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            # An IPv6 socket that speaks IPv4 has the address in its last 8 digits.
            local, remote = (field[-13:] for field in fields[1:3])
            if fields[3] == _ESTABLISHED and local == their_entry and remote == our_entry:
                return int(fields[7])
    return None


def accept_own(listener: socket.socket) -> socket.socket:
    """Return the next connection of a process of this user; all others are closed.

    Connections that are reset meanwhile are passed over, and a lack of descriptors is waited out. Raises OSError when
    the listener itself is broken.
    """
    while True:
        try:
            connection, _ = listener.accept()
        except OSError as error:
            time.sleep(pause_after(error))
            continue
        if _admit(connection):
            return connection


async def accept_own_async(listener: socket.socket) -> socket.socket:
    """Do what `accept_own` does, with a listener that does not block."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            connection, _ = await loop.sock_accept(listener)
        except OSError as error:
            await asyncio.sleep(pause_after(error))
            continue
        if _admit(connection):
            return connection


def pause_after(error: OSError) -> float:
    """Return how many seconds to wait before the next accept. Raises `error` when there is no point in another one."""
    if error.errno in _SHORTAGES:
        return _SHORTAGE_S
    if error.errno in _OF_THE_CONNECTION:
        return 0.0
    raise error


def _admit(connection: socket.socket) -> bool:
    """Return whether the other end is this user's; the connection is closed otherwise."""
    try:
        if peer_uid(connection) == os.getuid():
            # Both protocols answer small requests at once.
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return True
    except OSError:
        pass
    connection.close()
    return False


def _entry(address: tuple[str, int]) -> str:
    """Return an IPv4 address as the tables have it: the machine's own byte order, then the port."""
    (number,) = struct.unpack("=I", socket.inet_aton(address[0]))
    return f"{number:08X}:{address[1]:04X}"

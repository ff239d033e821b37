"""User at the other end of a socket, and accept loops that no client can break."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import struct
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest
from users import User

from farm.base import peer
from farm.base.peer import accept_own, accept_own_async, peer_uid

SECONDS = 30.0


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0), backlog=128) as found:
        yield found


def reset(listener: socket.socket) -> None:
    """Connect and reset the connection before it is accepted."""
    with socket.create_connection(listener.getsockname()) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


@pytest.fixture(params=["asked", "listed"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How the owner is found: the kernel is asked for one socket, or, in a sandbox, for all."""
    if request.param == "listed":
        monkeypatch.setattr(peer, "_asked", Mock(side_effect=PermissionError(errno.EPERM, "no netlink here")))


@pytest.mark.usefixtures("way")
def test_the_owner_of_a_connection_is_found(listener: socket.socket) -> None:
    with socket.create_connection(listener.getsockname()) as near, listener.accept()[0] as far:
        assert (peer_uid(near), peer_uid(far)) == (os.getuid(), os.getuid())


def test_the_owner_of_a_connection_over_ipv6_is_found() -> None:
    if not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")
    with socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True) as listener:
        for host in ("127.0.0.1", "::1"):
            near = socket.create_connection((host, listener.getsockname()[1]))
            with near, listener.accept()[0] as far:
                assert (peer_uid(near), peer_uid(far)) == (os.getuid(), os.getuid())


@pytest.mark.usefixtures("way")
def test_another_user_is_told_apart(listener: socket.socket, two_users: tuple[User, User]) -> None:
    user = two_users[0]
    code = "import socket, sys; s = socket.create_connection(('127.0.0.1', int(sys.argv[1]))); s.recv(1)"
    words = [user.interpreter, "-c", code, str(listener.getsockname()[1])]
    with subprocess.Popen(words, **user.start, cwd="/"), listener.accept()[0] as far:
        assert peer_uid(far) == user.uid


@pytest.mark.usefixtures("way")
def test_a_connection_that_was_closed_is_nobodys(listener: socket.socket) -> None:
    # A socket in this state belongs to root, whichever user opened it.
    near = socket.create_connection(listener.getsockname())
    with listener.accept()[0] as far:
        near.close()
        assert peer_uid(far) is None


def test_a_connection_that_was_reset_is_nobodys(listener: socket.socket) -> None:
    reset(listener)
    with listener.accept()[0] as connection:
        with pytest.raises(OSError, match="not connected"):
            connection.getpeername()
        assert peer_uid(connection) is None
    with socket.socket() as fresh:
        assert peer_uid(fresh) is None
    assert peer_uid(fresh) is None


def _accepted_in_thread(listener: socket.socket) -> socket.socket:
    with ThreadPoolExecutor() as pool:
        return pool.submit(accept_own, listener).result(SECONDS)


def _accepted_in_loop(listener: socket.socket) -> socket.socket:
    listener.setblocking(False)
    return asyncio.run(asyncio.wait_for(accept_own_async(listener), SECONDS))


both_ways = pytest.mark.parametrize("accepted", [_accepted_in_thread, _accepted_in_loop])


@both_ways
def test_resets_are_passed_over(listener: socket.socket, accepted: Callable[[socket.socket], socket.socket]) -> None:
    for _ in range(60):
        reset(listener)
    with socket.create_connection(listener.getsockname()) as near, accepted(listener) as far:
        assert far.getpeername() == near.getsockname()


class _ListenerStub(socket.socket):
    """A listener whose accept fails as the kernel's does, when it cannot be made to: once for each error."""

    def __init__(self, real: socket.socket, errors: list[int]) -> None:
        super().__init__(fileno=os.dup(real.fileno()))
        self._errors = errors

    def accept(self) -> tuple[socket.socket, object]:
        if self._errors:
            number = self._errors.pop(0)
            raise OSError(number, os.strerror(number))
        return super().accept()


@both_ways
def test_a_shortage_that_passes_is_waited_for(
    listener: socket.socket, accepted: Callable[[socket.socket], socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer, "_SHORTAGE_S", 0.01)
    errors = [errno.ECONNABORTED, errno.EPROTO, errno.EMFILE, errno.ENFILE, errno.ENOBUFS]
    with (
        _ListenerStub(listener, errors * 2) as failing,
        socket.create_connection(listener.getsockname()) as near,
        accepted(failing) as far,
    ):
        assert far.getpeername() == near.getsockname()


def test_a_listener_that_is_broken_is_told(listener: socket.socket) -> None:
    listener.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        accept_own(listener)

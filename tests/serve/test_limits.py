"""Silent, slow and many: connections that take from the server without asking for anything, over real sockets."""

from __future__ import annotations

import contextlib
import http.client
import select
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from waiting import until

from farm.serve import gate, limits, pages
from farm.serve.limits import network_of, peer_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from conftest import Filled, Server
    from users import User

    from farm.base.config.settings import Config

GET = b"GET %s HTTP/1.1\r\nHost: localhost\r\nAccept: text/html\r\n\r\n"

ASK = (
    "import http.client, sys\n"
    "connection = http.client.HTTPConnection('127.0.0.1', int(sys.argv[1]), timeout=60)\n"
    "connection.request('GET', sys.argv[2], headers={'Accept': 'text/html'})\n"
    "print(connection.getresponse().status)\n"
)


@contextlib.contextmanager
def connected(server: Server, count: int, say: bytes = b"") -> Iterator[list[socket.socket]]:
    """Hold connections that have sent `say`."""
    with contextlib.ExitStack() as stack:
        held = []
        for _ in range(count):
            held.append(stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=30)))
            with contextlib.suppress(ConnectionError):
                held[-1].sendall(say)
        yield held


def is_closed(connection: socket.socket) -> bool:
    """Return whether the server has hung up, after a possible answer."""
    connection.setblocking(False)
    try:
        while connection.recv(65536):
            pass
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
    return True


def is_reset(connection: socket.socket) -> bool:
    """Return whether the server has hung up with unread data."""
    poll = select.poll()
    poll.register(connection, 0)
    return any(event & select.POLLHUP for _, event in poll.poll(0))


@pytest.mark.parametrize(
    "say", [b"", b"GET / HT", GET[:-4] % b"/"], ids=["nothing", "a part", "headers without an end"]
)
def test_idle_connections_keep_nobody_out(server: Server, say: bytes) -> None:
    with connected(server, 300, say) as held:
        for _ in range(3):
            assert server.get("/runs").status == 200
        # The number of connections of a peer is limited: the oldest made room for the others.
        until(lambda: sum(not is_closed(one) for one in held) <= limits.OF_ONE_PEER)
        assert server.get("/runs").status == 200


def test_a_request_has_to_come_in_time(
    start: Callable[..., AbstractContextManager[Server]], filled: Filled, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert filled.live
    monkeypatch.setattr(limits, "REQUEST_S", 1.0)
    post = b"POST /login HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nt"
    with (
        start("a-token-of-sixteen-characters") as server,
        connected(server, 3) as silent,
        connected(server, 3, b"GET / HT") as without_end,
        connected(server, 3, post) as without_body,
    ):
        for held in (silent, without_end, without_body):
            until(lambda held=held: all(map(is_closed, held)))


def test_a_request_that_trickles_has_no_more_time(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "REQUEST_S", 1.0)

    def trickle(connection: socket.socket) -> None:
        for _ in range(300):
            connection.sendall(b".")
            time.sleep(0.1)

    with connected(server, 1, GET[:-2] % b"/" + b"X-Slow: ") as [slow], pytest.raises(ConnectionError):
        trickle(slow)


def test_a_connection_that_asks_again_and_again_stays(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "REQUEST_S", 2.0)
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)) as connection:
        local = None
        for _ in range(5):
            connection.request("GET", "/api/progress")
            assert connection.getresponse().read()
            assert local in (None, connection.sock.getsockname())
            local = connection.sock.getsockname()
            time.sleep(0.6)


@pytest.fixture
def download(config: Config, filled: Filled) -> bytes:
    """The request for a file that is too large for any buffer."""
    path = config.state_dir / "artifacts" / filled.sha256[:2] / filled.sha256[2:4] / filled.sha256
    assert path.is_file()
    path.chmod(0o600)
    with path.open("wb") as file:
        file.truncate(64 << 20)
    return GET % f"/artifacts/{filled.sha256}".encode()


def test_who_takes_nothing_of_an_answer_is_hung_up_on(
    server: Server, download: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "TAKING_S", 1.0)
    with connected(server, 2, download) as held:
        # Both have the beginning of an answer, of which they take nothing; then it ends in its middle.
        assert all(one.recv(1) for one in held)
        until(lambda: all(map(is_reset, held)))


def test_who_takes_it_slowly_gets_all_of_it(server: Server, download: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "TAKING_S", 3.0)
    with connected(server, 1, download) as [slow]:
        taken, began = 0, time.monotonic()
        while time.monotonic() - began < 4:
            taken += len(slow.recv(1 << 18))
            time.sleep(0.05)
        slow.settimeout(30)
        while taken < 64 << 20:
            part = slow.recv(1 << 20)
            assert part
            taken += len(part)


def test_a_peer_that_is_being_answered_everywhere_is_refused_and_others_are_not(
    server: Server, download: bytes, another_user: User
) -> None:
    with connected(server, limits.OF_ONE_PEER, download) as held:
        assert all(one.recv(1) for one in held)
        refused = server.get("/runs")
        assert refused.status == 503
        assert "too many connections are open from your side" in refused.text
        assert another_user.python("-c", ASK, str(server.port), "/runs") == "200\n"
    until(lambda: server.get("/runs").status == 200)


def test_peers_are_networks_and_on_this_machine_users(monkeypatch: pytest.MonkeyPatch) -> None:
    assert network_of("192.0.2.7") == "192.0.2.7"
    assert network_of("2001:db8:1:2:3:4:5:6") == network_of("2001:db8:1:2::7") == "2001:db8:1:2"
    monkeypatch.setattr(limits, "peer_uid", lambda _: 1234)
    with socket.socket() as any_socket:
        assert peer_of(any_socket, "127.0.0.1") == "user 1234"
        assert peer_of(any_socket, "192.0.2.7") == "192.0.2.7"


def test_one_peer_does_not_take_all_threads(
    start: Callable[..., AbstractContextManager[Server]],
    filled: Filled,
    another_user: User,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert filled.live
    go_on, working, most = threading.Event(), 0, 0
    made = pages.runs_page

    def slow(*arguments: Any, **more: Any) -> pages.Page:
        nonlocal working, most
        working += 1
        most = max(most, working)
        assert go_on.wait(60)
        working -= 1
        return made(*arguments, **more)

    monkeypatch.setattr(pages, "runs_page", slow)
    with start() as server, connected(server, 60, GET % b"/runs") as held:
        until(lambda: working == gate.AT_ONCE)
        # More threads than these are not there for all.
        assert another_user.python("-c", ASK, str(server.port), "/devices") == "200\n"
        assert (working, most) == (gate.AT_ONCE, gate.AT_ONCE)
        go_on.set()
        for one in held:
            assert one.recv(12) == b"HTTP/1.1 200"

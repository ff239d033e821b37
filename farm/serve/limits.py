"""Limits of connections and time for each peer, below HTTP.

uvicorn limits all connections together, which one peer can use up, and has no time limit for a request. This protocol
class adds both.
"""

from __future__ import annotations

import ipaddress
import socket
import struct
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

from uvicorn.protocols.http.h11_impl import H11Protocol

from farm.base.peer import peer_uid

if TYPE_CHECKING:
    import asyncio

    from uvicorn.protocols.http.flow_control import FlowControl

MOST_CONNECTIONS = 256
OF_ONE_PEER = 64
"""Connections of one peer; a browser opens six at most."""
REQUEST_S = 15.0
"""Seconds for a whole request, counted from the connection or from the previous response."""
TAKING_S = 60.0
"""Seconds for 48 kB of a response, the amount that drains from uvicorn's buffer before more is written."""
_LOOK_S = 1.0
_NO_LINGER = struct.pack("ii", 1, 0)
_REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: text/plain; charset=utf-8\r\ncontent-length: 45\r\n"
    b"retry-after: 5\r\nconnection: close\r\n\r\ntoo many connections are open from your side\n"
)


def network_of(host: str) -> str:
    """Return the key of an address for limits: itself, or the IPv6 network, as a machine has many addresses in one."""
    return ":".join(host.split(":")[:4]) if ":" in host and "." not in host else host


def peer_of(connection: socket.socket, host: str) -> str:
    """Return the peer of a connection: a network, or on this machine the user, since all users share one address."""
    try:
        local = ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = False
    uid = peer_uid(connection) if local else None
    return network_of(host) if uid is None else f"user {uid}"


class LimitedProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 protocol with limits for slow, silent and numerous peers."""

    peer = ""
    flow: FlowControl
    _timer: asyncio.TimerHandle | None = None
    _asking_since = 0.0
    _paused_since: float | None = None
    _refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept the connection, or refuse it with 503 when the peer or all peers together have too many."""
        host = (transport.get_extra_info("peername") or ("",))[0]
        self.peer = peer_of(transport.get_extra_info("socket"), host)
        if not self._make_room():
            self._refused, self.transport = True, transport
            transport.write(_REFUSAL)
            transport.close()
            return
        super().connection_made(transport)
        self.app_state = {**self.app_state, "peer": self.peer}
        self._asking_since = self.loop.time()
        self._timer = self.loop.call_later(_LOOK_S, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer of the connection."""
        if self._timer is not None:
            self._timer.cancel()
        if not self._refused:
            super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read a part of a request."""
        if not self._refused:
            super().data_received(data)

    def on_response_complete(self) -> None:
        """Start the time limit of the next request."""
        self._asking_since = self.loop.time()
        super().on_response_complete()

    def pause_writing(self) -> None:
        """Record when the peer stopped reading."""
        self._paused_since = self.loop.time()
        super().pause_writing()

    def resume_writing(self) -> None:
        """Clear the pause: the peer reads again."""
        self._paused_since = None
        super().resume_writing()

    @property
    def is_asking(self) -> bool:
        """True while no response is in progress: the request is missing or incomplete."""
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body

    def _look(self) -> None:
        now = self.loop.time()
        # The end of a response may still be in the write buffer.
        limit = TAKING_S if self.transport.get_write_buffer_size() else REQUEST_S
        late = self.is_asking and now - self._asking_since > limit
        stuck = self._paused_since is not None and now - self._paused_since > TAKING_S
        if late or stuck:
            self._hang_up()
            return
        self._timer = self.loop.call_later(_LOOK_S, self._look)

    def _make_room(self) -> bool:
        """Return True when a connection is free; otherwise close the connection that waits longest for its request."""
        connected = [one for one in cast("set[Any]", self.connections) if not one.transport.is_closing()]
        own = [one for one in connected if one.peer == self.peer]
        if len(own) >= OF_ONE_PEER:
            counted = own
        elif len(connected) >= MOST_CONNECTIONS:
            counted = connected
        else:
            return True
        waiting = [one for one in counted if one.is_asking]
        if waiting:
            min(waiting, key=lambda one: one._asking_since)._hang_up()  # noqa: SLF001 - of our own class
        return bool(waiting)

    def _hang_up(self) -> None:
        # Close with a reset: otherwise the kernel keeps unread data and retries delivery for many minutes.
        with suppress(OSError):
            self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        self.transport.abort()

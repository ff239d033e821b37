"""Keepalive of an SSH connection.

The kernel sees acknowledgements alone, and a forward on the way sends them itself: the user-mode network of an
emulated board, or `ssh -L`. So the other end gets requests and has to answer.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING, Any

import paramiko

if TYPE_CHECKING:
    import socket

ASK_SECONDS = 10.0
"""Between two questions, while nothing comes."""
DEAD_SECONDS = 30.0
"""A connection over which nothing came for so long is dead."""

_LOOKS = 10
# RFC 4254, 4: a server without this name answers with a refusal, which is an answer.
_REQUEST = 80
_NAME = "keepalive@openssh.com"


class HeardStream:
    """A stream to an SSH server, as paramiko takes it in the place of a socket, that notes when something came."""

    def __init__(self, stream: socket.socket | paramiko.Channel) -> None:
        self._stream = stream
        self.heard_s = time.monotonic()

    def recv(self, size: int) -> bytes:
        """Return what came, as a socket does."""
        data = self._stream.recv(size)
        self.heard_s = time.monotonic()
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def keep_alive(transport: paramiko.Transport, stream: HeardStream) -> None:
    """Ask the other end now and then as long as nothing comes, and end the connection where it does not answer."""
    message = paramiko.Message()
    message.add_byte(bytes([_REQUEST]))
    message.add_string(_NAME)
    # An answer is wanted: paramiko's own keep-alive wants none, or waits for it without end.
    message.add_boolean(True)
    # paramiko's reading thread sends the request, so that no blocked writer delays it.
    send = transport._send_user_message  # type: ignore[attr-defined] # noqa: SLF001
    transport.packetizer.set_keepalive(ASK_SECONDS, lambda: send(message))
    stream.heard_s = time.monotonic()
    threading.Thread(target=_watch, args=(transport, stream), daemon=True, name="ssh alive").start()


def _watch(transport: paramiko.Transport, stream: HeardStream) -> None:
    while transport.is_active():
        if time.monotonic() > stream.heard_s + DEAD_SECONDS:
            with contextlib.suppress(paramiko.SSHException, EOFError, OSError):
                transport.close()
            return
        time.sleep(min(1.0, DEAD_SECONDS / _LOOKS))

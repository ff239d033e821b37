"""Proxy in front of a real adb server with the services of a poor one, as a vendor's bridge to rented devices."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

REFUSED = (b"host:host-features", b"host:features", b"host:track-devices", b"reboot:")


class PoorAdbProxy:
    """Listens on loopback at `port`; refuses REFUSED anywhere in a request, and delays the first stream."""

    def __init__(self, server_port: int, first_stream_s: float) -> None:
        self._server, self._delay_s = server_port, first_stream_s
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.requests: list[bytes] = []
        self._connections: list[socket.socket] = []
        self._lock = threading.Lock()
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        """End the proxy and every connection, as at the end of a rented session."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for one in self._connections:
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._carry, args=(client,), daemon=True).start()

    def _carry(self, client: socket.socket) -> None:
        with client, socket.create_connection(("127.0.0.1", self._server)) as server, contextlib.suppress(OSError):
            with self._lock:
                self._connections += [client, server]
            while True:
                size = _exactly(client, 4)
                if not size:
                    return
                request = _exactly(client, int(size, 16))
                self.requests.append(request)
                if any(one in request for one in REFUSED):
                    reason = b"unknown host service"
                    client.sendall(b"FAIL%04x%s" % (len(reason), reason))
                    return
                is_transport = request.startswith(b"host:transport")
                if not is_transport and not request.startswith(b"host"):
                    # A service of a device: its stream is passed on as it is.
                    with self._lock:
                        delay_s, self._delay_s = self._delay_s, 0.0
                    time.sleep(delay_s)
                server.sendall(size + request)
                if is_transport:
                    client.sendall(_exactly(server, 4))
                    continue
                back = threading.Thread(target=_copy, args=(server, client), daemon=True)
                back.start()
                _copy(client, server)
                back.join()
                return


def _copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


def _exactly(stream: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size and (piece := stream.recv(size - len(data))):
        data += piece
    return data if len(data) == size else b""


@contextlib.contextmanager
def poor_adb_proxy(server_port: int, first_stream_s: float = 8.0) -> Iterator[PoorAdbProxy]:
    """Run a proxy in front of the adb server at `server_port`."""
    proxy = PoorAdbProxy(server_port, first_stream_s)
    try:
        yield proxy
    finally:
        proxy.close()

"""Proxy in front of a real adb server with the services of a poor one, as a vendor's bridge to rented devices."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from socketserver import BaseRequestHandler, ThreadingTCPServer

REFUSED = (b"host:host-features", b"host:features", b"host:track-devices", b"reboot:")


class PoorAdbProxy(ThreadingTCPServer):
    """Listens on loopback at `port`; refuses REFUSED anywhere in a request, and delays the first stream."""

    daemon_threads = True

    def __init__(self, server_port: int, first_stream_s: float) -> None:
        super().__init__(("127.0.0.1", 0), _Carrier)
        self.port = int(self.server_address[1])
        self.server_port, self.delay_s = server_port, first_stream_s
        self.requests: list[bytes] = []
        self.connections: list[socket.socket] = []
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        """End the proxy and every connection, as at the end of a rented session."""
        self.shutdown()
        self.server_close()
        for one in self.connections:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: object, client_address: object) -> None:
        """Print nothing: either end may hang up."""


class _Carrier(BaseRequestHandler):
    server: PoorAdbProxy

    def handle(self) -> None:
        client = self.request
        with socket.create_connection(("127.0.0.1", self.server.server_port)) as server:
            self.server.connections += [client, server]
            while True:
                size = _exactly(client, 4)
                if not size:
                    return
                request = _exactly(client, int(size, 16))
                self.server.requests.append(request)
                if any(one in request for one in REFUSED):
                    reason = b"unknown host service"
                    client.sendall(b"FAIL%04x%s" % (len(reason), reason))
                    return
                is_transport = request.startswith(b"host:transport")
                if not is_transport and not request.startswith(b"host"):
                    # A service of a device: its stream is passed on as it is.
                    delay_s, self.server.delay_s = self.server.delay_s, 0.0
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

"""Servers of tests on loopback."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import BaseRequestHandler, TCPServer, ThreadingTCPServer


class _Server(ThreadingTCPServer):
    daemon_threads = True


@contextmanager
def serving(handler: type[BaseRequestHandler], tls: ssl.SSLContext | None = None) -> Iterator[int]:
    """Answer connections, or requests without a log, by `handler` and yield the port."""
    kind: type[TCPServer] = _Server
    if issubclass(handler, BaseHTTPRequestHandler):
        kind, handler = ThreadingHTTPServer, type("Quiet", (handler,), {"log_message": lambda *_: None})
    with kind(("127.0.0.1", 0), handler) as server:
        # A client may leave early.
        server.handle_error = lambda *_: None  # type: ignore[method-assign]
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        # How often it looks for its end, in seconds: each server of a test would take half a second to stop.
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield int(server.server_address[1])
        finally:
            server.shutdown()
            thread.join()

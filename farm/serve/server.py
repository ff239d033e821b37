"""Listening socket and uvicorn server of `farm serve`."""

from __future__ import annotations

import errno
import os
import socket
import sys
import threading
from typing import TYPE_CHECKING

from farm.base.errors import UsageError

if TYPE_CHECKING:
    import uvicorn

    from farm.base.config.settings import Config

# Time for responses in progress after Ctrl-C.
_LAST_ANSWERS_S = 2
_INTERRUPTED = 130


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens on `host`. Raises UsageError with the reason when it cannot."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        found = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        raise UsageError(f"--host {host[:200]!r}: {getattr(error, 'strerror', None) or error}") from None
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
        found.listen(128)
    except OSError as error:
        found.close()
        raise UsageError(_explain(host, port, error)) from None
    return found


def url_of(bound: socket.socket) -> str:
    """Return the address to open in a browser."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"


def serve(config: Config, host: str, token: str, bound: socket.socket) -> None:
    """Serve until a signal ends the process."""
    import uvicorn

    try:
        uvicorn.Server(settings(config, host, token)).run(sockets=[bound])
    except KeyboardInterrupt:
        if any(not one.daemon for one in threading.enumerate() if one is not threading.main_thread()):
            # Python would wait for the threads of queries whose clients have left; queries only read, so an exit is
            # safe.
            sys.stderr.flush()
            os._exit(_INTERRUPTED)
        raise


def settings(config: Config, host: str, token: str) -> uvicorn.Config:
    """Return the uvicorn settings; `farm.serve.limits` sets the limits that are absent here."""
    import uvicorn

    from farm.base.structs import prepare_decoders
    from farm.serve.app import create_app
    from farm.serve.limits import LimitedProtocol

    # Several threads render pages, so the decoders are prepared before the first request.
    app = create_app(config, host, token)
    prepare_decoders()
    return uvicorn.Config(
        app,
        lifespan="off",
        loop="asyncio",
        http=LimitedProtocol,
        ws="none",
        interface="asgi3",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=_LAST_ANSWERS_S,
    )


def _explain(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} of {host} is taken: another 'farm serve'? --port names another, --port 0 takes a free one"
    if error.errno == errno.EACCES:
        return f"port {port} of {host} is not for this user: --port names another, above 1023"
    return f"cannot listen on {host}, port {port}: {error.strerror}"

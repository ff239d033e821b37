"""Listening socket and uvicorn server of `farm serve`."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from farm.base.errors import ExitCode, UsageError
from farm.base.text import one_line

if TYPE_CHECKING:
    from collections.abc import Callable

    import uvicorn
    from litestar.types import ASGIApp

    from farm.base.config.settings import Config

# Pages poll it.
_QUIET = "/api/v1/progress"
# Open connections and requests, beyond which a request gets 503.
_CONNECTIONS = 512
# Time for the first line and the headers of a request, and between two requests of a connection.
HEADERS_S = 10.0
_LONGEST_HEADERS = 1 << 15
# Threads of queries and templates.
_THREADS = 16
# Time for responses in progress after Ctrl-C.
_LAST_ANSWERS_S = 2


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


def serve(config: Config, bound: socket.socket, ready: Callable[[], None], *, demo: bool = False) -> None:
    """Serve until a signal ends the process; call `ready` before the first request.

    With `demo` each page is labelled as made-up data.
    Raises UsageError for a host that other machines reach, without an account.
    """
    import uvicorn

    # The name may resolve to another address by now: the bound address counts.
    server = uvicorn.Server(settings(config, str(bound.getsockname()[0]), demo=demo))
    ready()
    try:
        server.run(sockets=[bound])
    except KeyboardInterrupt:
        if any(not one.daemon for one in threading.enumerate() if one is not threading.main_thread()):
            # Python would wait for the threads of queries whose clients have left; queries only read, so an exit is
            # safe.
            sys.stderr.flush()
            os._exit(ExitCode.INTERRUPTED)
        raise


def settings(config: Config, host: str, *, demo: bool = False) -> uvicorn.Config:
    """Return the uvicorn settings."""
    import uvicorn
    from litestar.concurrency import set_asyncio_executor

    from farm.base.toml_tables import prepare_decoders
    from farm.serve.app import create_app

    # Several threads render pages, so the decoders are prepared before the first request.
    app = create_app(config, host, demo=demo)
    prepare_decoders()
    # Not asyncio's own executor, for which the end of the event loop would wait.
    set_asyncio_executor(ThreadPoolExecutor(_THREADS, "farm-serve"))
    return uvicorn.Config(
        logged(app),
        lifespan="off",
        loop="asyncio",
        http=_connection(),
        h11_max_incomplete_event_size=_LONGEST_HEADERS,
        ws="none",
        interface="asgi3",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        # Forwarded headers are trusted from a reverse proxy on this machine alone.
        proxy_headers=True,
        forwarded_allow_ips="127.0.0.1,::1",
        limit_concurrency=_CONNECTIONS,
        timeout_graceful_shutdown=_LAST_ANSWERS_S,
    )


def _connection() -> type[asyncio.Protocol]:
    """Return the protocol of a connection. uvicorn alone waits without end for a request whose headers never end."""
    from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

    class Connection(H11Protocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._expect_request()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._expect_request()

        def _expect_request(self) -> None:
            self.loop.call_later(HEADERS_S, self._end_if_idle, self.cycle)

        def _end_if_idle(self, last: RequestResponseCycle | None) -> None:
            if self.cycle is last and not self.transport.is_closing():
                self.transport.close()

    return Connection


def logged(app: ASGIApp) -> ASGIApp:
    """Return the application with answers to HEAD, and with a line on standard error for each response."""

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        began, status = time.monotonic(), 0

        async def sent(message: Any) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        # uvicorn leaves the body of an answer to HEAD out.
        asked: Any = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
        try:
            await app(asked, receive, sent)
        except asyncio.CancelledError:
            # The server is stopping and cancelled this request.
            if not status:
                await sent({"type": "http.response.start", "status": 503, "headers": []})
                await sent({"type": "http.response.body", "body": b"the server is ending\n"})
        finally:
            if scope["path"] != _QUIET or status >= 400:
                # Without the query, which may contain secrets of a user.
                path = one_line(scope.get("raw_path", b"").decode("latin-1"), 120)
                client, ms = (scope.get("client") or ("",))[0], 1000 * (time.monotonic() - began)
                # The reader of the log may have closed the pipe.
                with suppress(OSError):
                    sys.stderr.write(f"{client} {scope['method']} {path} {status or 'aborted'} {ms:.0f} ms\n")

    return answer


def _explain(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} of {host} is taken: another 'farm serve'? --port names another, --port 0 takes a free one"
    if error.errno == errno.EACCES:
        return f"port {port} of {host} is not for this user: --port names another, above 1023"
    return f"cannot listen on {host}, port {port}: {error.strerror}"

"""Servers of tests on loopback, and lines that are slow, break, or carry nothing."""

from __future__ import annotations

import asyncio
import contextlib
import random
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import BaseRequestHandler, TCPServer, ThreadingTCPServer

# Servers of tests on loopback.


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


# Lines between processes of this machine that are slow, break, or carry nothing.


class Relay:
    """Relay to a port or a socket of this machine that is slow, breaks at times, or stops to carry bytes."""

    def __init__(
        self, target: int | str, *, host: str = "127.0.0.1", delay_s: float = 0.0, breaks: float = 0.0
    ) -> None:
        """Listen on an address of this machine.

        Each piece of data comes `delay_s` later; with the probability `breaks` its connection is reset instead.
        """
        self._target, self._delay_s, self._breaks = target, delay_s, breaks
        self._chance = random.Random(1)
        self._holds = asyncio.Event()
        self._carried: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(self._listen(host), self._loop).result()
        self.port: int = self._server.sockets[0].getsockname()[1]
        self.broken = 0

    def cut(self) -> None:
        """Stop to carry bytes without closing: sent bytes are kept back, as with a pulled cable."""
        self._loop.call_soon_threadsafe(self._holds.clear)

    def restore(self) -> None:
        """Carry it again."""
        self._loop.call_soon_threadsafe(self._holds.set)

    def abort(self, *, always: bool) -> None:
        """Reset each connection at its first sent byte, or end this behaviour."""
        self._breaks = 1.0 if always else 0.0

    def close(self) -> None:
        """End all connections."""
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _listen(self, host: str) -> asyncio.Server:
        self._holds.set()
        return await asyncio.start_server(self._accept, host, 0)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # A task of its own: asyncio logs an error for each cancelled task that it makes itself.
        task = self._loop.create_task(self._carry(reader, writer))
        self._carried.add(task)
        task.add_done_callback(self._carried.discard)

    async def _end(self) -> None:
        self._server.close()
        carried = list(self._carried)
        for task in carried:
            task.cancel()
        await asyncio.gather(*carried, return_exceptions=True)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(writer.transport.abort)
            try:
                if isinstance(self._target, int):
                    there, further = await asyncio.open_connection("127.0.0.1", self._target)
                else:
                    there, further = await asyncio.open_unix_connection(self._target)
                stack.callback(further.transport.abort)
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._pump(reader, further))
                    group.create_task(self._pump(there, writer))
            except* (OSError, EOFError):
                self.broken += 1

    async def _pump(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        while data := await source.read(65536):
            await asyncio.sleep(self._delay_s)
            await self._holds.wait()
            if self._chance.random() < self._breaks:
                raise ConnectionResetError
            target.write(data)
            await target.drain()
        raise EOFError

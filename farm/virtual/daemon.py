"""The adb daemon of one virtual device: it listens on loopback and serves whoever runs as the same user."""

from __future__ import annotations

import asyncio
import os
import socket
from functools import partial
from typing import TYPE_CHECKING

from farm.virtual.peer import peer_uid
from farm.virtual.root import ROOT_PROPERTY, switch_root
from farm.virtual.shell import serve_shell
from farm.virtual.streams import Connection
from farm.virtual.sync import SyncSession
from farm.virtual.wire import Link

if TYPE_CHECKING:
    from collections.abc import Mapping

    from farm.virtual.streams import Service, Stream
    from farm.virtual.tree import DeviceTree

# What adb 36 asks for when it may; sendrecv_v2 would add compression, which loopback has no use for.
FEATURES = "shell_v2,stat_v2,ls_v2,fixed_push_mkdir"
_BANNER = ("ro.product.name", "ro.product.model", "ro.product.device")
_BACKLOG = 16


class Daemon:
    """Serves one device tree."""

    def __init__(self, tree: DeviceTree, properties: Mapping[str, str]) -> None:
        self._tree = tree
        self._banner = {name: properties[name] for name in _BANNER}
        self._connections: set[asyncio.Task[None]] = set()

    async def serve(self, listener: socket.socket) -> None:
        """Serve connections until cancelled; then everything that was started for them ends."""
        loop = asyncio.get_running_loop()
        listener.setblocking(False)
        try:
            while True:
                connection, _ = await loop.sock_accept(listener)
                if peer_uid(connection) != os.getuid():
                    connection.close()
                    continue
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                link = Link(connection)
                task = asyncio.create_task(Connection(link, self._banner, FEATURES, self._find).serve())
                self._connections.add(task)
                task.add_done_callback(self._connections.discard)
        finally:
            for task in self._connections:
                task.cancel()
            await asyncio.gather(*self._connections, return_exceptions=True)

    def _find(self, name: str) -> Service | None:
        if name == "sync:":
            return self._sync
        if name in ("root:", "unroot:"):
            return partial(self._switch_root, wanted=name == "root:")
        if name.startswith(("shell:", "shell,", "exec:")):
            return partial(serve_shell, tree=self._tree, service=name)
        return None

    async def _switch_root(self, stream: Stream, *, wanted: bool) -> None:
        answer, restarts = switch_root(self._tree.properties, wanted=wanted)
        await stream.write(answer.encode())
        await stream.finish()
        if restarts:
            # Together, so that no command of before says what only those after may.
            self._tree.set_property(ROOT_PROPERTY, "1" if wanted else "0")
            for task in self._connections:
                task.cancel()

    async def _sync(self, stream: Stream) -> None:
        await SyncSession(stream, self._tree).serve()


def listen(port: int) -> socket.socket:
    """Return a socket that listens on loopback; port 0 takes a free one. Raises OSError."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen(_BACKLOG)
    return listener

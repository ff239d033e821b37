"""The socket in a device's folder where faults are asked for: one JSON request and one answer a line."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from typing import TYPE_CHECKING

from farm.virtual.faults import Fault, control_address

if TYPE_CHECKING:
    from farm.virtual.injection import Injection

_BACKLOG = 4


class Control:
    """Takes requests from whoever may write in the device's folder, which is its owner alone."""

    def __init__(self, root: bytes, injection: Injection) -> None:
        """Listen in the folder `root`, where nobody else does. Raises OSError."""
        self._injection = injection
        self._listener = socket.socket(socket.AF_UNIX)
        folder = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._listener.bind(control_address(folder))
        finally:
            os.close(folder)
        self._listener.listen(_BACKLOG)

    async def serve(self) -> None:
        """Answer until cancelled."""
        server = await asyncio.start_unix_server(self._answer, sock=self._listener)
        async with server:
            await server.serve_forever()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while line := await reader.readline():
                answer: dict[str, object] = {}
                try:
                    await self._do(json.loads(line))
                except (ValueError, KeyError, TypeError, AttributeError) as error:
                    answer["error"] = str(error)
                except OSError as error:
                    answer["error"] = error.strerror or type(error).__name__
                writer.write(json.dumps(answer).encode() + b"\n")
                await writer.drain()
        writer.close()

    async def _do(self, request: dict[str, object]) -> None:
        match request:
            case {"do": "inject", "fault": dict(fields)}:
                await self._injection.add(Fault(**fields))
            case {"do": "clear"}:
                self._injection.clear()
            case {"do": "randomize", "rate": int() | float() as rate, "seed": int() as seed, "kinds": list(kinds)}:
                self._injection.randomize(rate, seed, kinds)
            case _:
                raise ValueError(f"{request!r} is no request")

"""Networks of hosts on this machine: a namespace each with a cable that can be pulled, and slow and lossy lines."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import random
import shutil
import subprocess
import threading
from collections.abc import Iterator

_CLONE_NEWNET = 0x40000000


def why_no_namespaces() -> str:
    """Return why this process cannot make network namespaces; empty where it can."""
    if shutil.which("ip", path=f"{os.environ.get('PATH', '')}:/usr/sbin") is None:
        return "no network namespaces: iproute2 is not installed"
    if os.geteuid() != 0:
        return "no network namespaces: they need root"
    child = os.fork()
    if not child:
        os._exit(ctypes.CDLL(None).unshare(_CLONE_NEWNET) != 0)
    return "no network namespaces: the kernel refuses" if os.waitpid(child, 0)[1] else ""


class Networks:
    """A namespace for each host, and a cable from each to this machine."""

    def __init__(self) -> None:
        # Two of these at once have names and addresses of their own.
        self._block = os.getpid() % 200
        self._names: list[str] = []

    def add(self, host: str) -> tuple[list[str], str]:
        """Return the prefix of commands of `host`, and the address at which they reach this machine."""
        number = len(self._names)
        self._names.append(host)
        ours, theirs, space = self._cable(host), self._end(number), self._space(host)
        here, there = f"10.{self._block}.{number}.1", f"10.{self._block}.{number}.2"
        _ip("netns", "add", space)
        _ip("link", "add", ours, "type", "veth", "peer", "name", theirs, "netns", space)
        _ip("address", "add", f"{here}/24", "dev", ours)
        _ip("link", "set", ours, "up")
        _ip("-n", space, "address", "add", f"{there}/24", "dev", theirs)
        for device in (theirs, "lo"):
            _ip("-n", space, "link", "set", device, "up")
        return ["ip", "netns", "exec", space], here

    def cut(self, host: str) -> None:
        """Pull the cable of a host: nothing arrives, and no connection gets an error."""
        _ip("link", "set", self._cable(host), "down")

    def restore(self, host: str) -> None:
        """Plug it in again."""
        _ip("link", "set", self._cable(host), "up")

    def disturb(self, host: str, delay_ms: int, loss_percent: float) -> str:
        """Delay and lose packets in both directions; return why that cannot be, empty when it is done."""
        words = ["root", "netem", "delay", f"{delay_ms}ms", "loss", f"{loss_percent}%"]
        there = ["ip", "netns", "exec", self._space(host)]
        for where, device in (([], self._cable(host)), (there, self._end(self._names.index(host)))):
            argv = [*where, "tc", "qdisc", "add", "dev", device, *words]
            done = subprocess.run(argv, capture_output=True, text=True, check=False)
            if done.returncode:
                return f"no tc netem here: {done.stderr.strip()}"
        return ""

    def close(self) -> None:
        """Remove all of it."""
        for host in self._names:
            for words in (("link", "delete", self._cable(host)), ("netns", "delete", self._space(host))):
                with contextlib.suppress(subprocess.CalledProcessError):
                    _ip(*words)

    def _end(self, number: int) -> str:
        """Return the name of a cable's other end."""
        return f"fw{self._block}-{number}"

    def _cable(self, host: str) -> str:
        # A name has at most 15 characters.
        return f"fv{self._block}-{self._names.index(host)}"

    def _space(self, host: str) -> str:
        return f"farm-{os.getpid()}-{host}"


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


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


@contextlib.contextmanager
def networks() -> Iterator[Networks]:
    """Yield networks that are removed in the end."""
    with contextlib.closing(Networks()) as made:
        yield made

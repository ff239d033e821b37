"""The pool's end of one builder process: asking it, limiting it, and ending it with all that it left."""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import sys
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from farm.bundles.leftovers import builder_folder_size, remove_builder
from farm.compile.protocol import BEGAN, BuildReply, BuildRequest
from farm.system import memory

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from farm.system.processes import Supervisor

_MEGABYTE = 2**20
# A module fills some GB a second: what it gets beyond the limit is a tenth of that.
_LOOK_EVERY_S = 0.1
# What compilers may leave in the folder of one builder before it gets no other job.
_MOST_LEFT_BYTES = 2**30


class BuilderOutcome(NamedTuple):
    """How one request ended."""

    reply: BuildReply | None = None
    """None when the process ended, or was ended, without one; all else says how."""
    code: int = 0
    """Of the process; -n for signal n."""
    began: bool = False
    """It had begun to compile."""
    overdue: bool = False
    """It took too long, and was ended."""
    greedy: bool = False
    """It took too much memory, and was ended."""


class BuilderProcess:
    """One builder, asked by one thread; any thread may end it."""

    def __init__(
        self, number: int, cache_root: Path, env: Mapping[str, str], supervisor: Supervisor, log: Path
    ) -> None:
        """Start it. Raises InfraError when it cannot be started."""
        self.log = log
        self.is_fresh = True
        """It has not answered yet."""
        # Both ends have folders of their own to start from.
        cache_root = cache_root.absolute()
        self._cache_root, self._name = cache_root, f"{os.getpid()}-{number}-{secrets.token_hex(4)}"
        self._child = supervisor.spawn(
            [sys.executable, "-m", "farm.compile.builder", str(cache_root), self._name],
            name=f"builder-{number}",
            env=env,
            stdin_pipe=True,
            stdout_pipe=True,
            stderr=log,
        )

    @property
    def is_alive(self) -> bool:
        """Whether it runs."""
        return self._child.process.poll() is None

    def has_grown(self, recycle_mb: int) -> bool:
        """Tell whether it has more memory than that, or too much in its folder, to get another job."""
        if memory.resident_bytes(self._child.pid) > recycle_mb * _MEGABYTE:
            return True
        return builder_folder_size(self._cache_root, self._name) > _MOST_LEFT_BYTES

    def ask(self, request: BuildRequest, timeout_s: float, most_mb: int) -> BuilderOutcome:
        """Return how `request` ended. Raises OSError and ValueError where it is not an answer that comes."""
        process = self._child.process
        if process.stdin is None or process.stdout is None:
            raise OSError("the builder has no pipes")
        # Where it has just died, the answer says how.
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(msgspec.json.encode(request) + b"\n")
            process.stdin.flush()
        received, code, greedy = b"", None, False
        with self._child.limited(timeout_s) as overdue:
            while code is None and not received.removeprefix(BEGAN).endswith(b"\n"):
                if select.select([process.stdout], [], [], _LOOK_EVERY_S)[0]:
                    data = os.read(process.stdout.fileno(), 2**16)
                    received += data
                    # It may have closed its output and hang all the same.
                    code = None if data else process.wait()
                elif greedy := greedy or self._is_greedy(most_mb):
                    # At once: every moment of grace is another gigabyte.
                    self._child.terminate(timeout_s=0.0)
        if code is not None:
            return BuilderOutcome(None, code, received.startswith(BEGAN), overdue.is_set(), greedy)
        self.is_fresh = False
        reply = msgspec.json.decode(received.removeprefix(BEGAN), type=BuildReply)
        if reply.key != request.key:
            raise ValueError(f"it answered what it was asked before ({reply.key})")
        return BuilderOutcome(reply)

    def interrupt(self) -> None:
        """End it and all that it started, whatever they are doing."""
        self._child.terminate(timeout_s=1.0)

    def end(self) -> None:
        """End it in the same way, and remove what it left."""
        self.interrupt()
        remove_builder(self._cache_root, self._name)

    def _is_greedy(self, most_mb: int) -> bool:
        most = most_mb * _MEGABYTE
        return memory.resident_bytes(self._child.pid) > most and memory.own_bytes(self._child.pid) > most

"""A pool of builder processes that fills the bundle cache in the order it is given."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections import deque
from typing import TYPE_CHECKING

import msgspec

from farm.build.protocol import CRASHES, Reply, Request

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from farm.processes import Child, Supervisor

_TRIES = 2


class BuilderPool:
    """`width` builder processes, each fed by a thread of this one.

    `on_start(key)` and `on_done(reply)` are called from those threads.
    """

    def __init__(
        self,
        requests: Iterable[Request],
        *,
        width: int,
        cache_root: Path,
        env: Mapping[str, str],
        supervisor: Supervisor,
        log_folder: Path,
        timeout_s: float,
        on_start: Callable[[str], None],
        on_done: Callable[[Reply], None],
    ) -> None:
        self._queue = deque(requests)
        self._cache_root, self._supervisor, self._log_folder = cache_root, supervisor, log_folder
        self._timeout_s = timeout_s
        self._env = {**env, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        self._on_start, self._on_done = on_start, on_done
        self._children: dict[int, Child] = {}
        self._stopping = threading.Event()
        width = min(width, len(self._queue))
        self._threads = [threading.Thread(target=self._feed, args=(n,), name=f"builder-{n}") for n in range(width)]

    def start(self) -> None:
        """Start the processes. Returns at once."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End the processes, whatever they are doing; what is unpublished is lost, what is published is whole."""
        self._stopping.set()
        self._queue.clear()
        for thread in self._threads:
            # A thread may just be starting a process that was not there to be ended a moment ago.
            while thread.is_alive():
                for child in list(self._children.values()):
                    child.terminate(timeout_s=1.0)
                thread.join(timeout=0.1)

    def join(self) -> None:
        """Wait until everything is built."""
        for thread in self._threads:
            thread.join()

    def _feed(self, number: int) -> None:
        while not self._stopping.is_set():
            try:
                request = self._queue.popleft()
            except IndexError:
                break
            self._on_start(request.key)
            reply = self._build(number, request)
            if not self._stopping.is_set():
                self._on_done(reply)
        child = self._children.pop(number, None)
        if child is not None:
            child.terminate(timeout_s=1.0)

    def _build(self, number: int, request: Request) -> Reply:
        reply = Reply(request.key, ok=False, seconds=0.0, reason="not tried", infra=True)
        for _ in range(_TRIES):
            if self._stopping.is_set():
                break
            try:
                reply = self._ask(number, request)
            except Exception as error:  # noqa: BLE001 - whatever it is, somebody waits for a reply
                reply = Reply(request.key, ok=False, seconds=0.0, reason=f"no builder: {error}", infra=True)
            if reply.ok or not reply.infra:
                break
        return reply

    def _ask(self, number: int, request: Request) -> Reply:
        child = self._children.get(number)
        if child is None or child.process.poll() is not None:
            child = self._children[number] = self._supervisor.spawn(
                [sys.executable, "-m", "farm.build.builder", str(self._cache_root)],
                name=f"builder-{number}",
                env={**os.environ, **self._env},
                stdin_pipe=True,
                stdout_pipe=True,
                stderr=self._log_of(number),
            )
        stdin, stdout = child.process.stdin, child.process.stdout
        if stdin is None or stdout is None:
            raise OSError("the builder has no pipes")
        try:
            stdin.write(msgspec.json.encode(request) + b"\n")
            stdin.flush()
        except BrokenPipeError:
            pass  # it has just died: the empty answer below says how
        with child.limited(self._timeout_s) as overdue:
            line = stdout.readline()
        if line.endswith(b"\n"):
            return msgspec.json.decode(line, type=Reply)
        code = child.process.wait()
        if overdue.is_set():
            reason = f"the compiler did not finish in {self._timeout_s:g} s and was ended"
            return Reply(request.key, ok=False, seconds=self._timeout_s, reason=reason)
        if -code in CRASHES:
            name = signal.Signals(-code).name
            return Reply(request.key, ok=False, seconds=0.0, reason=f"the compiler crashed ({name})")
        ended = f"signal {-code}" if code < 0 else f"exit code {code}"
        reason = f"the builder process ended with {ended}: see {self._log_of(number)}"
        return Reply(request.key, ok=False, seconds=0.0, reason=reason, infra=True)

    def _log_of(self, number: int) -> Path:
        return self._log_folder / f"builder-{number}.log"

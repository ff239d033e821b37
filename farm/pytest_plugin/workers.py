"""The worker processes of a run: which has which device, and what becomes of one that dies, hangs or does not start."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from queue import Empty
from typing import TYPE_CHECKING, Any

import pytest
from xdist.dsession import DSession
from xdist.workermanage import NodeManager

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


MOST_DEATHS = 5
"""After so many deaths of its workers in a row, with no job done in between, a device is used no more."""

START_SECONDS = 120.0
"""A worker that has not listed its items by then is ended; dozens at once on two cores take a third of it."""

STOPPED_SECONDS = 60.0
"""A worker that is stopped (SIGSTOP, a debugger) for so long is ended."""

_LOOK_SECONDS = 0.5
# Longer pauses between two looks are this process's own.
_TICK_SECONDS = 2.0
_BOOTSTRAP = b"exec(eval(sys.stdin.readline()))"


class Workers:
    """Which worker has which device, by their numbers in the plan. Belongs to pytest's thread, `watch` to another."""

    def __init__(
        self,
        serials: Sequence[str],
        *,
        is_wanted: Callable[[int], bool],
        retire: Callable[[int, str], None],
        note: Callable[[str], None],
        sign_of: Callable[[int], int],
        most_silence_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`is_wanted` tells whether there may be work for a device; `retire` takes one out of the run, with the reason.

        `sign_of` returns a number that changes while the worker of a device goes on; where it stays the same for
        `most_silence_s`, the worker is ended.
        """
        self._serials, self._is_wanted, self._retire, self._note = serials, is_wanted, retire, note
        self._sign_of, self._most_silence_s = sign_of, most_silence_s
        self._free = list(range(len(serials)))
        self._device_of: dict[Any, int] = {}
        self._deaths = [0] * len(serials)
        # A clock that goes only while `watch` is called: what was stopped together with this process is not late.
        self._clock = clock
        self._now_s, self._looked_s = 0.0, clock()
        self._began_s: dict[Any, float] = {}
        """When a worker was started that has not listed its items yet."""
        self._stopped_s: dict[Any, float] = {}
        """Since when a worker is stopped."""
        self._signs: dict[Any, tuple[int, float]] = {}
        """The newest sign of a worker, and since when it is that."""
        self._starting_s: float | None = None
        self._last_words: dict[Any, str] = {}
        """The traceback of a worker that broke down."""

    def device_of(self, node: Any) -> int:
        """Return the device of a worker, also of one that has gone."""
        return self._device_of[node]

    def lacks_one(self) -> bool:
        """Return whether a device that is wanted has no worker."""
        return self._next() is not None

    def assign(self, node: Any) -> int:
        """Give a worker that starts a device that no other has, and return it."""
        device = self._next()
        if device is None:
            raise RuntimeError("a worker was started that no device is left for")
        self._free.remove(device)
        self._device_of[node] = device
        self._began_s[node] = self._now_s
        return device

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """Note the death of the worker that the block starts, when it raises."""
        before = set(self._device_of)
        self._starting_s = self._now_s
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever broke: it has not started
            device = next((self._device_of[node] for node in self._device_of if node not in before), self._next())
            if device is not None:
                self._died(device, f"it did not start: {type(error).__name__}: {error}".rstrip(": "))
        finally:
            self._starting_s = None

    def is_ready(self, node: Any) -> None:
        """Note that a worker has listed its items."""
        self._began_s.pop(node, None)

    def broke_down(self, node: Any, traceback: str) -> None:
        """Remember what a worker said that is about to end."""
        self._last_words[node] = traceback

    def last_words_of(self, node: Any) -> str:
        """Return the traceback of a worker that broke down; empty of one that was killed."""
        return self._last_words.get(node, "")

    def died(self, node: Any, reason: str) -> None:
        """Take back the device of a worker that is no more."""
        self._forget(node)
        self._died(self._device_of[node], reason)

    def ended(self, node: Any) -> int:
        """Take back the device of a worker that has nothing left to do, and return it."""
        self._forget(node)
        return self._device_of[node]

    def want_again(self, device: int) -> None:
        """Let a device whose worker has ended get another one."""
        if device not in self._free:
            self._free.append(device)

    def job_done(self, node: Any) -> None:
        """Note that a worker is of use."""
        self._deaths[self._device_of[node]] = 0

    def watch(self, nodes: Sequence[Any]) -> None:
        """End workers that do not start, do not go on or are stopped: they are replaced as others that die."""
        moment = self._clock()
        now = self._now_s = self._now_s + min(moment - self._looked_s, _TICK_SECONDS)
        self._looked_s = moment
        if self._starting_s is not None and now > self._starting_s + START_SECONDS:
            _send(signal.SIGKILL, *_unknown_children({_pid(node) for node in nodes}))
        for node in nodes:
            if not (pid := _pid(node)):
                continue
            if not _is_stopped(pid):
                self._stopped_s[node] = now
            sign = self._sign_of(self._device_of[node])
            if self._signs.get(node, (None, now))[0] != sign:
                self._signs[node] = sign, now
            if (
                now > self._stopped_s.setdefault(node, now) + STOPPED_SECONDS
                or now > self._began_s.get(node, now) + START_SECONDS
                or now > self._signs[node][1] + self._most_silence_s
            ):
                _send(signal.SIGKILL, pid)

    def interrupt(self) -> None:
        """Make all workers end at once: they ignore Ctrl-C, which lets what runs finish."""
        running = (node for node, device in self._device_of.items() if device not in self._free)
        _send(signal.SIGTERM, *(pid for node in running if (pid := _pid(node))))

    def _next(self) -> int | None:
        return next((device for device in self._free if self._is_wanted(device)), None)

    def _forget(self, node: Any) -> None:
        self._began_s.pop(node, None)
        self._stopped_s.pop(node, None)
        self._signs.pop(node, None)

    def _died(self, device: int, reason: str) -> None:
        if device not in self._free:
            self._free.append(device)
        self._deaths[device] += 1
        serial = self._serials[device]
        if self._deaths[device] >= MOST_DEATHS:
            self._retire(device, f"its worker process died {MOST_DEATHS} times in a row, the last time: {reason}")
        elif self._is_wanted(device):
            self._note(f"the worker of {serial} died ({reason}); another takes its place")


class WorkerSession(DSession):  # type: ignore[misc]
    """xdist's session, in which no worker that dies, also while it starts, ends the run of the others."""

    def __init__(self, config: pytest.Config, workers: Workers) -> None:
        super().__init__(config)
        self._workers = workers
        self._broken: dict[Any, str] = {}
        self.sched: Any

    @pytest.hookimpl(trylast=True)
    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Start a worker for every device."""
        self.nodemanager = NodeManager(self.config)
        self._session = session
        self.config.hook.pytest_xdist_setupnodes(config=self.config, specs=self.nodemanager.specs)
        self._start_missing()

    @property
    def nodes(self) -> list[Any]:
        """Workers that have not ended, also those that are starting."""
        return list(self._active_nodes)

    def loop_once(self) -> None:
        """Take one event of a worker, if there is any in a while, and look whether anything is left to do."""
        try:
            name, arguments = self.queue.get(timeout=_LOOK_SECONDS)
        except Empty:
            # What is decided in another thread has no event.
            pass
        else:
            getattr(self, f"worker_{name}")(**arguments)
        self.look()

    def look(self) -> None:
        """Let workers end when nothing is left to do."""
        if self.sched.tests_finished or not self._active_nodes:
            self.triggershutdown()

    def worker_collectionfinish(self, node: Any, ids: Sequence[str]) -> None:
        """Note that a worker has started."""
        self._workers.is_ready(node)
        super().worker_collectionfinish(node, ids)

    def worker_internal_error(self, node: Any, formatted_error: str) -> None:
        """Remember why a worker that is about to end broke down."""
        self._workers.broke_down(node, formatted_error)
        lines = [line for line in formatted_error.splitlines() if line.strip()]
        self._broken[node] = lines[-1] if lines else "internal error"

    def worker_workerfinished(self, node: Any) -> None:
        """Let a worker go; one that a signal has ended, or that broke down, is replaced."""
        interrupted = node.workeroutput["exitstatus"] == pytest.ExitCode.INTERRUPTED
        if node in self._broken or (interrupted and not self.shouldstop):
            self.worker_errordown(node, self._broken.get(node, "a signal ended it"))
        else:
            super().worker_workerfinished(node)

    def worker_errordown(self, node: Any, error: object | None) -> None:
        """Hand on what a worker that died had in hand, and start another in its place where it is of use."""
        if node not in self._active_nodes:
            return
        self._active_nodes.remove(node)
        self.config.hook.pytest_testnodedown(node=node, error=self._broken.pop(node, error))
        item = self.sched.remove_node(node) if node in self.sched.nodes else None
        if item:
            self.handle_crashitem(item, node)
        if not self.shouldstop:
            # What it had begun may have to be done again.
            self.shuttingdown = False
            self._start_missing()

    def _start_missing(self) -> None:
        while self._workers.lacks_one():
            [spec, *_] = self.nodemanager.specs
            spec.id = None
            self.nodemanager.group.allocate_id(spec)
            with self._workers.starting():
                self._active_nodes.add(self.nodemanager.setup_node(spec, self.queue.put))


def _pid(node: Any) -> int:
    # Asked when it started, and kept by execnet.
    return int(getattr(node.gateway._rinfo(), "pid", 0)) if hasattr(node, "channel") else 0  # noqa: SLF001


def _is_stopped(pid: int) -> bool:
    return _state(pid) in {b"T", b"t"}


def _has_ended(pid: int) -> bool:
    return _state(pid) in {b"", b"Z", b"X"}


def _state(pid: int) -> bytes:
    """Return the kernel's letter for what a process does; nothing for none."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
    except (OSError, IndexError):
        return b""


def _unknown_children(known: set[int]) -> list[int]:
    """Return processes that are about to become workers."""
    found: list[int] = []
    for child in _children(os.getpid()) - known:
        with contextlib.suppress(OSError):
            if _BOOTSTRAP in Path(f"/proc/{child}/cmdline").read_bytes():
                found.append(child)
    return found


def _children(pid: int) -> set[int]:
    found: set[int] = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            found |= {int(word) for word in (task / "children").read_text().split()}
    return found


def _send(number: signal.Signals, *pids: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

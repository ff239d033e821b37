"""Starts the processes that live as long as farm does, and leaves none behind, not even after a kill -9.

psutil finds children by their parent, which is gone after a fork into the background; marks and sessions stay. Reaper
and pipe (farm.base.reaper) share that: docs/developers/architecture.md, "Processes".
"""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from farm.base import reaper
from farm.base.errors import InfraError, MissingToolError
from farm.base.files import end_of_log
from farm.base.reaper import Lifeline

_LINE_BYTES = 16 * 1024
_LAST_MOMENT_S = 1.0


def ending(code: int) -> str:
    """Return how a process ended, in words; `code` is Popen's, -n for signal n."""
    return f"signal {-code}" if code < 0 else f"exit code {code}"


class Answer(NamedTuple):
    """Exit code and output of a program that has ended."""

    code: int
    output: str
    errors: str

    @property
    def reason(self) -> str:
        """Reason of a failure: the last line of the errors, else the exit code."""
        return (self.errors.strip().splitlines() or [f"exit code {self.code}"])[-1]


def ask_program(argv: Sequence[str | Path], timeout_s: float | None, env: Mapping[str, str] | None = None) -> Answer:
    """Run a short program without input, in the environment `env`. Raises subprocess.TimeoutExpired, OSError."""
    done = subprocess.run(
        argv,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        timeout=timeout_s,
        check=False,
        env=env,
    )
    return Answer(done.returncode, done.stdout, done.stderr)


def ready_of(descriptors: Iterable[int], timeout_s: float) -> set[int]:
    """Return the descriptors that can be read or have ended, as soon as there is one; empty after `timeout_s`.

    Unlike `select.select`, it takes descriptors beyond 1023, which a long process with many devices reaches.
    """
    poller = select.poll()
    for descriptor in descriptors:
        poller.register(descriptor, select.POLLIN)
    return {descriptor for descriptor, _ in poller.poll(max(0.0, timeout_s) * 1000)}


def hide_environment() -> None:
    """Keep other processes of this user from reading environment and memory of this process, as in /proc/PID/environ.

    Programs that it starts are not hidden. On Linux alone. Raises OSError.
    """
    import ctypes

    if sys.platform != "linux":
        return
    libc, set_dumpable = ctypes.CDLL(None, use_errno=True), 4
    if libc.prctl(set_dumpable, 0, 0, 0, 0):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


class Child:
    """A process that a Supervisor started, and everything that it started itself."""

    def __init__(
        self, name: str, process: subprocess.Popen[bytes], group: reaper.Group, lifeline: Lifeline, log: Path | None
    ) -> None:
        self.name, self.process, self._group, self._lifeline, self._log = name, process, group, lifeline, log
        self._ending = threading.Lock()
        self._ended = False

    @property
    def pid(self) -> int:
        """Process id, and the number of its session."""
        return self.process.pid

    @contextlib.contextmanager
    def limited(self, timeout_s: float) -> Iterator[threading.Event]:
        """End it when the body takes longer than `timeout_s`; the event that is yielded is set then."""
        overdue = threading.Event()

        def end() -> None:
            overdue.set()
            self.terminate(timeout_s=1.0)

        timer = threading.Timer(timeout_s, end)
        # Ctrl-C may come while it starts: nothing may wait for it then.
        timer.daemon = True
        try:
            timer.start()
            yield overdue
        finally:
            timer.cancel()

    def first_line(self, timeout_s: float) -> bytes:
        """Return the first line of its standard output, a pipe, which a server writes when it is ready.

        The line has no end if it exceeds 16 KiB, if it is late, or if the process ended before.
        """
        pipe = self.process.stdout
        deadline = time.monotonic() + timeout_s
        line = b""
        while pipe is not None and not line.endswith(b"\n") and len(line) < _LINE_BYTES:
            readable = ready_of([pipe.fileno()], deadline - time.monotonic())
            data = os.read(pipe.fileno(), _LINE_BYTES) if readable else b""
            if not data:
                break
            line += data
        return line

    def why_silent(self, timeout_s: float) -> str:
        """Return why `first_line(timeout_s)` brought no whole line: how it ended, or that it did not begin in time."""
        # The pipe of a process closes a moment before its end.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_LAST_MOMENT_S)
        code = self.process.poll()
        problem = f"it was not ready in {timeout_s:g} s" if code is None else f"it ended with {ending(code)}"
        last = self.log_tail().strip().rpartition("\n")[2]
        return f"{problem}: {last}" if last else problem

    def log_tail(self) -> str:
        """Return the last few KiB of its standard error, empty unless that went into a file."""
        return "" if self._log is None else end_of_log(self._log)

    def terminate(self, timeout_s: float = reaper.GRACE_S) -> int:
        """End it and its whole group, with SIGKILL after `timeout_s`. Return its exit code, -n for signal n.

        May be called again, and from several threads.
        """
        _end([self], timeout_s)
        return self.process.wait()

    @contextlib.contextmanager
    def ending(self) -> Iterator[list[reaper.Group]]:
        """Yield the groups that the body ends: one, none after an earlier end. Other threads wait meanwhile."""
        with self._ending:
            if self._ended:
                yield []
                return
            # Once the leader is waited for, its number may belong to a stranger: then only the mark counts.
            yield [self._group if self.process.poll() is None else reaper.Group(self._group.mark)]
            _link.send("drop", self._group)
            self._lifeline.cut()
            self._ended = True


def _end(children: Iterable[Child], timeout_s: float) -> None:
    """End children and their groups, with SIGKILL after `timeout_s`, by looks at the processes for all of them."""
    with contextlib.ExitStack() as ending:
        groups = [group for child in children for group in ending.enter_context(child.ending())]
        reaper.end(groups, timeout_s)


class Supervisor:
    """The processes that one part of farm started; `close`, also by leaving `with`, ends them all.

    Several threads may use it. In a forked copy of the process it does nothing.
    """

    def __init__(self) -> None:
        self._children: list[Child] = []
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self._closed = False

    def spawn(
        self,
        argv: Sequence[str | Path],
        *,
        name: str,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        stdin: int | None = None,
        stdin_pipe: bool = False,
        stdout_pipe: bool = False,
        stderr: Path | None = None,
        stderr_pipe: bool = False,
        pass_fds: Sequence[int] = (),
        foreground: bool = False,
        popen: Callable[..., Any] | None = None,
    ) -> Child:
        """Start a process in a session of its own.

        `env` is its whole environment, by default this process's own. Standard streams are closed unless they are
        pipes, `child.process.stdin`, `.stdout` and `.stderr`, or given: `stdin` is a descriptor, `stderr` a new file.
        `popen` starts the process in place of `subprocess.Popen`, as a fork of another. With `foreground` the process
        stays in this process group with these standard streams, for a program on the terminal; of its children only the
        ones with its environment end with it. Raises MissingToolError for a missing program, InfraError for a failing
        start.
        """
        words = [str(word) for word in argv]
        group = reaper.Group(secrets.token_hex(12))
        with self._lock:
            if self._closed:
                raise InfraError(f"{name} cannot be started: farm is ending")
            _link.send("watch", group)
            nowhere = None if foreground else subprocess.DEVNULL
            try:
                with contextlib.ExitStack() as undo, contextlib.ExitStack() as stack:
                    lifeline = Lifeline()
                    undo.callback(lifeline.cut)
                    errors = subprocess.PIPE if stderr_pipe else nowhere
                    if stderr is not None:
                        stderr.parent.mkdir(parents=True, exist_ok=True)
                        errors = stack.enter_context(stderr.open("wb")).fileno()
                    process = (popen or subprocess.Popen)(
                        words,
                        env={**(os.environ if env is None else env), reaper.MARK: group.mark},
                        cwd=cwd,
                        stdin=subprocess.PIPE if stdin_pipe else nowhere if stdin is None else stdin,
                        stdout=subprocess.PIPE if stdout_pipe else nowhere,
                        stderr=errors,
                        pass_fds=(*pass_fds, lifeline.child_end),
                        start_new_session=not foreground,
                    )
                    lifeline.tie(process.pid, group=not foreground)
                    undo.pop_all()
            except OSError as error:
                _link.send("drop", group)
                if isinstance(error, FileNotFoundError) and error.filename == words[0]:
                    raise MissingToolError(f"{name} cannot be started: there is no {words[0]}") from None
                raise InfraError(f"{name} cannot be started: {error}") from error
            stat = reaper.read_stat(process.pid)
            group = group._replace(session=process.pid, start=stat.start if stat else 0)
            _link.send("lead", group)
            child = Child(name, process, group, lifeline, stderr)
            self._children.append(child)
            return child

    def find(self, name: str) -> Child:
        """Return the youngest child of that name. Raises KeyError."""
        with self._lock:
            for child in reversed(self._children):
                if child.name == name:
                    return child
        raise KeyError(name)

    def close(self) -> None:
        """End every process, all at the same time. May be called again."""
        if os.getpid() != self._owner:
            return
        with self._lock:
            self._closed = True
            children, self._children = self._children, []
        _end(children, reaper.GRACE_S)
        for child in children:
            child.process.wait()

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _ReaperLink:
    """Link to the reaper of this process, which is started on first use, and again after its end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0
        self._live: dict[str, reaper.Group] = {}

    def send(self, event: str, group: reaper.Group) -> None:
        with self._lock:
            if self._owner != os.getpid():
                # A forked copy has no children of ours, and must not speak for its parent.
                self._process, self._owner, self._live = None, os.getpid(), {}
            if event == "drop":
                self._live.pop(group.mark, None)
            else:
                self._live[group.mark] = group
            try:
                self._write(event, group)
            except BrokenPipeError:
                if self._process is not None:
                    self._process.wait()
                self._process = None
                for live in self._live.values():
                    self._write("watch", live)
                    if live.session:
                        self._write("lead", live)

    def _write(self, event: str, group: reaper.Group) -> None:
        if self._process is None:
            self._process = self._start()
        pipe = self._process.stdin
        if pipe is None:
            raise InfraError("the reaper has no standard input")
        detail = f" {group.session} {group.start}" if event == "lead" else ""
        pipe.write(f"{event} {group.mark}{detail}\n".encode())

    def _start(self) -> subprocess.Popen[bytes]:
        stat = reaper.read_stat(os.getpid())
        argv = [sys.executable, "-I", "-S", reaper.__file__, str(os.getpid()), str(stat.start if stat else 0)]
        # No environment: a mark in it would make an outer reaper end this one before its work is done.
        return subprocess.Popen(
            argv,
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env={},
            start_new_session=True,
        )

    def close(self) -> None:
        """Let the reaper end the remaining processes, and wait for it."""
        with self._lock:
            if self._process is not None and self._owner == os.getpid():
                self._process.communicate()
                self._process = None


_link = _ReaperLink()
atexit.register(_link.close)


def close() -> None:
    """End every living child of this process; for a fork, which runs no exit handlers."""
    _link.close()

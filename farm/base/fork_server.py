"""Server that forks processes from one process with all imports: a fork costs milliseconds, an import seconds.

`ForkServer` is the client's end. The server is a program that calls `serve_forks`: it has one thread, and exits when
the client's end of its socket is closed. A fork is in a session of its own. Forks end with their server, by the reaper
(farm.base.reaper), and with the client, by a pipe (farm.base.reaper).
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NoReturn

import msgspec

from farm.base.reaper import Lifeline

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from farm.base.processes import Child, Supervisor

_MESSAGE_BYTES = 2**18
_MOST_STREAMS = 8
# Most seconds until an answer: a fork costs milliseconds, and the imports before the first fork seconds.
_ANSWER_S = 60.0
_EXITED = (BrokenPipeError, ConnectionResetError, TimeoutError)


class ForkRequest(msgspec.Struct, frozen=True):
    """Request for a fork, or for the exit code of a fork."""

    words: tuple[bytes, ...] = ()
    """Arguments of the fork."""
    env: dict[bytes, bytes] = {}
    """Whole environment of the fork; empty for the server's."""
    waits_for: int = 0
    """Process id of the fork that has exited; 0 for a new fork."""


class ForkServer:
    """Makes forks of a program. Several threads may use it."""

    def __init__(
        self, supervisor: Supervisor, argv: Sequence[str], *, name: str, env: Mapping[str, str], log: Path | None = None
    ) -> None:
        """Start the server, the program `argv` with the environment `env`. Raises InfraError."""
        self._supervisor, self._argv, self._name, self._env, self._log = supervisor, argv, name, env, log
        self._lock = threading.Lock()
        self._is_ready = False
        self._control, self._child = self._start()

    @property
    def pid(self) -> int:
        """Process id of the server."""
        return self._child.pid

    @property
    def is_alive(self) -> bool:
        """True for a running server."""
        return self._child.process.poll() is None

    def wait_ready(self, timeout_s: float) -> bool:
        """Return whether the server has imported its modules within `timeout_s`. Raises OSError if it has exited."""
        with self._lock:
            if not self._is_ready:
                self._control.settimeout(max(0.0, timeout_s))
                try:
                    self._is_ready = bool(self._control.recv(_MESSAGE_BYTES))
                except (BlockingIOError, TimeoutError):
                    return False
                if not self._is_ready:
                    raise self._has_exited()
            return True

    def fork(self, log: Path) -> ForkProcess:
        """Return a new fork with a lifeline, whose standard error goes into `log`, made anew.

        Raises OSError, InfraError.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as stderr, contextlib.ExitStack() as failed:
            lifeline = Lifeline()
            failed.callback(lifeline.cut)
            process = self._fork(ForkRequest(), [stderr.fileno(), lifeline.child_end], again=True)
            lifeline.tie(process.pid, group=True)
            failed.pop_all()
        process.lifeline = lifeline
        return process

    def popen(
        self, words: Sequence[str], *, env: Mapping[str, str], stderr: int, pass_fds: Sequence[int], **_: Any
    ) -> ForkProcess:
        """Return a new fork, in place of the `subprocess.Popen` of `Supervisor.spawn`.

        Raises OSError, also if the server has exited: `Supervisor.spawn` cannot start another meanwhile.
        """
        variables = {os.fsencode(name): os.fsencode(value) for name, value in env.items()}
        return self._fork(ForkRequest(tuple(map(os.fsencode, words)), variables), [stderr, *pass_fds])

    def exit_code(self, pid: int) -> int | None:
        """Return the exit code of a fork that has exited, -n for signal n.

        None if the server has changed, or a debugger holds the fork.
        """
        with contextlib.suppress(OSError):
            return self._ask(ForkRequest(waits_for=pid), [])
        return None

    def close(self) -> None:
        """End the server and its forks."""
        self._child.terminate(timeout_s=0.0)
        self._control.close()

    def _fork(self, request: ForkRequest, streams: list[int], *, again: bool = False) -> ForkProcess:
        """Return a new fork with pipes; with `again` of another server if this one was killed.

        Raises OSError, InfraError.
        """
        (its_stdin, stdin), (stdout, its_stdout) = _pipe(), _pipe()
        with its_stdin, its_stdout, contextlib.ExitStack() as failed:
            failed.enter_context(stdin)
            failed.enter_context(stdout)
            pid = self._ask(request, [its_stdin.fileno(), its_stdout.fileno(), *streams], again=again)
            if pid is None:
                raise OSError(errno.EAGAIN, "no other process can be made")
            failed.pop_all()
        return ForkProcess(self, pid, stdin, stdout)

    def _ask(self, request: ForkRequest, streams: list[int], *, again: bool = False) -> int | None:
        """Return the answer: process id or exit code, None without one. Raises OSError, InfraError."""
        with self._lock:
            try:
                return self._send(request, streams)
            except OSError as error:
                # Other errors, as of a request beyond the size of a message, are no fault of the server.
                if not isinstance(error, _EXITED) and error.errno != errno.EBADF:
                    raise
                # The server was killed; or it hangs, and is killed. The reaper ends its forks.
                self._child.terminate(timeout_s=0.0)
                if again:
                    self._control.close()
                    self._is_ready = False
                    self._control, self._child = self._start()
                    with contextlib.suppress(OSError):
                        return self._send(request, streams)
        raise self._has_exited()

    def _send(self, request: ForkRequest, streams: list[int]) -> int | None:
        """Return the answer, which comes by a socket of its own. Raises OSError if the server has exited or hangs."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours:
            with theirs:
                self._control.settimeout(_ANSWER_S)
                socket.send_fds(self._control, [msgspec.msgpack.encode(request)], [theirs.fileno(), *streams])
            ours.settimeout(_ANSWER_S)
            if data := ours.recv(_MESSAGE_BYTES):
                answer: int | None = msgspec.msgpack.decode(data, type=int | None)
                return answer
        raise self._has_exited()

    def _has_exited(self) -> OSError:
        return OSError(errno.EPIPE, f"{self._name} has exited")

    def _start(self) -> tuple[socket.socket, Child]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                child = self._supervisor.spawn(
                    self._argv, name=self._name, env=self._env, stdin=theirs.fileno(), stderr=self._log
                )
            except BaseException:
                ours.close()
                raise
        return ours, child


def _pipe() -> tuple[IO[bytes], IO[bytes]]:
    reading, writing = os.pipe()
    return os.fdopen(reading, "rb"), os.fdopen(writing, "wb")


class ForkProcess:
    """Fork of a server with pipes, and the methods of `subprocess.Popen` that a Child needs.

    Several threads may use it.
    """

    stderr = None
    lifeline: Lifeline
    """Lifeline of a fork that `ForkServer.fork` made."""

    def __init__(self, server: ForkServer, pid: int, stdin: IO[bytes], stdout: IO[bytes]) -> None:
        self.pid, self.stdin, self.stdout = pid, stdin, stdout
        self.returncode: int | None = None
        self._server, self._lock = server, threading.Lock()
        try:
            self._pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            # Server and fork have exited.
            self._pidfd = -1

    def poll(self) -> int | None:
        """Return the exit code, -n for signal n; None for a running process."""
        return self._look(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code as soon as there is one. Raises subprocess.TimeoutExpired."""
        code = self._look(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return code

    def _look(self, timeout_s: float | None) -> int | None:
        if self.returncode is None and self._has_exited(timeout_s):
            with self._lock:
                if self.returncode is None:
                    code = self._server.exit_code(self.pid)
                    # The reaper kills a fork without a server, and farm a fork that a debugger holds.
                    self.returncode = -signal.SIGKILL if code is None else code
                    if self._pidfd >= 0:
                        os.close(self._pidfd)
        return self.returncode

    def _has_exited(self, timeout_s: float | None) -> bool:
        # A copy, as another thread closes the descriptor of an exited process.
        with self._lock:
            if self.returncode is not None or self._pidfd < 0:
                return True
            copy = os.dup(self._pidfd)
        try:
            poller = select.poll()
            poller.register(copy, select.POLLIN)
            return bool(poller.poll(None if timeout_s is None else timeout_s * 1000))
        finally:
            os.close(copy)


def serve_forks(
    prepare: Callable[[], None], run: Callable[[Sequence[str]], int], *, may_fork: Callable[[], bool] = lambda: True
) -> None:
    """Serve the socket at standard input: call `prepare` once, then `run(words)` in each fork, which exits with it.

    A request while `may_fork` returns False is refused. Returns when the other end is closed.
    """
    control = socket.socket(fileno=os.dup(0))
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.close(nowhere)
    # The objects of imports stay: collections among them would take a tenth of the start.
    gc.disable()
    prepare()
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    gc.freeze()
    gc.enable()

    # The client may have exited, also below.
    with contextlib.suppress(OSError):
        control.send(b"ready")
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, _MESSAGE_BYTES, _MOST_STREAMS)
        if not data:
            return
        request, streams = msgspec.msgpack.decode(data, type=ForkRequest), descriptors[1:]
        reply, value = socket.socket(fileno=descriptors[0]), None
        if request.waits_for:
            with contextlib.suppress(ChildProcessError):
                # A debugger may keep a fork that has exited: the others need this server.
                ended, status = os.waitpid(request.waits_for, os.WNOHANG)
                value = os.waitstatus_to_exitcode(status) if ended else None
        else:
            ready, say_ready = os.pipe()
            try:
                pid = os.fork() if may_fork() else -1
            except OSError:
                pid = -1
            if not pid:
                control.close()
                reply.close()
                os.close(ready)
                _be_fork(request, streams, say_ready, run)
            for stream in (*streams, say_ready):
                os.close(stream)
            # Until the process has a session of its own, or has exited.
            os.read(ready, 1)
            os.close(ready)
            value = None if pid < 0 else pid
        with reply, contextlib.suppress(OSError):
            reply.send(msgspec.msgpack.encode(value))


def take_name(name: str) -> None:
    """Make `name` the name of this process in `ps -o comm`."""
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(name)


def _be_fork(request: ForkRequest, streams: list[int], say_ready: int, run: Callable[[Sequence[str]], int]) -> NoReturn:
    """Run a fork, and exit; close `say_ready` once it has a session of its own. The lifeline stays open."""
    code = 1
    try:
        os.setsid()
        os.close(say_ready)
        for number, stream in enumerate(streams[:3]):
            os.dup2(stream, number)
            os.close(stream)
        if request.env:
            os.environ.clear()
            os.environb.update(request.env)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        from farm.base import processes

        code = run([os.fsdecode(word) for word in request.words])
        processes.close()
    except BaseException:  # noqa: BLE001 - nothing may return into the server's loop
        traceback.print_exc()
    for output in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            output.flush()
    os._exit(code)

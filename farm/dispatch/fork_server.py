"""Forks device processes from one process with all imports: a fork costs milliseconds, an import 0.2 s.

`ForkServer` is the dispatcher's end. The server is this module as a program: it has one thread, and exits when the
dispatcher's end of its socket is closed. A device process is in a session of its own, and is killed by the kernel when
the dispatcher has exited (farm.base.lifeline).
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import signal
import socket
import sys
import threading
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from farm.base.lifeline import Lifeline

if TYPE_CHECKING:
    from farm.base.processes import Child, Supervisor

SERVER_NAME, PROCESS_NAME = "farm-forks", "farm-device"
"""Names in `ps -o comm`."""

SECRETS = frozenset(
    {
        "FARM_STORE", "PGPASSWORD", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN",
        "FARM_TOKEN", "GITHUB_TOKEN", "GITLAB_TOKEN",
        "OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_TRACES_HEADERS",
    }
)  # fmt: skip
"""Environment variables that open the store, its files or a server: code of developers gets none of them."""

_MESSAGE_BYTES = 64
_STREAMS = 4
_NONE = "none"


class Forked(NamedTuple):
    """A device process."""

    pid: int
    stdin: int
    """Descriptor of a pipe to its standard input."""
    stdout: int
    """Descriptor of a pipe from its standard output."""
    lifeline: Lifeline


class ForkServer:
    """Makes device processes. Several threads may use it."""

    def __init__(self, supervisor: Supervisor) -> None:
        """Start the server. Raises InfraError."""
        self._supervisor, self._lock = supervisor, threading.Lock()
        self._control, self._child = self._start()

    @property
    def pid(self) -> int:
        """Process id of the server."""
        return self._child.pid

    def fork(self, log: Path) -> Forked:
        """Return a new device process whose standard error goes into `log`, made anew. Raises OSError, InfraError."""
        log.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as theirs, contextlib.ExitStack() as ours:
            stdin, to_process = os.pipe()
            from_process, stdout = os.pipe()
            for number in (stdin, stdout):
                theirs.callback(os.close, number)
            for number in (to_process, from_process):
                ours.callback(os.close, number)
            stderr = theirs.enter_context(log.open("wb")).fileno()
            lifeline = Lifeline()
            ours.callback(lifeline.cut)
            pid = self._ask("fork", [stdin, stdout, stderr, lifeline.child_end])
            if pid is None:
                raise OSError(errno.EAGAIN, "no other process can be made")
            lifeline.tie(pid, group=True)
            ours.pop_all()
        return Forked(pid, to_process, from_process, lifeline)

    def wait(self, pid: int) -> int | None:
        """Return the exit code of a device process that is ending, -n for signal n; None if the server has changed."""
        with contextlib.suppress(OSError):
            return self._ask(f"wait {pid}", [])
        return None

    def _ask(self, request: str, streams: list[int]) -> int | None:
        with self._lock:
            answer = self._send(request, streams)
            if not answer and streams:
                # The server was killed; the reaper ends its device processes.
                self._control.close()
                self._control, self._child = self._start()
                answer = self._send(request, streams)
        if not answer:
            raise OSError(errno.EPIPE, "the server of device processes has exited")
        return None if answer == _NONE else int(answer)

    def _send(self, request: str, streams: list[int]) -> str:
        """Return the answer; empty if the server has exited."""
        try:
            socket.send_fds(self._control, [request.encode()], streams)
            return self._control.recv(_MESSAGE_BYTES).decode()
        except OSError:
            return ""

    def _start(self) -> tuple[socket.socket, Child]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            argv = [sys.executable, "-P", "-m", "farm.dispatch.fork_server", str(theirs.fileno())]
            # Dozens of device processes share the processors, and no matrix here is worth threads.
            env = {name: value for name, value in os.environ.items() if name not in SECRETS}
            env["OPENBLAS_NUM_THREADS"] = "1"
            try:
                child = self._supervisor.spawn(argv, name=SERVER_NAME, env=env, pass_fds=[theirs.fileno()])
            except BaseException:
                ours.close()
                raise
        return ours, child


def _serve(control: socket.socket) -> None:
    """Answer requests until the other end of `control` is closed."""
    from farm.base.structs import prepare_decoders
    from farm.devices.adb import transport  # noqa: F401 - imported once for all forks
    from farm.dispatch import device_process  # noqa: F401

    _take_name(SERVER_NAME)
    prepare_decoders()
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    gc.freeze()
    while True:
        data, streams, _, _ = socket.recv_fds(control, _MESSAGE_BYTES, _STREAMS)
        if not data:
            return
        word, _, number_text = data.decode().partition(" ")
        if word == "wait":
            try:
                code = str(os.waitstatus_to_exitcode(os.waitpid(int(number_text), 0)[1]))
            except ChildProcessError:
                code = _NONE
            control.send(code.encode())
            continue
        ready, say_ready = os.pipe()
        try:
            pid = os.fork()
        except OSError:
            pid = -1
        if not pid:
            control.close()
            os.close(ready)
            _be_device_process(streams, say_ready)
        for stream in (*streams, say_ready):
            os.close(stream)
        # Until the process has a session of its own, or has exited.
        os.read(ready, 1)
        os.close(ready)
        control.send((_NONE if pid < 0 else str(pid)).encode())


def _take_name(name: str) -> None:
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(name)


def _be_device_process(streams: list[int], say_ready: int) -> NoReturn:
    """Run a device process, and exit; close `say_ready` once it has a session of its own."""
    code = 1
    try:
        os.setsid()
        os.close(say_ready)
        _take_name(PROCESS_NAME)
        stdin, stdout, stderr, _ = streams
        os.dup2(stderr, 2)
        # Output that anything prints by mistake is no message.
        os.dup2(stderr, 1)
        os.close(stderr)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        from farm.base import processes
        from farm.dispatch.device_process import serve

        serve(stdin, stdout)
        processes.close()
        code = 0
    except BaseException:  # noqa: BLE001 - nothing may return into the server's loop
        traceback.print_exc()
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as _control:
        _serve(_control)

"""Worker processes by fork: what a worker imports is imported once, and every worker is a copy that has it.

Importing takes half a second of processor time, a copy some milliseconds. The server is a copy of the controller
itself, made while that has one thread; where it has more, workers are started as xdist starts them.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import gc
import importlib
import os
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import execnet
import msgspec
from execnet.gateway_base import Popen2IO, get_execmodel, init_popen_io, serve

from farm.system import processes
from farm.system.lifeline import Lifeline
from farm.system.structs import prepare_decoders

if TYPE_CHECKING:
    from collections.abc import Iterator

SERVER_NAME, WORKER_NAME = "farm-forks", "farm-worker"
"""What `ps -o comm` shows of both: their command line is that of the controller."""

_OF_BOTH = ("xdist.plugin", "farm.run.plugin", "farm.store.store")
"""What the controller needs as well, and so imports before it is copied."""
_OF_WORKERS = ("farm.run.remote", "xdist.remote", "farm.devices.adb.transport")
_EXECUTION = "main_thread_only"
_END_SECONDS = 2.0
_SIZE, _PID = struct.Struct(">I"), struct.Struct(">i")
_NONE = -1
# What a worker is given: its input, its output, and a pipe that ends with it.
_STREAMS = 3


class _WorkerOrder(msgspec.Struct):
    """A worker to be made."""

    gateway: str
    environment: dict[bytes, bytes]


class ForkServer:
    """A copy of this process that makes workers of itself. It ends with this process, and workers end with it."""

    def __init__(self) -> None:
        """Make the copy. This process must have one thread: a lock that another holds would be locked for ever."""
        self._control, theirs = socket.socketpair()
        lifeline = Lifeline()
        self.pid = os.fork()
        if not self.pid:
            _run_server(theirs, lifeline.child_end)
        theirs.close()
        lifeline.tie(self.pid, group=False)
        self._lifeline = lifeline

    def fork(self, gateway: str) -> ForkedWorker:
        """Return the pipes of a new worker that serves an execnet gateway of that id. Raises OSError."""
        with contextlib.ExitStack() as theirs, contextlib.ExitStack() as ours:
            pairs = []
            for _ in range(_STREAMS):
                reader, writer = os.pipe()
                pairs.append((reader, writer))
            (stdin, to_worker), (from_worker, stdout), (life, alive) = pairs
            for number in (stdin, stdout, alive):
                theirs.callback(os.close, number)
            for number in (to_worker, from_worker, life):
                ours.callback(os.close, number)
            order = msgspec.msgpack.encode(_WorkerOrder(gateway, dict(os.environb)))
            socket.send_fds(self._control, [_SIZE.pack(len(order))], [stdin, stdout, alive])
            self._control.sendall(order)
            [pid] = _PID.unpack(_exactly(self._control, _PID.size))
            if pid == _NONE:
                raise OSError(errno.EAGAIN, "no process more can be made")
            ours.pop_all()
        return ForkedWorker(pid, self.pid, to_worker, from_worker, life)

    def close(self) -> None:
        """End it, once its workers have ended. May be called again."""
        self._control.close()
        with contextlib.suppress(ChildProcessError):
            # It ends by itself, once it has waited for its workers; else the kernel ends it.
            deadline = time.monotonic() + _END_SECONDS
            while not os.waitpid(self.pid, os.WNOHANG)[0]:
                if time.monotonic() > deadline:
                    self._lifeline.let_go()
                    os.waitpid(self.pid, 0)
                    return
                time.sleep(0.002)
        self._lifeline.let_go()


class ForkedWorker(Popen2IO):  # type: ignore[misc]
    """A worker's pipes, as execnet wants those of a process that it has started."""

    def __init__(self, pid: int, parent: int, stdin: int, stdout: int, life: int) -> None:
        super().__init__(os.fdopen(stdin, "wb"), os.fdopen(stdout, "rb"), get_execmodel(_EXECUTION))
        self.pid, self.parent, self._life = pid, parent, life

    def wait(self) -> None:
        """Return once the process has ended."""
        if self._life >= 0:
            os.read(self._life, 1)
            os.close(self._life)
            self._life = -1

    def kill(self) -> None:
        """End the process."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


class ForkingGroup(execnet.Group):  # type: ignore[misc]
    """Gateways to workers that a ForkServer makes; started as execnet does when that is no more."""

    def __init__(self, server: ForkServer) -> None:
        super().__init__(execmodel=_EXECUTION)
        self._server = server

    def makegateway(self, spec: Any = None) -> execnet.Gateway:
        """Return a gateway to a new worker."""
        self.allocate_id(spec)
        try:
            io = self._server.fork(spec.id)
        except OSError:
            return super().makegateway(spec)
        gateway = execnet.Gateway(io, spec)
        self._register(gateway)
        return gateway


@contextlib.contextmanager
def forking() -> Iterator[ForkServer | None]:
    """Yield a server for the workers of a run; None where this process has threads, and must not be copied."""
    if threading.active_count() > 1:
        yield None
        return
    for name in _OF_BOTH:
        importlib.import_module(name)
    server = ForkServer()
    try:
        yield server
    finally:
        server.close()


def _run_server(control: socket.socket, lifeline: int) -> NoReturn:
    """Be the server, until the other end of `control` is closed. Nothing of the controller's is touched, or ended."""
    code = 1
    try:
        _call_this(SERVER_NAME)
        # Ctrl-C and the like are for the controller, and for workers, which decide what they mean.
        deaf = [number for number in (signal.SIGINT, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_IGN]
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        atexit._clear()  # noqa: SLF001 - what the controller wants done at its end
        # Nothing that the controller has is let go of here, so that no descriptor is closed that others have by then.
        gc.freeze()
        _close_all_but(control.fileno(), lifeline)
        # Dozens of workers share the processors, and no matrix here is worth threads.
        os.environ["OPENBLAS_NUM_THREADS"] = "1"
        for name in _OF_WORKERS:
            importlib.import_module(name)
        prepare_decoders()
        # It was cleared with the controller's; a worker has children of its own.
        atexit.register(processes._link.close)  # noqa: SLF001
        gc.freeze()
        while header := socket.recv_fds(control, _SIZE.size, _STREAMS):
            size, streams = header[0], header[1]
            if len(size) < _SIZE.size:
                break
            order = msgspec.msgpack.decode(_exactly(control, _SIZE.unpack(size)[0]), type=_WorkerOrder)
            try:
                pid = os.fork()
            except OSError:
                # No process more for now: those that are there go on.
                pid = _NONE
            if not pid:
                control.close()
                _run_worker(order, streams, deaf)
            for stream in streams:
                os.close(stream)
            control.sendall(_PID.pack(pid))
        # For the times of those that have ended; others see that they are alone.
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        code = 0
    except OSError:
        # The controller was killed in the middle.
        pass
    except BaseException:  # noqa: BLE001 - nothing may return into the controller's code
        traceback.print_exc()
    os._exit(code)


def _run_worker(order: _WorkerOrder, streams: list[int], deaf: list[signal.Signals]) -> NoReturn:
    """Be a worker of xdist, as execnet starts one."""
    code = 1
    try:
        _call_this(WORKER_NAME)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            usual = signal.default_int_handler if number is signal.SIGINT else signal.SIG_DFL
            signal.signal(number, signal.SIG_IGN if number in deaf else usual)
        os.environb.clear()
        os.environb.update(order.environment)
        stdin, stdout, _ = streams
        for target, stream in enumerate((stdin, stdout)):
            os.dup2(stream, target)
            os.close(stream)
        serve(init_popen_io(get_execmodel(_EXECUTION)), id=f"{order.gateway}-worker")
        atexit._run_exitfuncs()  # noqa: SLF001
        code = 0
    except BaseException:  # noqa: BLE001 - nothing may return into the controller's code
        traceback.print_exc()
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.flush()
    os._exit(code)


def _close_all_but(*kept: int) -> None:
    """Let go of the controller's descriptors; their numbers stay taken, as objects here may still close them."""
    sys.stdin = sys.stdout = open(os.devnull, "r+")  # noqa: SIM115, PTH123
    nowhere = sys.stdin.fileno()
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        number = int(name)
        if number not in (2, nowhere, *kept):
            # One of them was that of the listing itself.
            with contextlib.suppress(OSError):
                os.fstat(number)
                os.dup2(nowhere, number, inheritable=False)


def _call_this(name: str) -> None:
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(name)


def _exactly(stream: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = stream.recv(size - len(data))
        if not part:
            raise ConnectionResetError("the other process has ended")
        data += part
    return data

"""Forks of one process per user that has imported farm: a command of that user without the start of an interpreter.

Run as a program it is the process that forks: `python user_forks.py DESCRIPTOR`, of a socket that listens. It ends
with the process that started it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from warm_torch import end_with

_MESSAGE_BYTES = 2**18


class UserForks:
    """The process of one user that forks."""

    def __init__(self, interpreter: str, env: Mapping[str, str], place: Path, **start: Any) -> None:
        """`start` is the user, as `subprocess.Popen` takes it; `place` is where the socket is made."""
        self._place = place
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(str(place))
            listener.listen(64)
            theirs, self._end = os.pipe()
            self._process = subprocess.Popen(
                [interpreter, __file__, str(listener.fileno()), str(theirs)], **start, env=env, cwd="/",
                pass_fds=[listener.fileno(), theirs], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                start_new_session=True,
            )  # fmt: skip
            os.close(theirs)

    def close(self) -> None:
        """End the process and the processes that wait for its forks."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._end)
        self._place.unlink()

    def run(
        self, words: Sequence[str], *, env: Mapping[str, str], cwd: Path, umask: int, stdin: str, timeout_s: float
    ) -> subprocess.CompletedProcess[str]:
        """Return the output and the exit code of `python WORDS` in a fork. Raises TimeoutExpired."""
        message = json.dumps({"words": list(words), "env": dict(env), "cwd": str(cwd), "umask": umask}).encode()
        with contextlib.ExitStack() as stack:
            streams = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(3)]
            streams[0].write(stdin.encode())
            streams[0].seek(0)
            connection = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MESSAGE_BYTES)
            connection.connect(str(self._place))
            socket.send_fds(connection, [message], [stream.fileno() for stream in streams])
            pid = int(connection.recv(64))
            connection.settimeout(timeout_s)
            try:
                code = int(connection.recv(64) or -signal.SIGKILL)
            except TimeoutError:
                os.killpg(pid, signal.SIGKILL)
                raise subprocess.TimeoutExpired(list(words), timeout_s) from None
            texts = [os.pread(stream.fileno(), 2**26, 0).decode(errors="replace") for stream in streams[1:]]
        return subprocess.CompletedProcess(list(words), code, *texts)


def _serve(listener: socket.socket) -> None:
    while True:
        connection, _ = listener.accept()
        if os.fork():
            connection.close()
            continue
        listener.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _MESSAGE_BYTES)
        data, descriptors, _, _ = socket.recv_fds(connection, _MESSAGE_BYTES, 3)
        pid = os.fork()
        if not pid:
            connection.close()
            end_with(functools.partial(_become, json.loads(data), descriptors))
        connection.send(str(pid).encode())
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with contextlib.suppress(OSError):
            connection.send(str(code).encode())
        os._exit(0)


def _become(message: dict[str, Any], descriptors: list[int]) -> None:
    """Run a module, a script or a program text in this fork as a new interpreter does."""
    os.setsid()
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
    os.closerange(3, 1024)
    os.environ.clear()
    os.environ.update(message["env"])
    tempfile.tempdir = None
    os.umask(message["umask"])
    os.chdir(message["cwd"])
    first, *rest = message["words"]
    if first == "-m":
        sys.argv = [sys.modules[rest[0]].__file__ or "", *rest[1:]]
        sys.path.insert(0, message["cwd"])
        importlib.import_module(rest[0]).main()
    elif first == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.path.insert(0, "")
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})  # noqa: S102 - of the tests
    else:
        sys.argv = [first, *rest]
        sys.path.insert(0, str(Path(first).parent))
        runpy.run_path(first, run_name="__main__")


def main(listener: str, end: str) -> None:
    """Import the modules of commands, and fork until the parent process is gone."""
    from forked_command import PRELOADED

    sys.path[:] = [entry for entry in sys.path if entry != str(Path(__file__).parent)]
    for name in PRELOADED:
        importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    if not os.fork():
        # The read ends when the process of the tests does, killed or not.
        os.read(int(end), 1)
        os.killpg(0, signal.SIGKILL)
    _serve(socket.socket(fileno=int(listener)))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Forks of a process that has imported what programs need: Python programs without the start of an interpreter.

Run as a program it is the process that forks: `python forks.py LISTENER OWNER LIBRARIES PADDING NAME...`. It imports
each NAME, a module or `MODULE:FUNCTION` to call, and ends with the process OWNER. glibc reads LD_LIBRARY_PATH at the
start of a process, so QNN's folder in it is /proc/self/fd/LIBRARIES: each fork opens the folder of its SDK there.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import inspect
import json
import os
import runpy
import select
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

_MESSAGE_BYTES, _MOST_DESCRIPTORS = 2**18, 16
# Fields of /proc/self/stat behind the name: where the arguments and the environment of a process begin and end.
_ARGUMENTS, _ENVIRONMENT = slice(45, 47), slice(47, 49)
_ROOM_BYTES = 2**13
_OWN_FOLDERS = {"tests", "chaos", "bench"}


def start_forking(
    place: Path, names: Sequence[str], *, owner: int, env: Mapping[str, str], interpreter: str = sys.executable,
    libraries: int = 0, **start: Any,
) -> subprocess.Popen[bytes]:  # fmt: skip
    """Start a process that forks at the socket `place`, as the user in `start`; its output is in a file beside it."""
    padding = "x" * _ROOM_BYTES
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener, Path(f"{place}.log").open("wb") as log:
        listener.bind(str(place))
        listener.listen(64)
        descriptors = [listener.fileno(), *([libraries] if libraries else [])]
        return subprocess.Popen(
            [interpreter, __file__, str(listener.fileno()), str(owner), str(libraries), padding, *names],
            env={**env, "PADDING": padding}, cwd="/", stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            pass_fds=descriptors, start_new_session=True, **start,
        )  # fmt: skip


class ForkedProcess:
    """Fork at a socket, as `subprocess.Popen` shows it; the text of a pipe is UTF-8 where `text` is true.

    `torch` are the facts of the session whose builders are forks as well (warm_torch.py).
    """

    def __init__(
        self, place: Path, words: Sequence[str], *, env: Mapping[str, str], cwd: Path | None = None,
        stdin: Any = subprocess.DEVNULL, stdout: Any = subprocess.DEVNULL, stderr: Any = subprocess.DEVNULL,
        pass_fds: Sequence[int] = (), text: bool = False, umask: int | None = None, torch: Sequence[Any] | None = None,
    ) -> None:  # fmt: skip
        self.args, self.returncode = list(words), None
        self.stdin = self.stdout = self.stderr = None
        self._lock = threading.Lock()
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MESSAGE_BYTES)
        self._connection.connect(str(place))
        facts = {"words": list(words), "env": dict(env), "cwd": str(cwd or os.getcwd()), "umask": umask, "torch": torch}
        with contextlib.ExitStack() as stack:
            descriptors = list[int]()
            for name, chosen in (("stdin", stdin), ("stdout", stdout), ("stderr", stderr)):
                if chosen == subprocess.PIPE:
                    ends = os.pipe()
                    own, theirs = ends if name != "stdin" else reversed(ends)
                    mode = "w" if name == "stdin" else "r"
                    file = open(own, mode, encoding="utf-8") if text else open(own, f"{mode}b")  # noqa: SIM115
                    setattr(self, name, file)
                    stack.callback(os.close, theirs)
                elif chosen == subprocess.DEVNULL:
                    theirs = os.open(os.devnull, os.O_RDWR)
                    stack.callback(os.close, theirs)
                else:
                    theirs = descriptors[1] if chosen == subprocess.STDOUT else chosen
                descriptors.append(theirs)
            socket.send_fds(self._connection, [json.dumps(facts).encode()], [*descriptors, *pass_fds])
        answer = self._connection.recv(64)
        assert answer, Path(f"{place}.log").read_text(errors="replace")[-4000:]
        self.pid = int(answer)

    def poll(self) -> int | None:
        return self._look(0.0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._look(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return code

    def communicate(self, timeout: float | None = None) -> tuple[Any, None]:
        texts = list[Any]()
        reader = threading.Thread(target=lambda: texts.append(self.stdout.read()), daemon=True)  # type: ignore[attr-defined]
        reader.start()
        reader.join(timeout)
        if reader.is_alive():
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        self.wait(timeout)
        return texts[0], None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _look(self, timeout_s: float | None) -> int | None:
        if self.returncode is None and select.select([self._connection], [], [], timeout_s)[0]:
            with self._lock:
                if self.returncode is None:
                    # Nothing comes where the process that forks has ended, and its forks with it.
                    self.returncode = int(self._connection.recv(64) or -signal.SIGKILL)
        return self.returncode


def run_fork(
    place: Path, words: Sequence[str], *, stdin: str = "", timeout_s: float | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Return the output and the exit code of a program in a fork. Raises TimeoutExpired."""
    with contextlib.ExitStack() as stack:
        streams = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(3)]
        streams[0].write(stdin.encode())
        streams[0].seek(0)
        given, output, errors = (stream.fileno() for stream in streams)
        process = ForkedProcess(place, words, stdin=given, stdout=output, stderr=errors, **options)
        try:
            code = process.wait(timeout_s)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        texts = [os.pread(descriptor, 2**26, 0).decode(errors="replace") for descriptor in (output, errors)]
    return subprocess.CompletedProcess(list(words), code, *texts)


def publish(words: Sequence[str], env: Mapping[str, str]) -> None:
    """Write arguments and environment where /proc shows them, cut to the room there: tests find processes by them."""
    shown = sorted(env.items(), key=lambda item: not item[0].startswith("FARM_"))
    if words:
        _write(_ARGUMENTS, words)
    _write(_ENVIRONMENT, [f"{name}={value}" for name, value in shown])


def _write(place: slice, texts: Sequence[str]) -> None:
    data = b"".join(os.fsencode(text) + b"\0" for text in texts)
    begin, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[place])
    ctypes.memmove(begin, data[: end - begin].ljust(end - begin, b"\0"), end - begin)


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[int]:
    """Yield a descriptor of a folder."""
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _serve(listener: socket.socket, owner: int, libraries: int) -> None:
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    selector.register(os.pidfd_open(owner), selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.data is not None:
                pid, connection = key.data
                selector.unregister(key.fd)
                os.close(key.fd)
                with contextlib.suppress(OSError):
                    connection.send(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())
                connection.close()
            elif key.fileobj is listener:
                connection, _ = listener.accept()
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _MESSAGE_BYTES)
                data, descriptors, _, _ = socket.recv_fds(connection, _MESSAGE_BYTES, _MOST_DESCRIPTORS)
                if not data:
                    connection.close()
                    continue
                pid = os.fork()
                if pid == 0:
                    _end_with(functools.partial(_become, json.loads(data), descriptors, libraries, connection))
                for descriptor in descriptors:
                    os.close(descriptor)
                selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, connection))
            else:
                return


def _become(facts: dict[str, Any], descriptors: list[int], libraries: int, connection: socket.socket) -> int | None:
    """Run a module, a script or a program text in this fork as a new interpreter does, and return the exit code."""
    os.setsid()
    os.environ.clear()
    os.environ.update(facts["env"])
    publish(facts["words"], facts["env"])
    # The sender reads /proc next.
    connection.send(str(os.getpid()).encode())
    for number, descriptor in enumerate(descriptors[:3]):
        os.dup2(descriptor, number)
    # Descriptors of other forks would keep the pipes of their callers open.
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in {*descriptors[3:], libraries}:
            with contextlib.suppress(OSError):
                os.close(int(name))
    if libraries:
        with opened(Path(os.environ["QNN_SDK_ROOT"], "lib", "x86_64-linux-clang")) as folder:
            os.dup2(folder, libraries, inheritable=False)
    # An import may have asked for the folder of temporary files, which this environment names anew.
    tempfile.tempdir = None
    if facts["umask"] is not None:
        os.umask(facts["umask"])
    os.chdir(facts["cwd"])
    if facts["torch"] is not None:
        from warm_torch import fork_builders

        fork_builders(*facts["torch"])
    sys.path[:0] = [path for path in os.environ.get("PYTHONPATH", "").split(":") if path and path not in sys.path]
    _, first, *rest = facts["words"]
    if first == "-m":
        module = importlib.import_module(rest[0])
        sys.argv = [module.__file__ or "", *rest[1:]]
        if not os.environ.get("PYTHONSAFEPATH"):
            sys.path.insert(0, facts["cwd"])
        code: int | None = module.main(*([rest[1:]] if inspect.signature(module.main).parameters else []))
        return code
    if first == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.path.insert(0, "")
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})  # noqa: S102 - of the tests
    else:
        sys.argv = [first, *rest]
        sys.path.insert(0, str(Path(first).parent))
        runpy.run_path(first, run_name="__main__")
    return 0


def _end_with(program: Callable[[], int | None]) -> NoReturn:
    """Run `program` and end this process as an interpreter ends: by its exit code, SystemExit or a traceback."""
    code: int | None = 1
    try:
        code = program()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if end.code is not None and not isinstance(end.code, int):
            sys.stderr.write(f"{end.code}\n")
    except BaseException:  # noqa: BLE001 - the loop of the process it is a fork of must not go on here
        sys.excepthook(*sys.exc_info())
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        # An interpreter ends well where the reader of its standard error has left.
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code or 0)


def main(listener: str, owner: str, libraries: str, _padding: str, *names: str) -> None:
    """Import, and fork until the owner is gone."""
    # Collections at Python's own thresholds are a quarter of torch's imports, and a tenth of the scripts' compiles.
    gc.set_threshold(100_000, 10, 10)
    # With PYTHONSAFEPATH, which builders have, it is not there.
    sys.path.append(str(Path(__file__).parent))
    for name in names:
        module, _, function = name.partition(":")
        imported = importlib.import_module(module)
        if function:
            getattr(imported, function)()
    sys.path[:] = [entry for entry in sys.path if Path(entry).name not in _OWN_FOLDERS]
    # Forks share objects until they write to them.
    gc.collect()
    gc.freeze()
    _serve(socket.socket(fileno=int(listener)), int(owner), int(libraries))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Builders and scripts that compile, as forks of one process per session that has imported torch and ExecuTorch.

A builder that starts by itself spends 6 s of processor time on its imports. Run as a program it is the process that
forks: `python warm_torch.py SOCKET OWNER LIBRARIES PADDING`. It ends with the process OWNER. glibc reads
LD_LIBRARY_PATH at the start of a process, so QNN's folder in it is /proc/self/fd/LIBRARIES: each fork opens the folder
of its SDK there.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib
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
from types import SimpleNamespace
from typing import Any, NamedTuple, NoReturn

import msgspec

from farm.builds.compile.compiler_process import ONE_THREAD, SAME_EACH_TIME
from farm.builds.runtime.simulator import TARGET, host_sdk

COLD = "FARM_TEST_COLD_TORCH"
"""Variable that lets every builder and script start by itself."""

# The words of each command. A builder has more where folders of its toolchain are traced, from the first import on.
_MODULES = {
    "farm.builds.compile.builder": 6,
    "farm.builds.compile.template": 7,
    "farm.builds.compile.debug.debugger": 4,
}
_READ_AT_START = ("GLIBC_", "LD_", "MKL_", "OMP_", "PYTHON", "QNN_")
_FLOWS = "farm.builds.compile.flows"
_PRELOADED = ("torch", f"{_FLOWS}.qualcomm", f"{_FLOWS}.xnnpack", f"{_FLOWS}.compiler")
_MESSAGE_BYTES, _MOST_DESCRIPTORS = 2**18, 16
_START_S = 300.0
# Fields of /proc/self/stat behind the name: where the arguments and the environment of a process begin and end.
_ARGUMENTS, _ENVIRONMENT = slice(45, 47), slice(47, 49)
_ROOM_BYTES = 2**13


class WarmTorch(NamedTuple):
    """Shared facts of all processes of a session."""

    folder: Path
    """Folder of the socket, the lock and the log."""
    cache: Path
    """The cache whose QNN the process loads."""
    owner: int

    def subprocess(self, *, traced: bool = False) -> SimpleNamespace:
        """Return a stand-in for the module `subprocess` of farm.base.processes that forks compiler processes.

        With `traced`, builders that trace are forks as well: the process has imported nothing of their folders.
        """

        def start(words: Sequence[str], **options: Any) -> Any:
            env = options["env"]
            is_known = list(words[:2]) == [sys.executable, "-m"] and _MODULES.get(words[2]) == len(words)
            if traced and list(words[1:3]) == ["-m", "farm.builds.compile.builder"]:
                is_known, env = True, {name: value for name, value in env.items() if name != "PYTHONPATH"}
            if is_known and (connection := self._connect(self._environment(env))):
                return ForkedProcess(connection, words, options)
            return subprocess.Popen(words, **options)

        return SimpleNamespace(**{**vars(subprocess), "Popen": start})

    def run(self, words: Sequence[str], *, env: Mapping[str, str], cwd: Path) -> subprocess.CompletedProcess[str]:
        """Return the output and the exit code of a script in a fork."""
        connection = self._connect(self._environment(env))
        assert connection is not None, f"{words}: another environment than that of builders"
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
            streams = {"stdin": subprocess.DEVNULL, "stdout": output.fileno(), "stderr": errors.fileno()}
            process = ForkedProcess(connection, words, {"env": env, "cwd": cwd, "pass_fds": (), **streams})
            try:
                process.wait()
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            texts = [os.pread(file.fileno(), 2**24, 0).decode(errors="replace") for file in (output, errors)]
        return subprocess.CompletedProcess(list(words), process.returncode or 0, *texts)

    def _environment(self, env: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of a new process, with the paths of the session's cache: names are hashes there.

        Stubs of SDKs around the session's libraries, as LPAI's stub, have the paths of the session's SDK.
        """
        kept = {name: value for name, value in env.items() if name.startswith(_READ_AT_START)} | ONE_THREAD
        root = Path(kept.get("QNN_SDK_ROOT", os.devnull))
        theirs, ours = str(root.parent.parent), str(self.cache)
        if _system_library(root) == _system_library(host := _host_root(self.cache)):
            theirs, ours = str(root), str(host)
        return {name: value.replace(theirs, ours) for name, value in kept.items()}

    def _connect(self, env: dict[str, str]) -> socket.socket | None:
        """Return a connection to the process of `env`, started if need be; None where it has another environment."""
        self.folder.mkdir(exist_ok=True)
        known = self.folder / "environment.json"
        with (self.folder / "lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not known.exists():
                # A builder of a stub of QNN may be the first of a session.
                if env.get("QNN_SDK_ROOT") != str(_host_root(self.cache)):
                    return None
                self._start(env)
                known.write_text(json.dumps(env))
        if json.loads(known.read_text()) != env:
            return None
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.connect(str(self.folder / "socket"))
        except OSError:
            connection.close()
            return None
        return connection

    def _start(self, env: dict[str, str]) -> None:
        ordinary = {name: value for name, value in os.environ.items() if not name.startswith(("FARM_", "PYTEST_"))}
        padding = "x" * _ROOM_BYTES
        folder = _libraries(env["QNN_SDK_ROOT"])
        with (self.folder / "log").open("wb") as log, _opened(folder) as libraries:
            paths = env["LD_LIBRARY_PATH"].replace(str(folder), f"/proc/self/fd/{libraries}")
            process = subprocess.Popen(
                [sys.executable, __file__, str(self.folder / "socket"), str(self.owner), str(libraries), padding],
                env={**ordinary, **env, "LD_LIBRARY_PATH": paths, "TMPDIR": str(self.folder), "PADDING": padding},
                cwd="/", stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, start_new_session=True,
                pass_fds=(libraries,),
            )  # fmt: skip
            assert process.stdout is not None
            ready, _, _ = select.select([process.stdout], [], [], _START_S)
            if not ready or process.stdout.readline() != b"ready\n":
                process.kill()
                process.wait()
                raise AssertionError((self.folder / "log").read_text(errors="replace")[-4000:])
            process.stdout.close()
            # The forking process outlives its parent.
            process.returncode = 0


@functools.cache
def _host_root(cache: Path) -> Path:
    return host_sdk(cache).root


def _libraries(sdk_root: str | Path) -> Path:
    return Path(sdk_root, "lib", TARGET)


def _system_library(sdk_root: Path) -> Path:
    """Return the file that is QNN's system library, wherever links in the SDK lead."""
    return (_libraries(sdk_root) / "libQnnSystem.so").resolve()


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[int]:
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


class ForkedProcess:
    """A fork as `subprocess.Popen` shows it."""

    def __init__(self, connection: socket.socket, words: Sequence[str], options: Mapping[str, Any]) -> None:
        self.args, self.returncode = list(words), None
        self.stdin = self.stdout = self.stderr = None
        self._connection, self._lock = connection, threading.Lock()
        with contextlib.ExitStack() as stack:
            descriptors = []
            for name, flags in (("stdin", os.O_RDONLY), ("stdout", os.O_WRONLY), ("stderr", os.O_WRONLY)):
                descriptor = options[name]
                if descriptor == subprocess.PIPE:
                    ends = os.pipe()
                    own, descriptor = ends if name != "stdin" else reversed(ends)
                    setattr(self, name, os.fdopen(own, "rb" if name != "stdin" else "wb"))
                    stack.callback(os.close, descriptor)
                elif descriptor == subprocess.DEVNULL:
                    descriptor = os.open(os.devnull, flags)
                    stack.callback(os.close, descriptor)
                descriptors.append(descriptor)
            cwd = options["cwd"] or os.getcwd()
            message = {"words": list(words), "env": dict(options["env"]), "cwd": str(cwd)}
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MESSAGE_BYTES)
            socket.send_fds(connection, [json.dumps(message).encode()], [*descriptors, *options["pass_fds"]])
        self.pid = int(connection.recv(64))

    def poll(self) -> int | None:
        return self._look(0.0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._look(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return code

    def _look(self, timeout_s: float | None) -> int | None:
        if self.returncode is None and select.select([self._connection], [], [], timeout_s)[0]:
            with self._lock:
                if self.returncode is None:
                    # Nothing comes where the process that forks has ended, and its forks with it.
                    self.returncode = int(self._connection.recv(64) or -signal.SIGKILL)
        return self.returncode


session: WarmTorch | None = None
"""Session of this process's tests."""


def run_script(script: Path, *arguments: str, cache: Path, folder: Path) -> str:
    """Run a script that imports torch in a folder, and return its output. Raises AssertionError when it fails."""
    from farm.base.config.settings import load_config
    from farm.builds.toolchains.interpreters import process_environment
    from farm.builds.toolchains.prepare import prepare

    tools = prepare(msgspec.structs.replace(load_config(), cache_dir=cache))
    env = {**process_environment(tools.compiler.env), **SAME_EACH_TIME, **ONE_THREAD, "FARM_CACHE_DIR": str(cache)}
    words = [sys.executable, str(script), *arguments]
    if session is not None and session.cache == cache:
        done = session.run(words, env=env, cwd=folder)
    else:
        # The script imports modules beside it, which the environment of a compiler leaves out.
        env |= {"PYTHONSAFEPATH": ""}
        done = subprocess.run(words, env=env, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


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


def _serve(path: str, owner: int, libraries: int) -> None:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(path)
    listener.listen(64)
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    selector.register(os.pidfd_open(owner), selectors.EVENT_READ)
    os.write(1, b"ready\n")
    os.dup2(2, 1)
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
                    end_with(functools.partial(_become, json.loads(data), descriptors, libraries))
                for descriptor in descriptors:
                    os.close(descriptor)
                # The sender reads /proc next: the session of the fork has to be there.
                with contextlib.suppress(OSError):
                    connection.send(str(pid).encode())
                selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, connection))
            else:
                return


def _become(message: dict[str, Any], descriptors: list[int], libraries: int) -> int:
    """Run a module or a script in this fork as a new interpreter does, and return the exit code.

    `libraries` is the descriptor of QNN's folder in the search path of libraries.
    """
    os.setsid()
    # Descriptors of other builders would keep the pipes of their callers open.
    kept = set(descriptors)
    for number, descriptor in enumerate(descriptors[:3]):
        os.dup2(descriptor, number)
        kept.discard(descriptor)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in {*kept, libraries}:
            with contextlib.suppress(OSError):
                os.close(int(name))
    os.environ.clear()
    os.environ.update(message["env"])
    with _opened(_libraries(os.environ["QNN_SDK_ROOT"])) as folder:
        os.dup2(folder, libraries, inheritable=False)
    # An import may have asked for the folder of temporary files, which this environment names anew.
    tempfile.tempdir = None
    publish(message["words"], message["env"])
    os.chdir(message["cwd"])
    sys.path[:0] = [path for path in os.environ.get("PYTHONPATH", "").split(":") if path and path not in sys.path]
    _, first, *rest = message["words"]
    if first == "-m":
        sys.argv = rest
        return int(importlib.import_module(rest[0]).main(rest[1:]))
    sys.argv = [first, *rest]
    sys.path.insert(0, str(Path(first).parent))
    runpy.run_path(first, run_name="__main__")
    return 0


def end_with(program: Callable[[], int | None]) -> NoReturn:
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
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


def main(path: str, owner: str, libraries: str, _padding: str) -> None:
    """Import the modules of builders, do the first steps of a builder once, and fork builders."""
    sys.path[:] = [entry for entry in sys.path if entry != str(Path(__file__).parent)]
    # Collections at Python's own thresholds are a quarter of these imports, and a tenth of the scripts' compiles.
    gc.set_threshold(100_000, 10, 10)
    for name in _PRELOADED:
        importlib.import_module(name)
    import torch

    from farm.builds.compile.forking import is_single_threaded, warm_up

    torch.set_num_threads(1)
    warm_up()
    assert is_single_threaded()
    gc.collect()
    gc.freeze()
    _serve(path, int(owner), int(libraries))


if __name__ == "__main__":
    main(*sys.argv[1:])

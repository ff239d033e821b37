"""The processes of one device with a real adbd: in namespaces of their own, and the way to it from this machine.

Only the standard library: the daemon of a virtual device imports this at its start.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import os
import signal
import socket
import struct
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from farm.errors import InfraError
from farm.system.lifeline import Lifeline
from farm.system.reaper import MARK

ADBD = "/usr/lib/android-sdk/platform-tools/adbd"
"""Where the daemon is on the device."""
SHELL_USER = 2000
"""The user that adbd and every command runs as: Android's `shell`."""
VERSION = "adbd.txt"
"""In the root folder of a device: the version of its daemon, Debian's, as `34.0.5-13`."""

_BEGIN = Path(__file__).with_name("begin.sh")
_LOOPBACK = "127.0.0.1"
_TOOLS = "/usr/sbin:/usr/bin:/sbin:/bin"
_PORT = 5555
_START_SECONDS = 20.0
_LOOK_SECONDS = 0.01
_CONNECT_SECONDS = 5.0

# linux/sched.h, linux/prctl.h, linux/seccomp.h, linux/if.h and linux/sockios.h.
_CLONE_NEWNET = 0x40000000
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1
# By processor: AUDIT_ARCH_* of linux/audit.h, and the number of socket(2).
_SOCKET_CALL = {"x86_64": (0xC000003E, 41), "aarch64": (0xC00000B7, 198)}
_AF_VSOCK, _EAFNOSUPPORT = 40, 97

# adbd logs to standard error, and is what the device lives by. Its init waits for what nobody else does.
INIT = f"{ADBD} & wait $!"


def begin_argv(system: Path, files: Path, init: str) -> list[str]:
    """Return the command that begins a device with the root `system`, its `files`, and `init` for its shell."""
    own = ["--mount", "--pid", "--ipc", "--uts", "--fork", "--kill-child=SIGKILL"]
    return ["unshare", *own, "--", "sh", str(_BEGIN), str(system), str(files), init]


class AdbdProcesses:
    """The processes of a device, from one start of it to the next, and a network that they alone have.

    The network belongs to one thread, which starts them and makes the connections to them.
    """

    def __init__(self, system: Path, files: Path, init: str) -> None:
        self._system, self._files, self._init = system, files, init
        self._inside = ThreadPoolExecutor(1, thread_name_prefix="network")
        self._process: subprocess.Popen[bytes] | None = None
        self._lifeline: Lifeline | None = None
        self._ready = False

    async def start(self) -> None:
        """Begin the device. Raises InfraError where it does not listen."""
        (await self.connect()).close()

    async def connect(self) -> socket.socket:
        """Return a connection to the daemon, which is started where it does not run. Raises InfraError."""
        return await asyncio.get_running_loop().run_in_executor(self._inside, self._connect)

    async def end(self) -> None:
        """Kill all processes of the device; the next connection begins it anew."""
        await asyncio.get_running_loop().run_in_executor(self._inside, self._kill)

    def _connect(self) -> socket.socket:
        if not self._ready:
            _have_own_network()
            self._ready = True
        if self._process is None or self._process.poll() is not None:
            self._kill()
            self._begin()
        deadline = time.monotonic() + _START_SECONDS
        while True:
            connection = socket.socket()
            try:
                connection.settimeout(_CONNECT_SECONDS)
                connection.connect((_LOOPBACK, _PORT))
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            except OSError as error:
                connection.close()
                code = self._process.poll() if self._process is not None else 0
                if code is not None:
                    raise InfraError(f"adbd ended with {code} at its start") from None
                if time.monotonic() > deadline:
                    raise InfraError(f"adbd does not listen: {error}") from None
                time.sleep(_LOOK_SECONDS)
            else:
                return connection

    def _begin(self) -> None:
        environment = {
            "ADBD_PORT": str(_PORT),
            "ANDROID_DATA": "/data",
            "ANDROID_ROOT": "/system",
            "LANG": "C.UTF-8",
            "PATH": _TOOLS,
            "TMPDIR": "/data/local/tmp",
        }
        if MARK in os.environ:
            environment[MARK] = os.environ[MARK]
        lifeline = Lifeline()
        try:
            self._process = subprocess.Popen(
                begin_argv(self._system, self._files, self._init),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=(lifeline.child_end,),
            )
        except BaseException:
            lifeline.cut()
            raise
        lifeline.tie(self._process.pid, group=True)
        self._lifeline = lifeline

    def _kill(self) -> None:
        if self._process is not None and self._process.poll() is None:
            # With its first process the kernel kills all others, and that one ends last.
            for pid in _children(self._process.pid) or [self._process.pid]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._process.wait()
        self._process = None
        if self._lifeline is not None:
            self._lifeline.cut()
            self._lifeline = None


def _children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _have_own_network() -> None:
    """Let this thread, and what it starts, have a network of its own with nothing but loopback. Raises InfraError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET):
        raise InfraError(f"a device cannot have a network of its own: {os.strerror(ctypes.get_errno())}")
    with socket.socket() as any_socket:
        name = struct.pack("16sH14x", b"lo", 0)
        flags = struct.unpack_from("H", fcntl.ioctl(any_socket, _SIOCGIFFLAGS, name), 16)[0]
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags | _IFF_UP))
    _refuse_vsock(libc)


def _refuse_vsock(libc: ctypes.CDLL) -> None:
    """Let this thread, and what it starts, have no sockets of AF_VSOCK, and gain no rights by executing a program.

    adbd listens on one, which no namespace keeps to itself: every user of the machine could come in. Raises InfraError.
    """
    arch, call = _SOCKET_CALL.get(os.uname().machine, (0, 0))
    # linux/filter.h: load a word of seccomp_data, jump if equal, return.
    load, equal, give = 0x20, 0x15, 0x06
    allow, refuse = 0x7FFF0000, 0x00050000 | _EAFNOSUPPORT
    program = [
        (load, 0, 0, 4), (equal, 0, 5, arch),
        (load, 0, 0, 0), (equal, 0, 3, call),
        (load, 0, 0, 16), (equal, 0, 1, _AF_VSOCK),
        (give, 0, 0, refuse), (give, 0, 0, allow),
    ]  # fmt: skip
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    filters = struct.pack("HxxxxxxP", len(program), ctypes.addressof(code))
    zero = ctypes.c_ulong(0)
    closed = not libc.prctl(_PR_SET_NO_NEW_PRIVS, ctypes.c_ulong(1), zero, zero, zero)
    if not closed or libc.prctl(_PR_SET_SECCOMP, ctypes.c_ulong(_SECCOMP_MODE_FILTER), filters, zero, zero):
        raise InfraError(
            f"a device cannot be kept off the sockets of virtual machines: {os.strerror(ctypes.get_errno())}"
        )

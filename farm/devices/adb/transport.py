"""The transport over a real adb server, for phones and virtual devices alike.

Programs run over adb's shell protocol v2, files move over its sync protocol.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path, PurePosixPath

from farm.base.errors import DeviceError, DeviceSpaceError, DeviceTimeoutError, InfraError
from farm.base.text import clean_text, says_full
from farm.devices.adb.host import AdbHost
from farm.devices.adb.protocol import (
    CLOSE_STDIN,
    DATA_BYTES,
    EXIT,
    FRAME,
    MESSAGE,
    PATH_BYTES,
    STDERR,
    STDIN,
    STDOUT,
    ProtocolError,
    acknowledge,
    data_messages,
    environment_with,
    take_frames,
)
from farm.devices.adb.server import suitable_adb
from farm.devices.device import AdbAddress
from farm.devices.files import MinThroughput, local_errors, replacing
from farm.devices.process import END_MARKED, Link, Output, Process, export_mark, new_mark
from farm.devices.transport import ANSWER_BYTES, ASK_SECONDS, Transport, communicate, shell_command

# The host's end of adb's sync protocol: many files over one stream, answers read behind the requests.


# Requests on their way before an answer is read: hides the round trip, and their answers fit into socket buffers.
_WINDOW = 32
_BUFFER = 1 << 20


class SyncStream:
    """Stream to a device's sync service for any number of transfers; unusable after an error."""

    def __init__(self, stream: socket.socket, serial: str, stall_s: float) -> None:
        """`stall_s` is how long the device may move nothing."""
        stream.settimeout(stall_s)
        self._stream, self._serial, self._stall_s = stream, serial, stall_s
        self._throughput = MinThroughput(serial, 0, stall_s)
        self._out = bytearray()
        self._buffer = memoryview(bytearray(_BUFFER))
        self._in = self._buffer[:0]
        self._links: set[PurePosixPath] = set()

    def close(self) -> None:
        """Hang up."""
        self._stream.close()

    def push(self, files: Mapping[PurePosixPath, Path | bytes | Link]) -> None:
        """Write every file. Raises DeviceError with the path that failed, InfraError for an unreadable local file.

        A link that the device does not make is a LinkRefusedError.
        """
        self._throughput = MinThroughput(self._serial, len(files), self._stall_s)
        pending: deque[PurePosixPath] = deque()
        self._links = {path for path, source in files.items() if isinstance(source, Link)}
        try:
            for path, source in files.items():
                pending.append(path)
                self._send_file(path, source)
                if len(pending) >= _WINDOW:
                    self._expect_okay(pending)
            self._flush()
        except HungUpError as error:
            # A device that hangs up has sent the reason before, unless its cable was pulled.
            self._out.clear()
            with contextlib.suppress(HungUpError):
                while pending:
                    self._expect_okay(pending)
            raise error from None
        while pending:
            self._expect_okay(pending)

    def pull(self, files: Mapping[PurePosixPath, Path], limits: Mapping[PurePosixPath, int]) -> None:
        """Read every file. Raises DeviceError for a file that is missing or larger than its limit."""
        self._throughput = MinThroughput(self._serial, len(files), self._stall_s)
        unasked = iter(files)
        for number, path in enumerate(files):
            for other in islice(unasked, 1 if number else _WINDOW):
                self._request(b"RECV", _name(other, self._serial))
            self._receive_file(path, files[path], limits[path])

    def _send_file(self, path: PurePosixPath, source: Path | bytes | Link) -> None:
        name = _name(path, self._serial)
        if isinstance(source, Link):
            # adbd takes the target as a string that ends with NUL.
            target = os.fsencode(source.target) + b"\0"
            self._request(b"SEND", name + b",%d" % (stat.S_IFLNK | 0o777))
            self._write(MESSAGE.pack(b"DATA", len(target)) + target + MESSAGE.pack(b"DONE", int(time.time())))
            return
        if isinstance(source, bytes):
            self._request(b"SEND", name + b",%d" % (stat.S_IFREG | 0o644))
            for start in range(0, len(source), DATA_BYTES):
                chunk = source[start : start + DATA_BYTES]
                self._write(MESSAGE.pack(b"DATA", len(chunk)))
                self._write(chunk)
            modified = time.time()
        else:
            with local_errors(source), source.open("rb", buffering=0) as file:
                status = os.fstat(file.fileno())
                mode = 0o755 if status.st_mode & 0o111 else 0o644
                self._request(b"SEND", name + b",%d" % (stat.S_IFREG | mode))
                for message in data_messages(file.fileno()):
                    self._write(message)
                modified = status.st_mtime
        self._write(MESSAGE.pack(b"DONE", int(modified) & 0xFFFFFFFF))

    def _expect_okay(self, pending: deque[PurePosixPath]) -> None:
        self._flush()
        path = pending[0]
        kind, size = MESSAGE.unpack(self._exactly(MESSAGE.size))
        if kind != b"OKAY":
            raise self._failure("push", path, kind, size)
        pending.popleft()

    def _receive_file(self, path: PurePosixPath, local: Path, limit: int) -> None:
        self._flush()
        kind, size = MESSAGE.unpack(self._exactly(MESSAGE.size))
        if kind not in {b"DATA", b"DONE"}:
            raise self._failure("pull", path, kind, size)
        with replacing(local) as file:
            left = limit
            while kind == b"DATA":
                left -= size
                if not size:
                    # adbd sends none: without end they would be no byte too many, and no stall.
                    raise DeviceError(self._serial, f"pull of {path}: sent a part of 0 bytes, which adb never does")
                if size > DATA_BYTES or left < 0:
                    raise DeviceError(self._serial, f"pull of {path}: it has more than the {limit} bytes it may have")
                for piece in self._pieces(size):
                    file.write(piece)
                kind, size = MESSAGE.unpack(self._exactly(MESSAGE.size))
            if kind != b"DONE":
                raise self._failure("pull", path, kind, size)

    def _failure(self, what: str, path: PurePosixPath, kind: bytes, size: int) -> DeviceError:
        if kind != b"FAIL":
            return DeviceError(self._serial, f"{what} of {path}: answered {kind!r}, which is not adb's sync protocol")
        reason = clean_text(self._exactly(min(size, PATH_BYTES)))
        if says_full(reason):
            return DeviceSpaceError(self._serial, f"{what} of {path}: {reason}: remove files there")
        error = LinkRefusedError if path in self._links else DeviceError
        return error(self._serial, f"{what} of {path}: {reason}")

    def _request(self, kind: bytes, argument: bytes) -> None:
        self._write(MESSAGE.pack(kind, len(argument)) + argument)

    def _write(self, data: bytes | memoryview) -> None:
        if len(data) >= DATA_BYTES:
            self._flush()
            self._sendall(data)
            return
        self._out += data
        if len(self._out) >= _BUFFER:
            self._flush()

    def _flush(self) -> None:
        if self._out:
            self._sendall(self._out)
            self._out.clear()

    def _sendall(self, data: bytes | bytearray | memoryview) -> None:
        try:
            self._stream.sendall(data)
        except TimeoutError:
            raise self._throughput.stalled() from None
        except OSError as error:
            raise HungUpError(self._serial, f"the connection broke during a push: {error.strerror}") from None
        self._throughput.moved(len(data))

    def _receive(self) -> int:
        try:
            count = self._stream.recv_into(self._buffer)
            acknowledge(self._stream)
        except TimeoutError:
            raise self._throughput.stalled() from None
        except OSError as error:
            raise HungUpError(self._serial, f"the connection broke while files moved: {error.strerror}") from None
        if not count:
            raise HungUpError(self._serial, "the connection ended while files moved")
        self._throughput.moved(count)
        return count

    def _pieces(self, size: int) -> Iterator[memoryview]:
        """Return the next `size` bytes, each piece valid until the next."""
        while size:
            if not self._in:
                self._in = self._buffer[: self._receive()]
            piece, self._in = self._in[:size], self._in[size:]
            size -= len(piece)
            yield piece

    def _exactly(self, size: int) -> bytes:
        return b"".join(bytes(piece) for piece in self._pieces(size))


class HungUpError(DeviceError):
    """The stream is gone."""


class LinkRefusedError(DeviceError):
    """The device makes no symbolic link for the sync service."""


def _name(path: PurePosixPath, serial: str) -> bytes:
    name = os.fsencode(path)
    if not path.is_absolute() or len(name) > PATH_BYTES or b"\0" in name:
        raise DeviceError(serial, f"{str(path)[:100]!r} cannot be a path on a device: absolute, at most 1024 bytes")
    return name


# Programs, and what else a device does.

_STDIN_CHUNK = 64 * 1024
_READ_BYTES = 256 * 1024


class ShellProcess(Process):
    """Program on a device, from its start to its exit code: see Process. Owns the stream."""

    def __init__(
        self,
        stream: socket.socket,
        host: AdbHost,
        serial: str,
        argv: Sequence[str],
        end: Callable[[], None] | None = None,
    ) -> None:
        """Take `end`, which ends the program and its children on the device after an early close."""
        super().__init__()
        self._stream, self._host, self._serial, self._argv, self._end = stream, host, serial, argv, end
        stream.setblocking(False)
        self._poll = select.poll()
        self._received = bytearray()

    def send(self, data: bytes) -> None:
        """See Process."""
        pieces = [data[start : start + _STDIN_CHUNK] for start in range(0, len(data), _STDIN_CHUNK)]
        super().send(b"".join(FRAME.pack(STDIN, len(piece)) + piece for piece in pieces))

    def close_stdin(self) -> None:
        """See Process."""
        super().send(FRAME.pack(CLOSE_STDIN, 0))

    def receive(self, timeout_s: float) -> Output:
        """See Process."""
        output: dict[int, list[bytes]] = {STDOUT: [], STDERR: []}
        deadline = time.monotonic() + timeout_s
        while self._code is None and not any(output.values()):
            self._poll.register(self._stream, select.POLLIN | (select.POLLOUT if self._sending else 0))
            left = deadline - time.monotonic()
            events = self._poll.poll(max(0.0, left) * 1000)
            for _, event in events:
                if event & select.POLLOUT:
                    self._send()
                if event & ~select.POLLOUT:
                    self._read(output)
            # Also when something came: it may have been nothing that this waits for.
            if left <= 0:
                break
        stdout, stderr = (b"".join(output[kind]) for kind in (STDOUT, STDERR))
        self._keep_tail(stderr)
        return Output(stdout, stderr, self._code)

    def close(self) -> None:
        """See Process."""
        # The stream closes first: adbd then hangs up the program even if this process is killed meanwhile.
        self._stream.close()
        end, self._end = self._end, None
        if end is not None and self._code is None:
            end()

    def _send(self) -> None:
        try:
            while self._sending:
                self._sending = self._sending[self._stream.send(self._sending) :]
        except BlockingIOError:
            return
        except OSError:
            # The program ended without reading everything: its exit code is on the way, or the end of the stream.
            self._sending = self._sending[:0]

    def _read(self, output: dict[int, list[bytes]]) -> None:
        try:
            data = self._stream.recv(_READ_BYTES)
            acknowledge(self._stream)
        except BlockingIOError:
            return
        except OSError as error:
            raise self._broke(f"the connection broke: {error.strerror}") from None
        if not data:
            raise self._broke("the connection ended before the program did")
        self._received += data
        try:
            frames = take_frames(self._received)
        except ProtocolError as error:
            raise DeviceError(self._serial, str(error), argv=self._argv, stderr=self._tail) from None
        for kind, payload in frames:
            if kind in output and payload:
                output[kind].append(payload)
            elif kind == EXIT and payload:
                self._code = payload[0]

    def _broke(self, problem: str) -> DeviceError:
        return self._host.classify(self._serial, problem, argv=self._argv, stderr=self._tail)


# Folder in which an ordinary adb user may write and execute; it has all files of farm.
STORAGE = PurePosixPath("/data/local/tmp/farm")

_POLL_SECONDS = 0.1
# A phone's adbd is back, as root, within two or three seconds.
_ROOT_SECONDS = 60.0
# Longest wait for an unanswering device when a program is closed.
_END_SECONDS = 5.0

# Answers of adbd, daemon/restart_service.cpp of AOSP's packages/modules/adb.
_RESTARTING = "restarting"
_PRODUCTION = "production builds"
# Root shells beside adbd: `su` of AOSP's system/extras, and `su` of Magisk, KernelSU and SuperSU.
_ELEVATIONS = (("su", "0", "sh", "-c"), ("su", "-c"))

_NO_ROOT = "install a userdebug or eng build of its system, or allow its su for adb's shell where it has one"


class AdbTransport(Transport):
    """The device `serial` behind the adb server at `address`.

    Streams for files are kept open and used again: opening one costs as much as a small file.
    """

    is_android = True
    no_reboot = ""

    def __init__(self, serial: str, address: AdbAddress) -> None:
        super().__init__(serial, STORAGE)
        self._attached_at = address.attached_at
        first, *others = (
            AdbHost(one.port, one.host, target=one.name, tunnel=one.tunnel) for one in (address, *address.also)
        )
        first.also = others
        self._host = first
        self._idle: list[SyncStream] = []
        self._lock = threading.Lock()
        self._sync_links = True

    def spawn(self, argv: Sequence[str], command: str, timeout_s: float, *, stdin: bool) -> ShellProcess:
        """Start a program: see Transport. Needs shell protocol v2, which is Android 7 or newer."""
        del stdin
        mark = new_mark()
        marked = f"{export_mark(mark)}; {command}"
        stream = self._host.open(self.serial, f"shell,v2,raw:{marked}", timeout_s=timeout_s, argv=argv)
        return ShellProcess(stream, self._host, self.serial, argv, partial(self._end_marked, mark))

    def _end_marked(self, mark: str) -> None:
        """End the children of a closed program, as adbd hangs up the program alone. Never raises."""
        argv = [*(self.elevation or ("sh", "-c")), END_MARKED]
        words = mark.encode() + b"\n"
        with contextlib.suppress(DeviceError):
            service = f"shell,v2,raw:{shell_command(argv, None, None)}"
            stream = self._host.open(self.serial, service, timeout_s=_END_SECONDS)
            ending = ShellProcess(stream, self._host, self.serial, argv)
            with contextlib.closing(ending):
                communicate(ending, self.serial, argv, stdin=words, timeout_s=_END_SECONDS, max_output=ANSWER_BYTES)

    def push(self, files: Mapping[PurePosixPath, Path | bytes | Link]) -> None:
        """Write files, all over one stream: see Transport."""
        links = {path: source for path, source in files.items() if isinstance(source, Link)}
        if links and self._sync_links:
            try:
                self._push(files)
            except LinkRefusedError:
                # On some builds of Android adbd may write files in /data/local/tmp and only the shell may make links.
                self._sync_links = False
            else:
                return
        self._push({path: source for path, source in files.items() if path not in links})
        if links:
            self._link(links)

    def _push(self, files: Mapping[PurePosixPath, Path | bytes | Link]) -> None:
        if files:
            self._sync(lambda stream: stream.push(files))

    def _link(self, links: Mapping[PurePosixPath, Link]) -> None:
        folders = sorted({str(path.parent) for path in links})
        words = [word for path, link in links.items() for word in (str(link.target), str(path))]
        script = (
            'n=$1; shift; while [ "$n" -gt 0 ]; do mkdir -p -- "$1" || exit 1; shift; n=$((n - 1)); done; '
            'while [ $# -gt 1 ]; do rm -f -- "$2"; ln -s -- "$1" "$2" || exit 1; shift 2; done'
        )
        argv = ["sh", "-c", script, "sh", str(len(folders)), *folders, *words]
        done = self.run(argv, timeout_s=self.stall_s)
        if done.code != 0:
            stderr = done.stderr.decode(errors="replace")
            kind = DeviceSpaceError if says_full(stderr) else DeviceError
            raise kind(self.serial, "links cannot be made", argv=["ln", "-s"], code=done.code, stderr=stderr)

    def pull(self, files: Mapping[PurePosixPath, Path], *, max_bytes: int | Mapping[PurePosixPath, int]) -> None:
        """Read files, all over one stream: see Transport."""
        if files:
            limits = max_bytes if isinstance(max_bytes, Mapping) else dict.fromkeys(files, max_bytes)
            self._sync(lambda stream: stream.pull(files, limits))

    def close(self) -> None:
        """Close the unused streams for files."""
        with self._lock:
            idle, self._idle = self._idle, []
        for stream in idle:
            stream.close()

    def shell_argv(self, words: Sequence[str], *, terminal: bool) -> tuple[list[str], dict[str, str]]:
        """Return `adb shell`: see Transport."""
        argv = [str(suitable_adb(self._host)), "-s", self._host.target(self.serial), "shell"]
        # Without a command, adb looks for itself.
        command = [*(["-t"] if terminal else []), shell_command(words, None, None)] if words else []
        return [*argv, *command], environment_with(self._host.environment())

    def tool_environment(self) -> dict[str, str]:
        """Return what brings `adb` to the device: see Transport."""
        return {"ANDROID_SERIAL": self._host.target(self.serial), **self._host.environment()}

    def server_answers(self) -> bool:
        """Tell whether the adb server answers."""
        return self._host.answers()

    def demand(self) -> None:
        """Open a stream: see Transport. An adb server takes a device for there whose network only acknowledges."""
        self._host.open(self.serial, "shell,v2,raw:exit", timeout_s=ASK_SECONDS).close()

    def become_root(self) -> None:
        """Restart adbd as root, as `adb root` does: the device goes away and returns. Otherwise use its `su`.

        Programs of `su` get no hangup from adbd, which is another user: they have to end with their standard input.
        """
        self._network_address()
        self.elevation = ()
        answer = self._ask_for_root()
        if _RESTARTING not in answer:
            self.elevation = self._find_elevation()
            if self.elevation:
                return
            problem = f"root is needed, and adbd answers {answer!r}"
            if _PRODUCTION in answer:
                problem += f": {_NO_ROOT}, or use another device"
            raise DeviceError(self.serial, problem)
        deadline = time.monotonic() + _ROOT_SECONDS
        last = "it still runs commands as another user"
        while time.monotonic() < deadline:
            try:
                # Until it ends, the adbd of before answers as before.
                if self.user_id() == 0:
                    return
            except DeviceError as error:
                last = str(error).removeprefix(f"{self.serial}: ")
                with contextlib.suppress(InfraError):
                    self.nudge()
            time.sleep(_POLL_SECONDS)
        problem = f"adbd was asked to start anew as root, and {_ROOT_SECONDS:g} s later it is not there as root: {last}"
        raise DeviceTimeoutError(self.serial, problem)

    def root_refusal(self) -> str:
        """Return why adbd cannot be root: see Transport."""
        done = self.run(["getprop", "ro.debuggable"], timeout_s=ASK_SECONDS, max_output=ANSWER_BYTES)
        if clean_text(done.stdout) == "1" or self._find_elevation():
            return ""
        return f"root is needed, and this is a production build: {_NO_ROOT}"

    def reconnect(self) -> None:
        """Attach a device on a network, else look for the device on its cable again."""
        if address := self._network_address():
            self._host.query(f"host:connect:{address}")
        else:
            self._host.query(f"host-serial:{self._host.target(self.serial)}:reconnect")

    def restart(self) -> None:
        """Detach and attach a device on a network, else have adbd begin its connection anew."""
        if address := self._network_address():
            try:
                self._host.query(f"host:disconnect:{address}")
            finally:
                self._host.query(f"host:connect:{address}")
        else:
            self._host.open(self.serial, "reconnect", timeout_s=ASK_SECONDS, argv=["reconnect"]).close()

    def reboot(self) -> None:
        """Have adbd reboot the device."""
        self._network_address()
        self._host.open(self.serial, "reboot:", timeout_s=ASK_SECONDS, argv=["reboot"]).close()

    def nudge(self) -> None:
        """Attach a device on a network, which the server looks for every ten seconds only."""
        if address := self._network_address():
            self._host.query(f"host:connect:{address}")

    def _network_address(self) -> str:
        # Another adb may have attached it anew, at another port.
        self._attached_at = self._host.network_address(self.serial) or self._attached_at
        return self._attached_at

    def _ask_for_root(self) -> str:
        """Return what adbd answers, which may be cut short by its end."""
        answer = b""
        deadline = time.monotonic() + ASK_SECONDS
        with self._host.open(self.serial, "root:", timeout_s=ASK_SECONDS, argv=["root"]) as stream:
            try:
                while len(answer) < ANSWER_BYTES and (data := stream.recv(ANSWER_BYTES)):
                    acknowledge(stream)
                    answer += data
                    stream.settimeout(max(0.01, deadline - time.monotonic()))
            except TimeoutError:
                problem = f"adbd did not answer in {ASK_SECONDS:g} s"
                raise DeviceTimeoutError(self.serial, problem, argv=["root"]) from None
            except OSError:
                # adbd's end may arrive as a reset.
                pass
        return clean_text(answer) or "nothing"

    def _find_elevation(self) -> tuple[str, ...]:
        """Return what of `_ELEVATIONS` is root on this device; empty where nothing is. It may ask who looks at it."""
        for words in _ELEVATIONS:
            done = self.run([*words, "id -u"], timeout_s=ASK_SECONDS, max_output=ANSWER_BYTES)
            if done.code == 0 and clean_text(done.stdout) == "0":
                return words
        return ()

    def _sync(self, transfer: Callable[[SyncStream], None]) -> None:
        with self._lock:
            stream = self._idle.pop() if self._idle else None
        if stream is not None:
            # The stream may have died with the server or the device; both transfers can begin again.
            with contextlib.suppress(HungUpError):
                self._transfer(stream, transfer)
                return
        opened = self._host.open(self.serial, "sync:", timeout_s=self.stall_s)
        try:
            self._transfer(SyncStream(opened, self.serial, self.stall_s), transfer)
        except HungUpError as error:
            raise self._host.classify(self.serial, str(error).removeprefix(f"{self.serial}: ")) from None

    def _transfer(self, stream: SyncStream, transfer: Callable[[SyncStream], None]) -> None:
        try:
            transfer(stream)
        except BaseException:
            # Answers to earlier requests may still arrive.
            stream.close()
            raise
        with self._lock:
            self._idle.append(stream)

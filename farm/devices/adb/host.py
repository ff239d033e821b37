"""Connections to an adb server, by adbutils, without its habit of starting a server that nobody asked for."""

from __future__ import annotations

import re
import socket
from typing import TYPE_CHECKING, NamedTuple, TypeVar, cast

import adbutils
from adbutils.errors import AdbConnectionError, AdbError, AdbTimeout

from farm.devices.adb.names import VIRTUAL_PREFIX, adb_target, network_address
from farm.devices.device import LOOPBACK
from farm.devices.text import clean_text
from farm.errors import AdbServerError, DeviceError, DeviceGoneError, DeviceTimeoutError, InfraError
from farm.system.ids import NAME

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# A server on this machine answers at once, unless the machine is very busy.
SERVER_SECONDS = 10.0
# The length of a request to the server is four hexadecimal digits.
REQUEST_BYTES = 0xFFFF
_STATE_SECONDS = 5.0
# More are not attached to one machine; a server that lists more is not believed.
_MOST_DEVICES = 256

# What an adb server answers for a device that is not, or no more, behind it. Source: transport.cpp of AOSP's
# packages/modules/adb.
_GONE = re.compile(r"not found|no devices|device offline|still connecting|device detached|transport has been removed")

# Linux alone has it; elsewhere an option that does no harm.
_QUICKACK = getattr(socket, "TCP_QUICKACK", socket.TCP_NODELAY)

_Answer = TypeVar("_Answer")


def acknowledge(stream: socket.socket) -> None:
    """Acknowledge what was read from an adb server at once.

    It holds a second small write back until the first is acknowledged, which Linux puts off for 40 ms. Linux forgets
    that it was asked not to, so this is for after every read.
    """
    stream.setsockopt(socket.IPPROTO_TCP, _QUICKACK, 1)


class Attached(NamedTuple):
    """A device that an adb server knows."""

    serial: str
    """What farm calls it: see adb_target."""
    state: str
    """adb's word: `device` for one that is ready."""
    adb_name: str
    """What the server calls it: `HOST:PORT` for one that `adb connect` attached, else its serial."""

    @property
    def network_address(self) -> str:
        """The `HOST:PORT` that it was attached at; empty for one on a cable."""
        return network_address(self.adb_name)


class _HungUpError(AdbError):  # type: ignore[misc]
    """The server ended the connection where an answer was due."""


class _Connection(adbutils.AdbConnection):  # type: ignore[misc]
    def _safe_connect(self) -> socket.socket:
        # adbutils would run `adb start-server` here, which starts one on port 5037 whatever port is wanted.
        connected = cast("socket.socket", self._create_socket())
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connected

    def send_command(self, cmd: str) -> None:
        data = cmd.encode("utf-8", errors="surrogateescape")
        if len(data) > REQUEST_BYTES:
            raise AdbError(f"the request has {len(data)} bytes, adb takes at most {REQUEST_BYTES}")
        # adbutils calls send, which may send a part.
        self.conn.sendall(b"%04x%s" % (len(data), data))

    def read(self, n: int) -> bytes:
        data = cast("bytes", super().read(n))
        if len(data) < n:
            raise _HungUpError("it hung up")
        return data

    def close(self) -> None:
        # adbutils sleeps here.
        if not self.closed:
            self.conn.close()


class _Client(adbutils.AdbClient):  # type: ignore[misc]
    _version = 0

    def make_connection(self, timeout: float | None = None) -> _Connection:
        connection = _Connection(self.host, self.port)
        connection.conn.settimeout(timeout or SERVER_SECONDS)
        return connection

    def server_version(self) -> int:
        # Asked by adbutils before every stream.
        if not self._version:
            self._version = int(super().server_version())
        return self._version


class AdbHost:
    """One adb server, by the port and the host that it listens on."""

    def __init__(self, port: int, host: str = LOOPBACK) -> None:
        self.port, self.host = port, host
        self._client = _Client(host=host, port=port)

    @property
    def place(self) -> str:
        """Where the server listens, for people."""
        return f"port {self.port}" if self.host == LOOPBACK else f"{self.host}:{self.port}"

    def query(self, request: str, *, timeout_s: float = SERVER_SECONDS) -> str:
        """Return the server's answer to a `host:` request. Raises InfraError when it fails or does not answer."""

        def ask() -> str:
            with self._client.make_connection(timeout_s) as connection:
                connection.send_command(request)
                connection.check_okay()
                return cast("str", connection.read_string_block())

        return self._answer(request, timeout_s, ask)

    def attached(self) -> list[Attached]:
        """Return every device that the server knows, ready or not. Raises InfraError."""
        return parse_listing(self.query("host:devices-l"))

    def network_address(self, serial: str) -> str:
        """Return the `HOST:PORT` of a device that was attached by `adb connect`, offline or not; else nothing.

        Raises InfraError.
        """
        return next((one.network_address for one in self.attached() if one.serial == serial), "")

    def wait_for(self, address: str, *, timeout_s: float = SERVER_SECONDS) -> None:
        """Return when the device that adb calls `address` is in state `device`. Raises InfraError in its absence."""
        request = f"wait for {address}"
        self._answer(request, timeout_s, lambda: self._client.wait_for(address, timeout=timeout_s))

    def _answer(self, request: str, timeout_s: float, ask: Callable[[], _Answer]) -> _Answer:
        try:
            return ask()
        except (AdbTimeout, TimeoutError):
            problem = f"the adb server on {self.place} did not answer {request!r} in {timeout_s:g} s"
            raise InfraError(problem) from None
        except AdbConnectionError:
            raise InfraError(self._nobody()) from None
        except (AdbError, OSError, ValueError) as error:
            raise InfraError(f"adb server on {self.place}: {request}: {clean_text(str(error))}") from None

    def open(self, serial: str, service: str, *, timeout_s: float, argv: Sequence[str] = ()) -> socket.socket:
        """Return a stream to a service of the device `serial`, to be closed by the caller.

        Raises DeviceError, of the kind that Transport describes, when server or device refuse.
        """
        device = adbutils.AdbDevice(self._client, serial=adb_target(serial))
        try:
            connection = device.open_transport(timeout=timeout_s)
            connection.send_command(service)
            connection.check_okay()
        except (AdbTimeout, TimeoutError):
            problem = f"did not open a stream in {timeout_s:g} s: is it hanging?"
            raise DeviceTimeoutError(serial, problem, argv=argv) from None
        except AdbConnectionError:
            raise AdbServerError(serial, self._nobody(), argv=argv) from None
        except (_HungUpError, OSError) as error:
            raise self.blame(serial, f"adb opened no stream: {clean_text(str(error))}", argv=argv) from None
        except (AdbError, ValueError) as error:
            reason = clean_text(str(error))
            kind = DeviceGoneError if _GONE.search(reason) else DeviceError
            problem = f"adb refuses: {reason}: 'farm devices' shows the state of every device"
            raise kind(serial, problem, argv=argv) from None
        else:
            # Detached, so that adbutils' object, when it is collected, closes nothing.
            stream = socket.socket(fileno=connection.conn.detach())
            stream.settimeout(timeout_s)
            return stream

    def blame(self, serial: str, problem: str, *, argv: Sequence[str] = (), stderr: str = "") -> DeviceError:
        """Return the error for a stream that broke: of the server, of the device, or of the stream alone.

        The server is asked. When it says that the device is there, only the stream broke.
        """
        try:
            with self._client.make_connection(_STATE_SECONDS) as connection:
                connection.send_command(f"host-serial:{adb_target(serial)}:get-state")
                connection.check_okay()
                state = clean_text(cast("str", connection.read_string_block()))
        except (AdbTimeout, AdbConnectionError, _HungUpError, OSError):
            problem = f"{problem}, and the adb server on {self.place} does not answer: restart it"
            return AdbServerError(serial, problem, argv=argv, stderr=stderr)
        except (AdbError, ValueError) as error:
            state = clean_text(str(error))
        if state == "device":
            return DeviceError(serial, problem, argv=argv, stderr=stderr)
        return DeviceGoneError(serial, f"{problem}, and adb says of it: {state}", argv=argv, stderr=stderr)

    def _nobody(self) -> str:
        if self.host == LOOPBACK:
            return f"no adb server listens on {self.place}: start one with 'adb start-server'"
        return f"no adb server listens on {self.place}: start one there, or name the machine's ssh in farm.toml"


def parse_listing(listing: str) -> list[Attached]:
    """Return what the answer to `host:devices-l` lists; a virtual device's serial is its product. Pure."""
    attached = []
    for line in listing.splitlines()[:_MOST_DEVICES]:
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        # The one state of two words, followed by an explanation.
        state = "no permissions" if rest.startswith("no permissions") else clean_text(rest.split(" ")[0])
        product = next((word.removeprefix("product:") for word in rest.split() if word.startswith("product:")), "")
        is_virtual = product.startswith(VIRTUAL_PREFIX) and NAME.fullmatch(product)
        attached.append(Attached(clean_text(product if is_virtual else name), state, clean_text(name)))
    return attached

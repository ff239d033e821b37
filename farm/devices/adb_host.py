"""Connections to an adb server, by adbutils, without its habit of starting a server that nobody asked for."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, TypeVar, cast

import adbutils
from adbutils.errors import AdbConnectionError, AdbError, AdbTimeout

from farm.devices.adb_names import adb_target
from farm.devices.text import clean_text
from farm.errors import DeviceError, DeviceTimeoutError, InfraError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# A server on this machine answers at once, unless the machine is very busy.
SERVER_SECONDS = 10.0
# The length of a request to the server is four hexadecimal digits.
REQUEST_BYTES = 0xFFFF

# Linux alone has it; elsewhere an option that does no harm.
_QUICKACK = getattr(socket, "TCP_QUICKACK", socket.TCP_NODELAY)

_Answer = TypeVar("_Answer")


def acknowledge(stream: socket.socket) -> None:
    """Acknowledge what was read from an adb server at once.

    It holds a second small write back until the first is acknowledged, which Linux puts off for 40 ms. Linux forgets
    that it was asked not to, so this is for after every read.
    """
    stream.setsockopt(socket.IPPROTO_TCP, _QUICKACK, 1)


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
    """One adb server on this machine, by its port."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._client = _Client(host="127.0.0.1", port=port)

    def query(self, request: str, *, timeout_s: float = SERVER_SECONDS) -> str:
        """Return the server's answer to a `host:` request. Raises InfraError when it fails or does not answer."""

        def ask() -> str:
            with self._client.make_connection(timeout_s) as connection:
                connection.send_command(request)
                connection.check_okay()
                return cast("str", connection.read_string_block())

        return self._answer(request, timeout_s, ask)

    def wait_for(self, address: str, *, timeout_s: float = SERVER_SECONDS) -> None:
        """Return when the device that adb calls `address` is in state `device`. Raises InfraError in its absence."""
        request = f"wait for {address}"
        self._answer(request, timeout_s, lambda: self._client.wait_for(address, timeout=timeout_s))

    def _answer(self, request: str, timeout_s: float, ask: Callable[[], _Answer]) -> _Answer:
        try:
            return ask()
        except (AdbTimeout, TimeoutError):
            raise InfraError(
                f"the adb server on port {self.port} did not answer {request!r} in {timeout_s:g} s"
            ) from None
        except AdbConnectionError:
            raise InfraError(f"no adb server listens on port {self.port}: start one with 'adb start-server'") from None
        except (AdbError, OSError, ValueError) as error:
            raise InfraError(f"adb server on port {self.port}: {request}: {clean_text(str(error))}") from None

    def open(self, serial: str, service: str, *, timeout_s: float, argv: Sequence[str] = ()) -> socket.socket:
        """Return a stream to a service of the device `serial`, to be closed by the caller.

        Raises DeviceError when server or device refuse.
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
            problem = f"no adb server listens on port {self.port}: start one with 'adb start-server'"
            raise DeviceError(serial, problem, argv=argv) from None
        except (AdbError, OSError, ValueError) as error:
            reason = clean_text(str(error))
            problem = f"adb refuses: {reason}: 'farm devices' shows the state of every device"
            raise DeviceError(serial, problem, argv=argv) from None
        else:
            # Detached, so that adbutils' object, when it is collected, closes nothing.
            stream = socket.socket(fileno=connection.conn.detach())
            stream.settimeout(timeout_s)
            return stream

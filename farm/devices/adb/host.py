"""Connections to an adb server.

Only the adb program of adbutils is used: its Python starts a server if none listens, may send a part of a request,
requests the version before every stream, and needs 60 ms per process to import an HTTP client.
"""

from __future__ import annotations

import contextlib
import re
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from farm.base.config.devices import Endpoint
from farm.base.errors import AdbServerError, DeviceError, DeviceGoneError, DeviceTimeoutError, InfraError
from farm.base.forms import NAME
from farm.base.text import clean_text
from farm.devices.adb.protocol import RELAYED_PRODUCT, VIRTUAL_PREFIX, adb_target
from farm.devices.device import LOOPBACK

# A server on this machine answers at once, unless the machine is very busy.
SERVER_SECONDS = 10.0
# The length of a request to the server is four hexadecimal digits.
REQUEST_BYTES = 0xFFFF
_STATE_SECONDS = 5.0
_LISTEN_SECONDS = 1.0
# More are not attached to one machine; a server that lists more is not believed.
_MOST_DEVICES = 256

# Answers of an adb server for an absent device. Source: transport.cpp of AOSP's packages/modules/adb.
_GONE = re.compile(r"not found|no devices|device offline|still connecting|device detached|transport has been removed")

# Every state of ConnectionState in AOSP's adb.h, as `adb devices` prints it; the text before it is the name.
_STATES = "offline|bootloader|device|host|recovery|rescue|sideload|unauthorized|authorizing|connecting|detached|unknown"
_LINE = re.compile(rf"(.+) +({_STATES}|no permissions)( ?[(;].*?)?((?: [a-z_]+:\S*)*)\s*")

_HOST_PORT = re.compile(r"[\w.-]+:\d{1,5}|\[[0-9A-Fa-f:]+\]:\d{1,5}")

_Answer = TypeVar("_Answer")


class Attached(NamedTuple):
    """A device that an adb server knows."""

    serial: str
    """Serial in farm: see adb_target."""
    state: str
    """State by adb: `device` for a ready device."""
    adb_name: str
    """Name in the server's listing: `HOST:PORT` after `adb connect`, a name of mDNS, else the serial."""
    has_twin: bool = False
    """True for an entry that shares its product with others, so that only adb's name differs."""

    @property
    def target(self) -> str:
        """Name by which the server finds the device."""
        return self.adb_name if self.has_twin else adb_target(self.serial)

    @property
    def network_address(self) -> str:
        """The `HOST:PORT` that it was attached at; empty for one on a cable."""
        return self.adb_name if _HOST_PORT.fullmatch(self.adb_name) else ""


class _RefusedError(Exception):
    """Refusal of the server with its reason, or an invalid answer."""


class _NoServerError(Exception):
    """No process listens at the address of the server."""


class _ServerHungUpError(Exception):
    """The server ended the connection where an answer was due."""


class _AdbConnection:
    """Connection to an adb server. Every method raises OSError and the errors above."""

    def __init__(self, host: str, port: int, timeout_s: float) -> None:
        try:
            self.stream = socket.create_connection((host, port), timeout=timeout_s)
        except TimeoutError:
            raise
        except OSError:
            raise _NoServerError from None
        self.stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def ask(self, request: str) -> None:
        """Send a request, and return once the server has accepted it."""
        data = request.encode("utf-8", errors="surrogateescape")
        if len(data) > REQUEST_BYTES:
            raise _RefusedError(f"the request has {len(data)} bytes, adb takes at most {REQUEST_BYTES}")
        self.stream.sendall(b"%04x%s" % (len(data), data))
        self.expect_okay()

    def expect_okay(self) -> None:
        """Return once the server answers OKAY."""
        status = self._read(4)
        if status != b"OKAY":
            raise _RefusedError(self.text() if status == b"FAIL" else f"Unknown data: {status!r}")

    def text(self) -> str:
        """Return what follows its length in four hexadecimal digits."""
        try:
            size = int(self._read(4), 16)
        except ValueError as error:
            raise _RefusedError(str(error)) from None
        return self._read(size).decode("utf-8", errors="replace")

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            piece = self.stream.recv(size - len(data))
            if not piece:
                raise _ServerHungUpError("it hung up")
            data += piece
        return data

    def __enter__(self) -> _AdbConnection:
        return self

    def __exit__(self, *_: object) -> None:
        self.stream.close()


class AdbHost:
    """adb server, known by its port and host."""

    def __init__(
        self,
        port: int,
        host: str = LOOPBACK,
        *,
        named_by: str = "",
        target: str = "",
        tunnel: str = "",
    ) -> None:
        """`named_by` is the variable that names a server on another host, empty where farm.toml does.

        `tunnel` is the `[[host]]` of farm.toml whose tunnel has the port, empty for a server that listens there itself.
        `target` is the server's name of the one device that is used, empty for `adb_target`.
        """
        self.port, self.host, self._named_by, self.tunnel = port, host, named_by, tunnel
        self._target = target
        self.also: Sequence[AdbHost] = ()
        """Other addresses of that device, which `open` takes where this one is gone."""

    @property
    def place(self) -> str:
        """Address of the server for messages."""
        return f"port {self.port}" if self.host == LOOPBACK else str(Endpoint(self.host, self.port))

    def query(self, request: str, *, timeout_s: float = SERVER_SECONDS) -> str:
        """Return the server's answer to a `host:` request. Raises InfraError when it fails or does not answer."""
        return self._answer(request, timeout_s, _AdbConnection.text)

    def answers(self, timeout_s: float = SERVER_SECONDS) -> bool:
        """Return whether an adb server answers within `timeout_s`; a starting server may need that time."""
        try:
            self.query("host:version", timeout_s=timeout_s)
        except InfraError:
            return False
        return True

    def listens(self) -> bool:
        """Tell whether something listens there, without a question: a server that hangs does."""
        try:
            _AdbConnection(self.host, self.port, _LISTEN_SECONDS).stream.close()
        except _NoServerError:
            return False
        except OSError:
            pass
        return True

    def version(self) -> int:
        """Return the server's version: 41 of adb 1.0.41. A client of another one ends the server. Raises InfraError."""
        answer = self.query("host:version")
        try:
            return int(answer, 16)
        except ValueError:
            problem = f"what listens on {self.place} is no adb server: its version is {clean_text(answer, 40)!r}"
            raise InfraError(problem) from None

    def environment(self) -> dict[str, str]:
        """Return what to set for `adb`, or a program that calls it, to reach this server: see `environment_with`."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        elsewhere = {} if self.host == LOOPBACK else {"ANDROID_ADB_SERVER_ADDRESS": host}
        return {"ANDROID_ADB_SERVER_PORT": str(self.port), **elsewhere}

    def attached(self) -> list[Attached]:
        """Return every device that the server knows, ready or not. Raises InfraError."""
        return parse_listing(self.query("host:devices-l"))

    def network_address(self, serial: str) -> str:
        """Return the `HOST:PORT` of a device that was attached by `adb connect`, offline or not; else nothing.

        Raises InfraError.
        """
        target = self.target(serial)
        return next((one.network_address for one in self.attached() if target in (one.adb_name, one.target)), "")

    def target(self, serial: str) -> str:
        """Return the server's name for the device `serial`."""
        return self._target or adb_target(serial)

    def wait_for(self, address: str, *, timeout_s: float = SERVER_SECONDS) -> None:
        """Return when the device that adb calls `address` is in state `device`. Raises InfraError in its absence."""
        self._answer(f"host-serial:{address}:wait-for-any-device", timeout_s, _AdbConnection.expect_okay)

    def _answer(self, request: str, timeout_s: float, take: Callable[[_AdbConnection], _Answer]) -> _Answer:
        try:
            with _AdbConnection(self.host, self.port, timeout_s) as connection:
                connection.ask(request)
                return take(connection)
        except TimeoutError:
            problem = f"the adb server on {self.place} did not answer {request!r} in {timeout_s:g} s"
            raise InfraError(f"{problem}: {self._check()}") from None
        except _NoServerError:
            raise InfraError(self._nobody()) from None
        except _RefusedError as error:
            raise InfraError(f"adb server on {self.place}: {request}: {clean_text(str(error))}") from None
        except (_ServerHungUpError, OSError) as error:
            problem = f"adb server on {self.place}: {request}: {clean_text(str(error))}"
            raise InfraError(f"{problem}: {self._check()}") from None

    def open(self, serial: str, service: str, *, timeout_s: float, argv: Sequence[str] = ()) -> socket.socket:
        """Return a stream to a service of the device `serial`, to be closed by the caller.

        Raises DeviceError, of the kind that Transport describes, when server or device refuse.
        """
        try:
            with contextlib.ExitStack() as opened:
                connection = opened.enter_context(_AdbConnection(self.host, self.port, timeout_s))
                connection.ask(f"host:transport:{self.target(serial)}")
                connection.ask(service)
                opened.pop_all()
                return connection.stream
        except TimeoutError:
            problem = f"did not open a stream in {timeout_s:g} s"
            if isinstance(found := self.classify(serial, problem, argv=argv), AdbServerError):
                raise found from None
            raise DeviceTimeoutError(serial, f"{problem}: is it hanging?", argv=argv) from None
        except _NoServerError:
            raise AdbServerError(serial, self._nobody(), argv=argv) from None
        except (_ServerHungUpError, OSError) as error:
            raise self.classify(serial, f"adb opened no stream: {clean_text(str(error))}", argv=argv) from None
        except _RefusedError as error:
            reason = clean_text(str(error))
            if _GONE.search(reason):
                for other in self.also:
                    if other.leads_to(serial, timeout_s):
                        return other.open(serial, service, timeout_s=timeout_s, argv=argv)
            kind = DeviceGoneError if _GONE.search(reason) else DeviceError
            problem = f"adb refuses: {reason}: 'farm devices' shows the state of every device"
            raise kind(serial, problem, argv=argv) from None

    def leads_to(self, serial: str, timeout_s: float) -> bool:
        """Return whether the device at this address names `serial` as its own: an address may be another's by now."""
        try:
            with self.open(serial, "shell:getprop ro.serialno", timeout_s=timeout_s) as stream:
                answer = b""
                while len(answer) <= len(serial) and (data := stream.recv(256)):
                    answer += data
        except (DeviceError, OSError):
            return False
        return answer.strip() == serial.encode()

    def classify(self, serial: str, problem: str, *, argv: Sequence[str] = (), stderr: bytes = b"") -> DeviceError:
        """Return the error of a broken stream: of the server, of the device, or of the stream alone.

        The server is asked; if it lists the device, only the stream broke.
        """
        try:
            with _AdbConnection(self.host, self.port, _STATE_SECONDS) as connection:
                connection.ask(f"host-serial:{self.target(serial)}:get-state")
                state = clean_text(connection.text())
        except (_NoServerError, _ServerHungUpError, OSError):
            problem = f"{problem}, and the adb server on {self.place} does not answer: {self._check()}"
            return AdbServerError(serial, problem, argv=argv, stderr=stderr)
        except _RefusedError as error:
            state = clean_text(str(error))
        if state == "device":
            return DeviceError(serial, problem, argv=argv, stderr=stderr)
        return DeviceGoneError(serial, f"{problem}, and its state in adb is: {state}", argv=argv, stderr=stderr)

    def _check(self) -> str:
        """Return the next step for a server that accepts connections and does not answer."""
        if self.tunnel:
            return f"the tunnel to {self.tunnel} leads there: check that 'adb devices' works on {self.tunnel}"
        if self.host != LOOPBACK:
            return f"check that 'adb devices' works on {self.host}, and the network in between"
        forwarded = "check the tunnel and the adb server behind it; otherwise restart it"
        return f"where it is forwarded (ssh -L, a container), {forwarded} ('adb -P {self.port} kill-server')"

    def _nobody(self) -> str:
        if self.tunnel:
            ended = f"the tunnel to {self.tunnel} on {self.place} has ended"
            return f"{ended}: check the ssh of that [[host]] in farm.toml, and try again"
        if self.host == LOOPBACK:
            return f"no adb server listens on {self.place}: start one with 'adb start-server'"
        if self._named_by:
            return f"no adb server listens on {self.place}, which {self._named_by} names: start one there, or unset it"
        return f"no adb server listens on {self.place}: start one there, or name the machine's ssh in farm.toml"


def parse_listing(listing: str) -> list[Attached]:
    """Return the entries of an answer to `host:devices-l`; a virtual device's serial is its product. Pure.

    Devices of `farm devices connect` are left out: a second user would reach the leased device by that name.
    """
    attached = [one for one, product in _listed(listing) if product != RELAYED_PRODUCT]
    count = Counter(one.serial for one in attached)
    return [one._replace(has_twin=count[one.serial] > 1) for one in attached]


def is_relayed(listing: str, adb_name: str) -> bool:
    """Return whether `farm devices connect` attached the device that the server calls `adb_name`. Pure."""
    return any(one.adb_name == adb_name and product == RELAYED_PRODUCT for one, product in _listed(listing))


def _listed(listing: str) -> Iterator[tuple[Attached, str]]:
    """Yield every line as a device and its product."""
    for line in listing.splitlines()[:_MOST_DEVICES]:
        found = _LINE.fullmatch(line)
        # A state of a newer adb follows the first blank, as in every line without a blank in its name.
        name, _, rest = line.partition(" ") if found is None else (found[1].rstrip(), "", found[4])
        rest = rest.strip()
        state = found[2] if found is not None else clean_text(rest.split(" ")[0])
        product = next((word.removeprefix("product:") for word in rest.split() if word.startswith("product:")), "")
        is_virtual = product.startswith(VIRTUAL_PREFIX) and NAME.fullmatch(product)
        serial, there = clean_text(product if is_virtual else name), clean_text(name)
        yield Attached(serial, state, there), product

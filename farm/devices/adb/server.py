"""adb servers: farm's private server for virtual and network devices, and the user's ordinary server."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import re
import shutil
import socket
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from farm.base.config.devices import Endpoint, is_ssh_host, split_address
from farm.base.errors import InfraError, MissingToolError, UsageError
from farm.base.processes import ask_program
from farm.base.reaper import MARK
from farm.base.text import clean_text
from farm.devices.adb.host import AdbHost
from farm.devices.adb.protocol import environment_with
from farm.devices.device import LOOPBACK

if TYPE_CHECKING:
    from collections.abc import Mapping

    from farm.base.processes import Child, Supervisor

ORDINARY_PORT = 5037
WHOLE_OUTPUT = 41
"""First version (1.0.41) of a server that passes on large outputs completely."""

# Wait for a server's first answer, which takes a tenth of a second without USB devices.
_START_SECONDS = 20.0
# Wait for a server that another process has started at the same moment.
_RACE_SECONDS = 5.0
_ASK_SECONDS = 5.0
_BACKLOG = 64

# As adb 36 reads $ANDROID_ADB_SERVER_PORT: a blank before it, and hexadecimal digits, are accepted.
_PORT = re.compile(r"\s*\+?(0[xX][0-9A-Fa-f]+|[0-9]+)", re.ASCII)
_SOCKET_FORMS = "expected tcp:PORT or tcp:HOST:PORT"

_VERSION = re.compile(r"Android Debug Bridge version 1\.0\.(\d{1,6})")

# Variables of adb 36 (main.cpp, client/main.cpp) for farm's own server: no mDNS, no phones on USB, no scan for
# emulators, and no `kill-server`, which adb programs of another version send by themselves.
_QUIET = {"ADB_MDNS": "0", "ADB_USB": "0", "ADB_EMU": "0", "ADB_REJECT_KILL_SERVER": "1"}


class AdbServer(AdbHost):
    """An adb server on this or another machine, and `adb`, a client program of its version."""

    def __init__(
        self,
        port: int,
        adb: Path,
        state: Path | None = None,
        child: Child | None = None,
        *,
        host: str = LOOPBACK,
        named_by: str = "",
    ) -> None:
        super().__init__(port, host, named_by=named_by)
        self.adb, self._state, self._child = adb, state, child
        self._attached: dict[str, None] = {}

    def environment(self) -> dict[str, str]:
        """Return the environment variables by which `adb`, or a program that calls it, reaches this server."""
        return {**super().environment(), **({"HOME": str(self._state)} if self._state is not None else {})}

    def connect(self, host: str, port: int, *, timeout_s: float = 10.0) -> str:
        """Attach the adb daemon at `host`:`port`, wait until it is ready and return its serial.

        Raises InfraError when it cannot be attached.
        """
        address = str(Endpoint(host, port))
        answer = self.query(f"host:connect:{address}", timeout_s=timeout_s)
        if not answer.startswith(("connected to ", "already connected to ")):
            raise InfraError(f"adb cannot attach {address}: {clean_text(answer)}")
        self.wait_for(address, timeout_s=timeout_s)
        self._attached[address] = None
        return address

    def revive(self, supervisor: Supervisor) -> bool:
        """Start farm's own server again on its port after its death, and attach its devices again.

        Return whether it had died. Raises InfraError if it does not start.
        """
        if self._child is None or self._state is None or self._child.process.poll() is None:
            return False
        again = start_adb_server(supervisor, self._state, port=self.port)
        self._child = again._child  # noqa: SLF001 - of the same class
        for address in self._attached:
            with contextlib.suppress(InfraError):
                # The device process of an unreachable device recovers it later.
                self.query(f"host:connect:{address}")
        return True

    def stop(self) -> None:
        """End the server if it is farm's own."""
        if self._child is not None:
            self._child.terminate()


def find_adb() -> Path:
    """Return the adb that adbutils brings, else the one on PATH. Raises MissingToolError. Does not import adbutils."""
    spec = importlib.util.find_spec("adbutils")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / "binaries" / "adb"
        if os.access(path, os.X_OK):
            return path
    if found := shutil.which("adb"):
        return Path(found)
    raise MissingToolError(
        "there is no adb on PATH, nor does adbutils bring one for this machine: install Android's platform-tools"
    )


def start_adb_server(supervisor: Supervisor, state: Path, *, port: int = 0) -> AdbServer:
    """Start a private server on a loopback port, 0 for a free one, and wait until it answers.

    The folder `state` is the server's home, with its keys and its log. Raises InfraError, with the log, for a server
    that does not start.
    """
    adb = find_adb()
    state.mkdir(parents=True, exist_ok=True, mode=0o700)
    state = state.resolve()
    # The server inherits a listening socket, so that no other process can take the port before it starts.
    try:
        listener = socket.create_server((LOOPBACK, port), backlog=_BACKLOG)
    except OSError as error:
        raise InfraError(f"adb server cannot start on port {port}: {error.strerror}") from None
    with listener:
        port = int(listener.getsockname()[1])
        child = supervisor.spawn(
            [adb, "-L", f"acceptfd:{listener.fileno()}", "server", "nodaemon"],
            name="adb server",
            env={"PATH": os.defpath, "HOME": str(state), "TMPDIR": str(state), **_QUIET},
            cwd=state,
            stderr=state / "adb-server.log",
            pass_fds=(listener.fileno(),),
        )
    server = AdbServer(port, adb, state, child)
    if not server.answers(_START_SECONDS):
        why = child.why_silent(_START_SECONDS)
        child.terminate()
        raise InfraError(f"adb server did not start: {why}")
    return server


class ServerPlace(NamedTuple):
    """Address of the user's own adb server, by adb's environment variables."""

    host: str
    port: int
    startable: bool
    """True if adb itself would start a server there: only for the name `localhost`, not for 127.0.0.1."""
    variable: str = ""
    """Environment variable that names the host; empty without one."""


def server_place(environment: Mapping[str, str]) -> ServerPlace:
    """Return the address of adb's server by `environment`. Pure. Raises UsageError for values without support in farm.

    ADB_SERVER_SOCKET wins over ANDROID_ADB_SERVER_ADDRESS and ANDROID_ADB_SERVER_PORT, as in adb's client/main.cpp.
    """
    name, text = "ADB_SERVER_SOCKET", environment.get("ADB_SERVER_SOCKET")
    if text is not None:
        kind, _, rest = text.partition(":")
        if kind != "tcp":
            problem = f"{name} is {clean_text(text)!r}, and farm reaches adb servers over TCP alone: {_SOCKET_FORMS}"
            raise UsageError(problem)
        if rest.isdecimal():
            return ServerPlace(LOOPBACK, _port(name, rest), startable=True)
        host, number = split_address(rest)
        if not is_ssh_host(host):
            raise UsageError(f"{name} is {clean_text(text)!r}, {_SOCKET_FORMS}, an IPv6 address in brackets")
        return _place(name, host, _port(name, number) if number is not None else ORDINARY_PORT)
    port = _port("ANDROID_ADB_SERVER_PORT", environment.get("ANDROID_ADB_SERVER_PORT") or str(ORDINARY_PORT))
    name, text = "ANDROID_ADB_SERVER_ADDRESS", environment.get("ANDROID_ADB_SERVER_ADDRESS")
    if text is None:
        return ServerPlace(LOOPBACK, port, startable=True)
    host, unwanted = split_address(text)
    if unwanted is not None or not is_ssh_host(host):
        problem = f"{name} is {clean_text(text)!r}, expected a host, an IPv6 address in brackets"
        raise UsageError(f"{problem}: correct it, or unset it")
    return _place(name, host, port)


def _place(variable: str, host: str, port: int) -> ServerPlace:
    if host == "localhost":
        return ServerPlace(LOOPBACK, port, startable=True)
    return ServerPlace(host, port, startable=False, variable=variable)


def _port(variable: str, text: str) -> int:
    found = _PORT.fullmatch(text)
    port = int(found[1], 16 if found[1][:2] in ("0x", "0X") else 10) if found and len(text) <= 16 else 0
    if not 0 < port < 65536:
        raise UsageError(f"{variable} is {clean_text(text)!r}, expected a port number from 1 to 65535")
    return port


def ordinary_server(*, start: bool = False) -> AdbServer:
    """Return the user's own server, which sees phones on USB, at the address of adb's variables, else port 5037.

    With `start`, a missing server is started in the cases in which `adb devices` starts one; it continues after farm.
    Raises UsageError for values of the variables that farm does not support.
    """
    place = server_place(os.environ)
    # Prefer the user's own adb: a client of another version makes the server restart.
    server = AdbServer(place.port, _candidates()[0], host=place.host, named_by=place.variable)
    # A listening server without an answer is left alone, as its owner is unknown.
    if start and place.startable and not server.listens():
        _start(server)
    return server


def _start(server: AdbServer) -> None:
    command = [str(server.adb), "-P", str(server.port), "start-server"]
    # Without the mark, farm.base.reaper does not end the server together with this command.
    env = environment_with(AdbHost.environment(server))
    env.pop(MARK, None)
    try:
        subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, env=env, timeout=_START_SECONDS, check=True
        )
    except (subprocess.SubprocessError, OSError) as error:
        # Another process may have started the server at the same moment: only one gets the port.
        if not server.answers(_RACE_SECONDS):
            raise InfraError(f"{' '.join(command)} failed: {error}") from None


def suitable_adb(server: AdbHost) -> Path:
    """Return an adb program of the version of `server`, the user's own first. Raises InfraError if none exists.

    A client of another version ends the server, and with it all work of other users behind it.
    """
    wanted = server.version()
    known = {adb: _version_of(adb) for adb in _candidates()}
    for adb, version in known.items():
        if version == wanted:
            return adb
    there = " and ".join(f"{adb} version {version or 'unknown'}" for adb, version in known.items())
    raise InfraError(
        f"the adb server on {server.place} is version {wanted}, and {there}: a client of another version would end the "
        "server and the work of all its users: put the adb that started it first on PATH, or, when the server is idle, "
        "end it with 'adb kill-server' and try again"
    )


def outdated(server: AdbHost) -> str:
    """Return the problem of a `server` that is too old, with the next step; "" for a newer one. Raises InfraError."""
    if (version := server.version()) >= WHOLE_OUTPUT:
        return ""
    return (
        f"the adb server on {server.place} is version {version}, which cuts large outputs of devices: when the "
        f"server is idle, end it with 'adb kill-server' and start version {WHOLE_OUTPUT} or newer (platform-tools 29)"
    )


@functools.cache
def _version_of(adb: Path) -> int:
    """Return the version of a client, 0 for a program without one."""
    try:
        found = _VERSION.search(ask_program([adb, "version"], _ASK_SECONDS).output)
    except (subprocess.SubprocessError, OSError):
        return 0
    return int(found[1]) if found else 0


def _candidates() -> list[Path]:
    """Return the adb programs of this machine, the user's own first. Raises MissingToolError where there is none."""
    on_path = shutil.which("adb")
    return list(dict.fromkeys([Path(on_path), find_adb()] if on_path else [find_adb()]))

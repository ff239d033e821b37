"""Logging in: the connections to every machine on the way to a device and to itself, with known host keys."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from pathlib import Path
from typing import Any

import paramiko

from farm.base.config.devices import SSH_PORT
from farm.base.errors import DeviceError, DeviceGoneError
from farm.devices.device import LOOPBACK, SshAddress
from farm.devices.text import clean_text

OPEN_SECONDS = 15.0
"""For a stream."""

# A small board that is busy takes seconds for its part of the key exchange.
_AUTH_SECONDS = 20.0
# A connection on which nothing was acknowledged for so long is dead; keep-alives see to it that something is sent.
_DEAD_MS = 30_000

# The kernel sees acknowledgements alone, and a forward on the way sends them itself, as the user-mode network of an
# emulated board or `ssh -L`. So the other end gets requests and has to answer.
ASK_SECONDS = 10.0
"""Between two questions, while nothing comes."""
DEAD_SECONDS = 30.0
"""A connection over which nothing came for so long is dead."""

_LOOKS = 10
# RFC 4254, 4: a server without this name answers with a refusal, which is an answer.
_REQUEST = 80
_NAME = "keepalive@openssh.com"

_SYSTEM_HOSTS = Path("/etc/ssh/ssh_known_hosts")

_DROPBEAR = "SSH-2.0-dropbear"


class HeardStream:
    """A stream to an SSH server, as paramiko takes it in the place of a socket, that notes when something came."""

    def __init__(self, stream: socket.socket | paramiko.Channel) -> None:
        self._stream = stream
        self.heard_s = time.monotonic()

    def recv(self, size: int) -> bytes:
        """Return what came, as a socket does."""
        data = self._stream.recv(size)
        self.heard_s = time.monotonic()
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def keep_alive(transport: paramiko.Transport, stream: HeardStream) -> None:
    """Ask the other end now and then as long as nothing comes, and end the connection where it does not answer."""
    message = paramiko.Message()
    message.add_byte(bytes([_REQUEST]))
    message.add_string(_NAME)
    # An answer is wanted: paramiko's own keep-alive wants none, or waits for it without end.
    message.add_boolean(True)
    # paramiko's reading thread sends the request, so that no blocked writer delays it.
    send = transport._send_user_message  # type: ignore[attr-defined] # noqa: SLF001
    transport.packetizer.set_keepalive(ASK_SECONDS, lambda: send(message))
    stream.heard_s = time.monotonic()
    threading.Thread(target=_watch, args=(transport, stream), daemon=True, name="ssh alive").start()


def _watch(transport: paramiko.Transport, stream: HeardStream) -> None:
    while transport.is_active():
        if time.monotonic() > stream.heard_s + DEAD_SECONDS:
            with contextlib.suppress(paramiko.SSHException, EOFError, OSError):
                transport.close()
            return
        time.sleep(min(1.0, DEAD_SECONDS / _LOOKS))


class Connection:
    """Login on the machine at `address` through its jump hosts. Errors carry `serial`."""

    def __init__(self, serial: str, address: SshAddress, timeout_s: float) -> None:
        """`timeout_s` is for reaching each machine. Raises DeviceError."""
        self._serial, self._address = serial, address
        self._clients: list[paramiko.SSHClient] = []
        try:
            for hop in (*address.jumps, address):
                stream = self._pass(self._clients[-1], hop, timeout_s) if self._clients else self._reach(hop, timeout_s)
                self._clients.append(self._log_in(hop, stream, timeout_s))
            transport = self._clients[-1].get_transport()
            if transport is None:
                raise DeviceGoneError(serial, "the connection ended as soon as it was made")
        except BaseException:
            self.close()
            raise
        self.transport = transport
        self.is_single = takes_one_program(transport.remote_version)
        """True if the connection carries one program at a time."""

    @property
    def is_active(self) -> bool:
        """True while this machine knows of no end of the connection."""
        return self.transport.is_active()

    def close(self) -> None:
        """Hang up, with everything that runs over it."""
        for client in reversed(self._clients):
            client.close()

    def _at(self, hop: SshAddress, problem: str) -> str:
        """Return a problem with the machine on the way that has it."""
        return problem if hop is self._address else f"on the way, at {hop.place}: {problem}"

    def _log_in(
        self, hop: SshAddress, stream: socket.socket | paramiko.Channel, timeout_s: float
    ) -> paramiko.SSHClient:
        client, heard = paramiko.SSHClient(), HeardStream(stream)
        client.set_missing_host_key_policy(paramiko.RejectPolicy())
        # Known hosts have a port only beside a name, never beside an alias.
        name, port = (hop.host_key_alias, SSH_PORT) if hop.host_key_alias else (hop.host, hop.port)
        try:
            if hop.key_file and not Path(hop.key_file).is_file():
                problem = f"there is no key file {hop.key_file}: see key_file in farm.toml"
                raise DeviceError(self._serial, self._at(hop, problem))
            for file in _known_hosts(hop):
                with contextlib.suppress(FileNotFoundError):
                    client.load_system_host_keys(str(file))
            client.connect(
                name,
                port,
                hop.user,
                sock=heard,  # type: ignore[arg-type] # nor that paramiko takes whatever has a socket's methods
                key_filename=_keys(hop) or None,  # type: ignore[arg-type] # its stubs know of one alone
                look_for_keys=not hop.key_file and not hop.identity_files,
                timeout=_AUTH_SECONDS,
                # A forward accepts connections for an absent machine and sends no data.
                banner_timeout=2 * timeout_s,
                auth_timeout=_AUTH_SECONDS,
                channel_timeout=OPEN_SECONDS,
            )
            transport = client.get_transport()
            if transport is not None:
                keep_alive(transport, heard)
        except BaseException as error:
            client.close()
            stream.close()
            if not isinstance(error, (paramiko.SSHException, EOFError, OSError)):
                raise
            raise self._refusal(hop, error) from None
        return client

    def _reach(self, hop: SshAddress, timeout_s: float) -> socket.socket:
        host, port = hop.host, hop.port
        try:
            stream = socket.create_connection((host, port), timeout=timeout_s)
        except TimeoutError:
            problem = f"{host} cannot be reached: no answer in {timeout_s:g} s"
            raise DeviceGoneError(self._serial, self._at(hop, problem)) from None
        except OSError as error:
            reason = error.strerror or str(error)
            problem = f"no SSH server can be reached at {host}, port {port}: {reason}"
            raise DeviceGoneError(self._serial, self._at(hop, problem)) from None
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _DEAD_MS)
        return stream

    def _pass(self, before: paramiko.SSHClient, hop: SshAddress, timeout_s: float) -> paramiko.Channel:
        """Return a stream to `hop` through the machine before it."""
        transport = before.get_transport()
        try:
            if transport is None:
                raise EOFError
            return transport.open_channel("direct-tcpip", (hop.host, hop.port), (LOOPBACK, 0), timeout=timeout_s)
        except (paramiko.SSHException, EOFError, OSError) as error:
            reason = clean_text(error.text if isinstance(error, paramiko.ChannelException) else str(error))
            problem = f"no SSH server can be reached at {hop.host}, port {hop.port}, from the machine before it"
            raise DeviceGoneError(self._serial, f"{problem}: {reason or 'it hung up'}") from None

    def _refusal(self, hop: SshAddress, error: Exception) -> DeviceError:
        host = hop.host_key_alias or hop.host
        name = host if hop.port == SSH_PORT or hop.host_key_alias else f"[{host}]:{hop.port}"
        reason = clean_text(str(error)) or "it hung up"
        if problem := _remedy(hop, name, error, reason):
            return DeviceError(self._serial, self._at(hop, problem))
        return DeviceGoneError(self._serial, self._at(hop, f"no SSH connection to {name}: {reason}"))


def takes_one_program(banner: str) -> bool:
    """Return whether the server of `banner` supports one program per connection alone. Pure.

    dropbear closes a stream without a running program when a program of another stream ends, and closes the connection
    after more data on that stream ("Unknown channel"): https://github.com/mkj/dropbear/pull/326. Tried: 2022.83, and
    2026.94, which still does so with concurrent programs and files.
    """
    return banner.startswith(_DROPBEAR)


def _remedy(hop: SshAddress, name: str, error: Exception, reason: str) -> str:
    """Return the reason of a refused login, with the next step; "" for another problem."""
    file = _known_hosts(hop)[0]
    if isinstance(error, paramiko.BadHostKeyException):
        return (
            f"its host key differs from the key in {file} for {name}: another machine may intercept the "
            f"connection. Only if it was set up anew: ssh-keygen -R '{name}' -f {file}, and add its new key"
        )
    if isinstance(error, paramiko.PasswordRequiredException):
        return f"the key {hop.key_file or 'of this user'} has a passphrase: unlock it with ssh-add"
    # paramiko has no type for an account without any key.
    if isinstance(error, paramiko.AuthenticationException) or "No authentication methods" in reason:
        tried = f"the key {hop.key_file}" if hop.key_file else "the keys of this user and its agent"
        return f"it does not let {hop.user} in with {tried}: add the public key to its authorized_keys"
    if "not found in known_hosts" in reason:
        return (
            f"its host key is not in {file}: run 'ssh-keyscan -p {hop.port} {hop.host}', compare the "
            "fingerprint ('... | ssh-keygen -lf -') with the one on the machine, and add the line"
        )
    return ""


def _keys(hop: SshAddress) -> list[str]:
    """Return the private keys to try; of those in `~/.ssh/config` many need not be there."""
    return [hop.key_file] if hop.key_file else [one for one in hop.identity_files if Path(one).is_file()]


def _known_hosts(hop: SshAddress) -> list[Path]:
    if hop.known_hosts:
        return [Path(hop.known_hosts)]
    return [Path(one) for one in hop.known_hosts_files] or [Path.home() / ".ssh/known_hosts", _SYSTEM_HOSTS]

"""One SSH connection to a machine, made when it is needed and made anew after it died."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import paramiko

from farm.config.devices import SSH_PORT
from farm.devices.device import LOOPBACK
from farm.devices.text import clean_text
from farm.errors import DeviceError, DeviceGoneError, DeviceTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from farm.devices.device import SshAddress

_CONNECT_SECONDS = 10.0
# A small board that is busy takes seconds for its part of the key exchange.
_AUTH_SECONDS = 20.0
_OPEN_SECONDS = 15.0
_KEEPALIVE_SECONDS = 10
# A connection on which nothing was acknowledged for so long is dead; keep-alives see to it that something is sent.
_DEAD_MS = 30_000
_FULL_SECONDS = 0.05
# To find out whether a device is still there.
_AGAIN_SECONDS = 5.0

# OpenSSH allows 10 (MaxSessions); what is beyond ours ends programs.
SESSIONS = 8

_SYSTEM_HOSTS = Path("/etc/ssh/ssh_known_hosts")

# What goes wrong is raised as an error of ours; without a handler, Python prints paramiko's tracebacks.
logging.getLogger("paramiko").addHandler(logging.NullHandler())


def end(channel: paramiko.Channel) -> None:
    """Close a stream; where its connection has broken, nothing is left to close."""
    with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
        channel.close()


class ForwardRefusedError(DeviceError):
    """The machine is there, and nothing listens where its sshd was to connect to, or it may not."""


class SshLink:
    """The connection to `address`, for any number of threads. `serial` is whom errors are about."""

    def __init__(self, serial: str, address: SshAddress) -> None:
        self._serial, self._address = serial, address
        self._clients: list[paramiko.SSHClient] = []
        """To the machines on the way, and to this one."""
        self._lock = threading.RLock()
        self._sessions = threading.BoundedSemaphore(SESSIONS)
        self._in_use = 0
        self._closing = False

    def take(self, timeout_s: float) -> None:
        """Wait until one more program may run over this connection. Raises DeviceTimeoutError."""
        if not self._sessions.acquire(timeout=timeout_s):
            problem = f"{SESSIONS} programs run over its connection already, and none ended in {timeout_s:g} s"
            raise DeviceTimeoutError(self._serial, problem)
        with self._lock:
            self._in_use += 1
            self._closing = False

    def give_back(self) -> None:
        """Say that a program is over."""
        with self._lock:
            self._in_use -= 1
            if self._closing and not self._in_use:
                self._drop()
        self._sessions.release()

    def execute(
        self,
        command: bytes,
        *,
        timeout_s: float = _OPEN_SECONDS,
        connect_s: float = _CONNECT_SECONDS,
        argv: Sequence[str] = (),
    ) -> paramiko.Channel:
        """Have the login shell there run `command` and return its streams; it is started once. Raises DeviceError.

        `connect_s` is for reaching the machine, when the connection has to be made.
        """
        return self._begin(
            lambda channel: channel.exec_command(command), "runs no programs", timeout_s, connect_s, argv
        )

    def sftp(self, *, timeout_s: float = _OPEN_SECONDS) -> paramiko.Channel:
        """Return a stream to the machine's SFTP server. Raises DeviceError."""
        return self._begin(
            lambda channel: channel.invoke_subsystem("sftp"),
            "has no SFTP: install openssh-sftp-server there, and name it in sshd_config as 'Subsystem sftp'",
            timeout_s,
            _CONNECT_SECONDS,
            ("sftp",),
        )

    def forward(self, host: str, port: int, *, timeout_s: float = _OPEN_SECONDS) -> paramiko.Channel:
        """Return a stream to `host`:`port` as the machine sees it.

        Raises ForwardRefusedError when sshd is there and does not connect, DeviceError otherwise.
        """
        argv = (f"connect to {host}:{port}",)

        def connect(transport: paramiko.Transport) -> paramiko.Channel:
            try:
                return transport.open_channel("direct-tcpip", (host, port), (LOOPBACK, 0), timeout=timeout_s)
            except paramiko.ChannelException as error:
                problem = f"sshd does not connect: {clean_text(error.text)}"
                raise ForwardRefusedError(self._serial, problem, argv=argv) from None

        return self._open(connect, timeout_s, _CONNECT_SECONDS, argv)

    def blame(self, problem: str, *, argv: Sequence[str] = (), stderr: str = "") -> DeviceError:
        """Return the error for a stream that broke: DeviceGoneError when the machine does not answer any more."""
        try:
            self._doubt()
            self._connected(_AGAIN_SECONDS)
        except DeviceError as error:
            why = str(error).removeprefix(f"{self._serial}: ")
            return DeviceGoneError(self._serial, f"{problem}, and now: {why}", argv=argv, stderr=stderr)
        return DeviceError(self._serial, problem, argv=argv, stderr=stderr)

    def _doubt(self) -> None:
        """Drop a connection on which nothing is answered, where the kernel sees only the first machine on the way."""
        with self._lock:
            transport = self._clients[-1].get_transport() if self._clients and self._address.jumps else None
            if transport is None or not transport.is_active():
                return
            try:
                end(transport.open_session(timeout=_AGAIN_SECONDS))
            except paramiko.ChannelException:
                # That is an answer.
                return
            except (paramiko.SSHException, EOFError, OSError):
                self._drop()

    def close(self) -> None:
        """Hang up, at once or when the last program is over. May be called again, and so may every other method."""
        with self._lock:
            if self._in_use:
                self._closing = True
            else:
                self._drop()

    def _begin(
        self,
        begin: Callable[[paramiko.Channel], None],
        refused: str,
        timeout_s: float,
        connect_s: float,
        argv: Sequence[str],
    ) -> paramiko.Channel:
        channel = self._open(lambda transport: transport.open_session(timeout=timeout_s), timeout_s, connect_s, argv)
        late = threading.Event()

        def give_up() -> None:
            late.set()
            end(channel)

        # The answer to the next request is waited for without end.
        timer = threading.Timer(timeout_s, give_up)
        timer.daemon = True
        timer.start()
        try:
            begin(channel)
        except (paramiko.SSHException, EOFError, OSError) as error:
            end(channel)
            transport = channel.get_transport()
            if transport.is_active() and not late.is_set():
                raise DeviceError(self._serial, f"its SSH server {refused}", argv=argv) from None
            raise self._unopened(transport, error, timeout_s, argv) from None
        except BaseException:
            end(channel)
            raise
        finally:
            timer.cancel()
        return channel

    def _open(
        self,
        opening: Callable[[paramiko.Transport], paramiko.Channel],
        timeout_s: float,
        connect_s: float,
        argv: Sequence[str],
    ) -> paramiko.Channel:
        deadline = time.monotonic() + timeout_s
        again = False
        while True:
            transport, made = self._connected(connect_s)
            try:
                return opening(transport)
            except (paramiko.SSHException, EOFError, OSError) as error:
                # sshd counts a session until all of it has ended, which is after we hung up.
                if _is_refused(error):
                    if time.monotonic() >= deadline:
                        raise DeviceError(self._serial, f"sshd refuses: {clean_text(str(error))}", argv=argv) from None
                    time.sleep(_FULL_SECONDS)
                    continue
                # It may have died long ago.
                if transport.is_active() or again or made:
                    raise self._unopened(transport, error, timeout_s, argv) from None
                again = True

    def _unopened(
        self, transport: paramiko.Transport, error: Exception, timeout_s: float, argv: Sequence[str]
    ) -> DeviceError:
        reason = clean_text(str(error)) or "it ended"
        if transport.is_active():
            problem = f"opened no stream in {timeout_s:g} s ({reason}): is it hanging?"
            return DeviceTimeoutError(self._serial, problem, argv=argv)
        return self.blame(f"the connection broke: {reason}", argv=argv)

    def _connected(self, timeout_s: float) -> tuple[paramiko.Transport, bool]:
        """Return the connection, and whether it was made just now."""
        with self._lock:
            transport = self._clients[-1].get_transport() if self._clients else None
            if transport is not None and transport.is_active():
                return transport, False
            self._drop()
            self._clients = self._connect(timeout_s)
            transport = self._clients[-1].get_transport()
            if transport is None:
                raise DeviceGoneError(self._serial, "the connection ended as soon as it was made")
            return transport, True

    def _drop(self) -> None:
        clients, self._clients, self._closing = self._clients, [], False
        for client in reversed(clients):
            client.close()

    def _connect(self, timeout_s: float) -> list[paramiko.SSHClient]:
        """Return the connections to every machine on the way and to this one, each through the one before."""
        clients: list[paramiko.SSHClient] = []
        try:
            for hop in (*self._address.jumps, self._address):
                stream = self._pass(clients[-1], hop, timeout_s) if clients else self._reach(hop, timeout_s)
                clients.append(self._log_in(hop, stream))
        except BaseException:
            for client in reversed(clients):
                client.close()
            raise
        return clients

    def _at(self, hop: SshAddress, problem: str) -> str:
        """Return a problem with the machine on the way that has it."""
        return problem if hop is self._address else f"on the way, at {hop.place}: {problem}"

    def _log_in(self, hop: SshAddress, stream: socket.socket | paramiko.Channel) -> paramiko.SSHClient:
        client = paramiko.SSHClient()
        client.set_missing_host_key_policy(paramiko.RejectPolicy())
        # Known hosts have a port only beside a name, never beside an alias.
        name, port = (hop.host_key_alias, SSH_PORT) if hop.host_key_alias else (hop.host, hop.port)
        try:
            if hop.key_file and not Path(hop.key_file).is_file():
                problem = f"there is no key file {hop.key_file}: see key_file in farm.toml"
                raise DeviceError(self._serial, self._at(hop, problem))
            self._load_known_hosts(hop, client)
            client.connect(
                name,
                port,
                hop.user,
                sock=stream,
                key_filename=_keys(hop) or None,  # type: ignore[arg-type] # its stubs know of one alone
                look_for_keys=not hop.key_file and not hop.identity_files,
                timeout=_AUTH_SECONDS,
                banner_timeout=_AUTH_SECONDS,
                auth_timeout=_AUTH_SECONDS,
                channel_timeout=_OPEN_SECONDS,
            )
            transport = client.get_transport()
            if transport is not None:
                transport.set_keepalive(_KEEPALIVE_SECONDS)
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

    def _load_known_hosts(self, hop: SshAddress, client: paramiko.SSHClient) -> None:
        for file in _known_hosts(hop):
            with contextlib.suppress(FileNotFoundError):
                client.load_system_host_keys(str(file))

    def _refusal(self, hop: SshAddress, error: Exception) -> DeviceError:
        host = hop.host_key_alias or hop.host
        name = host if hop.port == SSH_PORT or hop.host_key_alias else f"[{host}]:{hop.port}"
        reason = clean_text(str(error)) or "it hung up"
        if problem := _remedy(hop, name, error, reason):
            return DeviceError(self._serial, self._at(hop, problem))
        return DeviceGoneError(self._serial, self._at(hop, f"no SSH connection to {name}: {reason}"))


def _remedy(hop: SshAddress, name: str, error: Exception, reason: str) -> str:
    """Return why a machine that answers does not let us in, and what to do; empty where it is something else."""
    file = _known_hosts(hop)[0]
    if isinstance(error, paramiko.BadHostKeyException):
        return (
            f"its host key is not the one that {file} has for {name}: somebody may be in between. Only if it was "
            f"set up anew: ssh-keygen -R '{name}' -f {file}, and add its new key"
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
            "fingerprint ('... | ssh-keygen -lf -') with what the machine itself shows, and add the line"
        )
    return ""


def _keys(hop: SshAddress) -> list[str]:
    """Return the private keys to try; of those in `~/.ssh/config` many need not be there."""
    return [hop.key_file] if hop.key_file else [one for one in hop.identity_files if Path(one).is_file()]


def _known_hosts(hop: SshAddress) -> list[Path]:
    if hop.known_hosts:
        return [Path(hop.known_hosts)]
    return [Path(one) for one in hop.known_hosts_files] or [Path.home() / ".ssh/known_hosts", _SYSTEM_HOSTS]


def _is_refused(error: Exception) -> bool:
    # Of two that are refused at the same moment, paramiko tells only one so.
    return isinstance(error, paramiko.ChannelException) or str(error) == "Unable to open channel."

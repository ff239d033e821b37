"""SSH connections to a machine over every machine on the way, with known host keys, opened again after a loss."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import paramiko
from paramiko.common import cMSG_CHANNEL_CLOSE

from farm.base.config.devices import SSH_PORT
from farm.base.errors import DeviceError, DeviceGoneError, DeviceTimeoutError
from farm.base.text import clean_text
from farm.devices.device import LOOPBACK, SshAddress

# Logging in: the connections to every machine on the way to a device and to itself, with known host keys.


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


# SSH connections to a machine, opened on demand and opened again after a loss.
#
# All programs share a connection; dropbear needs a connection for each concurrent program.


_CONNECT_SECONDS = 10.0
_FULL_SECONDS = 0.05
# To find out whether a device is still there.
_RETRY_SECONDS = 5.0
# A stream whose program has ended is closed by the server within a round trip.
_CLOSE_SECONDS = 2.0
_CLOSE_POLL_SECONDS = 0.002
# A stream that the server closed before it ran anything.
_MOST_TRIES = 3

# Concurrent programs; OpenSSH allows 10 sessions (MaxSessions), and the others end programs.
SESSIONS = 8
_ENDING = 2

# Failures are raised as errors of farm; without a handler, Python prints paramiko's tracebacks.
logging.getLogger("paramiko").addHandler(logging.NullHandler())


def end(channel: paramiko.Channel) -> None:
    """Close a stream; where its connection has broken, nothing is left to close."""
    with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
        channel.close()


class _Sender:
    """Stands in for the transport of a channel and sends nothing of the channel after its end.

    paramiko 5.1 makes a channel's messages under a lock and sends them without it, so that data, or the end of the
    data, can follow the answer to the server's close. Over such a message OpenSSH ends the whole connection, with all
    programs and tunnels in it ("data packet referred to nonexistent channel").
    """

    def __init__(self, transport: paramiko.Transport) -> None:
        self.transport = transport
        self._sending = threading.Lock()
        self._has_ended = False

    @classmethod
    def installed(cls, transport: paramiko.Transport, channel: paramiko.Channel) -> paramiko.Channel:
        """Return `channel`, which sends by a stand-in for its `transport` from now on."""
        sender = cls(transport)
        channel.transport = sender  # type: ignore[assignment]
        # The server may have closed it meanwhile.
        sender._has_ended |= channel.closed
        return channel

    def __getattr__(self, name: str) -> Any:
        return getattr(self.transport, name)

    def _send_user_message(self, message: paramiko.Message) -> None:
        is_end = message.asbytes()[:1] == cMSG_CHANNEL_CLOSE
        with self._sending:
            if is_end or not self._has_ended:
                self.transport._send_user_message(message)  # type: ignore[attr-defined]  # noqa: SLF001 - as channels do
            self._has_ended |= is_end


class ForwardRefusedError(DeviceError):
    """The machine is there, and nothing listens where its sshd was to connect to, or it may not."""


class SshLink:
    """Link to `address` for any number of threads. Errors carry `serial`."""

    def __init__(self, serial: str, address: SshAddress) -> None:
        self.address = address
        self._serial = serial
        self._connections: list[Connection] = []
        self._resting: list[Connection] = []
        """Idle connections of servers that take one program per connection."""
        self._lock = threading.RLock()
        self._logging_in = threading.Lock()
        """Lock for one login at a time: dropbear has few places for unauthenticated connections."""
        self._sessions = threading.BoundedSemaphore(SESSIONS)
        self._ending = threading.BoundedSemaphore(_ENDING)
        self._in_use = 0
        self._closing = False

    def take(self, timeout_s: float) -> None:
        """Wait until one more program may run over this link. Raises DeviceTimeoutError."""
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
                self._drop_all()
        self._sessions.release()

    def execute(
        self,
        command: bytes,
        *,
        timeout_s: float = OPEN_SECONDS,
        connect_s: float = _CONNECT_SECONDS,
        argv: Sequence[str] = (),
    ) -> paramiko.Channel:
        """Have the login shell there run `command` and return its streams; it is started once. Raises DeviceError.

        `connect_s` is for reaching the machine, when a connection has to be made. To be ended by `release`.
        """
        return self._begin(
            lambda channel: channel.exec_command(command), "runs no programs", timeout_s, connect_s, argv
        )

    def sftp(self, *, timeout_s: float = OPEN_SECONDS) -> paramiko.Channel:
        """Return a stream to the machine's SFTP server, to be ended by `release`. Raises DeviceError."""
        return self._begin(
            lambda channel: channel.invoke_subsystem("sftp"),
            "has no SFTP: install openssh-sftp-server there, and name it in sshd_config as 'Subsystem sftp'",
            timeout_s,
            _CONNECT_SECONDS,
            ("sftp",),
        )

    def forward(self, host: str, port: int, *, timeout_s: float = OPEN_SECONDS) -> paramiko.Channel:
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

        return self._open(connect, timeout_s, _CONNECT_SECONDS, argv, runs_program=False)

    def run_ending(self, command: bytes, stdin: bytes, timeout_s: float) -> None:
        """Run a command that ends programs, in reserved sessions. Raises DeviceError, OSError and paramiko's errors."""
        with self._ending:
            channel = self.execute(command, timeout_s=timeout_s, connect_s=timeout_s)
            try:
                channel.settimeout(timeout_s)
                channel.sendall(stdin)
                channel.status_event.wait(timeout_s)
            finally:
                self.release(channel)

    def release(self, channel: paramiko.Channel) -> None:
        """End a stream of a program. Where its connection takes one at a time, the next one may have it."""
        connection = self._of(channel)
        if connection is None or not connection.is_single:
            end(channel)
        elif _is_closed_there(channel):
            with self._lock:
                self._resting.append(connection)
        else:
            self._drop(connection)

    def classify(self, problem: str, *, argv: Sequence[str] = (), stderr: bytes = b"") -> DeviceError:
        """Return the error of a broken stream: DeviceGoneError if the machine stopped answering."""
        try:
            self._doubt()
            connection, _ = self._connection(_RETRY_SECONDS, runs_program=True)
            if connection.is_single:
                with self._lock:
                    self._resting.append(connection)
        except DeviceError as error:
            why = str(error).removeprefix(f"{self._serial}: ")
            return DeviceGoneError(self._serial, f"{problem}, and now: {why}", argv=argv, stderr=stderr)
        return DeviceError(self._serial, problem, argv=argv, stderr=stderr)

    def _doubt(self) -> None:
        """Drop connections on which nothing may be answered: the kernel sees only the first machine on the way."""
        with self._lock:
            # A connection with a program shows its end by itself.
            for connection in [*self._resting]:
                self._drop(connection)
            shared = next((one for one in self._connections if not one.is_single), None)
            if shared is None or not self.address.jumps or not shared.is_active:
                return
            try:
                end(shared.transport.open_session(timeout=_RETRY_SECONDS))
            except paramiko.ChannelException:
                # A refusal is an answer.
                return
            except (paramiko.SSHException, EOFError, OSError):
                self._drop_all()

    def close(self) -> None:
        """Hang up, at once or when the last program is over. May be called again, and so may every other method."""
        with self._lock:
            if self._in_use:
                self._closing = True
            else:
                self._drop_all()

    def _begin(
        self,
        begin: Callable[[paramiko.Channel], None],
        refused: str,
        timeout_s: float,
        connect_s: float,
        argv: Sequence[str],
    ) -> paramiko.Channel:
        for left in reversed(range(_MOST_TRIES)):
            channel = self._open(
                lambda transport: transport.open_session(timeout=timeout_s),
                timeout_s,
                connect_s,
                argv,
                runs_program=True,
            )
            late = threading.Event()
            # The answer to the next request is waited for without end.
            timer = threading.Timer(timeout_s, _give_up, (channel, late))
            timer.daemon = True
            timer.start()
            try:
                begin(channel)
            except (paramiko.SSHException, EOFError, OSError) as error:
                # paramiko closes it as well when the request is refused.
                closed_there, transport, connection = channel.eof_received, channel.get_transport(), self._of(channel)
                self.release(channel)
                if late.is_set() or not transport.is_active():
                    raise self._unopened(transport, error, timeout_s, argv) from None
                if not closed_there:
                    raise DeviceError(self._serial, f"its SSH server {refused}", argv=argv) from None
                # The server reads no request of a closed stream, so that no program was started.
                if not left or connection is None or not connection.is_single:
                    problem = "its SSH server closes streams before anything runs in them: is there a newer one for it?"
                    raise DeviceError(self._serial, problem, argv=argv) from None
            except BaseException:
                self.release(channel)
                raise
            else:
                return channel
            finally:
                timer.cancel()
        raise AssertionError

    def _open(
        self,
        opening: Callable[[paramiko.Transport], paramiko.Channel],
        timeout_s: float,
        connect_s: float,
        argv: Sequence[str],
        *,
        runs_program: bool,
    ) -> paramiko.Channel:
        deadline = time.monotonic() + timeout_s
        again = False
        while True:
            connection, made = self._connection(connect_s, runs_program=runs_program)
            transport = connection.transport
            try:
                return _Sender.installed(transport, opening(transport))
            except (paramiko.SSHException, EOFError, OSError) as error:
                if connection.is_single and runs_program:
                    self._drop(connection)
                # sshd counts a session until all of it has ended, which is after we hung up.
                if _is_refused(error):
                    if time.monotonic() >= deadline:
                        raise DeviceError(self._serial, f"sshd refuses: {clean_text(str(error))}", argv=argv) from None
                    time.sleep(_FULL_SECONDS)
                    continue
                # The connection may have died long before.
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
        return self.classify(f"the connection broke: {reason}", argv=argv)

    def _connection(self, timeout_s: float, *, runs_program: bool) -> tuple[Connection, bool]:
        """Return a connection and whether it is new. With `runs_program` it may carry one more program.

        A connection for one program belongs to the caller until it returns to `_resting` or is dropped.
        """
        if connection := self._find(runs_program=runs_program):
            return connection, False
        with self._logging_in:
            if connection := self._find(runs_program=runs_program):
                return connection, False
            connection = Connection(self._serial, self.address, timeout_s)
            with self._lock:
                self._connections.append(connection)
                if connection.is_single and not runs_program:
                    self._resting.append(connection)
            return connection, True

    def _find(self, *, runs_program: bool) -> Connection | None:
        with self._lock:
            for dead in [one for one in self._connections if not one.is_active]:
                self._drop(dead)
            if not runs_program:
                return next(iter(self._connections), None)
            shared = next((one for one in self._connections if not one.is_single), None)
            return shared or (self._resting.pop() if self._resting else None)

    def _of(self, channel: paramiko.Channel) -> Connection | None:
        with self._lock:
            sender: Any = channel.get_transport()
            return next((one for one in self._connections if one.transport is sender.transport), None)

    def _drop(self, connection: Connection) -> None:
        with self._lock:
            for those in (self._connections, self._resting):
                with contextlib.suppress(ValueError):
                    those.remove(connection)
        connection.close()

    def _drop_all(self) -> None:
        self._closing = False
        for connection in [*self._connections]:
            self._drop(connection)


def _give_up(channel: paramiko.Channel, late: threading.Event) -> None:
    late.set()
    end(channel)


def _is_closed_there(channel: paramiko.Channel) -> bool:
    """Wait until the server closes a stream and return whether it did: before that, its program may still run."""
    deadline = time.monotonic() + _CLOSE_SECONDS
    while not channel.closed and time.monotonic() < deadline:
        time.sleep(_CLOSE_POLL_SECONDS)
    return channel.closed and bool(channel.eof_received) and channel.get_transport().is_active()


def _is_refused(error: Exception) -> bool:
    # paramiko raises ChannelException only once for two simultaneous refusals.
    return isinstance(error, paramiko.ChannelException) or str(error) == "Unable to open channel."

"""`python -m farm.devices.ssh.tunnel`: port of this machine that leads over SSH to the adb server of another one.

The other machine needs sshd and adb; the tunnel starts an adb server if none answers. Prints one line of JSON,
`{"port": N}` or `{"error": WHY}`, and serves until it is ended.
"""

from __future__ import annotations

import argparse
import contextlib
import socket
import sys
import threading
import time
from typing import TYPE_CHECKING

import msgspec

from farm.base.errors import DeviceError, InfraError
from farm.base.peer import accept_own
from farm.base.text import clean_text
from farm.devices.device import LOOPBACK, SshAddress
from farm.devices.ssh.link import ForwardRefusedError, SshLink, end

if TYPE_CHECKING:
    import paramiko

# `adb start-server` waits for the server it starts.
_START_SECONDS = 30.0
_ANSWER_SECONDS = 10.0
# A line that only a shell prints, before adb has its turn.
_SHELL_MARK = "farm-has-a-shell"
_BACKLOG = 64
_CHUNK = 1 << 18


def main() -> None:
    """Serve until ended."""
    parser = argparse.ArgumentParser(prog="python -m farm.devices.ssh.tunnel")
    parser.add_argument("address", help="of sshd, an SshAddress as JSON")
    parser.add_argument("--adb-host", default=LOOPBACK, help="where the adb server listens, as that machine sees it")
    parser.add_argument("--adb-port", type=int, default=5037)
    parser.add_argument("--port", type=int, default=0, help="where to listen here; a free port unless it is given")
    words = parser.parse_args()
    address = msgspec.json.decode(words.address, type=SshAddress)
    link = SshLink(address.host, address)
    try:
        ensure_server(link, words.adb_host, words.adb_port)
        # The port of a dead tunnel may have lingering connections, which this function allows.
        listener = socket.create_server((LOOPBACK, words.port), backlog=_BACKLOG)
    except (InfraError, OSError) as error:
        _print({"error": str(error)})
        raise SystemExit(1) from None
    _print({"port": int(listener.getsockname()[1])})
    serve(listener, link, words.adb_host, words.adb_port)


def ensure_server(link: SshLink, host: str, port: int) -> None:
    """Start the adb server of the other machine, unless one answers. Raises InfraError."""
    if _answers(link, host, port):
        return
    if host not in (LOOPBACK, "localhost"):
        raise InfraError(f"no adb server answers at {host}:{port}, as seen from there")
    command = f"echo {_SHELL_MARK}; exec adb -P {port} start-server"
    channel = link.execute(command.encode(), timeout_s=_START_SECONDS)
    try:
        # The started server may keep the streams open, so that only the exit code counts.
        if not channel.status_event.wait(_START_SECONDS):
            raise InfraError(f"'adb start-server' there did not end in {_START_SECONDS:g} s")
        time.sleep(0.1)
        code = f"exit code {channel.exit_status}"
        stdout = clean_text(channel.recv(4096), lines=True) if channel.recv_ready() else ""
        stderr = clean_text(channel.recv_stderr(4096)) if channel.recv_stderr_ready() else ""
        if _SHELL_MARK not in stdout.splitlines():
            raise InfraError(link.address.no_shell(code, stderr or clean_text(stdout)))
        if channel.exit_status != 0:
            why = stderr or "without an error message: run it there"
            raise InfraError(f"'adb start-server' there failed with {code}: {why}")
    finally:
        link.release(channel)
    if not _answers(link, host, port):
        raise InfraError(f"an adb server was started there, and none answers on port {port}: does sshd forward ports?")


def serve(listener: socket.socket, link: SshLink, host: str, port: int) -> None:
    """Carry every connection of this user to the adb server at `host`:`port` of the other machine, without end."""
    while True:
        connection = accept_own(listener)
        try:
            threading.Thread(target=_carry, args=(connection, link, host, port), daemon=True).start()
        except RuntimeError:
            # No more threads for this user: hanging up is all that a port can do.
            connection.close()


def _answers(link: SshLink, host: str, port: int) -> bool:
    """Tell whether an adb server answers there. Raises DeviceError when the machine itself does not."""
    try:
        channel = link.forward(host, port, timeout_s=_ANSWER_SECONDS)
    except ForwardRefusedError:
        return False
    try:
        channel.settimeout(_ANSWER_SECONDS)
        channel.sendall(b"000chost:version")
        return channel.recv(4) == b"OKAY"
    except OSError:
        return False
    finally:
        end(channel)


def _carry(connection: socket.socket, link: SshLink, host: str, port: int) -> None:
    with connection:
        try:
            channel = link.forward(host, port)
        except DeviceError:
            # The port can only close; the adb server's other answers give the reason.
            return
        try:
            back = threading.Thread(target=_copy_back, args=(channel, connection), daemon=True)
            back.start()
            try:
                while data := connection.recv(_CHUNK):
                    channel.sendall(data)
                channel.shutdown_write()
            except (OSError, EOFError):
                # A side has ended: data of the other side has no receiver, and its end may never come.
                end(channel)
            back.join()
        finally:
            end(channel)


def _copy_back(channel: paramiko.Channel, connection: socket.socket) -> None:
    with contextlib.suppress(OSError, EOFError):
        while data := channel.recv(_CHUNK):
            connection.sendall(data)
    # The other thread may still wait for data from here.
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    end(channel)


def _print(ready: dict[str, object]) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(ready) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()

"""Peculiarities of SSH: logins, trusted host keys, and programs that outlive a connection."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

import msgspec
import pytest
from networks import Relay
from ssh_server import SshServer, alive, descendants, running
from waiting import until

from farm.base.errors import DeviceError, DeviceGoneError, DeviceTimeoutError
from farm.base.processes import Supervisor
from farm.devices.device import SshAddress
from farm.devices.ssh.link import SESSIONS
from farm.devices.ssh.transport import SshTransport

SECONDS = 30.0


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshServer]:
    with running(SshServer, tmp_path_factory.mktemp("sshd"), sftp="") as server:
        yield server


@pytest.fixture
def server(started: SshServer) -> Iterator[SshServer]:
    """Server of all tests, which runs and is known at the beginning of each."""
    known = started.known_hosts.read_text()
    yield started
    started.known_hosts.write_text(known)
    if started.child.process.poll() is not None:
        started.start()


@pytest.fixture
def transport(server: SshServer) -> Iterator[SshTransport]:
    with contextlib.closing(SshTransport("board", server.address)) as transport:
        yield transport


def refusal(address: SshAddress) -> DeviceError:
    transport = SshTransport("board", address)
    with contextlib.closing(transport), pytest.raises(DeviceError) as caught:
        transport.run(["true"], timeout_s=SECONDS)
    return caught.value


def test_a_host_key_that_nobody_wrote_down_is_refused_and_nothing_is_written(server: SshServer, tmp_path: Path) -> None:
    known = tmp_path / "known_hosts"
    for content in (None, "", "other.example ssh-ed25519 AAAA\n"):
        if content is not None:
            known.write_text(content)
        error = refusal(msgspec.structs.replace(server.address, known_hosts=str(known)))
        assert f"its host key is not in {known}" in str(error)
        assert f"ssh-keyscan -p {server.port} 127.0.0.1" in str(error)
    assert known.read_text() == "other.example ssh-ed25519 AAAA\n"


def test_another_host_key_than_before_is_refused(server: SshServer) -> None:
    other = (server.folder / "other_key.pub").read_text()
    server.known_hosts.write_text(f"[127.0.0.1]:{server.port} {other}")
    error = refusal(server.address)
    assert "another machine may intercept the connection" in str(error)
    assert f"ssh-keygen -R '[127.0.0.1]:{server.port}'" in str(error)


def test_hashed_names_of_hosts_are_understood(server: SshServer, transport: SshTransport) -> None:
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", str(server.known_hosts)], check=True, capture_output=True)
    assert "127.0.0.1" not in server.known_hosts.read_text()
    assert transport.run(["true"], timeout_s=SECONDS).code == 0


def test_keys_that_do_not_open_it(server: SshServer, tmp_path: Path) -> None:
    error = refusal(msgspec.structs.replace(server.address, key_file=str(server.folder / "other_key")))
    assert "other_key: add the public key to its authorized_keys" in str(error)
    assert "no key file" in str(refusal(msgspec.structs.replace(server.address, key_file=str(tmp_path / "gone"))))
    locked = server.folder / "locked_key"
    shutil.copy(server.folder / "user_key", locked)
    subprocess.run(["ssh-keygen", "-q", "-p", "-N", "secret", "-f", str(locked)], check=True, capture_output=True)
    assert "ssh-add" in str(refusal(msgspec.structs.replace(server.address, key_file=str(locked))))


def test_the_agents_keys_are_used(server: SshServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with Supervisor() as supervisor:
        sock = tmp_path / "agent"
        agent = supervisor.spawn(["ssh-agent", "-D", "-a", sock], name="ssh-agent")
        while not sock.exists():
            assert agent.process.poll() is None
        monkeypatch.setenv("SSH_AUTH_SOCK", str(sock))
        address = msgspec.structs.replace(server.address, key_file="")
        assert "the keys of this user and its agent" in str(refusal(address))
        subprocess.run(["ssh-add", "-q", str(server.folder / "user_key")], check=True, capture_output=True)
        transport = SshTransport("board", address)
        assert transport.run(["true"], timeout_s=SECONDS).code == 0
        transport.close()


def test_nobody_listens_and_somebody_else_does(server: SshServer) -> None:
    server.stop()
    assert isinstance(refusal(server.address), DeviceGoneError)
    with socket.create_server(("127.0.0.1", server.port)) as other:
        # The other server hangs up without a banner.
        thread = threading.Thread(target=lambda: other.accept()[0].close())
        thread.start()
        error = refusal(server.address)
        thread.join()
    assert isinstance(error, DeviceGoneError)
    assert "no SSH connection to" in str(error)


def test_a_connection_that_died_is_made_anew(server: SshServer, transport: SshTransport, tmp_path: Path) -> None:
    for use in (
        lambda: transport.run(["true"], timeout_s=SECONDS),
        lambda: transport.push({transport.storage / "file": b"x"}),
        lambda: transport.pull({transport.storage / "file": tmp_path / "file"}, max_bytes=9),
    ):
        use()
        server.stop()
        server.start()
        use()


def test_a_connection_that_breaks_while_the_device_is_there_is_not_its_end(
    server: SshServer, transport: SshTransport
) -> None:
    process = transport.start(["sh", "-c", "echo $$; exec sleep 600"])
    pid = int(process.receive(SECONDS).stdout)
    server.stop()
    server.start()
    with pytest.raises(DeviceError, match="the connection ended before the program did") as caught:
        process.receive(SECONDS)
    assert type(caught.value) is DeviceError
    # sshd left it alone; closing finds it over a new connection.
    assert alive(pid)
    process.close()
    assert not alive(pid)


def test_more_programs_than_sshd_allows_wait_for_each_other(transport: SshTransport) -> None:
    running = [transport.start(["cat"]) for _ in range(SESSIONS)]
    with pytest.raises(DeviceTimeoutError, match=f"{SESSIONS} programs run over its connection"):
        transport.run(["true"], timeout_s=0.2)
    running.pop().close()
    assert transport.run(["true"], timeout_s=SECONDS).code == 0
    for process in running:
        process.close()


def test_programs_that_end_before_they_have_read_everything_take_no_other_along(transport: SshTransport) -> None:
    """sshd ends the whole connection over data for a stream that both sides have closed."""
    scripts = ("exit 3", "exec <&-; exit 3", "cat >/dev/null; exit 3")
    with contextlib.closing(transport.start(["sleep", "60"], cwd=PurePosixPath("/"), env={})) as other:
        with ThreadPoolExecutor(6) as pool:
            runs = [
                pool.submit(transport.run, ["sh", "-c", script], stdin=b"x" * size, timeout_s=SECONDS)
                for _ in range(40)
                for script, size in zip(scripts, (1, 100_000, 1), strict=True)
            ]
            assert {one.result().code for one in runs} == {3}
        assert other.receive(0.1).code is None


def test_a_pipe_is_not_waited_for(server: SshServer, transport: SshTransport, tmp_path: Path) -> None:
    transport.push({transport.storage / "file": b"x"})
    os.mkfifo(server.folder / "storage/pipe")
    with pytest.raises(DeviceError, match="pipe: not a regular file"):
        transport.pull({transport.storage / "pipe": tmp_path / "pipe"}, max_bytes=10)


def test_modes_are_the_same_whatever_the_umask(server: SshServer, transport: SshTransport, tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_bytes(b"x")
    program.chmod(0o755)
    transport.push({transport.storage / "program": program, transport.storage / "file": b"x"})
    modes = [(server.folder / "storage" / name).stat().st_mode & 0o777 for name in ("program", "file")]
    assert modes == [0o755, 0o644]


def test_a_program_that_runs_is_replaced(transport: SshTransport, tmp_path: Path) -> None:
    program = transport.storage / "program"
    transport.push({program: Path("/bin/sleep").resolve()})
    process = transport.start([str(program), "600"])
    script = tmp_path / "script"
    script.write_text("#!/bin/sh\necho new\n")
    script.chmod(0o755)
    transport.push({program: script})
    assert transport.run([str(program)], timeout_s=SECONDS).stdout == b"new\n"
    assert process.receive(0).code is None
    process.close()


def test_a_closed_transport_hangs_up_when_its_last_program_is_over(server: SshServer) -> None:
    transport = SshTransport("board", server.address)
    process = transport.start(["cat"])
    transport.close()
    process.send(b"still here\n")
    assert process.receive(SECONDS).stdout == b"still here\n"
    assert descendants(server.child.pid)
    process.close()
    until(lambda: not descendants(server.child.pid), "the end of the connection", SECONDS)


def test_a_server_that_hangs_is_a_timeout(server: SshServer, transport: SshTransport) -> None:
    transport.run(["true"], timeout_s=SECONDS)
    connections = descendants(server.child.pid)
    for pid in connections:
        os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(DeviceTimeoutError, match=r"opened no stream in 0.5 s"):
            transport.run(["true"], timeout_s=0.5)
    finally:
        for pid in connections:
            os.kill(pid, signal.SIGCONT)
    assert transport.run(["true"], timeout_s=SECONDS).code == 0


def test_a_cut_behind_a_forward_that_acknowledges_is_seen(server: SshServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farm.devices.ssh.login.ASK_SECONDS", 0.5)
    monkeypatch.setattr("farm.devices.ssh.login.DEAD_SECONDS", 2.0)
    monkeypatch.setattr("farm.devices.ssh.link._RETRY_SECONDS", 0.5)
    with contextlib.closing(Relay(server.port)) as line:
        server.known_hosts.write_text(server.known_hosts.read_text().replace(f":{server.port} ", f":{line.port} "))
        transport = SshTransport("board", msgspec.structs.replace(server.address, port=line.port))
        # A program may stay silent for any time while the other end answers.
        assert transport.run(["sleep", "3"], timeout_s=SECONDS).code == 0
        process = transport.start(["sleep", "600"])
        line.cut()
        with pytest.raises(DeviceGoneError, match="the connection ended before the program did, and now: no SSH"):
            process.receive(SECONDS)
        line.restore()
        process.close()
        transport.close()

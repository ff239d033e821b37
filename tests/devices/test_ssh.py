"""Peculiarities of SSH: logins, trusted host keys, and programs that outlive a connection."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from networks import Relay
from ssh_server import SshServer, alive, descendants
from waiting import until

from farm.base.errors import DeviceError, DeviceGoneError, DeviceSpaceError, DeviceTimeoutError
from farm.base.processes import Supervisor
from farm.devices.device import SshAddress
from farm.devices.ssh.link import SESSIONS
from farm.devices.ssh.transport import SshTransport

SECONDS = 30.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[SshServer]:
    with Supervisor() as supervisor:
        server = SshServer(supervisor, tmp_path / "sshd").start()
        yield server
        server.stop()


def refusal(address: SshAddress) -> DeviceError:
    transport = SshTransport("board", address)
    with pytest.raises(DeviceError) as caught:
        transport.run(["true"], timeout_s=SECONDS)
    transport.close()
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
    assert "somebody may be in between" in str(error)
    assert f"ssh-keygen -R '[127.0.0.1]:{server.port}'" in str(error)


def test_hashed_names_of_hosts_are_understood(server: SshServer) -> None:
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", str(server.known_hosts)], check=True, capture_output=True)
    assert "127.0.0.1" not in server.known_hosts.read_text()
    transport = SshTransport("board", server.address)
    assert transport.run(["true"], timeout_s=SECONDS).code == 0
    transport.close()


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
    with socket.socket() as other:
        other.bind(("127.0.0.1", server.port))
        other.listen()
        # The other server hangs up without a banner.
        thread = threading.Thread(target=lambda: other.accept()[0].close())
        thread.start()
        error = refusal(server.address)
        thread.join()
    assert isinstance(error, DeviceGoneError)
    assert "no SSH connection to" in str(error)


def test_a_connection_that_died_is_made_anew(server: SshServer, tmp_path: Path) -> None:
    transport = SshTransport("board", server.address)
    for use in (
        lambda: transport.run(["true"], timeout_s=SECONDS),
        lambda: transport.push({transport.storage / "file": b"x"}),
        lambda: transport.pull({transport.storage / "file": tmp_path / "file"}, max_bytes=9),
    ):
        use()
        server.stop()
        server.start()
        use()
    transport.close()


def test_a_connection_that_breaks_while_the_device_is_there_is_not_its_end(server: SshServer) -> None:
    transport = SshTransport("board", server.address)
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
    transport.close()


def test_a_program_that_left_its_session_is_ended_as_well(server: SshServer) -> None:
    transport = SshTransport("board", server.address)
    process = transport.start(["sh", "-c", "setsid sleep 600 >/dev/null 2>&1 </dev/null & echo $!; exec sleep 600"])
    pid = int(process.receive(SECONDS).stdout)
    process.close()
    assert not alive(pid)
    transport.close()


def test_more_programs_than_sshd_allows_wait_for_each_other(server: SshServer) -> None:
    transport = SshTransport("board", server.address)
    running = [transport.start(["cat"]) for _ in range(SESSIONS)]
    with pytest.raises(DeviceTimeoutError, match=f"{SESSIONS} programs run over its connection"):
        transport.run(["true"], timeout_s=0.2)
    running.pop().close()
    assert transport.run(["true"], timeout_s=SECONDS).code == 0
    for process in running:
        process.close()
    transport.close()


def test_a_full_disk_is_said_so(tmp_path: Path) -> None:
    server = shutil.which("sftp-server", path="/usr/lib/openssh:/usr/lib/ssh:/usr/libexec/openssh:/usr/libexec")
    small = f"mount -t tmpfs -o size=1m farm {tmp_path}/full"
    (tmp_path / "full").mkdir()
    own = ["unshare", "-rm", "sh", "-c"]
    if server is None or subprocess.run([*own, small], check=False, capture_output=True).returncode:
        pytest.skip("needs an sftp-server of its own, and to mount something for it")
    script = tmp_path / "sftp"
    script.write_text(f"#!/bin/sh\nexec {shlex.join([*own, f'{small} && exec {server}'])}\n")
    script.chmod(0o755)
    with Supervisor() as supervisor:
        board = SshServer(supervisor, tmp_path / "sshd", sftp=str(script)).start()
        address = msgspec.structs.replace(board.address, storage=f"{tmp_path}/full/storage")
        transport = SshTransport("board", address)
        for size in (200_000, 5_000_000):
            with pytest.raises(DeviceSpaceError, match="storage/.*: No space left on device"):
                transport.push({transport.storage / str(n): bytes(size) for n in range(10)})
        transport.push({transport.storage / "small": b"it still works"})
        transport.close()
        board.stop()


def test_a_machine_without_sftp_is_told_apart(tmp_path: Path) -> None:
    with Supervisor() as supervisor:
        for number, (sftp, problem) in enumerate([("", "has no SFTP: install"), ("/gone", "SFTP server ended")]):
            server = SshServer(supervisor, tmp_path / str(number), sftp=sftp).start()
            transport = SshTransport("board", server.address)
            with pytest.raises(DeviceError, match=problem) as caught:
                transport.push({transport.storage / "file": b"x"})
            assert type(caught.value) is DeviceError
            assert transport.run(["true"], timeout_s=SECONDS).code == 0
            transport.close()
            server.stop()


def test_a_pipe_is_not_waited_for(server: SshServer, tmp_path: Path) -> None:
    transport = SshTransport("board", server.address)
    transport.push({transport.storage / "file": b"x"})
    os.mkfifo(server.folder / "storage/pipe")
    with pytest.raises(DeviceError, match="pipe: not a regular file"):
        transport.pull({transport.storage / "pipe": tmp_path / "pipe"}, max_bytes=10)
    transport.close()


def test_modes_are_the_same_whatever_the_umask(tmp_path: Path) -> None:
    with Supervisor() as supervisor:
        server = SshServer(supervisor, tmp_path / "sshd", sftp="internal-sftp -u 077").start()
        program = tmp_path / "program"
        program.write_bytes(b"x")
        program.chmod(0o755)
        transport = SshTransport("board", server.address)
        transport.push({transport.storage / "program": program, transport.storage / "file": b"x"})
        modes = [(server.folder / "storage" / name).stat().st_mode & 0o777 for name in ("program", "file")]
        assert modes == [0o755, 0o644]
        transport.close()
        server.stop()


def test_a_program_that_runs_is_replaced(server: SshServer, tmp_path: Path) -> None:
    transport = SshTransport("board", server.address)
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
    transport.close()


@pytest.fixture(scope="module")
def liar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshServer]:
    """SSH server whose SFTP server gives the false answers in the file `lie`."""
    folder = tmp_path_factory.mktemp("liar")
    stub = [sys.executable, "-S", str(Path(__file__).with_name("sftp_stub.py")), str(folder / "lie")]
    with Supervisor() as supervisor:
        server = SshServer(supervisor, folder, sftp=shlex.join(stub)).start()
        yield server
        server.stop()


@pytest.mark.parametrize(
    ("lie", "problem"),
    [
        ("nothing", ""),
        ("greeting", "a login script"),
        ("version", "does not greet"),
        ("endless packet", "a packet of 4294967295 bytes"),
        ("other number", "answers what was not asked"),
        ("huge", "more than the 1000 bytes"),
        ("no size", "attributes without size"),
        ("long string", "longer than its packet"),
        ("wrong kind", "answered with bytes"),
        ("too much", "changed while it was read"),
        ("too little", "changed while it was read"),
        ("empty data", "changed while it was read"),
        ("ends", "SFTP server ended"),
        ("silence", "moved no byte of a file for 0.3 s"),
    ],
)
def test_what_a_device_sends_is_not_believed(liar: SshServer, tmp_path: Path, lie: str, problem: str) -> None:
    (liar.folder / "lie").write_text(lie)
    transport = SshTransport("board", liar.address, stall_s=0.3 if lie == "silence" else SECONDS)
    files = {transport.storage / "file": tmp_path / "file"}
    if not problem:
        transport.pull(files, max_bytes=1000)
        assert (tmp_path / "file").read_bytes() == b"12345"
    else:
        with pytest.raises(DeviceError, match=problem) as caught:
            transport.pull(files, max_bytes=1000)
        assert isinstance(caught.value, DeviceTimeoutError) == (lie == "silence")
        assert os.listdir(tmp_path) == []
    transport.close()


def test_a_file_that_drips_is_given_up(liar: SshServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farm.devices.min_throughput._STALLS", 0)
    monkeypatch.setattr("farm.devices.min_throughput._FILE_SECONDS", 1.0)
    (liar.folder / "lie").write_text("drip")
    transport = SshTransport("board", liar.address)
    with pytest.raises(DeviceTimeoutError, match=r"moved \d+ bytes of files in .* at least 64 KiB/s is expected"):
        transport.pull({transport.storage / "file": tmp_path / "file"}, max_bytes=1000)
    transport.close()


def test_a_closed_transport_hangs_up_when_its_last_program_is_over(server: SshServer) -> None:
    transport = SshTransport("board", server.address)
    process = transport.start(["cat"])
    transport.close()
    process.send(b"still here\n")
    assert process.receive(SECONDS).stdout == b"still here\n"
    assert descendants(server.child.pid)
    process.close()
    until(lambda: not descendants(server.child.pid), "the end of the connection", SECONDS)


def test_a_server_that_hangs_is_a_timeout(server: SshServer) -> None:
    transport = SshTransport("board", server.address)
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
    transport.close()


def test_a_cut_behind_a_forward_that_acknowledges_is_seen(server: SshServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farm.devices.ssh.alive.ASK_SECONDS", 0.5)
    monkeypatch.setattr("farm.devices.ssh.alive.DEAD_SECONDS", 2.0)
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

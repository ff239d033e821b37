"""SSH devices: connections, losses, and settings of `~/.ssh/config`."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import msgspec
import pytest
from attached import Rack
from made import config
from networks import Relay
from ssh_server import SshServer, descendants, running
from waiting import alive, until

from farm.base.config.devices import SshLogin
from farm.base.errors import ConfigError, DeviceError, DeviceGoneError, DeviceTimeoutError, InfraError
from farm.base.processes import Supervisor
from farm.devices.device import SshAddress
from farm.devices.discovery import _alone
from farm.devices.hosts import reach_server
from farm.devices.ssh.config import ssh_address
from farm.devices.ssh.link import SESSIONS
from farm.devices.ssh.transport import SshTransport

# Peculiarities of SSH: logins, trusted host keys, and programs that outlive a connection.


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
    monkeypatch.setattr("farm.devices.ssh.link.ASK_SECONDS", 0.5)
    monkeypatch.setattr("farm.devices.ssh.link.DEAD_SECONDS", 2.0)
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


# Machines that `~/.ssh/config` describes, behind a jump host: two real sshd on loopback.


class Lab(NamedTuple):
    """Board that only the bastion may reach, and the configuration for it."""

    board: SshServer
    bastion: SshServer
    config: Path

    def login(self, host: str = "board") -> SshLogin:
        return SshLogin("", host, config=str(self.config))

    def address(self) -> SshAddress:
        return ssh_address(self.login(), str(self.board.folder / "storage"))


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    folder = tmp_path_factory.mktemp("lab")
    with (
        running(SshServer, folder / "board") as board,
        running(SshServer, folder / "bastion", serial="bastion") as bastion,
    ):
        # The board's key is known by an alias alone, each key by its own file.
        key = (board.folder / "host_key.pub").read_text()
        (board.folder / "by_alias").write_text(f"the-board {key}")
        (folder / "hosts").write_text(f"""
            Host board
                HostName 127.0.0.1
                Port {board.port}
                HostKeyAlias the-board
                UserKnownHostsFile {board.folder}/by_alias
                IdentityFile {board.folder}/nowhere
                IdentityFile {board.folder}/%r_%p
                ProxyJump bastion
        """)
        (board.folder / f"{getpass.getuser()}_{board.port}").write_bytes((board.folder / "user_key").read_bytes())
        (board.folder / f"{getpass.getuser()}_{board.port}").chmod(0o600)
        config = folder / "config"
        config.write_text(f"""
            Include {folder}/hosts
            Host bastion
                HostName 127.0.0.1
                Port {bastion.port}
                IdentityFile {bastion.folder}/user_key
                UserKnownHostsFile {bastion.known_hosts}
            Match host other
                ProxyCommand nc %h %p
            Host circle
                ProxyJump round
            Host round
                ProxyJump circle
            Host *
                User {getpass.getuser()}
                GlobalKnownHostsFile /dev/null
        """)
        yield Lab(board, bastion, config)


def test_a_board_behind_a_jump_host_is_a_device(lab: Lab, tmp_path: Path) -> None:
    address = lab.address()
    assert (address.place, address.host, address.port) == ("board", "127.0.0.1", lab.board.port)
    transport = SshTransport("board", address)
    done = transport.run(["sh", "-c", "getprop ro.serialno; echo $SSH_CONNECTION"], timeout_s=SECONDS)
    serial, connection = done.stdout.decode().splitlines()
    assert serial == "board-1"
    transport.push({transport.storage / "file": b"over two machines"})
    transport.pull({transport.storage / "file": tmp_path / "file"}, max_bytes=99)
    assert (tmp_path / "file").read_bytes() == b"over two machines"
    assert int(connection.split()[3]) == lab.board.port
    assert f"from 127.0.0.1 port {connection.split()[1]} ssh2" in (lab.board.folder / "sshd.log").read_text()
    # The login at the board came from the bastion.
    assert f"Accepted publickey for {getpass.getuser()}" in (lab.bastion.folder / "sshd.log").read_text()
    transport.close()


def shell(transport: SshTransport, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a program as `farm shell` does."""
    argv, environment = transport.shell_argv(list(words), terminal=False)
    return subprocess.run(
        argv, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False
    )


def test_farm_shell_goes_the_same_way(lab: Lab) -> None:
    before = (lab.bastion.folder / "sshd.log").read_text().count("Accepted publickey")
    done = shell(SshTransport("board", lab.address()), "getprop", "ro.serialno")
    assert (done.returncode, done.stdout) == (0, "board-1\n"), done.stderr
    assert (lab.bastion.folder / "sshd.log").read_text().count("Accepted publickey") == before + 1


@pytest.mark.parametrize("which", ["board", "bastion"])
def test_host_keys_are_checked_at_each_machine(lab: Lab, which: str) -> None:
    server = lab.board if which == "board" else lab.bastion
    file = lab.board.folder / "by_alias" if which == "board" else lab.bastion.known_hosts
    name = "the-board" if which == "board" else f"[127.0.0.1]:{server.port}"
    good = file.read_text()
    where = "board: " if which == "board" else "board: on the way, at bastion: "
    try:
        for content, output in (
            (
                f"{name} {(server.folder / 'other_key.pub').read_text()}",
                f"its host key differs from the key in {file} for",
            ),
            ("", f"its host key is not in {file}"),
        ):
            file.write_text(content)
            transport = SshTransport("board", lab.address())
            with pytest.raises(DeviceError) as caught:
                transport.run(["true"], timeout_s=SECONDS)
            assert str(caught.value).startswith(f"{where}{output}")
            done = shell(transport, "true")
            assert (done.returncode, "Host key verification failed" in done.stderr) == (255, True)
    finally:
        file.write_text(good)


def test_what_farm_toml_says_wins(lab: Lab) -> None:
    login = SshLogin("root", "board", 2222, "/a/key", "/some/known_hosts", str(lab.config))
    address = ssh_address(login)
    assert (address.user, address.port) == ("root", 2222)
    assert (address.key_file, address.known_hosts) == ("/a/key", "/some/known_hosts")
    assert [hop.place for hop in address.jumps] == ["bastion"]
    plain = ssh_address(SshLogin("me", "board", config="none"))
    assert (plain.host, plain.port, plain.jumps) == ("board", 22, ())


def test_a_device_of_farm_toml_is_called_by_its_alias(lab: Lab, tmp_path: Path) -> None:
    toml = f'[[device]]\nssh = "board"\nssh_config = "{lab.config}"\nstorage = "{tmp_path}/storage"\n'
    [found] = _alone(config(tmp_path, toml).devices[0])
    assert (found.device.serial, found.device.soc) == ("board-1", "QCS9100")  # type: ignore[union-attr]


def test_an_adb_server_is_reached_through_a_jump_host(lab: Lab, bench: Rack, tmp_path: Path) -> None:
    adb = f'adb = "127.0.0.1:{bench.server.port}"\n'
    toml = f'[[host]]\nname = "attic"\nssh = "board"\nssh_config = "{lab.config}"\n{adb}'
    with Supervisor() as supervisor:
        server = reach_server(config(tmp_path, toml).hosts[0], supervisor)
        assert "virtual-SM8650-0" in server.query("host:devices-l")


def test_a_bastion_that_is_gone_and_a_board_that_is_gone(lab: Lab) -> None:
    address = lab.address()
    transport = SshTransport("board", address)
    assert transport.run(["true"], timeout_s=SECONDS).code == 0
    lab.board.stop()
    try:
        with pytest.raises(DeviceGoneError, match="from the machine before it"):
            transport.run(["true"], timeout_s=SECONDS)
    finally:
        lab.board.start()
    lab.bastion.stop()
    try:
        with pytest.raises(DeviceGoneError, match="board: on the way, at bastion: no SSH server can be reached"):
            transport.run(["true"], timeout_s=SECONDS)
    finally:
        lab.bastion.start()
    assert transport.run(["true"], timeout_s=SECONDS).code == 0
    transport.close()


@pytest.mark.parametrize(
    ("host", "message"),
    [
        ("other", "other is reached by ProxyCommand, which farm does not run: use ProxyJump"),
        ("circle", "ProxyJump leads in a circle: circle -> round -> circle"),
    ],
)
def test_what_farm_cannot_do_is_refused(lab: Lab, host: str, message: str) -> None:
    with pytest.raises(InfraError, match=message):
        ssh_address(lab.login(host))


def test_the_users_own_file_counts_where_nobody_else_can_write_it(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    login = SshLogin("me", "board")
    assert ssh_address(login).jumps == ()
    own = tmp_path / ".ssh/config"
    own.parent.mkdir(mode=0o700)
    own.write_bytes(lab.config.read_bytes())
    own.chmod(0o600)
    assert [hop.place for hop in ssh_address(login).jumps] == ["bastion"]
    own.chmod(0o666)
    with pytest.raises(InfraError, match=r"config is not used, .*: it can be written by all users: .*chmod go-w"):
        ssh_address(login)
    own.chmod(0o600)
    own.write_text("Hosst board\n")
    with pytest.raises(InfraError, match="ssh does not take it: .*line 1: Bad configuration option: hosst"):
        ssh_address(login)


def test_a_configuration_that_is_not_there_is_refused(tmp_path: Path) -> None:
    from farm.devices.connect import require_named

    with pytest.raises(ConfigError, match=r"device\[0\]\.ssh_config: there is no file .*/nowhere"):
        require_named(config(tmp_path, '[[device]]\nssh = "board"\nssh_config = "nowhere"\n'))

"""Machines that `~/.ssh/config` describes, behind a jump host: two real sshd on loopback."""

from __future__ import annotations

import getpass
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest
from ssh_server import SshServer, running

from farm.base.config.devices import SshLogin
from farm.base.config.settings import load_config
from farm.base.errors import ConfigError, DeviceError, DeviceGoneError, InfraError
from farm.base.processes import Supervisor
from farm.devices.device import SshAddress
from farm.devices.discovery import _alone
from farm.devices.hosts import reach_server
from farm.devices.ssh.config import ssh_address
from farm.devices.ssh.transport import SshTransport

if TYPE_CHECKING:
    from conftest import Bench

SECONDS = 30.0


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
    file = tmp_path / "farm.toml"
    file.write_text(f'[[device]]\nssh = "board"\nssh_config = "{lab.config}"\nstorage = "{tmp_path}/storage"\n')
    [found] = _alone(load_config(file).devices[0])
    assert (found.device.serial, found.device.soc) == ("board-1", "QCS9100")  # type: ignore[union-attr]


def test_an_adb_server_is_reached_through_a_jump_host(lab: Lab, bench: Bench, tmp_path: Path) -> None:
    file = tmp_path / "farm.toml"
    file.write_text(
        f'[[host]]\nname = "attic"\nssh = "board"\nssh_config = "{lab.config}"\nadb = "127.0.0.1:{bench.server.port}"\n'
    )
    with Supervisor() as supervisor:
        server = reach_server(load_config(file).hosts[0], supervisor)
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

    file = tmp_path / "farm.toml"
    file.write_text('[[device]]\nssh = "board"\nssh_config = "nowhere"\n')
    with pytest.raises(ConfigError, match=r"device\[0\]\.ssh_config: there is no file .*/nowhere"):
        require_named(load_config(file))

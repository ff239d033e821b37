"""`farm lease`, `farm devices release` and `farm shell`, on virtual devices behind a real adb server."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from farm_home import FarmHome
from made_runs import take
from programs import run_program
from ssh_server import SshServer, running
from terminals import Terminal, terminal_of
from waiting import Started, alive, until

from farm.base.errors import UsageError
from farm.cli.devices.hold import shell_of
from farm.devices.device import Device, HealthEvent, SshAddress
from farm.store.store import Store

FIRST, SECOND = (f"virtual-SM8650-{number}@{socket.gethostname()}" for number in range(2))


class User:
    """User of `farm`."""

    def __init__(self, home: FarmHome, bench: Mapping[str, str], name: str) -> None:
        self.home, self.env = home, {**home.env, **bench, "LOGNAME": name}

    def says(self, *words: str) -> str:
        return self.home.farm(*words, env=self.env, code=0).stdout

    def is_refused(self, *words: str, code: int) -> str:
        return self.home.refused(*words, env=self.env, code=code)

    def waits(self) -> Started[str]:
        """Start to wait for the first device."""
        process: Started[str] = self.home.start_alone("lease", FIRST, "--wait", "2m", env=self.env, text=True)
        assert "waiting: " in process.stderr.readline()
        return process


@pytest.fixture
def ada(home: FarmHome, bench: Mapping[str, str]) -> User:
    return User(home, bench, "ada")


@pytest.fixture
def bob(home: FarmHome, bench: Mapping[str, str]) -> User:
    return User(home, bench, "bob")


def test_a_device_is_reserved_used_and_given_back(ada: User, bob: User, store: Store) -> None:
    output = ada.says("lease", "sm8650", "--for", "2h")
    assert f"{FIRST} (SM8650, virtual) is yours until " in output
    assert f"farm shell {FIRST}" in output
    assert f"farm devices release {FIRST}" in output
    # The name of the device for the user's own adb, and its port.
    assert re.search(rf"farm devices connect {FIRST} +your own adb on it: \S+, port \d+\n", output)

    output = bob.is_refused("lease", FIRST, "--no-wait", code=4)
    assert f"{FIRST} is reserved for ada until " in output
    assert "wait for it with --wait 10m" in output
    assert f"{FIRST} is reserved for ada" in bob.is_refused("shell", FIRST, "--", "true", code=4)
    assert "name a device or an SoC" in bob.is_refused("shell", "--", "true", code=2)
    second = json.loads(bob.says("lease", "SM8650", "--json"))
    assert (second["schema"], second["id"], second["user"]) == (1, SECOND, "bob")
    assert second["device"]["soc"] == "SM8650"

    # Her own commands get in, without a name as well, and pass on the command's output.
    script = "echo $0; getprop ro.soc.model"
    assert ada.says("shell", "--", "sh", "-c", script, "a b").splitlines() == ["a b", "SM8650"]
    (mine, _) = store.leases.all()
    assert (mine.reserved_for, mine.token) == ("ada", "")

    store.devices.set_name(SECOND, "desk", None)
    assert "desk is reserved for bob until" in ada.is_refused("devices", "release", "desk", code=2)
    assert "desk is reserved for bob until" in ada.is_refused("lease", SECOND, "--no-wait", code=4)
    store.devices.set_name(SECOND, "", None)
    assert ada.says("devices", "release") == f"{FIRST} is given back\n"
    assert "no device is reserved for you" in ada.is_refused("devices", "release", code=2)
    assert f"{FIRST} is free already" in ada.is_refused("devices", "release", FIRST, code=2)
    assert ada.says("devices", "release", SECOND, "--force") == f"{SECOND} is given back\n"
    assert store.leases.all() == []


def test_several_are_given_back_by_name_or_all_at_once(ada: User, store: Store) -> None:
    # A name of farm.toml for an SoC leases one more device each time.
    (ada.home.cwd / "farm.toml").write_text('[soc.QCS6490]\nlike = "SM8650"\n')
    for name in ("QCS6490", "qcs6490"):
        ada.says("lease", name)
    assert "is yours already" in ada.is_refused("lease", "SM8650", code=4)
    before = {lease.device: lease.reserved_until_ms for lease in store.leases.all()}
    ada.says("lease", FIRST, "--for", "3d")
    after = {lease.device: lease.reserved_until_ms for lease in store.leases.all()}
    assert after[FIRST] > before[FIRST] + 2 * 86_400_000
    assert after[SECOND] == before[SECOND]
    assert f"name one of {FIRST}, {SECOND}, or give --all" in ada.is_refused("devices", "release", code=2)
    assert ada.says("devices", "release", "--all").count("is given back") == 2


def test_who_has_it_is_said_and_a_person_who_waits_gets_it(ada: User, store: Store) -> None:
    take(store, FIRST)
    shown = ada.says("devices", "release", FIRST, "--force")
    assert shown == f"{FIRST} is given back; 'farm run' of ci stops using it\n"
    take(store, FIRST)
    shown = ada.is_refused("lease", FIRST, "--no-wait", code=4)
    assert f"{FIRST} is used by ci since " in shown
    assert "for 'farm run' (process 7 on bench)" in shown
    assert "give --force" in ada.is_refused("devices", "release", FIRST, code=2)
    waiting = ada.waits()
    [queued] = store.leases.waiting()
    assert (queued.user, queued.devices, queued.count, queued.purpose) == ("ada", (FIRST,), 1, "farm lease")
    assert "; waiting as well: ada since " in ada.is_refused("lease", FIRST, "--no-wait", code=4)
    ended = ada.waits()
    ended.send_signal(signal.SIGHUP)
    ended.communicate(timeout=60)
    assert ended.returncode == 128 + signal.SIGHUP
    assert [one.user for one in store.leases.waiting()] == ["ada"]
    leases = store.leases.all()
    assert store.leases.renew(leases, ttl_s=60, heartbeat_s=20).wanted == {FIRST}
    store.leases.release(leases)
    output, _ = waiting.communicate(timeout=60)
    assert waiting.returncode == 0
    assert f"{FIRST} (SM8650, virtual) is yours" in output


def test_texts_of_others_do_not_reach_a_terminal(ada: User, store: Store) -> None:
    take(store, FIRST, "\x1b[31mci", host="\x07", purpose="\x1b]0;x")
    output = ada.is_refused("lease", FIRST, "--no-wait", code=4) + ada.says("devices", "release", FIRST, "--force")
    assert all(line.isprintable() for line in output.splitlines()), output


def test_what_cannot_be_leased_is_refused_with_what_to_do(ada: User, store: Store) -> None:
    assert "no SM8750 is attached: 'farm devices'" in ada.is_refused("lease", "SM8750", code=4)
    assert "did you mean 'virtual-SM8650-0'" in ada.is_refused("lease", "virtual-SM8650-00", code=2)
    assert "such as 90s, 10m, 1h30m or 2d" in ada.is_refused("lease", "SM8650", "--for", "soon", code=2)
    store.devices.set_service(FIRST, False, "cracked screen", "bob")
    output = ada.is_refused("lease", FIRST, code=4)
    assert f"{FIRST} is out of service: cracked screen; 'farm devices enable {FIRST}' puts it back" in output
    store.devices.record_health(HealthEvent(SECOND, "health_check", "quarantined", "3 crashes in a row"))
    output = ada.is_refused("lease", "SM8650", code=4)
    assert f"{SECOND} is quarantined: 3 crashes in a row; 'farm devices unquarantine {SECOND}'" in output
    assert "cracked screen" in output


@pytest.fixture
def shell(ada: User, store: Store) -> Iterator[Started[str]]:
    """A shell on the first device, whose command runs."""
    process = ada.home.start_alone("shell", FIRST, "--", "sh", "-c", "echo here; sleep 300", env=ada.env, text=True)
    assert process.stdout.readline() == "here\n"
    (lease,) = store.leases.all()
    # The arguments may be secrets, and all users can read the purpose.
    assert (lease.user, lease.pid, lease.purpose) == ("ada", process.pid, "farm shell -- sh")
    yield process
    process.kill()
    process.communicate()


def test_a_shell_ends_when_its_lease_is_taken_away(shell: Started[str], bob: User, store: Store) -> None:
    released = bob.says("devices", "release", FIRST, "--force")
    assert released == f"{FIRST} is given back; 'farm shell -- sh' of ada stops using it\n"
    _, errors = shell.communicate(timeout=60)
    assert shell.returncode == 4
    assert f"{FIRST} was released and is free: the shell was ended" in errors
    assert store.leases.all() == []


def test_a_shell_whose_device_was_given_to_somebody_says_to_whom(shell: Started[str], store: Store) -> None:
    os.kill(shell.pid, signal.SIGSTOP)
    store.leases.release(store.leases.all())
    take(store, FIRST, "carol")
    os.kill(shell.pid, signal.SIGCONT)
    _, errors = shell.communicate(timeout=60)
    assert shell.returncode == 4
    assert f"{FIRST} was given to carol: the shell was ended" in errors


def test_a_shell_in_a_terminal_is_one_on_the_device(ada: User, store: Store, tmp_path: Path) -> None:
    with terminal_of("shell", FIRST, env=ada.env, cwd=tmp_path) as terminal:
        # adb drops input from before it took over the terminal.
        terminal.read_until(r"[$#] $")
        terminal.write(b"echo $((6 * 7)) $(getprop ro.soc.model); exit 3\n")
        terminal.read_until("42 SM8650")
        assert terminal.close() == 3
    assert store.leases.all() == []


# Programs of `farm shell` end with it, and its device is released; over ssh it takes the same way as farm itself.


SERIAL = "virtual-SM8650-0"


@pytest.fixture(scope="module")
def board(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshServer]:
    with running(SshServer, tmp_path_factory.mktemp("board"), "QCS9100", "board-7") as board:
        yield board


@contextlib.contextmanager
def started_shell(home: FarmHome, env: Mapping[str, str], *words: str) -> Iterator[tuple[Started[bytes], int]]:
    """Yield a `farm shell` that leads a session, and the process id that its command on the device printed first."""
    with home.start_alone("shell", *words, env=env, start_new_session=True) as process:
        line = process.stdout.readline()
        assert line.strip().isdigit(), (line, process.stderr and process.stderr.read())
        try:
            yield process, int(line)
        finally:
            process.kill()


SLEEP = ("--", "sh", "-c", "echo $$; exec sleep 600")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP])
def test_what_runs_on_the_device_ends_with_it(
    home: FarmHome, bench: dict[str, str], store: Store, number: signal.Signals
) -> None:
    with started_shell(home, bench, SERIAL, *SLEEP) as (process, there):
        (lease,) = store.leases.all()
        assert lease.pid == process.pid
        process.send_signal(number)
        code = process.wait(timeout=60)
    until(lambda: not alive(there))
    if number != signal.SIGKILL:
        assert code == 128 + number
        assert store.leases.all() == []


def test_what_a_former_owner_left_is_ended_first(home: FarmHome, bench: dict[str, str], bench_root: Path) -> None:
    folder = bench_root / SERIAL / "data/local/tmp/farm/run-before-1"
    folder.mkdir(parents=True)
    with Started(["sleep", "600"], cwd=folder) as left:
        done = home.farm("shell", SERIAL, "--", "echo", "mine", env=bench)
        assert (done.returncode, done.stdout) == (0, "mine\n"), done.stderr
        assert left.wait(timeout=60) == -signal.SIGKILL
    assert not folder.exists()


@pytest.fixture
def on_board(home: FarmHome, bench: dict[str, str], board: SshServer, tmp_path: Path) -> dict[str, str]:
    """Configure the board, with keys in a folder whose name ssh would expand or divide."""
    keys = tmp_path / "100% %h keys"
    keys.mkdir()
    for name in ("user_key", "known_hosts"):
        shutil.copy(board.folder / name, keys / name)
    address = board.address
    home.cwd.joinpath("farm.toml").write_text(
        f"[[device]]\nssh = '{address.user}@{address.host}:{address.port}'\nstorage = '{address.storage}'\n"
        f"key_file = '{keys}/user_key'\nknown_hosts = '{keys}/known_hosts'\n"
    )
    return bench


def test_over_ssh_it_ends_as_well(home: FarmHome, on_board: dict[str, str]) -> None:
    words = ("--", "sh", "-c", "sleep 600 & trap '' HUP; echo $$; wait")
    with started_shell(home, on_board, "board-7", *words) as (process, there):
        child = int(Path(f"/proc/{there}/task/{there}/children").read_text().split()[0])
        process.kill()
        process.wait(timeout=60)
    until(lambda: not alive(there) and not alive(child))


def test_over_ssh_input_output_and_exit_code_are_handed_on(home: FarmHome, on_board: dict[str, str]) -> None:
    for words, code, output in ((["--", "sh", "-c", "cat; exit 7"], 7, "exit 3\n"), ([], 3, "")):
        done = home.farm("shell", "board-7", *words, env=on_board, stdin="exit 3\n", timeout_s=60, code=code)
        assert done.stdout == output


def test_ssh_reads_no_configuration_and_believes_only_the_keys_that_are_named(tmp_path: Path) -> None:
    address = SshAddress("board", "root", 22, str(tmp_path / "key%h"), str(tmp_path / "known %h"))
    device = Device("b", "QCS9100", "hardware", "", address, "")
    argv, _ = shell_of(device, ["true"])
    assert argv[1:3] == ["-F", "none"]
    program = shutil.which(argv[0])
    if program is None:
        pytest.skip("there is no ssh: install openssh-client")
    answer = run_program([program, "-G", *argv[1 : argv.index("--") + 2]])
    settings = dict(line.split(" ", 1) for line in answer.stdout.splitlines() if " " in line)
    assert (settings["forwardagent"], settings["forwardx11"]) == ("no", "no")
    assert settings["globalknownhostsfile"] == "/dev/null"
    assert settings["stricthostkeychecking"] in ("yes", "true")
    with pytest.raises(UsageError, match="cannot use the file"):
        shell_of(Device("b", "QCS9100", "hardware", "", SshAddress("board", "root", 22, "/a/${HOME}"), ""), ["true"])


def test_an_interactive_shell_that_loses_its_lease_ends_and_leaves_the_terminal_as_it_was(
    home: FarmHome, bench: dict[str, str], board: SshServer, store: Store, tmp_path: Path
) -> None:
    (home.cwd / "farm.toml").write_text(f"[[device]]\nlocal = true\nstorage = '{tmp_path}/storage'\nname = 'here'\n")
    bash = shutil.which("bash")
    env = {**home.env, **bench, "PATH": f"{board.tools}:{os.environ['PATH']}", "SHELL": bash, "PS1": "ready> "}
    script = f"{sys.executable} -m farm.cli.main shell here; echo code $?; stty -a"
    terminal = Terminal(["/bin/sh", "-c", script], {**env, "HOME": str(tmp_path)}, home.cwd)
    terminal.read_until(r"[$#>] $")
    terminal.write(b"stty -echo; sleep 600 & echo pid $!\n")
    there = int(terminal.read_until(r"pid \d+\r\n").rpartition("pid ")[2].split()[0])
    assert store.leases.release(store.leases.all()) is None
    output = terminal.read_until(r"(?s)code \d+.* -?echo ")
    terminal.close()
    assert "was released and is free: the shell was ended" in output
    assert "code 4" in output
    assert " echo " in output
    until(lambda: not alive(there))

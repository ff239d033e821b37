"""Programs of `farm shell` end with it, and its device is released; over ssh it takes the same way as farm itself."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from farm_home import FarmHome
from ssh_server import SshServer, alive
from terminals import Terminal
from waiting import Started, until

from farm.base.errors import UsageError
from farm.base.processes import Supervisor
from farm.cli.devices.hold import shell_of
from farm.devices.device import Device, SshAddress
from farm.store.store import Store

SERIAL = "virtual-SM8650-0"


@pytest.fixture(scope="module")
def board(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshServer]:
    with Supervisor() as supervisor:
        yield SshServer(supervisor, tmp_path_factory.mktemp("board"), "QCS9100", "board-7").start()


@contextlib.contextmanager
def shell(home: FarmHome, env: Mapping[str, str], *words: str) -> Iterator[tuple[Started[bytes], int]]:
    """Yield a `farm shell` that leads a session, and the process id that its command on the device printed first."""
    with home.start_alone("shell", *words, env=env, start_new_session=True) as process:
        assert process.stdout is not None
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
    with shell(home, bench, SERIAL, *SLEEP) as (process, there):
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
    with shell(home, on_board, "board-7", *words) as (process, there):
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
    answer = subprocess.run(
        [program, "-G", *argv[1 : argv.index("--") + 2]], capture_output=True, text=True, check=True
    )
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
    assert bash is not None
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

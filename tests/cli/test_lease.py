"""`farm lease`, `farm devices release` and `farm shell`, on virtual devices behind a real adb server."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping

import pytest
from farm_home import FarmHome

from farm.base.processes import Supervisor
from farm.devices.adb.server import start_adb_server
from farm.devices.health import HealthEvent
from farm.devices.virtual.boot import boot
from farm.policy.situation import Priority
from farm.store.store import Store

FIRST, SECOND = (f"virtual-SM8650-{number}@{socket.gethostname()}" for number in range(2))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment that finds two virtual devices where a user's own adb server would be."""
    root = tmp_path_factory.mktemp("lease")
    with Supervisor() as supervisor:
        adb = start_adb_server(supervisor, root / "adb")
        boot(supervisor, adb, ["SM8650", "SM8650"], root)
        yield {"ANDROID_ADB_SERVER_PORT": str(adb.port)}


class User:
    """User of `farm`."""

    def __init__(self, home: FarmHome, server: Mapping[str, str], name: str) -> None:
        self.name, self._home = name, home
        self.env = {**home.env, **server, **({"LOGNAME": name} if name else {})}

    def farm(self, *words: str) -> subprocess.CompletedProcess[str]:
        return self._home.farm(*words, env=self.env)

    def says(self, *words: str) -> str:
        done = self.farm(*words)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def is_refused(self, *words: str, code: int) -> str:
        done = self.farm(*words)
        assert done.returncode == code, (done.stdout, done.stderr)
        assert done.stderr.count("\n") == 1, done.stderr
        return done.stderr

    def start(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "farm.cli.main", *words],
            env=self.env,
            cwd=self._home.cwd,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


@pytest.fixture
def ada(home: FarmHome, server: Mapping[str, str]) -> User:
    return User(home, server, "ada")


@pytest.fixture
def bob(home: FarmHome, server: Mapping[str, str]) -> User:
    return User(home, server, "bob")


def nightly(store: Store, device: str) -> None:
    token = store.leases.request(
        [device], count=1, user="ci", host="bench", pid=7, purpose="farm run", priority=Priority.NIGHTLY, ttl_s=60
    )
    assert store.leases.poll(token, ttl_s=60)


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
    done = ada.farm("shell", "--", "sh", "-c", "echo $0; getprop ro.soc.model; exit 7", "a b")
    assert (done.returncode, done.stdout.splitlines()) == (7, ["a b", "SM8650"]), done.stderr
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
    ada.says("lease", "SM8650")
    ada.says("lease", "SM8650")
    assert "every SM8650 is yours already" in ada.is_refused("lease", "SM8650", code=4)
    before = {lease.device: lease.reserved_until_ms for lease in store.leases.all()}
    ada.says("lease", FIRST, "--for", "3d")
    after = {lease.device: lease.reserved_until_ms for lease in store.leases.all()}
    assert after[FIRST] > before[FIRST] + 2 * 86_400_000
    assert after[SECOND] == before[SECOND]
    assert f"name one of {FIRST}, {SECOND}, or give --all" in ada.is_refused("devices", "release", code=2)
    assert ada.says("devices", "release", "--all").count("is given back") == 2


def test_who_has_it_is_said_and_a_person_who_waits_gets_it(ada: User, store: Store) -> None:
    nightly(store, FIRST)
    shown = ada.says("devices", "release", FIRST, "--force")
    assert shown == f"{FIRST} is given back; 'farm run' of ci stops using it after its running job\n"
    nightly(store, FIRST)
    shown = ada.is_refused("lease", FIRST, "--no-wait", code=4)
    assert f"{FIRST} is used by ci since " in shown
    assert "for 'farm run' (process 7 on bench)" in shown
    assert "give --force" in ada.is_refused("devices", "release", FIRST, code=2)
    waiting = ada.start("lease", FIRST, "--wait", "2m")
    assert waiting.stderr is not None
    assert "waiting: " in waiting.stderr.readline()
    [queued] = store.leases.waiting()
    assert (queued.user, queued.devices, queued.count, queued.purpose) == ("ada", (FIRST,), 1, "farm lease")
    assert "; waiting as well: ada since " in ada.is_refused("lease", FIRST, "--no-wait", code=4)
    for number in (signal.SIGTERM, signal.SIGHUP):
        ended = ada.start("lease", FIRST, "--wait", "2m")
        assert ended.stderr is not None
        assert "waiting: " in ended.stderr.readline()
        ended.send_signal(number)
        ended.communicate(timeout=60)
        assert ended.returncode == 128 + number
        assert [one.user for one in store.leases.waiting()] == ["ada"]
    leases = store.leases.all()
    assert store.leases.renew(leases, ttl_s=60, heartbeat_s=20).wanted == {FIRST}
    store.leases.release(leases)
    output, _ = waiting.communicate(timeout=60)
    assert waiting.returncode == 0
    assert f"{FIRST} (SM8650, virtual) is yours" in output


def test_what_others_wrote_does_not_reach_a_terminal(ada: User, store: Store) -> None:
    token = store.leases.request(
        [FIRST], count=1, user="\x1b[31mci", host="\x07", pid=7, purpose="\x1b]0;x", priority=Priority.NIGHTLY, ttl_s=60
    )
    assert store.leases.poll(token, ttl_s=60)
    output = ada.is_refused("lease", FIRST, "--no-wait", code=4) + ada.says("devices", "release", FIRST, "--force")
    assert all(line.isprintable() for line in output.splitlines()), output


def test_what_cannot_be_leased_is_refused_with_what_to_do(ada: User, store: Store) -> None:
    assert "no SM8750 is attached: 'farm devices'" in ada.is_refused("lease", "SM8750", code=4)
    assert "did you mean 'virtual-SM8650-0'" in ada.is_refused("lease", "virtual-SM8650-00", code=2)
    done = ada.farm("lease", "SM8650", "--for", "soon")
    assert done.returncode == 2
    assert "such as 90s, 10m, 1h30m or 2d" in done.stderr
    store.devices.set_service(FIRST, False, "cracked screen", "bob")
    output = ada.is_refused("lease", FIRST, code=4)
    assert f"{FIRST} is out of service (cracked screen): 'farm devices enable {FIRST}' puts it back" in output
    store.devices.record_health(HealthEvent(SECOND, "health_check", "quarantined", "3 crashes in a row"))
    output = ada.is_refused("lease", "SM8650", code=4)
    assert f"{SECOND} is quarantined (3 crashes in a row): 'farm devices show {SECOND}'" in output
    assert "cracked screen" in output


def test_a_shell_ends_when_its_lease_is_taken_away(ada: User, bob: User, store: Store) -> None:
    shell = ada.start("shell", FIRST, "--", "sh", "-c", "echo here; sleep 300")
    assert shell.stdout is not None
    assert shell.stdout.readline() == "here\n"
    (lease,) = store.leases.all()
    # The arguments may be secrets, and all users can read the purpose.
    assert (lease.user, lease.pid, lease.purpose) == ("ada", shell.pid, "farm shell -- sh")
    assert (
        bob.says("devices", "release", FIRST, "--force") == f"{FIRST} is given back; the shell of ada is being ended\n"
    )
    _, errors = shell.communicate(timeout=60)
    assert shell.returncode == 4
    assert f"{FIRST} was released and is free: the shell was ended" in errors
    assert store.leases.all() == []


def test_a_shell_whose_device_was_given_to_somebody_says_to_whom(ada: User, store: Store) -> None:
    shell = ada.start("shell", FIRST, "--", "sh", "-c", "echo here; sleep 300")
    assert shell.stdout is not None
    assert shell.stdout.readline() == "here\n"
    os.kill(shell.pid, signal.SIGSTOP)
    store.leases.release(store.leases.all())
    token = store.leases.request(
        [FIRST], count=1, user="carol", host="there", pid=7, purpose="a night", priority=Priority.NIGHTLY, ttl_s=60
    )
    assert store.leases.poll(token, ttl_s=60)
    os.kill(shell.pid, signal.SIGCONT)
    _, errors = shell.communicate(timeout=60)
    assert shell.returncode == 4
    assert f"{FIRST} was given to carol: the shell was ended" in errors


def read_until(terminal: int, pattern: str) -> None:
    output = b""
    while not re.search(pattern.encode(), output):
        assert select.select([terminal], [], [], 60)[0], output
        output += os.read(terminal, 4096)


def test_a_shell_in_a_terminal_is_one_on_the_device(ada: User, store: Store) -> None:
    master, slave = os.openpty()
    shell = subprocess.Popen(
        [sys.executable, "-m", "farm.cli.main", "shell", FIRST],
        env=ada.env,
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
    )
    os.close(slave)
    try:
        # adb drops input from before it took over the terminal.
        read_until(master, r"[$#] $")
        os.write(master, b"echo $((6 * 7)) $(getprop ro.soc.model); exit 3\n")
        read_until(master, "42 SM8650")
        assert shell.wait(timeout=60) == 3
    finally:
        shell.kill()
        shell.wait()
        os.close(master)
    assert store.leases.all() == []


def test_a_name_of_farm_toml_for_an_soc_leases_one_more_device_each_time(
    home: FarmHome, server: Mapping[str, str]
) -> None:
    (home.cwd / "farm.toml").write_text('[soc.QCS6490]\nlike = "SM8650"\n')
    ada = User(home, server, "ada")
    taken = [json.loads(ada.says("lease", name, "--json"))["id"] for name in ("QCS6490", "qcs6490")]
    assert sorted(taken) == [FIRST, SECOND]
    ada.says("devices", "release", "--all")

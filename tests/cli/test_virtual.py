"""Virtual devices that stay: output and effects of `farm virtual`, at a real adb server."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator

import pytest
from farm_home import FarmHome, processes_of, wait_for_no_process

from farm.base.processes import Supervisor
from farm.devices.adb.server import AdbServer, start_adb_server

SERIAL = "virtual-SM8650-0"


@pytest.fixture
def server(home: FarmHome) -> Iterator[AdbServer]:
    """The user's ordinary adb server."""
    with Supervisor() as supervisor:
        yield start_adb_server(supervisor, home.cwd / "adb")


@contextlib.contextmanager
def up(home: FarmHome, server: AdbServer, *words: str) -> Iterator[list[str]]:
    """The lines that it prints once the devices are there."""
    environment = {"ANDROID_ADB_SERVER_PORT": str(server.port)}
    with home.running("virtual", "up", "--soc", "SM8650", *words, env=environment) as process:
        assert process.stdout is not None
        lines: list[str] = []
        while not lines or not lines[-1].startswith("Ctrl-C"):
            line = process.stdout.readline()
            assert line, lines
            lines.append(line.rstrip("\n"))
        yield lines
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 0


def adb(server: AdbServer, *words: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **server.environment()}
    return subprocess.run([server.adb, *words], env=env, capture_output=True, text=True, timeout=60, check=False)


def test_devices_stay_fail_on_request_and_leave_nothing(home: FarmHome, server: AdbServer) -> None:
    env = {"ANDROID_ADB_SERVER_PORT": str(server.port)}

    def refused(*words: str) -> str:
        done = home.farm("virtual", *words, env=env, code=2)
        assert done.stderr.count("\n") == 1, done.stderr
        return done.stderr

    with up(home, server, "-n", "2") as output:
        assert [line.split()[0] for line in output[:2]] == [SERIAL, "virtual-SM8650-1"]
        assert f"adb -s product:{SERIAL} shell" in "\n".join(output)
        shell = ("-s", f"product:{SERIAL}", "shell", "echo well")
        assert adb(server, *shell).stdout == "well\n"

        done = home.json("virtual", "fault", SERIAL, "exit_code", "--code", "7", "--match", "^echo")
        assert (done["device"], done["fault"]["kind"], done["fault"]["code"]) == (SERIAL, "exit_code", 7)
        assert [adb(server, *shell).returncode for _ in range(2)] == [7, 0]
        struck = home.json("virtual", "faults", SERIAL)["struck"]
        assert [(one["kind"], one["operation"]) for one in struck] == [("exit_code", "shell")]

        home.farm("devices", env=env, code=0)
        home.farm("devices", "name", SERIAL, "desk", code=0)
        assert home.farm("virtual", "fault", "desk", "wrong_soc").stdout == "desk: wrong_soc, until cleared\n"
        soc = ("-s", f"product:{SERIAL}", "shell", "getprop ro.soc.model")
        assert adb(server, *soc).stdout == "SM8550\n"
        assert home.json("virtual", "clear", SERIAL, "--yes")["device"] == SERIAL
        assert adb(server, *soc).stdout == "SM8650\n"

        for words, message in (
            (("up", "--soc", "SM8650"), "runs already"),
            (("up", "--soc", "SM8650", "--folder", str(home.cwd / "other")), "is attached to the adb server"),
            (("fault", "desk", "clear"), "'farm virtual clear desk --yes'"),
            (("fault", "dask", "wrong_soc"), "did you mean 'desk'"),
            (("fault", SERIAL, "stal"), "did you mean 'stall'"),
            (("fault", SERIAL, "stall", "--duration", "-1"), "seconds"),
            (("fault", SERIAL, "exit_code", "--match", "("), "regular expression"),
        ):
            assert message in refused(*words)
    assert adb(server, "devices").stdout.split("\n")[1] == ""
    assert wait_for_no_process(home) == {}
    assert "farm virtual up" in refused("fault", SERIAL, "stall")


def test_a_device_that_is_killed_is_named_with_how_it_ended(home: FarmHome, server: AdbServer) -> None:
    environment = {"ANDROID_ADB_SERVER_PORT": str(server.port)}
    with home.running("virtual", "up", "--soc", "SM8650", env=environment) as process:
        assert process.stdout is not None
        while not (line := process.stdout.readline()).startswith("Ctrl-C"):
            assert line
        (daemon,) = [pid for pid, command in processes_of(home).items() if "-m farm.devices.virtual" in command]
        os.kill(daemon, signal.SIGKILL)
        output = process.stdout.read()
        assert process.wait(timeout=60) == 4
    assert output == f"farm: {SERIAL} is gone: it ended with signal 9\n"
    assert wait_for_no_process(home) == {}


def test_with_a_server_of_their_own_and_random_faults(home: FarmHome, server: AdbServer) -> None:
    words = ("--own-server", "--fault-rate", "1", "--fault-kinds", "exit_code")
    with up(home, server, *words) as output:
        [port] = [line.rpartition("=")[2] for line in output if "ANDROID_ADB_SERVER_PORT" in line]
        assert adb(server, "devices").stdout.split("\n")[1] == ""
        command = [server.adb, "-P", port, "-s", f"product:{SERIAL}", "shell", "true"]
        assert subprocess.run(command, capture_output=True, timeout=60, check=False).returncode != 0
    assert wait_for_no_process(home) == {}

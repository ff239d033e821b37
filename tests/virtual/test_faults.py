"""Devices that fail on request, as seen by adb and by farm's own transport."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import pytest
from waiting import Started, until

from farm.base.errors import DeviceError, DeviceTimeoutError, InfraError
from farm.base.processes import Supervisor
from farm.devices.adb.server import start_adb_server
from farm.devices.adb.transport import AdbTransport
from farm.devices.virtual.boot import boot
from farm.devices.virtual.faults import (
    Fault,
    FaultKind,
    clear,
    control_address,
    fired,
    inject,
    randomize,
)

if TYPE_CHECKING:
    from conftest import Attached

TMP = "/data/local/tmp"
SIZE = 300_000
# Answers every line like a runner in a session.
RUNNER = (
    "echo ready; while read -r line; do echo begins >&2; "
    'if [ "$line" = bare ]; then echo bare; else echo "{\\"job\\": \\"$line\\"}"; fi; done'
)


@pytest.fixture
def phone(device: Attached) -> Iterator[Attached]:
    """The device of the session, without a fault before and after."""
    clear(device.root)
    yield device
    clear(device.root)
    until(lambda: device.adb("shell", "echo up", check=False).stdout == b"up\n")


@pytest.fixture
def transport(phone: Attached) -> Iterator[AdbTransport]:
    opened = AdbTransport(phone.serial, phone.server.port)
    yield opened
    opened.close()


@pytest.fixture
def large(tmp_path: Path) -> Path:
    path = tmp_path / "large"
    path.write_bytes(os.urandom(SIZE))
    return path


def state(phone: Attached) -> str:
    [line] = phone.adb("devices").stdout.decode().splitlines()[1:2]
    return line.split("\t")[1]


def boot_id(phone: Attached) -> bytes:
    return phone.adb("shell", "getprop farm.boot_id; cat /proc/sys/kernel/random/boot_id", check=False).stdout


def changed_bytes(before: bytes, after: bytes) -> list[int]:
    assert len(before) == len(after)
    return [number for number in range(len(before)) if before[number] != after[number]]


def test_every_kind_is_described_and_has_its_place() -> None:
    assert all(kind.description for kind in FaultKind)
    known = {"push", "pull", "shell", "answer", "link", "list"}
    assert all(kind.operations and kind.operations <= known for kind in FaultKind)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "explode"}, "explode"),
        ({"kind": "stall", "seconds": -1}, "seconds"),
        ({"kind": "stall", "after_bytes": "7"}, "after_bytes"),
        ({"kind": "exit_code", "code": 256}, "at most 255"),
        ({"kind": "exit_code", "match": "("}, "regular expression"),
    ],
)
def test_what_cannot_be_is_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Fault(**fields)  # type: ignore[arg-type]


def test_without_a_device_there_is_nobody_to_ask(tmp_path: Path) -> None:
    with pytest.raises(InfraError, match="no virtual device runs"):
        inject(tmp_path, Fault("stall"))
    with pytest.raises(InfraError, match="no virtual device runs"):
        clear(tmp_path / "none")


@pytest.mark.parametrize("data", [b"\xff\n", b"[" * 50_000 + b"\n", b"x" * (1 << 20), b'{"do": "inject"}\n', b"3\n"])
def test_garbage_for_the_control_socket_harms_nobody(phone: Attached, data: bytes) -> None:
    folder = os.open(phone.root, os.O_PATH)
    try:
        for patient in (True, False):
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(30)
                connection.connect(control_address(folder))
                with contextlib.suppress(ConnectionError):
                    connection.sendall(data)
                    if patient:
                        # The device answers or hangs up, without a wait.
                        connection.recv(4096)
    finally:
        os.close(folder)
    inject(phone.root, Fault("exit_code", match="^echo garbage", code=7))
    assert phone.adb("shell", "echo garbage", check=False).returncode == 7


def test_what_struck_is_told_in_order_and_hidden_from_the_device(phone: Attached) -> None:
    before = len(fired(phone.root))
    inject(phone.root, Fault("exit_code", match="^echo second", code=5))
    inject(phone.root, Fault("exit_code", match="^echo first", code=4, times=2))
    codes = [phone.adb("shell", f"echo {word}", check=False).returncode for word in ("first", "second", "first")]
    assert codes == [4, 5, 4]
    assert phone.adb("shell", "echo first").returncode == 0
    answer = fired(phone.root)[before:]
    assert [(fault["kind"], fault["operation"], fault["subject"]) for fault in answer] == [
        ("exit_code", "shell", f"echo {word}") for word in ("first", "second", "first")
    ]
    assert b"faults" not in phone.adb("ls", "/").stdout
    assert phone.adb("pull", "/faults.jsonl", phone.root / "stolen", check=False).returncode != 0


def test_a_push_and_a_pull_that_are_dropped(phone: Attached, large: Path, tmp_path: Path) -> None:
    inject(phone.root, Fault("drop_push", after_bytes=100_000))
    refused = phone.adb("push", large, f"{TMP}/dropped", check=False)
    assert refused.returncode != 0
    assert b"EOF" in refused.stderr
    assert phone.adb("shell", f"ls {TMP}/dropped", check=False).returncode != 0
    phone.adb("push", large, f"{TMP}/dropped")
    inject(phone.root, Fault("drop_pull", after_bytes=100_000))
    assert phone.adb("pull", f"{TMP}/dropped", tmp_path / "got", check=False).returncode != 0
    assert not (tmp_path / "got").exists()
    phone.adb("pull", f"{TMP}/dropped", tmp_path / "got")
    assert (tmp_path / "got").read_bytes() == large.read_bytes()


@pytest.mark.parametrize(("wanted", "struck"), [(0, 0), (123_456, 123_456), (10**9, SIZE - 1)])
def test_one_byte_is_changed(phone: Attached, large: Path, tmp_path: Path, wanted: int, struck: int) -> None:
    data = large.read_bytes()
    place = phone.root / "data/local/tmp/changed"
    inject(phone.root, Fault("corrupt_push", after_bytes=wanted, match="changed$"))
    phone.adb("push", large, f"{TMP}/changed")
    assert changed_bytes(data, place.read_bytes()) == [struck]
    phone.adb("push", large, f"{TMP}/changed")
    inject(phone.root, Fault("corrupt_pull", after_bytes=wanted))
    phone.adb("pull", f"{TMP}/changed", tmp_path / "got")
    assert changed_bytes(data, (tmp_path / "got").read_bytes()) == [struck]
    assert place.read_bytes() == data


def test_a_stall_moves_nothing_until_it_is_over(phone: Attached, large: Path) -> None:
    transport = AdbTransport(phone.serial, phone.server.port, stall_s=0.5)
    place = PurePosixPath(TMP, "stalled")
    inject(phone.root, Fault("stall"))
    with pytest.raises(DeviceTimeoutError):
        transport.run(["echo", "hi"], timeout_s=0.5)
    clear(phone.root)
    assert transport.run(["echo", "hi"], timeout_s=30).stdout == b"hi\n"
    inject(phone.root, Fault("stall", after_bytes=70_000))
    with pytest.raises(DeviceTimeoutError):
        transport.push({place: large})
    clear(phone.root)
    transport.push({place: large})
    inject(phone.root, Fault("stall", after_bytes=70_000, seconds=0.1))
    transport.push({place: large})
    assert (phone.root / "data/local/tmp/stalled").read_bytes() == large.read_bytes()
    transport.close()


def test_a_reset_breaks_what_is_under_way(phone: Attached, transport: AdbTransport, large: Path) -> None:
    same = boot_id(phone)
    with contextlib.closing(transport.start(["sleep", "600"])) as process:
        inject(phone.root, Fault("reset"))
        with pytest.raises(DeviceError):
            process.receive(30)
    until(lambda: state(phone) == "device")
    inject(phone.root, Fault("reset", after_bytes=100_000))
    assert phone.adb("push", large, f"{TMP}/reset", check=False).returncode != 0
    until(lambda: boot_id(phone) == same)
    assert not (phone.root / "data/local/tmp/reset").exists()


def test_offline_ends_commands_and_keeps_the_boot(phone: Attached, transport: AdbTransport) -> None:
    same = boot_id(phone)
    with contextlib.closing(transport.start(["sh", "-c", "echo $$; exec sleep 600"])) as process:
        pid = int(process.receive(30).stdout)
        inject(phone.root, Fault("offline"))
        with pytest.raises(DeviceError):
            process.receive(30)
    assert not Path(f"/proc/{pid}").exists()
    until(lambda: state(phone) == "offline")
    assert b"offline" in phone.adb("shell", "true", check=False).stderr
    clear(phone.root)
    until(lambda: boot_id(phone) == same)


def test_a_reboot_loses_what_ran_and_keeps_the_files(phone: Attached, large: Path) -> None:
    phone.adb("push", large, f"{TMP}/kept")
    first = boot_id(phone)
    inject(phone.root, Fault("reboot", after_bytes=100_000, seconds=0.1))
    assert phone.adb("push", large, f"{TMP}/torn", check=False).returncode != 0
    until(lambda: boot_id(phone) not in (first, b""))
    second = boot_id(phone)
    lengths = phone.adb("shell", f"stat -c %s {TMP}/kept {TMP}/torn").stdout.split()
    assert lengths == [b"%d" % SIZE, b"100000"]
    phone.adb("reboot")
    until(lambda: boot_id(phone) not in (second, b""))


def test_a_full_disk(phone: Attached, transport: AdbTransport, large: Path) -> None:
    inject(phone.root, Fault("disk_full", after_bytes=100_000))
    refused = phone.adb("push", large, f"{TMP}/full", check=False)
    assert b"No space left on device" in refused.stderr
    with pytest.raises(DeviceError, match="No space left"):
        transport.push({PurePosixPath(TMP, "small"): b"x"})
    free = phone.adb("shell", f"df -kP {TMP} | tail -n 1").stdout.split()
    assert free[3] == b"0"
    clear(phone.root)
    phone.adb("push", large, f"{TMP}/full")
    assert int(phone.adb("shell", f"df -kP {TMP} | tail -n 1").stdout.split()[3]) > 0


def test_exit_codes_and_partial_output(phone: Attached, transport: AdbTransport) -> None:
    inject(phone.root, Fault("exit_code", code=7, text="oops\n"))
    done = phone.adb("shell", "echo whole", check=False)
    assert (done.returncode, done.stdout, done.stderr) == (7, b"whole\n", b"oops\n")
    inject(phone.root, Fault("partial_output", after_bytes=3))
    done = phone.adb("shell", "echo whole; sleep 600", check=False)
    assert (done.returncode, done.stdout) == (255, b"who")
    inject(phone.root, Fault("partial_output", after_bytes=1000))
    with pytest.raises(DeviceError, match="ended before the program"):
        transport.run(["echo", "whole"], timeout_s=30)


def test_endless_output_of_a_command_and_of_a_listing(phone: Attached, transport: AdbTransport) -> None:
    inject(phone.root, Fault("endless_output", text="more "))
    with pytest.raises(DeviceError, match="wrote more than"):
        transport.run(["echo", "whole"], timeout_s=30, max_output=10_000_000)
    inject(phone.root, Fault("endless_output", match="^/data"))
    with Started(
        phone.command("ls", TMP), env=phone.environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as listing:
        assert listing.stdout is not None
        assert len(listing.stdout.read(100_000)) == 100_000
        listing.kill()


def test_a_slow_link_lets_everything_through(phone: Attached, large: Path, tmp_path: Path) -> None:
    inject(phone.root, Fault("slow_link", bytes_per_s=2_000_000, seconds=20))
    phone.adb("push", large, f"{TMP}/slow")
    phone.adb("pull", f"{TMP}/slow", tmp_path / "got")
    assert (tmp_path / "got").read_bytes() == large.read_bytes()


def test_nobody_is_trusted(phone: Attached) -> None:
    inject(phone.root, Fault("unauthorized"))
    until(lambda: state(phone) == "unauthorized")
    refused = phone.adb("shell", "true", check=False)
    assert b"device unauthorized" in refused.stderr
    clear(phone.root)
    until(lambda: state(phone) == "device")


def test_a_state_is_shown_and_ends(phone: Attached) -> None:
    def shown(command: str) -> bytes:
        return phone.adb("shell", command).stdout.strip()

    temperatures = "dumpsys battery | sed -n 's/.*temperature: //p'; cat /sys/class/thermal/thermal_zone*/temp"
    for fault, command, healthy, sick in (
        (Fault("wrong_soc"), "getprop ro.soc.model", b"SM8650", b"SM8550"),
        (Fault("wrong_soc", text="SM8750"), "getprop ro.soc.model", b"SM8650", b"SM8750"),
        (Fault("overheated"), temperatures, b"250\n25000", b"600\n60000"),
        (Fault("low_battery", code=9), "dumpsys battery | sed -n 's/.*level: //p'", b"100", b"9"),
    ):
        assert shown(command) == healthy
        inject(phone.root, fault)
        assert shown(command) == sick
        clear(phone.root)
        assert shown(command) == healthy
    inject(phone.root, Fault("overheated"))
    inject(phone.root, Fault("low_battery"))
    assert shown(f"{temperatures}; dumpsys battery | sed -n 's/.*level: //p'") == b"600\n60000\n5"
    clear(phone.root)
    inject(phone.root, Fault("low_battery", seconds=0.05))
    until(lambda: shown("dumpsys battery | grep level") == b"level: 100")


def test_a_wrong_clock(phone: Attached, tmp_path: Path) -> None:
    inject(phone.root, Fault("clock_skew", seconds=-86_400))
    (tmp_path / "dated").write_bytes(b"")
    os.utime(tmp_path / "dated", (10**9, 10**9))
    phone.adb("push", tmp_path / "dated", f"{TMP}/dated")
    script = f"date +%s; touch {TMP}/touched; stat -c '%Y %s' {TMP}/touched {TMP}/dated"
    now, touched, dated = phone.adb("shell", script).stdout.decode().splitlines()
    assert abs(int(now) + 86_400 - time.time()) < 30
    assert abs(int(touched.split()[0]) + 86_400 - time.time()) < 30
    # adb sets the host's time on a pushed file, and reads the same time back.
    assert dated == "1000000000 0"
    assert b"%08x" % 10**9 in phone.adb("ls", TMP).stdout
    clear(phone.root)
    assert abs(int(phone.adb("shell", "date +%s").stdout) - time.time()) < 30


def test_hostile_names(phone: Attached, tmp_path: Path) -> None:
    phone.adb("shell", f"touch '{TMP}/a b'")
    kept = phone.adb("shell", f"ls {TMP}").stdout
    inject(phone.root, Fault("hostile_names"))
    assert b"$(reboot)" in phone.adb("shell", f"ls {TMP}").stdout
    # adb itself refuses a listing with names that lead elsewhere.
    assert phone.adb("pull", TMP, tmp_path / "got", check=False).returncode != 0
    assert not (tmp_path.parent / "outside").exists()
    clear(phone.root)
    assert phone.adb("shell", f"ls {TMP}").stdout == kept


def session(phone: Attached) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        phone.command("shell", f"exec sh -c '{RUNNER}' runner --serve"),
        env=phone.environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


@pytest.mark.parametrize(
    ("fault", "code", "rest"),
    [
        (Fault("kill_runner"), 137, b""),
        (Fault("kill_runner", code=11), 139, b""),
        (Fault("exit_code", code=3, match="--serve"), 3, b""),
        (Fault("partial_output", after_bytes=5, match="--serve"), 255, b'{"job'),
    ],
)
def test_a_runner_dies_before_its_answer(phone: Attached, fault: Fault, code: int, rest: bytes) -> None:
    with session(phone) as runner:
        assert runner.stdin is not None
        assert runner.stdout is not None
        assert runner.stdout.readline() == b"ready\n"
        runner.stdin.write(b"0\n")
        runner.stdin.flush()
        assert runner.stdout.readline() == b'{"job": "0"}\n'
        inject(phone.root, fault)
        runner.stdin.write(b"bare\n1\n")
        runner.stdin.flush()
        assert runner.stdout.read() == b"bare\n" + rest
        assert runner.wait(timeout=30) == code
    assert fired(phone.root)[-1]["operation"] == "answer"


def test_a_runner_hangs(phone: Attached, transport: AdbTransport) -> None:
    with contextlib.closing(transport.start(["sh", "-c", f"echo $$; {RUNNER}", "runner", "--serve"])) as process:
        output = b""
        while output.count(b"\n") < 2:
            output += process.receive(30).stdout
        pid = int(output.split()[0])
        inject(phone.root, Fault("hang_runner"))
        process.send(b"1\n")
        until(lambda: Path(f"/proc/{pid}/stat").read_text().split()[2] == "T")
        assert process.receive(0.3).stdout == b""
    until(lambda: not Path(f"/proc/{pid}").exists())
    assert transport.run(["echo", "well"], timeout_s=30).stdout == b"well\n"


def test_random_faults_are_the_same_for_the_same_seed(phone: Attached) -> None:
    def struck(seed: int) -> list[int]:
        randomize(phone.root, 0.3, seed, ["exit_code"])
        codes = [phone.adb("shell", "exit 0", check=False).returncode for _ in range(20)]
        clear(phone.root)
        return codes

    first = struck(7)
    assert 0 < sum(map(bool, first)) < 20
    assert struck(7) == first
    assert struck(8) != first


def test_boot_randomizes_once_everything_is_up(tmp_path: Path) -> None:
    with Supervisor() as supervisor:
        server = start_adb_server(supervisor, tmp_path / "adb")
        [device] = boot(
            supervisor, server, ["SM8650"], tmp_path, fault_rate=1.0, fault_seed=3, fault_kinds=["exit_code"]
        )
        transport = AdbTransport(device.serial, server.port)
        assert transport.run(["true"], timeout_s=30).code != 0
        assert [fault["kind"] for fault in fired(tmp_path / device.serial)] == ["exit_code"]


def test_by_hand_with_a_rate_and_only_one_daemon_a_folder(tmp_path: Path) -> None:
    argv = [sys.executable, "-S", "-m", "farm.devices.virtual", "--root", str(tmp_path / "root"), "--soc", "SM8750"]
    package = str(Path(__file__).resolve().parents[2])
    environment = {"PATH": os.defpath, "PYTHONPATH": package}
    random = ["--fault-rate", "1", "--fault-seed", "7", "--fault-kinds", "exit_code,stall"]
    with Started([*argv, *random], stdout=subprocess.PIPE, env=environment) as daemon:
        assert daemon.stdout is not None
        assert json.loads(daemon.stdout.readline())["port"]
        second = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=60, check=False)
        assert (second.returncode, second.stderr.count("\n")) == (2, 1)
        assert "another virtual device runs in" in second.stderr
        clear(tmp_path / "root")
        daemon.terminate()
        assert daemon.wait(timeout=30) == 0
    for words in (["--fault-rate", "2"], ["--fault-rate", "0.5", "--fault-kinds", "explode"]):
        wrong = subprocess.run(
            [*argv, *words], env=environment, capture_output=True, text=True, timeout=60, check=False
        )
        assert (wrong.returncode, wrong.stderr.count("\n")) == (2, 1)

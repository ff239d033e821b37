"""Devices that fail on request, as seen by adb and by farm's own transport."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING
from unittest.mock import Mock

import pytest
from waiting import Started, until

from farm.base.errors import DeviceError, DeviceTimeoutError, InfraError
from farm.devices.adb.protocol import LinkThrottle
from farm.devices.adb.transport import AdbTransport
from farm.devices.device import AdbAddress
from farm.devices.virtual.faults import Fault, clear, fired, inject
from farm.devices.virtual.injection import Injection
from farm.devices.virtual.tree import DeviceTree, device_properties

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
    opened = AdbTransport(phone.serial, AdbAddress(phone.server.port))
    yield opened
    opened.close()


@pytest.fixture
def large(tmp_path: Path) -> Path:
    path = tmp_path / "large"
    path.write_bytes(os.urandom(SIZE))
    return path


def boot_id(phone: Attached) -> bytes:
    return phone.adb("shell", "getprop farm.boot_id; cat /proc/sys/kernel/random/boot_id", check=False).stdout


def test_without_a_device_there_is_nobody_to_ask(tmp_path: Path) -> None:
    with pytest.raises(InfraError, match="no virtual device runs"):
        inject(tmp_path, Fault("stall"))
    with pytest.raises(InfraError, match="no virtual device runs"):
        clear(tmp_path / "none")


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


def test_a_stall_moves_nothing_until_it_is_over(phone: Attached, large: Path) -> None:
    transport = AdbTransport(phone.serial, AdbAddress(phone.server.port))
    transport.stall_s = 0.5
    place = PurePosixPath(TMP, "stalled")
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
    until(lambda: boot_id(phone) == same)
    inject(phone.root, Fault("reset", after_bytes=100_000))
    assert phone.adb("push", large, f"{TMP}/reset", check=False).returncode != 0
    until(lambda: boot_id(phone) == same)
    assert not (phone.root / "data/local/tmp/reset").exists()


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
    with Started(
        phone.command("shell", f"exec sh -c '{RUNNER}' runner --serve"),
        env=phone.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as runner:  # fmt: skip
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


def test_random_faults_are_the_same_for_the_same_seed(tmp_path: Path) -> None:
    tree = DeviceTree(tmp_path, device_properties("SM8650", "virtual-SM8650-0", "test"))
    injection = Injection(tree, LinkThrottle(), Mock(), "virtual-SM8650-0")

    def struck(seed: int) -> list[str]:
        injection.randomize(0.3, seed)
        return [fault.kind if (fault := injection.strike("shell", "true")) else "" for _ in range(50)]

    first = struck(7)
    assert len(set(first)) > 3
    assert "" in first
    assert struck(7) == first
    assert struck(8) != first

"""Devices that fail for good, or whose storage another user has filled."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from attached import Attached, attach
from farm_home import FarmHome
from receivers import web_server
from small_disk import small_disk
from stub_home import make_stub_home, write_stub_suite
from waiting import until

from farm.devices.connect import open_transport
from farm.devices.recovery import PRINT_BOOT
from farm.devices.virtual.faults import Fault, FaultKind, inject

# Device whose storage another user has filled: it waits, and is neither rebooted nor put into quarantine.


pytestmark = pytest.mark.whole

RUN = ("run", "--soc", "SM8650", "--backend", "xnnpack", "--suite", "smoke", "-k", "add")
# The runtime's objects take some 10 MiB of it.
SIZE_MIB, LEFT_MIB = 160, 4


@pytest.fixture
def small(home: FarmHome, tmp_path: Path) -> Iterator[Attached]:
    """Yield an attached virtual device on a small file system."""
    with small_disk(tmp_path / "bench", f"{SIZE_MIB}m") as disk, attach(home, disk, ["SM8650"]) as attached:
        yield attached


def boot_id(small: Attached) -> bytes:
    transport = open_transport(small.devices[0])
    try:
        return transport.run(["sh", "-c", PRINT_BOOT], timeout_s=20).stdout
    finally:
        transport.close()


def fill(small: Attached) -> Path:
    """Fill the storage up to a few MiB, like a user's models beside farm's folder."""
    film = small.root(0) / "data/local/tmp/somebodys.film"
    free = os.statvfs(small.folder)
    with film.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, free.f_bavail * free.f_frsize - (LEFT_MIB << 20))
    return film


def test_it_is_neither_rebooted_nor_in_quarantine_and_what_is_farms_is_freed(small: Attached) -> None:
    small.farm(*RUN, timeout_s=300, code=0)
    objects = small.root(0) / "data/local/tmp/farm/objects"
    assert list(objects.iterdir())
    before = boot_id(small)
    for path in objects.iterdir():
        # The job has to push its files again, like a new job, with no room for them.
        path.unlink()
    film = fill(small)
    (small.home.cwd / "farm.toml").write_text("[health]\ndisk_wait_s = 1.0\n")
    done = small.farm(*RUN, timeout_s=300, code=4)
    assert "its storage is full: the user who filled it has to free space" in done.stderr
    assert "reboot" not in done.stderr
    assert boot_id(small) == before
    [row] = small.json("devices")["devices"]
    assert row["health"] == "suspect"
    assert "its storage is full" in row["health_reason"]
    assert film.exists()
    assert list(objects.iterdir()) == []
    assert not any("reboot" in event["reason"] for event in small.json("devices", "show", row["serial"])["events"])


def test_it_goes_on_as_soon_as_there_is_room_again(small: Attached) -> None:
    film = fill(small)
    with small.running(*RUN) as process:
        # Only free space helps after a step of recovery.
        until(lambda: small.home.rows("select * from health_event where event = 'recovery'"), "a wait for room")
        film.unlink()
        output = process.communicate(timeout=300)[0]
    assert process.returncode == 0, output
    [row] = small.json("devices")["devices"]
    assert row["health"] == "healthy"


# Runs on devices that fail for good: one is revived by its power command, of the other its owner gets a notice.


STUB_RUN = ("run", "--soc", "SM8650", "--suite", "./mine", "--json")


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Attached]:
    home = make_stub_home(tmp_path / "stub")
    write_stub_suite(home, "mine", {"only": 20})
    with attach(home, tmp_path, ["SM8650", "SM8650"]) as attached:
        yield attached


def test_power_revives_a_device_and_a_quarantine_is_announced_once(pair: Attached, tmp_path: Path) -> None:
    # Every runner dies, also at a health check, until the power is switched off and on.
    for number in (0, 1):
        inject(pair.root(number), Fault(FaultKind.KILL_RUNNER, times=0))
    left, other = (device.serial for device in pair.devices)
    hub = tmp_path / "hub.py"
    hub.write_text(
        f"#!{sys.executable}\nimport sys\nfrom pathlib import Path\nfrom farm.devices.virtual.faults import clear\n"
        f"clear(Path({str(pair.root(0))!r}))\nprint('cycled', *sys.argv[1:])\n"
    )
    hub.chmod(0o700)
    (pair.home.cwd / "farm.toml").write_text(
        f'[[device]]\nserial = "{left}"\nname = "left"\npower = ["{hub}", "{{serial}}"]\n'
        f'[[notify.webhook]]\nurl_env = "LAB_HOOK"\n'
    )
    with web_server() as hook:
        env = {**pair.env, "LAB_HOOK": hook.url("/T0/SECRET")}
        with pair.home.running(*STUB_RUN, "--device", "left", env=env) as revived:
            # At the same time: most of either is the pauses between the steps.
            pair.home.farm(*STUB_RUN, "--device", other, env=env, timeout_s=300, code=4)
            output = revived.communicate(timeout=300)[0]
        assert revived.returncode == 0, output
        [event] = [one for one in pair.json("devices", "show", "left")["events"] if "power" in one["reason"]]
        assert event["reason"] == f"power cycle: it answers again; the command printed: cycled {left}"
        pair.home.farm(*STUB_RUN, "--device", other, env=env, timeout_s=300, code=4)
        answers = [json.loads(body)["device"]["serial"] for body in hook.bodies]
        assert answers == [other], "once for the quarantine, and not for each run"
    assert "sent: webhook 1 (http://127.0.0.1" in pair.farm("devices", "show", other).stdout
    everything = [file.read_bytes() for file in pair.home.state.rglob("*") if file.is_file()]
    assert not any(b"T0/SECRET" in content for content in everything)

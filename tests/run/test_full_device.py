"""Device whose storage another user has filled: it waits, and is neither rebooted nor put into quarantine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from attached import Attached, attach
from farm_home import FarmHome
from small_disk import small_disk
from waiting import until

from farm.devices.connect import open_transport
from farm.devices.recovery import PRINT_BOOT

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

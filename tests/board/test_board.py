"""A board that boots, with an old dropbear and busybox on it: jobs, and what befalls boards while they run."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from booted_board import Board
from farm_home import FarmHome
from waiting import until

from farm.base.errors import DeviceError, DeviceSpaceError
from farm.devices.device import RECOVERY, Device
from farm.devices.facts import identify, read_status
from farm.devices.recovery import Step, recover
from farm.devices.ssh.transport import SshTransport

SMOKE = ("run", "--soc", "QCS9100", "--suite", "smoke", "--backend", "xnnpack", "--json")
SMOKE_JOBS = 8
# Remount as soon as the first job is on the board; a file open for writing makes the storage busy.
_READ_ONLY_ONCE_USED = """
for _ in 1 2 3 4 5 6 7 8 9 10; do
    ls -d /var/tmp/farm-root/run-*/*/ && mount -o remount,ro /var/tmp && echo read-only && break
    sleep 0.2
done 2>/dev/null
true
"""

pytestmark = pytest.mark.whole


@pytest.fixture
def device(board: Board) -> Device:
    return identify("board", board.address)


@pytest.fixture
def transport(board: Board) -> Iterator[SshTransport]:
    with contextlib.closing(SshTransport("board", board.address)) as transport:
        yield transport


@contextlib.contextmanager
def shell(board: Board) -> Iterator[Callable[[str], str]]:
    """Function that runs a script on the board and returns its output; the script has to succeed."""

    def run(script: str) -> str:
        done = transport.run(["sh", "-c", script], timeout_s=60)
        assert done.code == 0, done
        return done.stdout.decode().strip()

    with contextlib.closing(SshTransport("board", board.address)) as transport:
        yield run


def boot_id(board: Board) -> str:
    with shell(board) as run:
        return run("cat /proc/sys/kernel/random/boot_id")


def decided(view: dict[str, Any]) -> dict[str, list[str]]:
    """Return the verdicts of every job, attempt by attempt."""
    return {job["id"]: [attempt["verdict"] for attempt in job["attempts"]] for job in view["jobs"]}


def test_it_is_who_its_device_tree_says(board: Board, device: Device, transport: SshTransport) -> None:
    assert (device.soc, device.os, device.kind) == ("QCS9100", "linux", "hardware")
    assert device.product == "Qualcomm QCS9100 Ride, emulated"
    assert device.build.startswith("A board of busybox and dropbear 6.")
    status = read_status(transport, os="linux")
    assert status.root
    assert status.boot_id == boot_id(board)
    assert status.free_bytes is not None
    assert 100 << 20 < status.free_bytes < 200 << 20


def test_a_program_that_is_stopped_leaves_nothing_on_it(board: Board, transport: SshTransport) -> None:
    with shell(board) as run:
        process = transport.start(["sh", "-c", "echo begun; sleep 4321 & sleep 4322"])
        until(lambda: b"begun" in process.receive(1).stdout)
        assert "sleep 432" in run("ps")
        process.close()
        assert "sleep 432" not in run("ps")


def test_pressing_reset_ends_what_runs_and_one_step_brings_it_back(
    board: Board, device: Device, transport: SshTransport
) -> None:
    before, start = boot_id(board), board.starts
    process = transport.start(["sleep", "600"])
    board.reset()
    with pytest.raises(DeviceError), contextlib.closing(process):
        until(lambda: process.receive(1).code is not None)
    board.wait(start + 1)
    recovery = recover(device)
    assert [(step.step, step.problem) for step in recovery.steps] == [(Step.RECONNECT, "")]
    assert boot_id(board) != before


def test_a_cut_is_seen_and_what_ran_is_ended_once_the_plug_is_in_again(board: Board, transport: SshTransport) -> None:
    process = transport.start(["sh", "-c", "echo begun; exec sleep 5432"])
    until(lambda: b"begun" in process.receive(1).stdout)
    board.cut_network()
    try:
        # QEMU acknowledges sent bytes: only the missing answer shows the failure.
        with pytest.raises(DeviceError):
            until(lambda: process.receive(1).code is not None)
    finally:
        board.cut_network(cut=False)
    until(lambda: board.is_well)
    process.close()
    with shell(board) as run:
        assert "sleep 5432" not in run("ps")


def test_a_full_disk_is_said_to_be_that_and_nothing_is_left_of_a_push(board: Board, transport: SshTransport) -> None:
    with shell(board) as run:
        run(f"mkdir -p {transport.storage}; dd if=/dev/zero of=/var/tmp/film bs=1M count=300 2>/dev/null; true")
        try:
            assert read_status(transport, os="linux").free_bytes == 0
            with pytest.raises(DeviceSpaceError):
                transport.push({transport.storage / "file": bytes(1 << 20)})
        finally:
            run("rm -f /var/tmp/film")
        transport.push({transport.storage / "file": bytes(1 << 20)})


def test_a_clock_that_is_years_off_changes_nothing(board: Board, board_home: FarmHome, transport: SshTransport) -> None:
    with shell(board) as run:
        run("date -s 2019-05-04 >/dev/null")
    try:
        offset = read_status(transport, os="linux").clock_offset_ms
        assert offset is not None
        assert offset < -365 * 86_400_000
        done = board_home.farm(*SMOKE, "-k", "add", timeout_s=400, code=0)
        assert list(decided(json.loads(done.stdout)).values()) == [["passed"]]
    finally:
        with shell(board) as run:
            run(f"date -s @{time.time():.0f} >/dev/null")


def test_smoke_passes_on_it_and_a_reboot_by_the_ladder_in_the_middle_costs_no_result(
    board: Board, board_home: FarmHome
) -> None:
    before = boot_id(board)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(board_home.farm, *SMOKE, timeout_s=600)
        with shell(board) as run:
            until(lambda: "read-only" in run(_READ_ONLY_ONCE_USED) or running.done(), timeout_s=400)
        done = running.result()
    assert done.returncode == 0, done.stderr[-4000:]
    assert boot_id(board) != before
    assert "is being brought back" in done.stderr
    verdicts = decided(json.loads(done.stdout))
    assert len(verdicts) == SMOKE_JOBS
    assert all(attempts[-1] == "passed" for attempts in verdicts.values())
    assert sum(attempts.count("infra") for attempts in verdicts.values()) <= 2
    events = board_home.json("devices", "show", "board")["events"]
    steps = [one["reason"].split(": ", 1) for one in reversed(events) if one["event"] == RECOVERY]
    assert [step for step, _ in steps] == [Step.RECONNECT, Step.RESTART, Step.REBOOT]
    assert [result == "it answers again" for _, result in steps] == [False, False, True]

"""Every script that farm sends to a device, as it is sent, under the tools of each kind of device.

The tools are GNU's with the login shell of this machine, toybox under mksh on Android's own adbd, and busybox behind
dropbear. `tools/device_tables.py` makes the table in docs/evidence/devices.md from what this prints.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

import pytest
from adbd_device import AdbdDevice
from ssh_server import DropbearServer, SshServer
from waiting import until

from farm.base.processes import Supervisor
from farm.devices.connect import open_transport
from farm.devices.device import AdbAddress, Device
from farm.devices.execution.content_store import ContentStore, differing, expected_content, hashes_of
from farm.devices.execution.liveness import take_over
from farm.devices.execution.shell import shell_script
from farm.devices.facts import identify, read_platform, read_status
from farm.devices.recovery import PRINT_BOOT, PRINT_STATE
from farm.devices.transport import Completed, Transport

SECONDS = 60.0


@pytest.fixture(
    scope="module",
    params=["GNU", *(pytest.param(name, marks=pytest.mark.whole) for name in ("toybox", "busybox"))],
)
def device(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Device]:
    if request.param == "toybox":
        real: AdbdDevice = request.getfixturevalue("adbd")
        yield identify(real.serial, AdbAddress(real.server.port))
        return
    kind = SshServer if request.param == "GNU" else DropbearServer
    with Supervisor() as supervisor:
        board = kind(supervisor, tmp_path_factory.mktemp("commands") / "board").start()
        yield identify("board", board.address)
        board.stop()


@pytest.fixture(scope="module")
def transport(device: Device) -> Iterator[Transport]:
    with contextlib.closing(open_transport(device)) as transport:
        yield transport


@pytest.fixture
def folder(transport: Transport) -> PurePosixPath:
    """An empty folder on the device, beside which sessions are."""
    place = transport.storage / "run-1-1"
    done = transport.run(["sh", "-c", 'rm -rf -- "$1" && mkdir -p -- "$1"', "sh", str(place)], timeout_s=SECONDS)
    assert (done.code, done.stderr) == (0, b"")
    return place


def run(
    transport: Transport, script: str, *words: str, cwd: PurePosixPath | None = None, stdin: bytes = b""
) -> Completed:
    return transport.run(["sh", "-c", script, "sh", *words], cwd=cwd, stdin=stdin, timeout_s=SECONDS)


def test_identity_status_and_facts(device: Device, transport: Transport) -> None:
    assert (bool(device.soc), device.kind) == (True, "virtual")
    assert device.build
    assert transport.user_id() in {0, 2000, os.getuid()}
    status = read_status(transport, os=device.os)
    assert status.boot_id
    assert status.uptime_s
    assert status.free_bytes
    assert status.clock_offset_ms is not None
    assert abs(status.clock_offset_ms) < 60_000
    facts = read_platform(transport)
    assert facts.page_bytes >= 4096
    assert facts.page_bytes & (facts.page_bytes - 1) == 0
    assert facts.selinux in {"", "Disabled", "Permissive", "Enforcing"}
    boot, state = run(transport, PRINT_BOOT), run(transport, PRINT_STATE)
    assert boot.code == state.code == 0
    assert state.stdout.splitlines() == [*boot.stdout.splitlines(), b"1"]


def test_survey_admit_hash_and_remove_objects(transport: Transport, folder: PurePosixPath, tmp_path: Path) -> None:
    for number in range(150):
        (tmp_path / str(number)).write_bytes(b"%d" % number)
    files = {sha256: tmp_path / name for name, sha256 in hashes_of(tmp_path.iterdir()).items()}
    store = ContentStore(transport, folder)
    store.ensure(files)
    assert store.verify(files.keys())
    again = ContentStore(transport, folder)
    again.ensure(files)
    assert again.pushed_bytes == 0
    [victim] = list(files)[:1]
    assert run(transport, 'chmod 666 -- "$1"; printf x >"$1"', str(again.path(victim))).code == 0
    assert not ContentStore(transport, folder).verify([victim])
    assert again.free(keep=())
    assert run(transport, 'ls -- "$1"', str(again.path(victim).parent)).stdout == b""


def test_hash_files(transport: Transport, folder: PurePosixPath) -> None:
    files: Mapping[PurePosixPath, bytes] = {folder / "a": b"one", folder / "b": b"two"}
    transport.push(files)
    expected = expected_content(files, folder)
    assert differing(transport, folder, expected) == []
    assert differing(transport, folder, {**expected, "b": expected["a"], "c": expected["a"]}) == ["b", "c"]


def test_take_over(transport: Transport, folder: PurePosixPath) -> None:
    process = transport.start(["sh", "-c", "echo begun; exec sleep 600"], cwd=folder)
    assert process.receive(SECONDS).stdout == b"begun\n"
    take_over(transport, "run-2-2")
    until(lambda: process.receive(1).code is not None)
    process.close()
    assert run(transport, '[ -e "$1" ]', str(folder)).code == 1


def test_end_by_mark(transport: Transport, folder: PurePosixPath) -> None:
    # Other tests sleep on this machine meanwhile: the random duration identifies these two processes.
    asleep = f"sleep {random.randrange(10**7, 10**8)}"
    found_by = 'for one in /proc/[0-9]*/cmdline; do tr "\\0" " " <"$one"; echo; done 2>/dev/null; true'
    script = f'for n in 1 2; do (trap "" HUP; exec {asleep}) & done; echo begun; wait'
    process = transport.start(["sh", "-c", script], cwd=folder)
    assert process.receive(SECONDS).stdout == b"begun\n"
    until(lambda: run(transport, found_by).stdout.decode(errors="replace").splitlines().count(f"{asleep} ") == 2)
    process.close()
    assert asleep.encode() not in run(transport, found_by).stdout


def test_run_once_and_gather(transport: Transport, folder: PurePosixPath) -> None:
    program = b"""#!/bin/sh
n=0
while read -r line; do
    printf %s "$line" >out/output_${n}_0.raw
    n=$((n + 1))
done <lines
"""
    transport.push({folder / "input_list.txt": b"a\nb\n", folder / "program": program, folder / "speed": b"1.5"})
    assert run(transport, "chmod 755 program", cwd=folder).code == 0
    done = run(transport, shell_script("run_once"), "2", "lines", "out", "./program", cwd=folder, stdin=b"")
    # Standard input that ends ends the program, if it still runs: it may have.
    assert done.code in {0, 137, 143}
    process = transport.start(
        ["sh", "-c", shell_script("run_once"), "sh", "2", "lines", "out", "./program"], cwd=folder
    )
    assert until(lambda: None if (code := process.receive(1).code) is None else [code]) == [0]
    process.close()
    gathered = run(
        transport, shell_script("gather"), "out", "../speed", cwd=folder, stdin=b"out/output_3_0.raw output_1_0.raw\n"
    )
    lines = gathered.stdout.decode().splitlines()
    assert (gathered.code, gathered.stderr) == (0, b"")
    assert lines[:4] == [f"size 1 output_{n}_0.raw" for n in range(4)]
    assert [line.split()[-1] for line in lines[4:8]] == [f"output_{n}_0.raw" for n in range(4)]
    assert all(len(line.split()[0]) == 64 for line in lines[4:8])
    assert run(transport, "cat output_1_0.raw", cwd=folder).stdout == b"b"


def test_read_the_beginning_of_a_file(transport: Transport, folder: PurePosixPath) -> None:
    transport.push({folder / "text": b"x" * 5000})
    done = run(
        transport, 'if [ -e "$1" ]; then exec head -c "$2" -- "$1"; fi; exit "$3"', "text", "9", "77", cwd=folder
    )
    assert (done.code, done.stdout) == (0, b"x" * 9)
    assert run(transport, 'wc -c <"$1"', "text", cwd=folder).stdout.split() == [b"5000"]


def test_crash_logs(transport: Transport) -> None:
    for name in ("tombstone", "logcat", "dmesg", "journal", "dsp"):
        done = run(transport, shell_script(name), "60", "10000")
        # A log that is not there is no text; a word that a tool does not take would be on standard error.
        for complaint in (b"nvalid option", b"nrecognized option", b"yntax error", b"Unknown option"):
            assert complaint not in done.stderr, name


def test_remove_a_session(transport: Transport, folder: PurePosixPath) -> None:
    transport.push({folder / "-rf": b"x", folder / "a b": b"x"})
    assert transport.run(["rm", "-rf", "--", str(folder)], timeout_s=SECONDS).code == 0
    assert run(transport, '[ -e "$1" ]', str(folder)).code == 1

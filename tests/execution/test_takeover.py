"""The new owner of a device ends and removes what others left, and nothing else."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from watched_transport import Watched

from farm.builds.bundles.bundle import Bundle
from farm.builds.runtime.runtime import Runtime
from farm.devices.execution.raw import RunnerOptions
from farm.devices.execution.session import DeviceSession
from farm.devices.execution.takeover import take_over

OPTIONS = RunnerOptions(timeout_s=30)
SECONDS = 10.0


@pytest.fixture
def start_in() -> Iterator[Callable[[Path], subprocess.Popen[bytes]]]:
    """Start a process in a folder: a survivor of another owner."""
    started = []

    def start(folder: Path) -> subprocess.Popen[bytes]:
        folder.mkdir(parents=True, exist_ok=True)
        started.append(subprocess.Popen(["sleep", "600"], cwd=folder))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def runner_of(session: DeviceSession, bundle: Bundle, folder: Path) -> int:
    """Run a job and return the process id of the session's runner, which stays."""
    raw = session.execute("s/c", session.stage(bundle), folder, OPTIONS)
    assert raw.exit_code == 0, raw.error
    return int(raw.stderr.split()[1])


def alive(pid: int) -> bool:
    """Return whether a program of the device runs, or waits for its parent."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_new_owner_ends_what_others_left_and_keeps_what_is_its_own(
    transport: Watched,
    runtime: Runtime,
    make_bundle: Callable[..., Bundle],
    storage: Path,
    tmp_path: Path,
    start_in: Callable[[Path], subprocess.Popen[bytes]],
) -> None:
    good = make_bundle(b"good")
    old = DeviceSession(transport, runtime, "old", transport.serial)
    old_runner = runner_of(old, good, tmp_path / "old")
    survivor = start_in(storage / "run-killed-1" / "7")
    outside, bystander = tmp_path / "outside", start_in(tmp_path / "elsewhere")
    outside.mkdir()
    (outside / "precious").write_text("not farm's")
    (storage / "run-link-1").symlink_to(outside)
    (storage / "run-a b'; \n*").mkdir()
    objects = transport.listed(transport.storage / "objects")

    new = DeviceSession(transport, runtime, "new", transport.serial, takeover=True)
    new_runner = runner_of(new, good, tmp_path / "new")
    assert survivor.wait(SECONDS) == -9
    assert not alive(old_runner)
    assert bystander.poll() is None
    assert [path.name for path in storage.glob("run-*")] == [f"run-new-{os.getpid()}"]
    assert (outside / "precious").read_text() == "not farm's"
    assert transport.listed(transport.storage / "objects") >= objects
    # A session takes over once: later remains are its own.
    assert runner_stays(new, good, tmp_path / "again")
    assert alive(new_runner)
    take_over(transport, f"run-new-{os.getpid()}")
    assert alive(new_runner)
    new.close()
    with contextlib.suppress(OSError):
        old.close()


def runner_stays(session: DeviceSession, bundle: Bundle, folder: Path) -> bool:
    """Run a job and return whether the runner of the previous job executed it."""
    raw = session.execute("s/c", session.stage(bundle), folder, OPTIONS)
    return raw.exit_code == 0 and not raw.stderr.startswith("started")


def test_without_taking_over_others_are_left_alone(
    transport: Watched, runtime: Runtime, make_bundle: Callable[..., Bundle], tmp_path: Path
) -> None:
    good = make_bundle(b"good")
    first = DeviceSession(transport, runtime, "first", transport.serial)
    runner = runner_of(first, good, tmp_path / "first")
    second = DeviceSession(transport, runtime, "second", transport.serial)
    runner_of(second, good, tmp_path / "second")
    assert runner_stays(first, good, tmp_path / "again")
    assert alive(runner)
    second.close()
    first.close()


def test_a_folder_whose_name_looks_like_a_line_of_ls_ends_nobody(
    transport: Watched, storage: Path, tmp_path: Path, start_in: Callable[[Path], subprocess.Popen[bytes]]
) -> None:
    victim = start_in(tmp_path / "victim")
    fake = f"x\nlrwx 1 u g 0 now /proc/{victim.pid}/cwd -> {storage}"
    liar = start_in(tmp_path / f"{fake}/run-fake-1")
    assert str(storage).startswith("/")
    take_over(transport, "run-mine-1")
    assert victim.poll() is None
    assert liar.poll() is None


def test_a_device_that_nobody_has_used_has_nothing_to_take_over(transport: Watched, storage: Path) -> None:
    storage.mkdir(exist_ok=True)
    storage.rename(storage.with_name("aside"))
    try:
        take_over(transport, "run-mine-1")
        assert not storage.exists()
    finally:
        storage.with_name("aside").rename(storage)

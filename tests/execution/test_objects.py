"""Files on a device under their hash, and what other sessions left: pushes, repairs, room, and a new owner."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import msgspec
import pytest
from small_disk import small_disk
from waiting import alive
from watched_transport import Watched

from farm.base.errors import DeviceError
from farm.base.processes import Supervisor
from farm.builds.bundles.bundle import Bundle
from farm.builds.runtime.runtime import Runtime
from farm.devices.adb.server import start_adb_server
from farm.devices.adb.transport import AdbTransport
from farm.devices.execution.content_store import ContentStore
from farm.devices.execution.liveness import take_over
from farm.devices.execution.raw import RawResult, RunnerOptions
from farm.devices.execution.session import DeviceSession
from farm.devices.virtual.boot import boot

OPTIONS = RunnerOptions(timeout_s=30)
MIB = 1 << 20


StartIn = Callable[[Path], subprocess.Popen[bytes]]
Execute = Callable[..., tuple[DeviceSession, list[RawResult]]]
Make = Callable[..., Bundle]


def local(tmp_path: Path, name: str, data: bytes) -> dict[str, Path]:
    path = tmp_path / name
    path.write_bytes(data)
    return {hashlib.sha256(data).hexdigest(): path}


@pytest.fixture
def execute(transport: Watched, runtime: Runtime, tmp_path: Path) -> Iterator[Execute]:
    """Function that executes bundles in a new session of this name; the session before ends."""
    with ExitStack() as stack:

        def execute(name: str, *bundles: Bundle, runtime: Runtime = runtime) -> tuple[DeviceSession, list[RawResult]]:
            stack.close()
            session = stack.enter_context(closing(DeviceSession(transport, runtime, name, transport.serial)))
            session.prepare(bundles)
            raws = [
                session.execute("s/c", session.stage(bundle), tmp_path / f"{name}{number}", OPTIONS)
                for number, bundle in enumerate(bundles)
            ]
            assert [raw.error or raw.stderr for raw in raws if raw.exit_code] == []
            return session, raws

        yield execute


def test_a_second_run_pushes_nothing(transport: Watched, execute: Execute, make_bundle: Make) -> None:
    large = os.urandom(256 * 1024)
    bundles = [make_bundle(b"good 1" + large), make_bundle(b"good 2", [large])]
    session, _ = execute("first", *bundles)
    assert session.pushed_bytes > len(large) * 2
    transport.forget()
    session, raws = execute("second", *bundles)
    assert session.pushed_bytes == 0
    # Lists and small inputs travel; nothing else does.
    assert sum(transport.pushed.values()) < 200
    assert raws[1].output(0, 0).read_bytes() == large


def test_a_damaged_object_is_replaced(execute: Execute, make_bundle: Make, storage: Path, tmp_path: Path) -> None:
    bundle = make_bundle(b"good" + os.urandom(8))
    execute("a", bundle)
    place = storage / "objects" / bundle.manifest.files["model.pte"]
    times = place.stat()
    place.write_bytes(b"DAMAGED".ljust(times.st_size))
    os.utime(place, (times.st_atime, times.st_mtime))
    session, _ = execute("b", bundle)
    assert session.pushed_bytes == times.st_size
    assert place.read_bytes() == bundle.model.read_bytes()
    place.write_bytes(b"DAMAGED")
    raw = session.execute("s/c", session.stage(bundle), tmp_path / "out", OPTIONS)
    assert (raw.exit_code, raw.error) == (0, "")
    assert any("damaged" in note for note in raw.notes)
    assert place.read_bytes() == bundle.model.read_bytes()


def test_an_interrupted_push_is_not_complete(transport: Watched, execute: Execute, make_bundle: Make) -> None:
    bundle = make_bundle(b"good" + os.urandom(100))
    half = bundle.model.read_bytes()[:50]
    # Remains of a session killed in the middle of a push, and of another with the same name after it.
    for folder in ("run-other-1", f"run-half-{os.getpid()}"):
        place = transport.storage / folder / "incoming" / bundle.manifest.files["model.pte"]
        AdbTransport.push(transport, {place: half})
    execute("half", bundle)


def test_a_file_that_changes_on_its_way_is_told_and_not_kept(transport: Watched, storage: Path, tmp_path: Path) -> None:
    [(sha256, path)] = local(tmp_path, "changing.bin", os.urandom(1000)).items()
    path.write_bytes(b"something else")
    store = ContentStore(transport, transport.storage / "run-changing")
    with pytest.raises(DeviceError, match=r"changing\.bin arrives damaged, twice"):
        store.ensure({sha256: path})
    assert not (storage / "objects" / sha256).exists()


def test_what_killed_sessions_left_goes_after_a_day(transport: Watched, storage: Path) -> None:
    old, young = storage / "run-old-1", storage / "run-young-2"
    for folder in (old, young):
        # The device's user creates the folder, as this user has to remove it.
        transport.run(["mkdir", "-p", str(transport.storage / folder.name / "1")], timeout_s=10)
    two_days_ago = time.time() - 2 * 86400
    os.utime(old, (two_days_ago, two_days_ago))
    ContentStore(transport, transport.storage / "run-now").survey()
    assert (old.exists(), young.exists()) == (False, True)


def test_strange_files_among_the_objects_are_no_objects(transport: Watched, storage: Path, tmp_path: Path) -> None:
    (storage / "objects").mkdir(parents=True, exist_ok=True)
    for name in ("objects", "a b", "x" * 64, "-rf", "new\nline"):
        (storage / "objects" / name).write_bytes(b"strange")
    store = ContentStore(transport, transport.storage / "run-strange")
    wanted = local(tmp_path, "wanted", os.urandom(10))
    assert store.ensure(wanted) == 10
    assert store.verify(list(wanted))


@pytest.fixture(scope="module")
def small_device(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Watched, Path]]:
    """A virtual device with 8 MiB of storage."""
    folder = tmp_path_factory.mktemp("small")
    with small_disk(folder / "disk", "8m") as root, Supervisor() as supervisor:
        server = start_adb_server(supervisor, folder / "adb")
        [device] = boot(supervisor, server, ["SM8650"], root)
        with closing(Watched(device.serial, device.address.port)) as transport:
            yield transport, root / device.serial / "data/local/tmp/farm"


@pytest.fixture
def small(small_device: tuple[Watched, Path], monkeypatch: pytest.MonkeyPatch) -> tuple[Watched, Path]:
    """The small device, without files."""
    monkeypatch.setattr("farm.devices.execution.content_store.RESERVE_BYTES", MIB)
    transport, storage = small_device
    shutil.rmtree(storage, ignore_errors=True)
    transport.forget()
    return small_device


def test_the_least_recently_used_objects_without_a_link_make_room(small: tuple[Watched, Path], tmp_path: Path) -> None:
    transport, storage = small
    files = [local(tmp_path, f"model{n}", os.urandom(2 * MIB)) for n in range(5)]
    names = [next(iter(file)) for file in files]
    for number in range(3):
        ContentStore(transport, transport.storage / "run-a").ensure(files[number])
    now = time.time()
    for name, hours in zip(names[:3], (3, 5, 1), strict=True):
        os.utime(storage / "objects" / name, (now - hours * 3600,) * 2)
    # The oldest file is requested again, which makes it the youngest.
    ContentStore(transport, transport.storage / "run-b").survey([names[1]])
    ContentStore(transport, transport.storage / "run-c").ensure(files[3])
    assert {path.name for path in (storage / "objects").iterdir()} == {names[1], names[2], names[3]}
    # A running session links the oldest file.
    workspace = storage / "run-live-1/1"
    workspace.mkdir(parents=True)
    (workspace / "model.pte").symlink_to(f"../../objects/{names[2]}")
    os.utime(storage / "objects" / names[2], (0, 0))
    os.utime(storage / "objects" / names[1], (1, 1))
    ContentStore(transport, transport.storage / "run-d").ensure(files[4])
    assert {path.name for path in (storage / "objects").iterdir()} == {names[2], names[3], names[4]}


def test_a_device_without_room_is_told_before_anything_is_pushed(small: tuple[Watched, Path], tmp_path: Path) -> None:
    transport, storage = small
    with pytest.raises(DeviceError, match="has no room: 10 MiB and a reserve of 1 MiB are needed, . MiB are lacking"):
        ContentStore(transport, transport.storage / "run-a").ensure(local(tmp_path, "huge", bytes(10 * MIB)))
    assert transport.pushed == {}
    assert list((storage / "objects").iterdir()) == []


def test_a_session_with_more_models_than_room_goes_on(
    small: tuple[Watched, Path], runtime: Runtime, make_bundle: Make, tmp_path: Path
) -> None:
    transport, _ = small
    bundles = [make_bundle(b"good " + os.urandom(2 * MIB)) for _ in range(6)]
    with closing(DeviceSession(transport, runtime, "many", transport.serial)) as session:
        session.prepare(bundles)
        for number, bundle in enumerate(bundles):
            raw = session.execute("s/c", session.stage(bundle), tmp_path / f"out{number}", OPTIONS)
            assert (raw.error, raw.exit_code) == ("", 0)


def test_a_runtime_that_changed_is_another(
    transport: Watched, runtime: Runtime, execute: Execute, make_bundle: Make, tmp_path: Path
) -> None:
    execute("old", make_bundle(b"good"))
    [(sha256, library)] = local(tmp_path, "new.so", os.urandom(5000)).items()
    newer = msgspec.structs.replace(
        runtime,
        files={**runtime.files, "real/libstub.so": library},
        hashes={**runtime.hashes, "real/libstub.so": sha256},
    )
    session, _ = execute("new", make_bundle(b"good"), runtime=newer)
    assert session.pushed_bytes == 5000
    there, here = session.runtime_folder / "real/libstub.so", tmp_path / "read"
    transport.pull({there: here}, max_bytes=10_000)
    assert here.read_bytes() == library.read_bytes()


@pytest.fixture
def start_in() -> Iterator[StartIn]:
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


def test_a_new_owner_ends_what_others_left(
    transport: Watched, runtime: Runtime, make_bundle: Make, storage: Path, tmp_path: Path, start_in: StartIn
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
    assert survivor.wait(10) == -9
    assert not alive(old_runner)
    assert bystander.poll() is None
    assert [path.name for path in storage.glob("run-*")] == [f"run-new-{os.getpid()}"]
    assert (outside / "precious").read_text() == "not farm's"
    assert transport.listed(transport.storage / "objects") >= objects
    # A session takes over once: later remains are its own.
    raw = new.execute("s/c", new.stage(good), tmp_path / "again", OPTIONS)
    assert (raw.exit_code, raw.stderr.startswith("started")) == (0, False)
    assert alive(new_runner)
    take_over(transport, f"run-new-{os.getpid()}")
    assert alive(new_runner)
    new.close()
    with contextlib.suppress(OSError):
        old.close()


def test_a_folder_named_like_a_line_of_ls_ends_nobody(
    transport: Watched, storage: Path, tmp_path: Path, start_in: StartIn
) -> None:
    victim = start_in(tmp_path / "victim")
    fake = f"x\nlrwx 1 u g 0 now /proc/{victim.pid}/cwd -> {storage}"
    liar = start_in(tmp_path / f"{fake}/run-fake-1")
    assert str(storage).startswith("/")
    take_over(transport, "run-mine-1")
    assert victim.poll() is None
    assert liar.poll() is None

"""Files on a device under their hash: pushes, and the handling of broken, old and superfluous files."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

import msgspec
import pytest
from small_disk import small_disk
from watched_transport import Watched

from farm.base.errors import DeviceError
from farm.base.processes import Supervisor
from farm.builds.bundles.bundle import Bundle
from farm.builds.runtime.runtime import Runtime
from farm.devices.adb.server import start_adb_server
from farm.devices.adb.transport import AdbTransport
from farm.devices.execution.content_store import ContentStore
from farm.devices.execution.raw import RunnerOptions
from farm.devices.execution.session import DeviceSession
from farm.devices.virtual.boot import boot

OPTIONS = RunnerOptions(timeout_s=30)
MIB = 1 << 20


def local(tmp_path: Path, name: str, data: bytes) -> dict[str, Path]:
    path = tmp_path / name
    path.write_bytes(data)
    return {hashlib.sha256(data).hexdigest(): path}


def unique(size: int) -> bytes:
    return os.urandom(size)


def run_once(
    transport: Watched, runtime: Runtime, bundles: list[Bundle], out: Path, name: str
) -> tuple[DeviceSession, list[str]]:
    session = DeviceSession(transport, runtime, name, transport.serial)
    session.prepare(bundles)
    problems = []
    for number, bundle in enumerate(bundles):
        raw = session.execute("s/c", session.stage(bundle), out / f"{name}{number}", OPTIONS)
        problems.append(raw.error or raw.stderr if raw.exit_code else "")
    return session, problems


def test_a_second_run_pushes_nothing_of_runtime_and_models(
    transport: Watched, runtime: Runtime, make_bundle: Callable[..., Bundle], tmp_path: Path
) -> None:
    large = unique(256 * 1024)
    bundles = [make_bundle(b"good 1" + large), make_bundle(b"good 2", [large])]
    session, problems = run_once(transport, runtime, bundles, tmp_path, "first")
    assert problems == ["", ""]
    assert session.pushed_bytes > len(large) * 2
    session.close()
    transport.forget()
    session, problems = run_once(transport, runtime, bundles, tmp_path, "second")
    assert problems == ["", ""]
    assert session.pushed_bytes == 0
    # Lists and small inputs travel; nothing else does.
    assert sum(transport.pushed.values()) < 200
    assert (tmp_path / "second1" / "output_0_0.raw").read_bytes() == large
    session.close()


def test_one_round_trip_tells_what_is_missing_and_a_ready_bundle_needs_one_more(
    transport: Watched, runtime: Runtime, make_bundle: Callable[..., Bundle], tmp_path: Path
) -> None:
    bundles = [make_bundle(b"good %d" % number + unique(10)) for number in range(20)]
    session, _ = run_once(transport, runtime, bundles, tmp_path, "a")
    session.close()
    session = DeviceSession(transport, runtime, "b", transport.serial)
    transport.forget()
    session.prepare(bundles)
    assert transport.calls == ["run", "push", "run"], "the question; then the links of the runtime"
    session.stage(bundles[0])
    transport.forget()
    session.stage(bundles[1])
    assert transport.calls == ["push"]
    session.close()


def test_a_workspace_links_to_objects(
    transport: Watched, runtime: Runtime, make_bundle: Callable[..., Bundle], storage: Path
) -> None:
    session = DeviceSession(transport, runtime, "links", transport.serial)
    bundle = make_bundle(b"good")
    workspace = session.stage(bundle)
    link = storage / workspace.folder.relative_to(transport.storage) / "model.pte"
    assert link.is_symlink()
    assert link.resolve() == (storage / "objects" / bundle.manifest.files["model.pte"]).resolve()
    nested = link.parent.parent / "runtime/real/libstub.so"
    assert nested.read_bytes() == runtime.files["real/libstub.so"].read_bytes()
    session.close()


def test_a_damaged_object_is_found_at_the_start_and_replaced(
    transport: Watched, runtime: Runtime, make_bundle: Callable[..., Bundle], storage: Path, tmp_path: Path
) -> None:
    bundle = make_bundle(b"good" + unique(8))
    session, _ = run_once(transport, runtime, [bundle], tmp_path, "a")
    session.close()
    place = storage / "objects" / bundle.manifest.files["model.pte"]
    times = place.stat()
    place.write_bytes(b"DAMAGED".ljust(times.st_size))
    os.utime(place, (times.st_atime, times.st_mtime))
    session, problems = run_once(transport, runtime, [bundle], tmp_path, "b")
    assert problems == [""]
    assert session.pushed_bytes == times.st_size
    assert place.read_bytes() == bundle.model.read_bytes()
    session.close()


def test_an_object_that_is_damaged_later_is_replaced_when_its_job_fails(
    transport: Watched, runtime: Runtime, make_bundle: Callable[..., Bundle], storage: Path, tmp_path: Path
) -> None:
    bundle = make_bundle(b"good" + unique(8))
    session, _ = run_once(transport, runtime, [bundle], tmp_path, "a")
    place = storage / "objects" / bundle.manifest.files["model.pte"]
    place.write_bytes(b"DAMAGED")
    raw = session.execute("s/c", session.stage(bundle), tmp_path / "out", OPTIONS)
    assert (raw.exit_code, raw.error) == (0, "")
    assert any("damaged" in note for note in raw.notes)
    assert place.read_bytes() == bundle.model.read_bytes()
    session.close()


def test_a_job_that_fails_by_itself_is_run_once(
    transport: Watched, runtime: Runtime, make_bundle: Callable[..., Bundle], tmp_path: Path
) -> None:
    session = DeviceSession(transport, runtime, "f", transport.serial)
    raw = session.execute("s/c", session.stage(make_bundle(b"refused")), tmp_path / "out", OPTIONS)
    assert (raw.exit_code, raw.notes) == (4, ())
    assert raw.stderr.count("begins") == 0
    assert raw.stderr.count("line --") == 1
    session.close()


def test_an_interrupted_push_is_never_taken_for_complete(
    transport: Watched, runtime: Runtime, make_bundle: Callable[..., Bundle], tmp_path: Path
) -> None:
    bundle = make_bundle(b"good" + unique(100))
    sha256 = bundle.manifest.files["model.pte"]
    half = bundle.model.read_bytes()[:50]
    # Remains of a session killed in the middle of a push, and of another with the same name after it.
    for folder in ("run-other-1", f"run-half-{os.getpid()}"):
        AdbTransport.push(transport, {transport.storage / folder / "incoming" / sha256: half})
    session, problems = run_once(transport, runtime, [bundle], tmp_path, "half")
    assert problems == [""]
    session.close()


def test_a_file_that_changes_on_its_way_is_told_and_not_kept(transport: Watched, storage: Path, tmp_path: Path) -> None:
    [(sha256, path)] = local(tmp_path, "changing.bin", unique(1000)).items()
    path.write_bytes(b"something else")
    store = ContentStore(transport, transport.storage / "run-changing")
    with pytest.raises(DeviceError, match=r"changing\.bin arrives damaged, twice"):
        store.ensure({sha256: path})
    assert not (storage / "objects" / sha256).exists()
    path.write_bytes(b"")


def test_what_killed_sessions_left_goes_after_a_day(transport: Watched, storage: Path) -> None:
    old, young = storage / "run-old-1", storage / "run-young-2"
    for folder in (old, young):
        # The device's user creates the folder, as this user has to remove it.
        transport.run(["mkdir", "-p", str(transport.storage / folder.name / "1")], timeout_s=10)
    two_days_ago = time.time() - 2 * 86400
    os.utime(old, (two_days_ago, two_days_ago))
    ContentStore(transport, transport.storage / "run-now").survey()
    assert not old.exists()
    assert young.exists()


def test_strange_files_among_the_objects_are_no_objects(transport: Watched, storage: Path, tmp_path: Path) -> None:
    (storage / "objects").mkdir(parents=True, exist_ok=True)
    for name in ("objects", "a b", "x" * 64, "-rf", "new\nline"):
        (storage / "objects" / name).write_bytes(b"strange")
    store = ContentStore(transport, transport.storage / "run-strange")
    wanted = local(tmp_path, "wanted", unique(10))
    assert store.ensure(wanted) == 10
    assert store.verify(list(wanted))


@pytest.fixture
def small(tmp_path: Path) -> Iterator[tuple[Watched, Path]]:
    """A virtual device with 24 MiB of storage."""
    with small_disk(tmp_path / "small", "24m") as root, Supervisor() as supervisor:
        server = start_adb_server(supervisor, tmp_path / "adb")
        [device] = boot(supervisor, server, ["SM8650"], root)
        transport = Watched(device.serial, device.address.port)
        yield transport, root / device.serial / "data/local/tmp/farm"
        transport.close()


def test_the_least_recently_used_objects_make_room(
    small: tuple[Watched, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("farm.devices.execution.content_store.RESERVE_BYTES", MIB)
    transport, storage = small
    files = [local(tmp_path, f"model{n}", unique(6 * MIB)) for n in range(4)]
    names = [next(iter(file)) for file in files]
    for number in range(3):
        ContentStore(transport, transport.storage / "run-a").ensure(files[number])
    now = time.time()
    for name, hours in zip(names[:3], (3, 5, 1), strict=True):
        os.utime(storage / "objects" / name, (now - hours * 3600,) * 2)
    # The oldest file is requested again, which makes it the youngest; a running session links another file.
    ContentStore(transport, transport.storage / "run-b").survey([names[1]])
    ContentStore(transport, transport.storage / "run-c").ensure(files[3])
    kept = {path.name for path in (storage / "objects").iterdir()}
    assert kept == {names[1], names[2], names[3]}


def test_what_a_session_links_to_stays(
    small: tuple[Watched, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("farm.devices.execution.content_store.RESERVE_BYTES", MIB)
    transport, storage = small
    files = [local(tmp_path, f"model{n}", unique(8 * MIB)) for n in range(3)]
    names = [next(iter(file)) for file in files]
    ContentStore(transport, transport.storage / "run-a").ensure({**files[0], **files[1]})
    workspace = storage / "run-live-1/1"
    workspace.mkdir(parents=True)
    (workspace / "model.pte").symlink_to(f"../../objects/{names[0]}")
    os.utime(storage / "objects" / names[0], (0, 0))
    ContentStore(transport, transport.storage / "run-b").ensure(files[2])
    assert {path.name for path in (storage / "objects").iterdir()} == {names[0], names[2]}


def test_a_device_without_room_is_told_before_anything_is_pushed(
    small: tuple[Watched, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("farm.devices.execution.content_store.RESERVE_BYTES", MIB)
    transport, storage = small
    with pytest.raises(DeviceError, match="has no room: 30 MiB and a reserve of 1 MiB are needed, . MiB are lacking"):
        ContentStore(transport, transport.storage / "run-a").ensure(local(tmp_path, "huge", bytes(30 * MIB)))
    assert transport.pushed == {}
    assert list((storage / "objects").iterdir()) == []


def test_a_session_with_more_models_than_room_goes_on(
    small: tuple[Watched, Path],
    runtime: Runtime,
    make_bundle: Callable[..., Bundle],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("farm.devices.execution.content_store.RESERVE_BYTES", MIB)
    transport, _ = small
    bundles = [make_bundle(b"good " + unique(6 * MIB)) for _ in range(6)]
    session, problems = run_once(transport, runtime, bundles, tmp_path, "many")
    assert problems == [""] * 6
    session.close()


def test_a_runtime_that_changed_is_another(
    transport: Watched, runtime: Runtime, make_bundle: Callable[..., Bundle], tmp_path: Path
) -> None:
    session, _ = run_once(transport, runtime, [make_bundle(b"good")], tmp_path, "old")
    session.close()
    library = tmp_path / "new.so"
    library.write_bytes(unique(5000))
    newer = msgspec.structs.replace(
        runtime,
        files={**runtime.files, "real/libstub.so": library},
        hashes={**runtime.hashes, "real/libstub.so": hashlib.sha256(library.read_bytes()).hexdigest()},
    )
    session, problems = run_once(transport, newer, [make_bundle(b"good")], tmp_path, "new")
    assert problems == [""]
    assert session.pushed_bytes == 5000
    folder = transport.storage / f"run-new-{os.getpid()}" / "runtime/real/libstub.so"
    out = tmp_path / "read"
    transport.pull({PurePosixPath(folder): out}, max_bytes=10_000)
    assert out.read_bytes() == library.read_bytes()
    session.close()

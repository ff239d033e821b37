"""Contract of each kind of transport: virtual devices behind adb, SSH servers on loopback, and this machine."""

from __future__ import annotations

import os
import stat
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import TYPE_CHECKING

import msgspec
import pytest
from adbd_device import AdbdDevice, start_adbd
from dropbear_server import DropbearServer, newer_system
from recipe import recipe_code
from ssh_server import SshServer, alive
from waiting import until

from farm.base.errors import DeviceError, DeviceGoneError, DeviceTimeoutError, InfraError
from farm.base.processes import Supervisor
from farm.devices.adb.server import start_adb_server
from farm.devices.adb.transport import AdbTransport
from farm.devices.connect import from_plain, open_transport
from farm.devices.device import Device, LocalAddress
from farm.devices.local.transport import LocalTransport
from farm.devices.ssh.transport import SshTransport
from farm.devices.transport import Link, Process, Transport
from farm.devices.virtual.boot import boot

if TYPE_CHECKING:
    from conftest import Bench

SECONDS = 30.0

HOSTILE_NAMES = [
    "blank in it",
    "quote'and\"quote",
    "$(touch pwned) `touch pwned`",
    "semi;colon&and|pipe>to*?[a]~",
    "new\nline\ttab",
    "-rf",
    "back\\slash",
    "comma,0755",
    "Grüße 漢字 \N{GRINNING FACE}",
    os.fsdecode(b"not utf-8 \xff\xfe"),
]


@dataclass
class Way:
    """Transport of one kind, and the folder of this machine with the device's files."""

    kind: str
    transport: Callable[[], Transport]
    root: str = ""
    alive: Callable[[int], bool] = alive
    """Function that returns whether the program with this id on the device runs."""

    def here(self, path: PurePosixPath) -> Path:
        return Path(f"{self.root}{path}")


@pytest.fixture(scope="session")
def ssh_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshServer]:
    with Supervisor() as supervisor:
        server = SshServer(supervisor, tmp_path_factory.mktemp("sshd")).start()
        yield server
        server.stop()


@pytest.fixture(scope="session")
def dropbear_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DropbearServer]:
    with Supervisor() as supervisor:
        server = DropbearServer(supervisor, tmp_path_factory.mktemp("dropbear") / "board").start()
        yield server
        server.stop()


@pytest.fixture(scope="session")
def newer_dropbear_server(tmp_path_factory: pytest.TempPathFactory, farm_cache: Path) -> Iterator[DropbearServer]:
    with Supervisor() as supervisor:
        root = tmp_path_factory.mktemp("newer-dropbear") / "board"
        server = DropbearServer(supervisor, root, system=newer_system(farm_cache)).start()
        yield server
        server.stop()


def container(storage: str) -> Device:
    """Follow the recipe of docs/developers/recipes.md and return a device of its kind, entered by `env`."""
    [code] = recipe_code("developers/recipes.md", "Adding a transport")
    module = sys.modules["adding_a_transport"] = ModuleType("adding_a_transport")
    exec(code, vars(module))  # noqa: S102
    return Device("board-2", "SM8650", "hardware", "", module.ContainerAddress(("env",), storage), "", "linux")


@pytest.fixture(
    scope="module",
    params=[
        "adb",
        pytest.param("adbd", marks=pytest.mark.whole),
        "ssh",
        pytest.param("dropbear", marks=pytest.mark.whole),
        pytest.param("newer_dropbear", marks=pytest.mark.whole),
        "local",
        "recipe",
    ],
)
def way(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Way:
    if request.param == "adb":
        bench: Bench = request.getfixturevalue("bench")
        return Way("adb", bench.transport, str(bench.root / bench.devices[0].serial))
    if request.param == "adbd":
        real: AdbdDevice = request.getfixturevalue("adbd")
        return Way("adbd", real.transport, str(real.root), real.alive)
    if request.param == "ssh":
        server: SshServer = request.getfixturevalue("ssh_server")
        return Way("ssh", lambda: SshTransport("board-1", server.address))
    if request.param.endswith("dropbear"):
        board: DropbearServer = request.getfixturevalue(f"{request.param}_server")
        return Way("dropbear", lambda: SshTransport("board-8", board.address), str(board.root))
    storage = str(tmp_path_factory.mktemp("local") / "storage")
    if request.param == "recipe":
        return Way("recipe", lambda: open_transport(container(storage)))
    return Way("local", lambda: LocalTransport("this", LocalAddress(storage)))


def test_a_transport_that_is_registered_reaches_other_processes(tmp_path: Path) -> None:
    device = container(str(tmp_path))
    assert msgspec.json.decode(msgspec.json.encode(device), type=Device, dec_hook=from_plain) == device
    argv, _ = open_transport(device).shell_argv(["true"], terminal=False)
    assert argv == ["env", "true"]


@pytest.fixture
def device(way: Way) -> Iterator[Transport]:
    transport = way.transport()
    transport.push({transport.storage / "contract": b""})
    yield transport
    transport.close()


@pytest.fixture
def folder(device: Transport, request: pytest.FixtureRequest) -> PurePosixPath:
    """A folder of the test on the device, which a first push makes."""
    return device.storage / f"test {request.node.originalname}"


def read_until(process: Process, end: bytes | None) -> tuple[bytes, bytes, int | None]:
    """Return the output up to `end` at the end of a stream, or to the end of the program."""
    out, err, code = b"", b"", None
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline and code is None:
        more = process.receive(1)
        out, err, code = out + more.stdout, err + more.stderr, more.code
        if end is not None and end in (out[-len(end) :], err[-len(end) :]):
            break
    return out, err, code


def test_its_storage_takes_files_that_run(device: Transport, way: Way) -> None:
    assert device.storage.is_absolute()
    program = device.storage / "program"
    source = way.here(device.storage) / "source"
    source.write_text("#!/bin/sh\necho ran\n")
    source.chmod(0o700)
    device.push({program: source})
    assert device.run([str(program)], timeout_s=SECONDS).stdout == b"ran\n"


def test_exit_codes_and_streams_are_kept_apart(device: Transport) -> None:
    done = device.run(["sh", "-c", "echo out; echo err >&2; exit 7"], timeout_s=SECONDS)
    assert (done.code, done.stdout, done.stderr) == (7, b"out\n", b"err\n")
    assert done.seconds > 0
    assert device.run(["true"], timeout_s=SECONDS).code == 0


def test_a_signal_and_a_missing_program(device: Transport) -> None:
    killed = device.run(["sh", "-c", "kill -SEGV $$"], timeout_s=SECONDS)
    assert (killed.code, killed.stdout, killed.stderr) == (128 + 11, b"", b"")
    missing = device.run(["no-such-program"], timeout_s=SECONDS)
    assert missing.code == 127
    assert b"no-such-program" in missing.stderr


def test_words_arrive_as_they_are(device: Transport) -> None:
    words = [*HOSTILE_NAMES, "", "$HOME", "%s", "*", "'", '"']
    done = device.run(["printf", "%s\\0", *words], timeout_s=SECONDS)
    assert done.stdout.split(b"\0")[:-1] == [os.fsencode(word) for word in words]
    with pytest.raises(DeviceError, match="NUL"):
        device.run(["echo", "a\0b"], timeout_s=SECONDS)


def test_cwd_and_environment(device: Transport, folder: PurePosixPath) -> None:
    place = folder / "a folder; true"
    device.push({place / "here": b"yes"})
    script = 'cat here; printf "|%s" "$WHO"'
    done = device.run(["sh", "-c", script], cwd=place, env={"WHO": "it's $me\n"}, timeout_s=SECONDS)
    assert done.stdout == b"yes|it's $me\n"
    gone = device.run(["true"], cwd=folder / "gone", timeout_s=SECONDS)
    assert gone.code != 0
    assert b"gone" in gone.stderr
    with pytest.raises(DeviceError, match="environment variable"):
        device.run(["true"], env={"A=B; touch x": "y"}, timeout_s=SECONDS)


def test_standard_input_of_any_size(device: Transport) -> None:
    data = os.urandom(1 << 20) * 5
    assert device.run(["cat"], stdin=data, timeout_s=60).stdout == data
    # A program that does not read it is no reason to hang.
    assert device.run(["true"], stdin=data, timeout_s=60).code == 0


def test_a_program_that_does_not_end_is_ended_with_its_children(device: Transport, way: Way) -> None:
    script = (
        "trap '' HUP; echo $$ >pid; sleep 600 & echo $! >child; setsid sleep 600 & echo $! >daemon; "
        "echo trouble >&2; wait"
    )
    with pytest.raises(DeviceTimeoutError, match=r"did not finish in 1 s") as caught:
        device.run(["sh", "-c", script], cwd=device.storage, timeout_s=1)
    assert caught.value.serial == device.serial
    assert "trouble" in caught.value.stderr
    for name in ("pid", "child", "daemon"):
        pid = int((way.here(device.storage) / name).read_text())
        until(lambda pid=pid: not way.alive(pid), f"the {name} outlived its stream")


def test_output_without_end_is_an_error(device: Transport) -> None:
    with pytest.raises(DeviceError, match="more than 100000 bytes"):
        device.run(["yes"], timeout_s=60, max_output=100_000)


def test_a_command_that_is_too_long_is_refused(device: Transport) -> None:
    with pytest.raises(DeviceError, match=r"at most \d+"):
        device.run(["echo", "x" * 200_000], timeout_s=SECONDS)
    assert device.run(["echo", "x" * 50_000], timeout_s=SECONDS).stdout == b"x" * 50_000 + b"\n"


def test_a_program_that_stays_answers_its_input(device: Transport) -> None:
    script = 'echo ready; while read -r line; do echo "got $line"; done; exit 7'
    process = device.start(["sh", "-c", script])
    try:
        assert read_until(process, b"ready\n") == (b"ready\n", b"", None)
        for word in (b"one", b"two"):
            process.send(word + b"\n")
            assert read_until(process, b"\n") == (b"got " + word + b"\n", b"", None)
        process.close_stdin()
        assert read_until(process, None) == (b"", b"", 7)
        assert process.receive(0).code == 7
    finally:
        process.close()
        process.close()


def test_waiting_for_a_silent_program_ends(device: Transport) -> None:
    process = device.start(["cat"])
    assert process.receive(0.05) == (b"", b"", None)
    process.close()


def test_a_program_ends_with_its_children_when_its_pipes_are_closed(device: Transport, way: Way) -> None:
    process = device.start(["sh", "-c", "sleep 600 & echo $$ $!; exec sleep 600"])
    pids = [int(word) for word in read_until(process, b"\n")[0].split()]
    assert len(pids) == 2
    process.close()
    for pid in pids:
        until(lambda pid=pid: not way.alive(pid), "a program outlived its pipes")


def test_a_signal_ends_a_program_that_stays(device: Transport) -> None:
    process = device.start(["sh", "-c", "echo last words >&2; kill -KILL $$"])
    assert read_until(process, None) == (b"", b"last words\n", 137)
    process.close()


def test_contents_of_any_size_round_trip(device: Transport, folder: PurePosixPath, tmp_path: Path) -> None:
    sizes = [0, 1, 511, 512, 65_536, 65_537, (1 << 20) + 7]
    contents = {folder / "sizes" / str(size): os.urandom(size) for size in sizes}
    device.push(contents)
    device.pull({path: tmp_path / path.name for path in contents}, max_bytes=max(sizes))
    assert {path.name: (tmp_path / path.name).read_bytes() for path in contents} == {
        path.name: data for path, data in contents.items()
    }


def test_a_large_file_and_its_mode(device: Transport, way: Way, folder: PurePosixPath, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(os.urandom(1 << 20) * 20 + b"odd end")
    plain = tmp_path / "plain"
    plain.write_bytes(b"plain")
    source.chmod(0o744)
    plain.chmod(0o600)
    device.push({folder / "large": source, folder / "plain": plain})
    modes = [stat.S_IMODE(way.here(folder / name).stat().st_mode) for name in ("large", "plain")]
    # adbd gives all users the rights of the owner.
    assert modes == ([0o777, 0o666] if way.kind in {"adb", "adbd"} else [0o755, 0o644])
    device.pull({folder / "large": tmp_path / "back"}, max_bytes=source.stat().st_size)
    assert (tmp_path / "back").read_bytes() == source.read_bytes()


def test_many_files_are_written_anew(device: Transport, folder: PurePosixPath, tmp_path: Path) -> None:
    files: dict[PurePosixPath, Path | bytes] = {folder / str(n % 7) / str(n): b"%d" % n * n for n in range(200)}
    device.push(dict.fromkeys(files, b"before"))
    device.push(files)
    device.pull({path: tmp_path / path.name for path in files}, max_bytes=4096)
    assert all((tmp_path / path.name).read_bytes() == data for path, data in files.items())
    device.push({})
    device.pull({}, max_bytes=0)


def test_hostile_names_round_trip(device: Transport, way: Way, folder: PurePosixPath, tmp_path: Path) -> None:
    files: dict[PurePosixPath, Path | bytes] = {folder / name: os.fsencode(name) for name in HOSTILE_NAMES}
    files[folder / "deep" / ("n" * 200)] = b"long"
    device.push(files)
    device.pull({path: tmp_path / str(n) for n, path in enumerate(files)}, max_bytes=1000)
    assert [(tmp_path / str(n)).read_bytes() for n in range(len(files))] == list(files.values())
    assert sorted(os.listdir(way.here(folder))) == sorted([*HOSTILE_NAMES, "deep"])


def test_names_that_fill_several_commands(device: Transport, folder: PurePosixPath, tmp_path: Path) -> None:
    files = {folder / ("'" * 200 + str(n)): b"%d" % n for n in range(200)}
    device.push(files)
    device.pull({path: tmp_path / path.name[200:] for path in files}, max_bytes=10)
    assert all((tmp_path / path.name[200:]).read_bytes() == data for path, data in files.items())


def test_links_are_made_and_made_anew(device: Transport, way: Way, folder: PurePosixPath) -> None:
    link = folder / "deep/link"
    device.push({folder / "target": b"there", link: Link(PurePosixPath("../target"))})
    assert way.here(link).read_bytes() == b"there"
    device.push({folder / "other": b"else", link: Link(PurePosixPath("../other"))})
    assert way.here(link).read_bytes() == b"else"
    device.push({link: b"a file takes its place"})
    assert not way.here(link).is_symlink()
    assert way.here(folder / "other").read_bytes() == b"else"
    device.push({link: Link(PurePosixPath("../$(nowhere at all)"))})
    assert way.here(link).readlink() == Path("../$(nowhere at all)")


def test_a_file_that_is_too_large_leaves_nothing(device: Transport, folder: PurePosixPath, tmp_path: Path) -> None:
    small, large = folder / "small", folder / "large"
    device.push({small: b"12345", large: b"x" * 200_000})
    device.pull({small: tmp_path / "small"}, max_bytes=5)
    with pytest.raises(DeviceError, match=r"large: it has more than the 199999 bytes"):
        device.pull({small: tmp_path / "small", large: tmp_path / "large"}, max_bytes={small: 5, large: 199_999})
    assert os.listdir(tmp_path) == ["small"]


def test_a_missing_file_is_named_and_leaves_nothing(device: Transport, folder: PurePosixPath, tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match=r"pull of .*/nothing: .*No such file"):
        device.pull({folder / "nothing": tmp_path / "nothing"}, max_bytes=10)
    with pytest.raises(DeviceError, match="not a regular file|Is a directory"):
        device.pull({device.storage: tmp_path / "folder"}, max_bytes=10)
    assert os.listdir(tmp_path) == []


def test_a_push_that_fails_names_the_file(device: Transport, folder: PurePosixPath, tmp_path: Path) -> None:
    device.push({folder / "file": b"x"})
    with pytest.raises(DeviceError, match=r"push .*file/below: .*(Not a directory|File exists)"):
        device.push({folder / "file" / "below": b"x" * 500_000, folder / "other": b"y"})
    with pytest.raises(InfraError, match="gone: No such file"):
        device.push({folder / "x": tmp_path / "gone"})
    with pytest.raises(DeviceError, match="cannot be a path on a device"):
        device.push({PurePosixPath("relative"): b""})
    with pytest.raises(DeviceError):
        device.push({folder / ("x" * 5000): b""})
    device.push({folder / "after": b"it still works"})


def test_threads_use_it_at_the_same_time(device: Transport, folder: PurePosixPath, tmp_path: Path) -> None:
    def work(number: int) -> bool:
        data = os.urandom(1 << 17) * 4
        path = folder / str(number)
        device.push({path: data})
        echoed = device.run(["cat", str(path)], timeout_s=60).stdout
        device.pull({path: tmp_path / str(number)}, max_bytes=len(data))
        return echoed == data and (tmp_path / str(number)).read_bytes() == data

    with ThreadPoolExecutor(12) as pool:
        assert all(pool.map(work, range(24)))


def test_many_short_programs_at_once_do_not_break_the_connection(device: Transport, way: Way) -> None:
    # This machine has no connection, and a process of its own for each program.
    count = 60 if way.kind in ("local", "recipe") else 500
    with ThreadPoolExecutor(12) as pool:
        ended = pool.map(lambda _: device.run(["true"], timeout_s=60).code, range(count))
        assert set(ended) == {0}


def test_a_program_that_is_given_nothing_reads_nothing(device: Transport) -> None:
    assert device.run(["cat"], timeout_s=20).stdout == b""
    assert device.run(["cat"], stdin=b"something", timeout_s=20).stdout == b"something"


def test_closed_and_used_again(device: Transport, folder: PurePosixPath) -> None:
    for _ in range(2):
        device.close()
        device.close()
        device.push({folder / "file": b"x"})
        assert device.run(["cat", str(folder / "file")], timeout_s=SECONDS).stdout == b"x"
    process = device.start(["cat"])
    device.close()
    process.send(b"still here\n")
    assert read_until(process, b"\n")[0] == b"still here\n"
    process.close()


@pytest.fixture(params=["adb", pytest.param("adbd", marks=pytest.mark.whole), "ssh"])
def doomed(
    request: pytest.FixtureRequest, tmp_path: Path, farm_cache: Path
) -> Iterator[tuple[Transport, Callable[[], None]]]:
    """A device of the test alone, and what makes it vanish. This machine cannot."""
    with Supervisor() as supervisor:
        if request.param == "adb":
            # An adb server goes on to list a device that vanished, which other tests would see.
            server = start_adb_server(supervisor, tmp_path / "adb")
            (device,) = boot(supervisor, server, ["SM8450"], tmp_path / "doomed")
            child = supervisor.find(device.serial)
            transport: Transport = AdbTransport(device.serial, server.port)
            yield transport, lambda: os.kill(child.pid, 9)
        elif request.param == "adbd":
            real = start_adbd(supervisor, tmp_path, farm_cache)
            transport = real.transport()
            yield transport, real.vanish
        else:
            server = SshServer(supervisor, tmp_path / "doomed").start()
            transport = SshTransport("board-1", server.address)
            yield transport, server.stop
        transport.close()


def test_a_device_that_vanishes_is_gone(doomed: tuple[Transport, Callable[[], None]], tmp_path: Path) -> None:
    transport, vanish = doomed
    transport.push({transport.storage / "file": b"x"})
    process = transport.start(["cat"])
    process.send(b"here\n")
    assert read_until(process, b"\n")[0] == b"here\n"
    vanish()
    with pytest.raises(DeviceGoneError):
        read_until(process, None)
    process.close()
    with pytest.raises(DeviceGoneError):
        transport.run(["true"], timeout_s=SECONDS)
    with pytest.raises(DeviceGoneError):
        transport.push({transport.storage / "file": b"y"})
    with pytest.raises(DeviceGoneError):
        transport.pull({transport.storage / "file": tmp_path / "file"}, max_bytes=10)
    assert not (tmp_path / "file").exists()

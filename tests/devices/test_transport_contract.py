"""Contract of each kind of transport: virtual devices behind adb, SSH servers on loopback, and this machine."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import ModuleType

import msgspec
import pytest
from adbd_device import AdbdDevice, start_adbd
from attached import Rack, rack
from recipe import recipe_code
from ssh_server import DropbearServer, SshServer, newer_system, running
from waiting import alive, until

from farm.base.errors import DeviceError, DeviceGoneError, DeviceTimeoutError, InfraError
from farm.base.processes import Supervisor
from farm.devices.connect import from_plain, open_transport
from farm.devices.device import Device, LocalAddress
from farm.devices.local import LocalTransport
from farm.devices.process import Link, Process
from farm.devices.ssh.transport import SshTransport
from farm.devices.transport import Transport

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
    ],
)
def way(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Way]:
    folder = tmp_path_factory.mktemp(request.param)
    with contextlib.ExitStack() as opened:
        if request.param == "adb":
            bench: Rack = request.getfixturevalue("bench")
            yield Way("adb", bench.transport, str(bench.folder()))
        elif request.param == "adbd":
            real: AdbdDevice = request.getfixturevalue("adbd")
            yield Way("adbd", real.transport, str(real.root), real.alive)
        elif request.param == "ssh":
            server = opened.enter_context(running(SshServer, folder))
            yield Way("ssh", lambda: SshTransport("board-1", server.address))
        elif request.param == "local":
            yield Way("local", lambda: LocalTransport("this", LocalAddress(str(folder / "storage"))))
        else:
            system = newer_system(request.getfixturevalue("farm_cache")) if "newer" in request.param else Path("/")
            board = opened.enter_context(running(DropbearServer, folder / "board", system=system))
            yield Way("dropbear", lambda: SshTransport("board-8", board.address), str(board.root))


def test_a_transport_that_is_registered_reaches_other_processes(tmp_path: Path) -> None:
    device = container(str(tmp_path / "storage"))
    assert msgspec.json.decode(msgspec.json.encode(device), type=Device, dec_hook=from_plain) == device
    transport = open_transport(device)
    assert transport.shell_argv(["true"], terminal=False)[0] == ["env", "true"]
    transport.push({transport.storage / "file": b"pushed"})
    assert transport.run(["cat", str(transport.storage / "file")], timeout_s=SECONDS).stdout == b"pushed"
    transport.pull({transport.storage / "file": tmp_path / "file"}, max_bytes=6)
    assert (tmp_path / "file").read_bytes() == b"pushed"


@pytest.fixture(scope="module")
def device(way: Way) -> Iterator[Transport]:
    with contextlib.closing(way.transport()) as transport:
        transport.push({transport.storage / "contract": b""})
        yield transport


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


def test_streams_and_exit_codes_are_kept_apart(device: Transport) -> None:
    for script, result in (
        ("echo out; echo err >&2; exit 7", (7, b"out\n", b"err\n")),
        ("kill -SEGV $$", (128 + 11, b"", b"")),
        ("true", (0, b"", b"")),
    ):
        done = device.run(["sh", "-c", script], timeout_s=SECONDS)
        assert (done.code, done.stdout, done.stderr) == result
        assert done.seconds > 0
    missing = device.run(["no-such-program"], timeout_s=SECONDS)
    assert missing.code == 127
    assert b"no-such-program" in missing.stderr
    with pytest.raises(DeviceError, match="more than 100000 bytes"):
        device.run(["yes"], timeout_s=60, max_output=100_000)


def test_a_program_gets_its_words_folder_and_environment(device: Transport, folder: PurePosixPath) -> None:
    words = [*HOSTILE_NAMES, "", "$HOME", "%s", "*", "'", '"', "x" * 50_000]
    done = device.run(["printf", "%s\\0", *words], timeout_s=SECONDS)
    assert done.stdout.split(b"\0")[:-1] == [os.fsencode(word) for word in words]
    place = folder / "a folder; true"
    device.push({place / "here": b"yes"})
    script = 'cat here; printf "|%s" "$WHO"'
    done = device.run(["sh", "-c", script], cwd=place, env={"WHO": "it's $me\n"}, timeout_s=SECONDS)
    assert done.stdout == b"yes|it's $me\n"
    gone = device.run(["true"], cwd=folder / "gone", timeout_s=SECONDS)
    assert gone.code != 0
    assert b"gone" in gone.stderr
    for argv, env, problem in (
        (["echo", "a\0b"], {}, "NUL"),
        (["true"], {"A=B; touch x": "y"}, "environment variable"),
        (["echo", "x" * 200_000], {}, r"at most \d+"),
    ):
        with pytest.raises(DeviceError, match=problem):
            device.run(argv, env=env, timeout_s=SECONDS)


def test_standard_input_of_any_size(device: Transport) -> None:
    for data in (b"", b"something", os.urandom(1 << 20) * 5):
        assert device.run(["cat"], stdin=data, timeout_s=60).stdout == data
    # A program that does not read it is no reason to hang.
    assert device.run(["true"], stdin=data, timeout_s=60).code == 0
    assert device.run(["cat"], timeout_s=20).stdout == b""


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


def test_a_program_that_stays_answers_its_input(device: Transport) -> None:
    script = 'echo ready; while read -r line; do echo "got $line"; done; exit 7'
    process = device.start(["sh", "-c", script])
    try:
        assert read_until(process, b"ready\n") == (b"ready\n", b"", None)
        assert process.receive(0.05) == (b"", b"", None)
        for word in (b"one", b"two"):
            process.send(word + b"\n")
            assert read_until(process, b"\n") == (b"got " + word + b"\n", b"", None)
        process.close_stdin()
        assert read_until(process, None) == (b"", b"", 7)
        assert process.receive(0).code == 7
    finally:
        process.close()
        process.close()
    process = device.start(["sh", "-c", "echo last words >&2; kill -KILL $$"])
    assert read_until(process, None) == (b"", b"last words\n", 137)
    process.close()


def test_a_program_ends_with_its_children_when_its_pipes_are_closed(device: Transport, way: Way) -> None:
    process = device.start(["sh", "-c", "sleep 600 & echo $$ $!; exec sleep 600"])
    pids = [int(word) for word in read_until(process, b"\n")[0].split()]
    assert len(pids) == 2
    process.close()
    for pid in pids:
        until(lambda pid=pid: not way.alive(pid), "a program outlived its pipes")


def test_files_of_any_size_number_and_name_round_trip(
    device: Transport, way: Way, folder: PurePosixPath, tmp_path: Path
) -> None:
    sizes = [0, 1, 511, 512, 65_535, 65_536, 65_537, 15 * 65_536 + 1, 1 << 20, (1 << 20) + 7]
    files: dict[PurePosixPath, Path | bytes] = {folder / "sizes" / str(size): os.urandom(size) for size in sizes}
    files |= {folder / "number" / str(n % 7) / str(n): b"%d" % n * n for n in range(200)}
    # Names that fill several commands.
    files |= {folder / "long" / ("'" * 200 + str(n)): b"%d" % n for n in range(200)}
    files |= {folder / "names" / name: os.fsencode(name) for name in HOSTILE_NAMES}
    device.push(dict.fromkeys(files, b"before"))
    device.push(files)
    device.pull({path: tmp_path / str(n) for n, path in enumerate(files)}, max_bytes=max(sizes))
    assert [(tmp_path / str(n)).read_bytes() for n in range(len(files))] == list(files.values())
    assert sorted(os.listdir(way.here(folder / "names"))) == sorted(HOSTILE_NAMES)
    device.push({})
    device.pull({}, max_bytes=0)


def test_a_large_file_and_its_mode(device: Transport, way: Way, folder: PurePosixPath, tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\necho ran\n")
    program.chmod(0o700)
    device.push({folder / "program": program})
    assert device.run([str(folder / "program")], timeout_s=SECONDS).stdout == b"ran\n"
    source = tmp_path / "source"
    source.write_bytes(os.urandom(1 << 20) * 20 + b"odd end")
    plain = tmp_path / "plain"
    plain.write_bytes(b"plain")
    source.chmod(0o744)
    plain.chmod(0o600)
    device.push({folder / "large": source, folder / "plain": plain, folder / "bytes": b"x"})
    modes = [stat.S_IMODE(way.here(folder / name).stat().st_mode) for name in ("large", "plain", "bytes")]
    # adbd gives all users the rights of the owner.
    assert modes == ([0o777, 0o666, 0o666] if way.kind in {"adb", "adbd"} else [0o755, 0o644, 0o644])
    device.pull({folder / "large": tmp_path / "back"}, max_bytes=source.stat().st_size)
    assert (tmp_path / "back").read_bytes() == source.read_bytes()


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


def test_a_pull_that_fails_leaves_nothing(device: Transport, folder: PurePosixPath, tmp_path: Path) -> None:
    small, large = folder / "small", folder / "large"
    device.push({small: b"12345", large: b"x" * 200_000})
    with pytest.raises(DeviceError, match=r"large: it has more than the 199999 bytes"):
        device.pull({large: tmp_path / "large"}, max_bytes={large: 199_999})
    with pytest.raises(DeviceError, match=r"pull of .*/nothing: .*No such file"):
        device.pull({folder / "nothing": tmp_path / "nothing"}, max_bytes=10)
    with pytest.raises(DeviceError, match="not a regular file|Is a directory"):
        device.pull({device.storage: tmp_path / "folder"}, max_bytes=10)
    assert os.listdir(tmp_path) == []
    device.pull({small: tmp_path / "small"}, max_bytes=5)
    assert os.listdir(tmp_path) == ["small"]


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


def test_threads_use_it_at_the_same_time(device: Transport, way: Way, folder: PurePosixPath, tmp_path: Path) -> None:
    # This machine has no connection that many short programs could break.
    short = 1 if way.kind == "local" else 20

    def work(number: int) -> bool:
        data = os.urandom(1 << 17) * 4
        path = folder / str(number)
        device.push({path: data})
        echoed = device.run(["cat", str(path)], timeout_s=60).stdout
        device.pull({path: tmp_path / str(number)}, max_bytes=len(data))
        ended = {device.run(["true"], timeout_s=60).code for _ in range(short)}
        return echoed == data and (tmp_path / str(number)).read_bytes() == data and ended == {0}

    with ThreadPoolExecutor(12) as pool:
        assert all(pool.map(work, range(24)))


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
    with contextlib.ExitStack() as opened:
        if request.param == "adb":
            # An adb server goes on to list a device that vanished, which other tests would see.
            one = opened.enter_context(rack(tmp_path, "SM8450"))
            transport: Transport = one.transport()
            yield transport, lambda: os.kill(one.supervisor.find(one.device.serial).pid, 9)
        elif request.param == "adbd":
            real = start_adbd(opened.enter_context(Supervisor()), tmp_path, farm_cache)
            transport = real.transport()
            yield transport, real.vanish
        else:
            server = opened.enter_context(running(SshServer, tmp_path / "doomed"))
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

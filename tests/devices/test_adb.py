from __future__ import annotations

import os
import socket
import stat
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import pytest

from farm.devices.adb import AdbTransport
from farm.devices.adb_host import AdbHost
from farm.devices.adb_sync import LinkRefusedError, SyncStream
from farm.devices.transport import Link
from farm.errors import DeviceError, DeviceTimeoutError, InfraError

if TYPE_CHECKING:
    from conftest import Bench

    from farm.devices.adb_shell import ShellProcess

TMP = PurePosixPath("/data/local/tmp")

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


def test_run_tells_exit_code_and_keeps_streams_apart(bench: Bench) -> None:
    done = bench.transport().run(["sh", "-c", "echo out; echo err >&2; exit 7"], timeout_s=30)
    assert (done.code, done.stdout, done.stderr) == (7, b"out\n", b"err\n")
    assert done.seconds > 0


def test_run_reports_a_signal_and_a_missing_program(bench: Bench) -> None:
    assert bench.transport().run(["sh", "-c", "kill -SEGV $$"], timeout_s=30).code == 128 + 11
    missing = bench.transport().run(["no-such-program"], timeout_s=30)
    assert missing.code == 127
    assert b"no-such-program" in missing.stderr


def test_words_arrive_as_they_are(bench: Bench) -> None:
    words = [*HOSTILE_NAMES, "", "$HOME", "%s", "*"]
    done = bench.transport().run(["printf", "%s\\0", *words], timeout_s=30)
    assert done.stdout.split(b"\0")[:-1] == [os.fsencode(word) for word in words]


def test_cwd_and_environment(bench: Bench) -> None:
    transport = bench.transport()
    folder = TMP / "a folder; true"
    transport.push({folder / "here": b"yes"})
    done = transport.run(
        ["sh", "-c", 'cat here; printf "|%s" "$WHO"'], cwd=folder, env={"WHO": "it's $me"}, timeout_s=30
    )
    assert done.stdout == b"yes|it's $me"
    assert transport.run(["true"], cwd=TMP / "gone", timeout_s=30).code != 0
    with pytest.raises(DeviceError, match="environment variable"):
        transport.run(["true"], env={"A=B; touch x": "y"}, timeout_s=30)


def test_standard_input_of_any_size(bench: Bench) -> None:
    data = os.urandom(1 << 20) * 5
    assert bench.transport().run(["cat"], stdin=data, timeout_s=60).stdout == data
    # A program that does not read it is no reason to hang.
    assert bench.transport().run(["true"], stdin=data, timeout_s=60).code == 0


def test_a_program_that_does_not_end_is_ended(bench: Bench) -> None:
    script = "echo $$ >pid; echo trouble >&2; sleep 600"
    with pytest.raises(DeviceTimeoutError, match="did not finish in 0.5 s") as caught:
        bench.transport().run(["sh", "-c", script], cwd=TMP, timeout_s=0.5)
    assert caught.value.serial == bench.devices[0].serial
    assert "trouble" in caught.value.stderr
    pid = int((bench.files() / "pid").read_text())
    deadline = time.monotonic() + 20
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline, "the program outlived its stream"
        time.sleep(0.01)


def test_output_without_end_is_an_error(bench: Bench) -> None:
    with pytest.raises(DeviceError, match="more than 100000 bytes"):
        bench.transport().run(["yes"], timeout_s=60, max_output=100_000)


def test_a_command_too_long_for_adb_is_refused(bench: Bench) -> None:
    with pytest.raises(DeviceError, match="at most 65535"):
        bench.transport().run(["echo", "x" * 70_000], timeout_s=30)


def test_large_file_round_trip(bench: Bench, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(os.urandom(1 << 20) * 50 + b"odd end")
    source.chmod(0o744)
    there = TMP / "large"
    bench.transport().push({there: source})
    assert stat.S_IMODE((bench.files() / "large").stat().st_mode) == 0o755
    bench.transport().pull({there: tmp_path / "back"}, max_bytes=source.stat().st_size)
    assert (tmp_path / "back").read_bytes() == source.read_bytes()


@pytest.mark.parametrize("size", [0, 1, 65535, 65536, 65537, 15 * 65536, 15 * 65536 + 1, 16 * 65536])
def test_sizes_around_the_protocols_limits(bench: Bench, tmp_path: Path, size: int) -> None:
    data = os.urandom(size)
    source = tmp_path / "source"
    source.write_bytes(data)
    files = {TMP / "sizes" / "file": source, TMP / "sizes" / "bytes": data}
    bench.transport().push(files)
    bench.transport().pull({path: tmp_path / path.name for path in files}, max_bytes=size)
    assert (tmp_path / "file").read_bytes() == (tmp_path / "bytes").read_bytes() == data


def test_many_files_over_one_stream(bench: Bench, tmp_path: Path) -> None:
    files: dict[PurePosixPath, Path | bytes] = {TMP / "many" / str(n % 7) / f"{n}": b"%d" % n * n for n in range(300)}
    bench.transport().push(files)
    bench.transport().pull({path: tmp_path / path.name for path in files}, max_bytes=4096)
    assert all((tmp_path / path.name).read_bytes() == data for path, data in files.items())
    bench.transport().push({})
    bench.transport().pull({}, max_bytes=0)


def test_hostile_names_round_trip(bench: Bench, tmp_path: Path) -> None:
    files: dict[PurePosixPath, Path | bytes] = {TMP / "hostile" / name: os.fsencode(name) for name in HOSTILE_NAMES}
    bench.transport().push(files)
    bench.transport().pull({path: tmp_path / str(n) for n, path in enumerate(files)}, max_bytes=1000)
    assert [(tmp_path / str(n)).read_bytes() for n in range(len(files))] == list(files.values())
    assert sorted(os.listdir(bench.files() / "hostile")) == sorted(HOSTILE_NAMES)


def test_a_file_that_is_too_large_leaves_nothing(bench: Bench, tmp_path: Path) -> None:
    small, large = TMP / "limits" / "small", TMP / "limits" / "large"
    bench.transport().push({small: b"12345", large: b"x" * 200_000})
    bench.transport().pull({small: tmp_path / "small"}, max_bytes=5)
    with pytest.raises(DeviceError, match=r"large: it has more than the 199999 bytes"):
        bench.transport().pull(
            {small: tmp_path / "small", large: tmp_path / "large"}, max_bytes={small: 5, large: 199_999}
        )
    assert os.listdir(tmp_path) == ["small"]


def test_a_missing_file_is_named_and_leaves_nothing(bench: Bench, tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="pull of /data/local/tmp/nothing: .*No such file"):
        bench.transport().pull({TMP / "nothing": tmp_path / "nothing"}, max_bytes=10)
    with pytest.raises(DeviceError, match="not a regular file"):
        bench.transport().pull({TMP: tmp_path / "folder"}, max_bytes=10)
    assert os.listdir(tmp_path) == []


def test_a_push_that_fails_names_the_file(bench: Bench, tmp_path: Path) -> None:
    bench.transport().push({TMP / "file": b"x"})
    with pytest.raises(DeviceError, match="push of /data/local/tmp/file/below: .*(Not a directory|File exists)"):
        bench.transport().push({TMP / "file" / "below": b"x" * 500_000, TMP / "other": b"y"})
    with pytest.raises(InfraError, match="gone: No such file"):
        bench.transport().push({TMP / "x": tmp_path / "gone"})
    with pytest.raises(DeviceError, match="cannot be a path on a device"):
        bench.transport().push({PurePosixPath("relative"): b""})
    with pytest.raises(DeviceError, match="cannot be a path on a device"):
        bench.transport().push({TMP / ("x" * 1100): b""})


def test_the_sync_service_never_leaves_the_device(bench: Bench, tmp_path: Path) -> None:
    outside = bench.root / "outside"
    outside.write_text("secret")
    transport = bench.transport()
    assert transport.run(["ln", "-s", str(bench.root), "/data/local/tmp/link"], timeout_s=30).code == 0
    ways = [PurePosixPath("/../outside"), TMP / "../../../../outside", TMP / "link/outside", TMP / "link/new"]
    for way in ways:
        with pytest.raises(DeviceError, match=r"leads out of the device|No such file"):
            transport.pull({way: tmp_path / "got"}, max_bytes=100)
        with pytest.raises(DeviceError, match="leads out of the device"):
            transport.push({way: b"changed"})
    assert outside.read_text() == "secret"
    assert not (bench.root / "new").exists()


def test_a_broken_push_leaves_no_partial_file(bench: Bench) -> None:
    host = AdbHost(bench.server.port)
    name = b"/data/local/tmp/broken"
    argument = name + b",33188"
    with host.open(bench.devices[0].serial, "sync:", timeout_s=30) as stream:
        stream.sendall(struct.pack("<4sI", b"SEND", len(argument)) + argument)
        stream.sendall(struct.pack("<4sI", b"DATA", 65536) + b"x" * 65536)
        # Answered only when what came before was taken in.
        incoming = bench.root / bench.devices[0].serial / ".incoming"
        deadline = time.monotonic() + 20
        while not os.listdir(incoming):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        stream.shutdown(socket.SHUT_RDWR)
    while os.listdir(incoming):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert not (bench.files() / "broken").exists()


def test_streams_at_the_same_time(bench: Bench, tmp_path: Path) -> None:
    def work(number: int) -> bool:
        transport = bench.transport(number % 2)
        data = os.urandom(1 << 18) * 8
        path = TMP / "parallel" / str(number)
        transport.push({path: data})
        echoed = transport.run(["cat", str(path)], timeout_s=60).stdout
        transport.pull({path: tmp_path / str(number)}, max_bytes=len(data))
        return echoed == data and (tmp_path / str(number)).read_bytes() == data

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(16)))


def test_an_unknown_device_and_a_missing_server(bench: Bench) -> None:
    with pytest.raises(DeviceError, match=r"nobody: adb refuses: .*not found"):
        AdbTransport("nobody", bench.server.port).run(["true"], timeout_s=5)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        with pytest.raises(DeviceError, match=f"no adb server listens on port {port}"):
            AdbTransport("nobody", port).run(["true"], timeout_s=5)


def test_a_program_that_stays_answers_what_it_is_sent(bench: Bench) -> None:
    script = 'echo ready; while read -r line; do echo "got $line"; echo "log $line" >&2; done; exit 7'
    process = bench.transport().start(["sh", "-c", script])
    try:
        assert until(process, b"ready\n") == (b"ready\n", b"", None)
        for word in (b"one", b"two"):
            process.send(word + b"\n")
            assert until(process, b"log " + word + b"\n")[:2] == (b"got " + word + b"\n", b"log " + word + b"\n")
        process.close_stdin()
        assert until(process, None)[2] == 7
    finally:
        process.close()


def test_waiting_for_a_program_that_says_nothing_ends(bench: Bench) -> None:
    process = bench.transport().start(["cat"])
    assert process.receive(0.05) == (b"", b"", None)
    process.close()


def test_a_program_ends_when_its_pipes_are_closed(bench: Bench) -> None:
    process = bench.transport().start(["sh", "-c", "echo $$; exec sleep 600"])
    pid = int(until(process, b"\n")[0])
    process.close()
    deadline = time.monotonic() + 20
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not Path(f"/proc/{pid}").exists()


def test_a_signal_ends_a_program_that_stays(bench: Bench) -> None:
    process = bench.transport().start(["sh", "-c", "echo last words >&2; kill -SEGV $$"])
    assert until(process, None) == (b"", b"last words\n", 139)
    process.close()


def until(process: ShellProcess, end: bytes | None) -> tuple[bytes, bytes, int | None]:
    """Return what comes until one of the streams ends so, or the program has ended."""
    out, err, code = b"", b"", None
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and code is None:
        more = process.receive(1)
        out, err, code = out + more.stdout, err + more.stderr, more.code
        if end is not None and end in (out[-len(end) :], err[-len(end) :]) and (end == b"\n" or out):
            break
    return out, err, code


def test_links_are_made_and_made_anew(bench: Bench) -> None:
    transport = bench.transport()
    folder = TMP / "links here"
    transport.push({folder / "target": b"there", folder / "deep/link": Link(PurePosixPath("../target"))})
    assert (bench.files() / "links here/deep/link").read_bytes() == b"there"
    transport.push({folder / "other": b"else", folder / "deep/link": Link(PurePosixPath("../other"))})
    assert (bench.files() / "links here/deep/link").read_bytes() == b"else"


def test_the_shell_makes_links_where_adbd_may_not(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    real = SyncStream.push

    def refusing_stub(self: SyncStream, files: dict[PurePosixPath, Any]) -> None:
        if any(isinstance(source, Link) for source in files.values()):
            raise LinkRefusedError("virtual", "couldn't create link: Permission denied")
        real(self, files)

    monkeypatch.setattr(SyncStream, "push", refusing_stub)
    transport = bench.transport()
    folder = TMP / "by 'shell'"
    wanted = {folder / "a/link": Link(PurePosixPath("../$(target)")), folder / "$(target)": b"there"}
    transport.push(wanted)
    assert (bench.files() / "by 'shell'/a/link").read_bytes() == b"there"
    transport.push(wanted)
    assert (bench.files() / "by 'shell'/a/link").readlink() == Path("../$(target)")
    transport.close()


def test_streams_for_files_are_used_again_and_survive_a_hangup(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    opened: list[str] = []
    real = AdbHost.open

    def counting(self: AdbHost, serial: str, service: str, **options: Any) -> socket.socket:
        opened.append(service)
        return real(self, serial, service, **options)

    monkeypatch.setattr(AdbHost, "open", counting)
    transport = bench.transport()
    for number in range(5):
        transport.push({TMP / "again": b"%d" % number})
        transport.pull({TMP / "again": tmp_path / "again"}, max_bytes=10)
        assert (tmp_path / "again").read_bytes() == b"%d" % number
    assert opened == ["sync:"]
    transport._idle[0]._stream.shutdown(socket.SHUT_RDWR)
    transport.push({TMP / "again": b"after"})
    assert (bench.files() / "again").read_bytes() == b"after"
    assert opened == ["sync:"] * 2
    # An answer that was never read must not be taken for that to another question.
    with pytest.raises(DeviceError, match="No such file"):
        transport.pull({TMP / "gone": tmp_path / "gone"}, max_bytes=10)
    transport.pull({TMP / "again": tmp_path / "again"}, max_bytes=10)
    assert (tmp_path / "again").read_bytes() == b"after"
    transport.close()
    transport.push({TMP / "again": b"closed and opened"})
    transport.close()

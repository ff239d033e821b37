"""Staging, running and collecting over a real adb server, with a stub runner that does what each test needs."""

from __future__ import annotations

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import msgspec
import pytest

from farm.build.bundle import INPUTS, MANIFEST, MODEL, Bundle, Manifest, TensorSpec, load_bundle
from farm.devices.adb import AdbTransport
from farm.devices.adb_server import start_adb_server
from farm.execution.session import DEVICE_ROOT, DeviceSession, RunnerOptions
from farm.processes import Supervisor
from farm.runtime.runtime import Runtime
from farm.virtual.boot import boot

if TYPE_CHECKING:
    from collections.abc import Iterator

GOOD = """#!/bin/sh
echo to-stderr >&2
echo "$@" >&2
cat input_0_0.raw > outputs/output_0_0.raw
printf '{}' > result.json
printf 'dump' > etdump.etdp
printf 'not asked for' > outputs/extra.raw
"""


@pytest.fixture(scope="module")
def transport(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdbTransport]:
    folder = tmp_path_factory.mktemp("device")
    with Supervisor() as supervisor:
        server = start_adb_server(supervisor, folder / "adb")
        [device] = boot(supervisor, server, ["SM8650"], folder / "devices")
        yield AdbTransport(device.serial, device.adb_port)


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    folder = tmp_path / "bundle"
    (folder / INPUTS).mkdir(parents=True)
    (folder / MODEL).write_bytes(b"model")
    (folder / INPUTS / "input_0_0.raw").write_bytes(b"12345678")
    tensor = TensorSpec((2,), "float32")
    manifest = Manifest(
        key="k", job_id="s/c", soc="SM8650", backend="htp", precision="8a8w", samples=1, inputs=(tensor,),
        outputs=(tensor,), pte_bytes=5, delegates={}, delegated_ops=0, fallback_ops={}, seconds={}, versions={},
        files={},
    )  # fmt: skip
    (folder / MANIFEST).write_bytes(msgspec.json.encode(manifest))
    return load_bundle(folder)


def runtime(tmp_path: Path, script: str, digest: str) -> Runtime:
    path = tmp_path / f"stub_runner_{digest[:8]}"
    path.write_text(script)
    path.chmod(0o755)
    return Runtime({"stub_runner": path}, digest, "stub_runner", {}, "simulator")


def listed(transport: AdbTransport, path: PurePosixPath) -> set[str]:
    return set(transport.run(["ls", str(path)], timeout_s=10).stdout.decode().split())


def test_what_was_chosen_is_collected_and_nothing_else(transport: AdbTransport, bundle: Bundle, tmp_path: Path) -> None:
    session = DeviceSession(transport, runtime(tmp_path, GOOD, "a" * 64), "r1", transport.serial)
    out = tmp_path / "out"
    options = RunnerOptions(iterations=7, warm_up=2, flags={"profile_level": "2"})
    raw = session.execute("s/c", bundle, out, options)
    assert (raw.error, raw.exit_code, raw.timed_out) == ("", 0, False)
    assert "to-stderr" in raw.stderr
    assert {path.name for path in out.iterdir()} == {"output_0_0.raw", "result.json", "etdump.etdp"}
    assert (out / "output_0_0.raw").read_bytes() == b"12345678"
    assert raw.push_seconds > 0
    assert raw.run_seconds > 0
    said = raw.stderr.split()
    assert {"--iteration=7", "--warm_up=2", "--profile_level=2", "--model_path=model.pte"} <= set(said)
    assert listed(transport, DEVICE_ROOT / f"run-r1-{os.getpid()}") == set(), "a suite must not fill the device"
    session.close()
    assert f"run-r1-{os.getpid()}" not in listed(transport, DEVICE_ROOT)


def test_the_runtime_is_pushed_once_for_all_sessions(
    transport: AdbTransport, bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pushed: list[str] = []
    push = AdbTransport.push

    def counting(self: AdbTransport, files: dict[PurePosixPath, Path | bytes]) -> None:
        pushed.extend(path.name for path in files)
        push(self, files)

    monkeypatch.setattr(AdbTransport, "push", counting)
    for run_id in ("r1", "r2"):
        session = DeviceSession(transport, runtime(tmp_path, GOOD, "b" * 64), run_id, transport.serial)
        for number in range(2):
            assert session.execute("s/c", bundle, tmp_path / f"{run_id}{number}", RunnerOptions()).error == ""
        session.close()
    assert pushed.count("stub_runner") == 1
    assert pushed.count("model.pte") == 4


def test_two_runs_on_one_device_do_not_see_each_other(transport: AdbTransport, bundle: Bundle, tmp_path: Path) -> None:
    waits = GOOD.replace("to-stderr >&2", "to-stderr >&2; sleep 1")
    slow = DeviceSession(transport, runtime(tmp_path, waits, "c" * 64), "a", transport.serial)
    quick = DeviceSession(transport, runtime(tmp_path, GOOD, "9" * 64), "b", transport.serial)
    with ThreadPoolExecutor(1) as aside:
        running = aside.submit(slow.execute, "s/c", bundle, tmp_path / "a", RunnerOptions())
        assert quick.execute("s/c", bundle, tmp_path / "b", RunnerOptions()).exit_code == 0
        quick.close()
        raw = running.result()
    assert (raw.error, raw.exit_code) == ("", 0)
    assert (tmp_path / "a" / "output_0_0.raw").read_bytes() == b"12345678"
    slow.close()


@pytest.mark.parametrize(
    ("script", "exit_code"),
    [("#!/bin/sh\necho wrong >&2; exit 6\n", 6), ("#!/bin/sh\nkill -SEGV $$\n", 139), ("#!/bin/sh\nexit 0\n", 0)],
)
def test_a_runner_that_fails_is_told_as_it_was(
    transport: AdbTransport, bundle: Bundle, tmp_path: Path, script: str, exit_code: int
) -> None:
    digest = hashlib.sha256(script.encode()).hexdigest()
    session = DeviceSession(transport, runtime(tmp_path, script, digest), "r", transport.serial)
    raw = session.execute("s/c", bundle, tmp_path / "out", RunnerOptions())
    assert (raw.exit_code, raw.error) == (exit_code, "")
    assert list((tmp_path / "out").iterdir()) == []
    session.close()


def test_a_runner_that_hangs_is_ended_in_its_time(transport: AdbTransport, bundle: Bundle, tmp_path: Path) -> None:
    session = DeviceSession(
        transport, runtime(tmp_path, "#!/bin/sh\nexec sleep 600\n", "d" * 64), "r", transport.serial
    )
    raw = session.execute("s/c", bundle, tmp_path / "out", RunnerOptions(timeout_s=1))
    assert raw.timed_out
    assert raw.error == ""
    assert raw.exit_code is None
    session.close()


def test_a_device_that_is_gone_is_the_farms_trouble(bundle: Bundle, tmp_path: Path) -> None:
    with Supervisor() as supervisor:
        server = start_adb_server(supervisor, tmp_path / "adb")
        [device] = boot(supervisor, server, ["SM8650"], tmp_path / "devices")
        gone = AdbTransport(device.serial, device.adb_port)
    session = DeviceSession(gone, runtime(tmp_path, GOOD, "e" * 64), "r", "virtual-SM8650-0")
    raw = session.execute("s/c", bundle, tmp_path / "out", RunnerOptions())
    assert raw.error_stage == "push"
    assert "virtual-SM8650-0" in raw.error
    session.close()


def test_a_second_device_with_a_half_pushed_runtime_is_not_taken_for_complete(
    transport: AdbTransport, bundle: Bundle, tmp_path: Path
) -> None:
    half = DEVICE_ROOT / f"runtime-{'f' * 16}.123"
    transport.push({half / "stub_runner": b"#!/bin/sh\nexit 9\n"})
    session = DeviceSession(transport, runtime(tmp_path, GOOD, "f" * 64), "r", transport.serial)
    raw = session.execute("s/c", bundle, tmp_path / "out", RunnerOptions())
    assert raw.exit_code == 0
    assert json.loads((tmp_path / "out" / "result.json").read_text()) == {}
    session.close()

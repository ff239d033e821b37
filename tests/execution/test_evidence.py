"""Logs of a device after a crash: all available ones, bounded and made fit to read."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import made
import msgspec
import pytest
from watched_transport import Watched

from farm.builds.bundles.bundle import Bundle
from farm.builds.runtime.runtime import Runtime
from farm.devices.device import AdbAddress
from farm.devices.execution.crash_logs import collect_crash_logs
from farm.devices.execution.raw import RunnerOptions
from farm.devices.virtual.faults import Fault, FaultKind, clear, inject
from farm.dispatch.device_run.artifacts import AttemptArtifacts
from farm.dispatch.device_run.device_run import DeviceRun
from farm.dispatch.request.profiling import Profile
from farm.results.attempt import Attempt, Cause, Ending
from farm.results.outcome import outcome

LOGCAT = """#!/bin/sh
# Says what it was asked for, and one line of a crash.
echo "asked: $*"
printf 'F DEBUG: signal 11 (SIGSEGV)\\033[31m\\n'
"""


Tools = Callable[[str, str], None]
DSP_CRASH = """#!/bin/sh
echo '11-23 06:00:01.1 I: adsprpc: vendor/qcom: log_config.c: FARF enabled'
echo '11-23 06:00:01.2 D: Zygote: what others log'
echo '11-23 06:00:01.3 E: [Qnn ExecuTorch]: SMMU fastrpc mmap error (err 1002)'
"""


@pytest.fixture
def tools(storage: Path) -> Iterator[Tools]:
    """Give the device a command, for the time of a test."""
    folder = storage.parents[3] / "system/bin"
    made = set()

    def make(name: str, script: str) -> None:
        made.add(folder / name)
        (folder / name).write_text(script)
        (folder / name).chmod(0o755)

    yield make
    for path in made:
        path.unlink()


def test_there_is_what_the_device_has_made_fit_to_read(transport: Watched, tools: Tools, tmp_path: Path) -> None:
    tools("logcat", LOGCAT)
    tools("dmesg", "#!/bin/sh\nprintf '[1.0] adsprpc: restart \\377\\n'\n")
    found = collect_crash_logs(transport, "android", tmp_path / "evidence", since=time.time() - 90)
    assert set(found) == {"logcat", "dmesg"}
    text = found["logcat"].read_text()
    assert "signal 11 (SIGSEGV)" in text
    assert "\033" not in text
    assert "asked: -d -v threadtime -t " in text
    assert found["dmesg"].read_text().startswith("[1.0] adsprpc: restart")
    assert sorted(path.name for path in (tmp_path / "evidence").iterdir()) == ["dmesg.txt", "logcat.txt"]
    # A logcat that takes no time is asked for its last lines.
    tools("logcat", '#!/bin/sh\n[ "$5" = 3000 ] || exit 1\necho the last lines\n')
    tools("dmesg", "#!/bin/sh\necho 'dmesg: klogctl: Operation not permitted' >&2; exit 1\n")
    found = collect_crash_logs(transport, "android", tmp_path, since=time.time())
    assert {kind: path.read_text() for kind, path in found.items()} == {"logcat": "the last lines"}
    # Bytes that are not UTF-8 become longer when they are made fit to read.
    for name in ("logcat", "dmesg"):
        tools(name, "#!/bin/sh\nhead -c 3000000 /dev/zero | tr '\\0' '\\377'\n")
    found = collect_crash_logs(transport, "android", tmp_path, since=time.time(), max_bytes=100_000)
    assert set(found) == {"logcat", "dmesg"}
    assert sum(path.stat().st_size for path in found.values()) <= 100_000


def test_a_linux_device_has_other_logs(transport: Watched, tools: Tools, tmp_path: Path) -> None:
    tools("dmesg", "#!/bin/sh\necho from the kernel\n")
    tools("journalctl", '#!/bin/sh\necho "asked: $*"\n')
    found = collect_crash_logs(transport, "linux", tmp_path, since=time.time() - 9)
    assert found["dmesg"].read_text() == "from the kernel"
    assert found["journal"].read_text() == "asked: -k -n 1000 --no-pager --since -10 seconds"


def test_logs_of_a_crash_are_kept_and_explain_it(
    device_port: tuple[str, int, Path],
    runtime: Runtime,
    make_bundle: Callable[..., Bundle],
    tools: Tools,
    tmp_path: Path,
) -> None:
    tools("logcat", DSP_CRASH)
    tools("dmesg", "#!/bin/sh\nexit 1\n")
    serial, port, _ = device_port
    device = made.device(serial, kind="virtual", address=AdbAddress(port))
    artifacts = AttemptArtifacts(tmp_path / "artifacts", Profile.OFF)
    with DeviceRun(device, runtime, "crash", takeover=False, artifacts=artifacts) as run:
        raw = run.run("s/c", make_bundle(b"crash"), tmp_path / "out", RunnerOptions(timeout_s=30))
        ending = outcome(raw)
        assert isinstance(ending, Ending)
        attempt = Attempt(
            "s/c", ending.verdict, ending.stage, ending.reason, started_ms=raw.started_ms, cause=ending.cause
        )
        explained, kept = run.keep_crash_logs(attempt, tmp_path / "logs")
        passed = msgspec.structs.replace(attempt, cause=Cause.NONE)
        assert run.keep_crash_logs(passed, tmp_path / "none") == (passed, ())
    assert ending.reason.startswith("the runner ended with signal 11")
    assert explained.reason.startswith(f"{ending.reason}; by the device's logs the DSP's SMMU cannot map")
    assert {one.kind for one in kept} == {"logcat", "dsp"}
    [dsp] = [one.sha256 for one in kept if one.kind == "dsp"]
    [file] = (tmp_path / "artifacts").glob(f"*/*/*{dsp}*")
    assert [line.split(": ", 1)[1] for line in file.read_text().splitlines()] == [
        "adsprpc: vendor/qcom: log_config.c: FARF enabled",
        "[Qnn ExecuTorch]: SMMU fastrpc mmap error (err 1002)",
    ]


def test_it_never_raises(transport: Watched, storage: Path, tools: Tools, tmp_path: Path) -> None:
    root = storage.parents[3]
    tools("logcat", LOGCAT)
    tools("dmesg", "#!/bin/sh\necho from the kernel\n")
    inject(root, Fault(FaultKind.ENDLESS_OUTPUT, match="logcat", times=1, text="again and "))
    found = collect_crash_logs(transport, "android", tmp_path / "a", since=time.time())
    assert set(found) == {"dmesg"}, "what says too much is left out, the rest is there"
    clear(root)
    (tmp_path / "file").write_text("in the way")
    assert collect_crash_logs(transport, "android", tmp_path / "file", since=time.time()) == {}
    gone = type(transport)("virtual-none", 1)
    assert collect_crash_logs(gone, "android", tmp_path / "b", since=time.time()) == {}
    assert not (tmp_path / "b").exists()

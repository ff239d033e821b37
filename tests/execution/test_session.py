"""Sessions of runners on a device: results, and logs of crashes."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import made
import msgspec
import pytest
from attached import Rack
from waiting import ends
from watched_transport import Watched

from farm.builds.bundles.bundle import Bundle
from farm.builds.runtime.runtime import Runtime
from farm.devices.device import AdbAddress
from farm.devices.execution import session as session_module
from farm.devices.execution.liveness import collect_crash_logs
from farm.devices.execution.raw import DEBUG_FILE, ETDUMP_FILE, HEAP_FILE, RawResult, RunnerOptions, heap_folders
from farm.devices.execution.session import DeviceSession
from farm.devices.virtual.faults import Fault, FaultKind, clear, inject
from farm.dispatch.device_run.artifacts import AttemptArtifacts
from farm.dispatch.device_run.device_run import DeviceRun
from farm.dispatch.request.profiling import Profile
from farm.results.attempt import Attempt, Cause, Ending
from farm.results.outcome import outcome

# Staging, running and collecting over a real adb server, with a stub runner that does what each test needs.


OPTIONS = RunnerOptions(timeout_s=30)
HEAP = RunnerOptions(iterations=1, timeout_s=30, heap=True)
Run = Callable[..., RawResult]
Make = Callable[..., Bundle]


def process_of(raw: RawResult) -> int:
    """Return the process id that the stub prints at its start; 0 for a process that ran already."""
    return int(raw.stderr.split()[1]) if raw.stderr.startswith("started ") else 0


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_what_was_chosen_is_collected_and_nothing_else(run: Run) -> None:
    raw = run(b"good", RunnerOptions(iterations=7, warm_up=2, timeout_s=30, flags={"profile_level": "2"}))
    assert (raw.error, raw.exit_code, raw.timed_out, raw.process_ended) == ("", 0, False, False), raw.stderr
    assert names_in(raw.folder) == {"output_0_0.raw", "result.json", ETDUMP_FILE}
    assert raw.output(0, 0).read_bytes() == b"12345678"
    assert "--serve --profile_level=2" in raw.stderr
    assert {"--iteration=7", "--warm_up=2", "--timeout_ms=30000"} <= set(raw.stderr.split())
    assert raw.push_seconds > 0
    assert raw.run_seconds > 0
    debug = run(b"good", RunnerOptions(timeout_s=30, debug=True))
    assert (debug.folder / DEBUG_FILE).read_bytes() == b"intermediate"
    assert (debug.folder / ETDUMP_FILE).read_bytes() == b"dump"


def test_no_result_of_an_earlier_execution_is_left(session: DeviceSession, make_bundle: Make, tmp_path: Path) -> None:
    """A health check uses its folder again, and files of the one before would be judged."""
    session.execute("s/c", session.stage(make_bundle(b"good")), tmp_path / "out", OPTIONS)
    assert names_in(tmp_path / "out") == {"output_0_0.raw", "result.json"}
    raw = session.execute("s/c", session.stage(make_bundle(b"mute")), tmp_path / "out", OPTIONS)
    assert (raw.error, raw.exit_code, raw.timed_out) == ("", 0, False)
    assert names_in(tmp_path / "out") == set()


def test_one_process_takes_many_jobs(
    run: Run, session: DeviceSession, transport: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"run-r-{os.getpid()}"
    raws = []
    # A suite must not fill the device: neither by many workspaces nor by large outputs.
    for most, bound in (("_SWEEP", 8), ("_SWEEP_BYTES", 64)):
        with monkeypatch.context() as limit:
            limit.setattr(session_module, most, bound)
            raws += [run(b"good") for _ in range(20)]
            assert len(transport.listed(transport.storage / name)) < 15, most
    assert [raw.exit_code for raw in raws] == [0] * 40
    first, *later = map(process_of, raws)
    assert (bool(first), any(later)) == (True, False)
    # Packed weights are as large as the program.
    options = RunnerOptions(timeout_s=30, flags={"weight_cache_enabled": "1", "packed_cache_path": "w.packed"})
    raws = [run(b"good", options) for _ in range(6)]
    assert [raw.exit_code for raw in raws] == [0] * 6
    assert len([name for name in transport.listed(raws[-1].workspace.parent) if name.isdecimal()]) <= 2
    session.close()
    assert name not in transport.listed(transport.storage)
    assert ends(first)


def test_when_a_process_is_renewed(run: Run, session: DeviceSession, monkeypatch: pytest.MonkeyPatch) -> None:
    raws = [run(b"good"), run(b"good")]
    session.end_process()
    raws += [run(b"good"), run(b"good")]
    traced = RunnerOptions(timeout_s=30, flags={"profile_level": "2"})
    raws += [run(b"good", traced), run(b"good", traced)]
    assert [bool(process_of(raw)) for raw in raws] == [True, False] * 3
    # Tracing costs time: only when asked.
    assert [(raw.folder / ETDUMP_FILE).exists() for raw in raws] == [False] * 4 + [True] * 2
    assert all(ends(process_of(raw)) for raw in raws[:4:2])
    monkeypatch.setattr("farm.devices.execution.session._JOBS_OF_A_PROCESS", 3)
    session.end_process()
    assert [bool(process_of(run(b"good"))) for _ in range(7)] == [n % 3 == 0 for n in range(7)]


def test_the_heap_has_a_process_of_its_own(run: Run, session: DeviceSession, make_bundle: Make) -> None:
    session.keep_loaded(make_bundle(b"anchor"))
    before, after = "DSP:before_context_created (bytes), 928212\n", "DSP:after_context_freed (bytes), 930000\n"
    for model, expected in (
        (b"good", before + after), (b"good again", before + after), (b"crash", before), (b"heapless", None),
    ):  # fmt: skip
        raw = run(model, HEAP, alone=True)
        assert (raw.heap, raw.error) == (True, "")
        assert "--profile_level=2" in raw.stderr, "upstream measured the heap with no other"
        assert "keep_loaded" not in raw.stderr, "the second number is written when the last program has gone"
        assert process_of(raw)
        file = raw.folder / HEAP_FILE
        assert (file.read_text() if file.exists() else None) == expected


def test_the_heap_is_measured_in_several_processes_until_one_fails(run: Run) -> None:
    heap = dataclasses.replace(HEAP, iterations=3)
    raw = run(b"good", heap, alone=True)
    assert raw.exit_code == 0
    assert [(folder / HEAP_FILE).read_text().count("\n") for folder in heap_folders(raw.folder)] == [2, 2, 2]
    assert "--iteration=1" in raw.stderr
    crash = run(b"crash", heap, alone=True)
    assert crash.exit_code not in (0, None)
    assert crash.folder.name == "process1"
    assert heap_folders(crash.folder.parent) == [crash.folder, crash.folder.parent]


def test_the_dsp_finds_its_libraries_in_a_list_as_it_reads_it(session: DeviceSession) -> None:
    """FastRPC takes a list with colons, as the loader of the CPU's libraries reads it, for one folder."""
    answer = ["sh", "-c", 'printf "%s\\n" "$LD_LIBRARY_PATH" "$ADSP_LIBRARY_PATH"']
    done = session.run_tool({"a": b"1"}, answer, {}, timeout_s=30, max_bytes=10)
    cpu, dsp = done.stdout.decode().splitlines()
    own, runtime = cpu.split(":")
    assert runtime.endswith(str(session.runtime_folder))
    assert dsp == f"{own};{runtime}"


def test_the_dsp_logs_for_the_runner_that_has_a_skel(transport: Watched, runtime: Runtime, storage: Path) -> None:
    for versions, logs in (({}, {}), ({"dsp_logs": "0x0C"}, {f"{runtime.runner}.farf": "0x0C\n"})):
        session = DeviceSession(transport, msgspec.structs.replace(runtime, versions=versions), "logs", "serial")
        session.prepare([])
        assert {path.name: path.read_text() for path in storage.glob("run-logs-*/runtime/*.farf")} == logs
        session.close()


def test_a_refused_job_runs_once_and_costs_the_session_and_no_other_job(run: Run) -> None:
    raws = [run(model) for model in (b"good", b"refused", b"good")]
    assert [(raw.exit_code, raw.refused) for raw in raws] == [(0, False), (4, True), (0, False)]
    assert (raws[1].process_ended, raws[1].notes, raws[1].stderr.count("line --")) == (False, (), 1)
    assert names_in(raws[1].folder) == {"result.json"}
    # The DSP session behind the runner may be dead: docs/guides/infra_or_failed.md.
    assert process_of(raws[2])


@pytest.mark.parametrize(
    ("model", "exit_code", "timed_out"), [(b"crash", 139, False), (b"late", 9, False), (b"hang", None, True)]
)
def test_a_job_that_ends_the_runner_is_at_fault(
    run: Run, monkeypatch: pytest.MonkeyPatch, model: bytes, exit_code: int | None, timed_out: bool
) -> None:
    monkeypatch.setattr("farm.devices.execution.session._GRACE_SECONDS", 0.5)
    first, bad, after = run(b"good"), run(model, RunnerOptions(timeout_s=1)), run(b"good")
    assert (bad.exit_code, bad.timed_out, bad.process_ended, bad.error) == (exit_code, timed_out, True, "")
    assert (after.exit_code, after.error, after.process_ended) == (0, "", False)
    assert process_of(after)
    assert ends(process_of(first)), "nothing of it is left on the device"


def test_a_job_is_not_at_fault_for_a_process_that_ended_before_it_or_for_its_company(run: Run) -> None:
    assert run(b"leaves").exit_code == 0
    raw = run(b"good")
    assert (raw.exit_code, raw.error, raw.process_ended) == (0, "", False)
    assert run(b"crash-in-company").process_ended
    raw = run(b"crash-in-company", alone=True)
    assert (raw.exit_code, raw.error, raw.process_ended) == (0, "", False)


def test_a_runner_that_says_something_else_is_the_farms_trouble(run: Run) -> None:
    raw = run(b"babble")
    assert raw.error_stage == "execute"
    assert "what a backend prints" in raw.error


def test_a_runner_that_does_not_start_is_the_farms_trouble(
    transport: Watched, make_bundle: Make, runtime: Runtime, tmp_path: Path
) -> None:
    broken = tmp_path / "stub_broken"
    broken.write_text("#!/bin/sh\necho error while loading shared libraries >&2\nexit 127\n")
    files = {**runtime.files, "serve_stub.py": broken}
    hashes = {**runtime.hashes, "serve_stub.py": hashlib.sha256(broken.read_bytes()).hexdigest()}
    session = DeviceSession(transport, msgspec.structs.replace(runtime, files=files, hashes=hashes), "r", "s")
    raw = session.execute("s/c", session.stage(make_bundle(b"good")), tmp_path / "out", OPTIONS)
    assert "error while loading shared libraries" in raw.error
    assert "exit code 127" in raw.error
    session.close()


def test_a_long_log_is_cut_in_the_middle(run: Run) -> None:
    raw = run(b"noisy")
    assert raw.exit_code == 0
    assert len(raw.stderr) < 70_000
    assert raw.stderr.startswith("started ")
    assert raw.stderr.endswith("the end\n")


def test_two_runs_on_one_device_do_not_see_each_other(
    session: DeviceSession, runtime: Runtime, transport: Watched, make_bundle: Make, tmp_path: Path
) -> None:
    other = DeviceSession(transport, runtime, "other", transport.serial)

    def execute(session: DeviceSession, content: bytes, name: str) -> RawResult:
        return session.execute("s/c", session.stage(make_bundle(b"good", [content])), tmp_path / name, OPTIONS)

    with ThreadPoolExecutor(2) as aside:
        for number in range(5):
            running = [
                aside.submit(execute, one, content, f"{content.decode()}{number}")
                for one, content in ((session, b"12345678"), (other, b"abcdefgh"))
            ]
            raws = [future.result() for future in running]
            assert [raw.exit_code for raw in raws] == [0, 0]
            assert [raw.output(0, 0).read_bytes() for raw in raws] == [b"12345678", b"abcdefgh"]
            assert [bool(process_of(raw)) for raw in raws] == [not number] * 2
    other.close()
    assert execute(session, b"12345678", "last").exit_code == 0


# Logs of a device after a crash: all available ones, bounded and made fit to read.


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
    attached: Rack, runtime: Runtime, make_bundle: Make, tools: Tools, tmp_path: Path
) -> None:
    tools("logcat", DSP_CRASH)
    tools("dmesg", "#!/bin/sh\nexit 1\n")
    device = made.device(attached.device.serial, kind="virtual", address=AdbAddress(attached.server.port))
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

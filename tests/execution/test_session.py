"""Staging, running and collecting over a real adb server, with a stub runner that does what each test needs."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from waiting import ends
from watched_transport import Watched

from farm.base.processes import Supervisor
from farm.builds.bundles.bundle import Bundle
from farm.builds.runtime.runtime import Runtime
from farm.devices.adb.server import start_adb_server
from farm.devices.adb.transport import AdbTransport
from farm.devices.execution.raw import DEBUG_FILE, ETDUMP_FILE, HEAP_FILE, RunnerOptions, heap_folders
from farm.devices.execution.session import DeviceSession
from farm.devices.virtual.boot import boot

OPTIONS = RunnerOptions(timeout_s=30)


@pytest.fixture
def session(transport: Watched, runtime: Runtime) -> Iterator[DeviceSession]:
    session = DeviceSession(transport, runtime, "r", transport.serial)
    yield session
    session.close()


def process_of(stderr: str) -> str:
    """Return the process id that the stub prints at its start; empty for a process that ran already."""
    return stderr.split()[1] if stderr.startswith("started ") else ""


def alive(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    return True


def test_what_was_chosen_is_collected_and_nothing_else(
    session: DeviceSession, make_bundle: Callable[..., Bundle], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    options = RunnerOptions(iterations=7, warm_up=2, timeout_s=30, flags={"profile_level": "2"})
    raw = session.execute("s/c", session.stage(make_bundle(b"good")), out, options)
    assert (raw.error, raw.exit_code, raw.timed_out, raw.process_ended) == ("", 0, False, False), raw.stderr
    assert {path.name for path in out.iterdir()} == {"output_0_0.raw", "result.json", "etdump.etdp"}
    assert (out / "output_0_0.raw").read_bytes() == b"12345678"
    assert msgspec.json.decode((out / "result.json").read_bytes())["ok"] is True
    assert "--serve --profile_level=2" in raw.stderr
    assert {"--iteration=7", "--warm_up=2", "--timeout_ms=30000"} <= set(raw.stderr.split())
    assert raw.push_seconds > 0
    assert raw.run_seconds > 0


def test_a_runner_that_ends_without_an_answer_leaves_no_result_of_an_earlier_execution(
    session: DeviceSession, make_bundle: Callable[..., Bundle], tmp_path: Path
) -> None:
    """A health check uses its folder again, and files of the one before would be judged."""
    out = tmp_path / "out"
    session.execute("s/c", session.stage(make_bundle(b"good")), out, OPTIONS)
    assert {path.name for path in out.iterdir()} == {"output_0_0.raw", "result.json"}
    raw = session.execute("s/c", session.stage(make_bundle(b"mute")), out, OPTIONS)
    assert (raw.error, raw.exit_code, raw.timed_out) == ("", 0, False)
    assert list(out.iterdir()) == []


def test_one_process_takes_many_jobs_and_nothing_is_left_of_it(
    session: DeviceSession, transport: Watched, make_bundle: Callable[..., Bundle], tmp_path: Path
) -> None:
    bundle = make_bundle(b"good")
    raws = [session.execute("s/c", session.stage(bundle), tmp_path / str(n), OPTIONS) for n in range(40)]
    assert [raw.exit_code for raw in raws] == [0] * 40
    processes = [process_of(raw.stderr) for raw in raws]
    assert processes[0]
    assert not any(processes[1:])
    name = f"run-r-{os.getpid()}"
    assert len(transport.listed(transport.storage / name)) < 30, "a suite must not fill the device"
    session.close()
    assert name not in transport.listed(transport.storage)
    assert ends(int(processes[0]))


def test_packed_weights_which_are_as_large_as_the_program_do_not_pile_up(
    session: DeviceSession, transport: Watched, make_bundle: Callable[..., Bundle], tmp_path: Path
) -> None:
    bundle = make_bundle(b"good")
    options = RunnerOptions(timeout_s=30, flags={"weight_cache_enabled": "1", "packed_cache_path": "w.packed"})
    for number in range(6):
        raw = session.execute("s/c", session.stage(bundle), tmp_path / str(number), options)
        assert raw.exit_code == 0, raw.stderr
    kept = [name for name in transport.listed(raw.workspace.parent) if name.isdecimal()]
    assert len(kept) <= 2, kept


def test_a_process_is_renewed_before_it_has_grown(
    session: DeviceSession, make_bundle: Callable[..., Bundle], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("farm.devices.execution.session._JOBS_OF_A_PROCESS", 3)
    bundle = make_bundle(b"good")
    raws = [session.execute("s/c", session.stage(bundle), tmp_path / str(n), OPTIONS) for n in range(7)]
    assert [raw.exit_code for raw in raws] == [0] * 7
    assert [bool(process_of(raw.stderr)) for raw in raws] == [n % 3 == 0 for n in range(7)]


def test_a_process_that_is_ended_is_followed_by_a_new_one(
    session: DeviceSession, make_bundle: Callable[..., Bundle], tmp_path: Path
) -> None:
    bundle = make_bundle(b"good")
    processes = []
    for number in range(4):
        if number == 2:
            session.end_process()
        raw = session.execute("s/c", session.stage(bundle), tmp_path / str(number), OPTIONS)
        processes.append(process_of(raw.stderr))
    assert [bool(process) for process in processes] == [True, False, True, False]
    assert ends(int(processes[0]))


def test_other_backend_options_are_another_process(
    session: DeviceSession, make_bundle: Callable[..., Bundle], tmp_path: Path
) -> None:
    bundle = make_bundle(b"good")
    processes = []
    for number, level in enumerate("0022"):
        options = RunnerOptions(timeout_s=30, flags={"profile_level": level})
        raw = session.execute("s/c", session.stage(bundle), tmp_path / str(number), options)
        processes.append(process_of(raw.stderr))
        assert (tmp_path / str(number) / "etdump.etdp").exists() == (level == "2"), (
            "tracing costs time: only when asked"
        )
    assert [bool(process) for process in processes] == [True, False, True, False]
    assert ends(int(processes[0]))


def test_the_heap_is_measured_in_a_process_of_its_own_and_read_even_of_a_crash(
    session: DeviceSession, make_bundle: Callable[..., Bundle], tmp_path: Path
) -> None:
    session.keep_loaded(make_bundle(b"anchor"))
    heap = RunnerOptions(iterations=1, timeout_s=30, heap=True)
    files, processes = [], []
    for number, model in enumerate([b"good", b"good again", b"crash", b"heapless"]):
        workspace = session.stage(make_bundle(model))
        raw = session.execute_alone("s/c", workspace, tmp_path / str(number), heap)
        assert raw.heap
        assert raw.error == ""
        assert "--profile_level=2" in raw.stderr, "upstream measured the heap with no other"
        assert "keep_loaded" not in raw.stderr, "the second number is written when the last program has gone"
        processes.append(process_of(raw.stderr))
        file = tmp_path / str(number) / HEAP_FILE
        files.append(file.read_text().splitlines() if file.exists() else None)
    before, after = "DSP:before_context_created (bytes), 928212", "DSP:after_context_freed (bytes), 930000"
    assert files == [[before, after], [before, after], [before], None]
    assert all(processes)


def test_the_heap_is_measured_several_times_in_as_many_processes_until_one_fails(
    session: DeviceSession, make_bundle: Callable[..., Bundle], tmp_path: Path
) -> None:
    heap = RunnerOptions(iterations=3, timeout_s=30, heap=True)
    raw = session.execute_alone("s/c", session.stage(make_bundle(b"good")), tmp_path / "good", heap)
    assert (raw.folder, raw.exit_code) == (tmp_path / "good", 0)
    assert [(folder / HEAP_FILE).read_text().count("\n") for folder in heap_folders(raw.folder)] == [2, 2, 2]
    assert "--iteration=1" in raw.stderr
    crash = session.execute_alone("s/c", session.stage(make_bundle(b"crash")), tmp_path / "crash", heap)
    assert crash.exit_code not in (0, None)
    assert [folder.name for folder in heap_folders(tmp_path / "crash")] == ["process1", "crash"]
    assert crash.folder == tmp_path / "crash" / "process1"


def test_the_dsp_finds_its_libraries_in_a_list_as_it_reads_it(session: DeviceSession) -> None:
    """FastRPC takes a list with colons, as the loader of the CPU's libraries reads it, for one folder."""
    answer = ["sh", "-c", 'printf "%s\\n" "$LD_LIBRARY_PATH" "$ADSP_LIBRARY_PATH"']
    done = session.run_tool({"a": b"1"}, answer, {}, timeout_s=30, max_bytes=10)
    cpu, dsp = done.stdout.decode().splitlines()
    own, runtime = cpu.split(":")
    assert runtime.endswith(str(session.runtime_folder))
    assert dsp == f"{own};{runtime}"


def test_the_dsp_logs_for_the_runner_that_has_a_skel(transport: Watched, runtime: Runtime, storage: Path) -> None:
    for versions, logs in (({}, []), ({"dsp_logs": "0x0C"}, [f"{runtime.runner}.farf"])):
        session = DeviceSession(transport, msgspec.structs.replace(runtime, versions=versions), "logs", "serial")
        session.prepare([])
        files = list(storage.glob("run-logs-*/runtime/*.farf"))
        assert [path.name for path in files] == logs
        assert [path.read_text() for path in files] == ["0x0C\n"] * len(logs), "as ExecuTorch's scripts write it"
        session.close()


def test_intermediate_outputs_come_only_when_asked(
    session: DeviceSession, make_bundle: Callable[..., Bundle], tmp_path: Path
) -> None:
    raw = session.execute(
        "s/c", session.stage(make_bundle(b"good")), tmp_path / "1", RunnerOptions(timeout_s=30, debug=True)
    )
    assert raw.error == ""
    assert (tmp_path / "1" / DEBUG_FILE).read_bytes() == b"intermediate"
    assert (tmp_path / "1" / ETDUMP_FILE).read_bytes() == b"dump"


def test_a_refused_job_costs_the_session_and_no_other_job(
    session: DeviceSession, make_bundle: Callable[..., Bundle], tmp_path: Path
) -> None:
    good, bad = make_bundle(b"good"), make_bundle(b"refused")
    raws = [
        session.execute("s/c", session.stage(bundle), tmp_path / str(n), OPTIONS)
        for n, bundle in enumerate([good, bad, good])
    ]
    assert [raw.exit_code for raw in raws] == [0, 4, 0]
    assert [raw.refused for raw in raws] == [False, True, False]
    assert not raws[1].process_ended
    # The DSP session behind the runner may be dead: docs/guides/infra_or_failed.md.
    assert process_of(raws[2].stderr)
    assert {path.name for path in (tmp_path / "1").iterdir()} == {"result.json"}


@pytest.mark.parametrize(
    ("model", "exit_code", "timed_out"), [(b"crash", 139, False), (b"late", 9, False), (b"hang", None, True)]
)
def test_a_job_that_ends_the_runner_is_at_fault_and_the_next_gets_a_new_one(
    session: DeviceSession,
    make_bundle: Callable[..., Bundle],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    model: bytes,
    exit_code: int | None,
    timed_out: bool,
) -> None:
    monkeypatch.setattr("farm.devices.execution.session._GRACE_SECONDS", 0.5)
    good = make_bundle(b"good")
    first = session.execute("s/c", session.stage(good), tmp_path / "first", OPTIONS)
    ready = session.stage(good)
    bad = session.execute("s/c", session.stage(make_bundle(model)), tmp_path / "bad", RunnerOptions(timeout_s=1))
    assert (bad.exit_code, bad.timed_out, bad.process_ended, bad.error) == (exit_code, timed_out, True, "")
    after = session.execute("s/c", ready, tmp_path / "after", OPTIONS)
    assert (after.exit_code, after.error, after.process_ended) == (0, "", False)
    assert process_of(after.stderr)
    assert ends(int(process_of(first.stderr))), "nothing of it is left on the device"


def test_a_job_is_not_at_fault_for_a_process_that_ended_before_it(
    session: DeviceSession, make_bundle: Callable[..., Bundle], tmp_path: Path
) -> None:
    leaves, good = make_bundle(b"leaves"), make_bundle(b"good")
    assert session.execute("s/c", session.stage(leaves), tmp_path / "a", OPTIONS).exit_code == 0
    raw = session.execute("s/c", session.stage(good), tmp_path / "b", OPTIONS)
    assert (raw.exit_code, raw.error, raw.process_ended) == (0, "", False)


def test_what_crashes_in_company_may_run_alone(
    session: DeviceSession, make_bundle: Callable[..., Bundle], tmp_path: Path
) -> None:
    session.execute("s/c", session.stage(make_bundle(b"good")), tmp_path / "a", OPTIONS)
    bundle = make_bundle(b"crash-in-company")
    assert session.execute("s/c", session.stage(bundle), tmp_path / "b", OPTIONS).process_ended
    raw = session.execute_alone("s/c", session.stage(bundle), tmp_path / "c", OPTIONS)
    assert (raw.exit_code, raw.process_ended, raw.error) == (0, False, "")


def test_a_runner_that_says_something_else_is_the_farms_trouble(
    session: DeviceSession, make_bundle: Callable[..., Bundle], tmp_path: Path
) -> None:
    raw = session.execute("s/c", session.stage(make_bundle(b"babble")), tmp_path / "out", OPTIONS)
    assert raw.error_stage == "execute"
    assert "what a backend prints" in raw.error


def test_a_runner_that_does_not_start_is_the_farms_trouble(
    transport: Watched, make_bundle: Callable[..., Bundle], runtime: Runtime, tmp_path: Path
) -> None:
    broken = tmp_path / "stub_broken"
    broken.write_text("#!/bin/sh\necho error while loading shared libraries >&2\nexit 127\n")
    files = {**runtime.files, "serve_stub.py": broken}
    hashes = {**runtime.hashes, "serve_stub.py": _sha256(broken)}
    session = DeviceSession(transport, msgspec.structs.replace(runtime, files=files, hashes=hashes), "r", "s")
    raw = session.execute("s/c", session.stage(make_bundle(b"good")), tmp_path / "out", OPTIONS)
    assert "error while loading shared libraries" in raw.error
    assert "exit code 127" in raw.error
    session.close()


def test_a_long_log_is_cut_in_the_middle(
    session: DeviceSession, make_bundle: Callable[..., Bundle], tmp_path: Path
) -> None:
    raw = session.execute("s/c", session.stage(make_bundle(b"noisy")), tmp_path / "out", OPTIONS)
    assert raw.exit_code == 0
    assert len(raw.stderr) < 70_000
    assert raw.stderr.startswith("started ")
    assert raw.stderr.endswith("the end\n")


def test_two_runs_on_one_device_do_not_see_each_other(
    session: DeviceSession, runtime: Runtime, transport: Watched, make_bundle: Callable[..., Bundle], tmp_path: Path
) -> None:
    other = DeviceSession(transport, runtime, "other", transport.serial)
    bundles = make_bundle(b"good"), make_bundle(b"good", [b"abcdefgh"])
    with ThreadPoolExecutor(2) as aside:
        for number in range(5):
            running = [
                aside.submit(lambda s, b, f: s.execute("s/c", s.stage(b), f, OPTIONS), one, bundle, tmp_path / name)
                for one, bundle, name in zip((session, other), bundles, (f"a{number}", f"b{number}"), strict=True)
            ]
            assert [future.result().exit_code for future in running] == [0, 0]
            assert (tmp_path / f"a{number}" / "output_0_0.raw").read_bytes() == b"12345678"
            assert (tmp_path / f"b{number}" / "output_0_0.raw").read_bytes() == b"abcdefgh"
    other.close()
    assert session.execute("s/c", session.stage(bundles[0]), tmp_path / "last", OPTIONS).exit_code == 0


def test_a_device_that_is_gone_is_the_farms_trouble(
    runtime: Runtime, make_bundle: Callable[..., Bundle], tmp_path: Path
) -> None:
    with Supervisor() as supervisor:
        server = start_adb_server(supervisor, tmp_path / "adb")
        [device] = boot(supervisor, server, ["SM8650"], tmp_path / "devices")
        gone = AdbTransport(device.serial, device.address.port)
        session = DeviceSession(gone, runtime, "r", device.serial)
        good = make_bundle(b"good")
        assert session.execute("s/c", session.stage(good), tmp_path / "before", OPTIONS).exit_code == 0
        staged = session.stage(good)
    during = session.execute("s/c", staged, tmp_path / "during", OPTIONS)
    assert (during.error_stage, during.exit_code) == ("execute", None)
    after = session.execute("s/c", session.stage(good), tmp_path / "after", OPTIONS)
    assert after.error_stage == "push"
    assert device.serial in after.error
    session.close()


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()

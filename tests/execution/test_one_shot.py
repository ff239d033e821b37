"""ExecuTorch's own runners, which run one job and end, over a real adb server and a real sshd, with a stub of them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from ssh_server import SshServer
from waiting import ends, until
from watched_transport import Watched

from farm.base.processes import Supervisor
from farm.builds.bundles.bundle import Bundle
from farm.builds.runtime.runtime import Runtime
from farm.devices.execution import one_shot as one_shot_module
from farm.devices.execution.raw import HEAP_FILE, RESULT_FILE, RawResult, RunnerOptions
from farm.devices.execution.session import DeviceSession
from farm.devices.execution.takeover import take_over
from farm.devices.ssh.transport import SshTransport
from farm.policy.retries import Tried, classify
from farm.results.attempt import Cause, Ending, Stage, Verdict
from farm.results.iterations import describe_differing
from farm.results.measurements import time_measurements
from farm.results.outcome import outcome

STUB = Path(__file__).with_name("one_shot_stub.sh")
OPTIONS = RunnerOptions(iterations=2, warm_up=1, timeout_s=30)
MS = 1_000_000


@pytest.fixture
def one_shot(tmp_path: Path) -> Runtime:
    """Direct mode's runner: its one flag more, and a library beside it."""
    library = tmp_path / "libqnn_executorch_stub.so"
    library.write_bytes(str(tmp_path).encode())
    files = {STUB.name: STUB, library.name: library}
    hashes = {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()}
    return Runtime(files, "d" * 64, STUB.name, {}, "android", False, hashes, one_shot=True, flags={"domain_id": "3"})


@pytest.fixture
def session(transport: Watched, one_shot: Runtime) -> Iterator[DeviceSession]:
    session = DeviceSession(transport, one_shot, "r", transport.serial)
    yield session
    session.close()


@pytest.fixture
def run(session: DeviceSession, make_bundle: Callable[..., Bundle], tmp_path: Path) -> Callable[..., RawResult]:
    def run(what: bytes, options: RunnerOptions = OPTIONS, inputs: list[bytes] | None = None) -> RawResult:
        return session.execute("s/c", session.stage(make_bundle(what, inputs)), tmp_path / what.decode(), options)

    return run


def latency(raw: RawResult) -> tuple[float, ...]:
    report = outcome(raw)
    assert not isinstance(report, Ending), report
    return next((one.samples for one in time_measurements(report) if one.metric == "latency"), ())


def test_every_execution_is_a_line_and_the_last_of_each_sample_is_kept(run: Callable[..., RawResult]) -> None:
    raw = run(b"good", inputs=[b"12345678", b"abcdefgh"])
    assert (raw.error, raw.exit_code, raw.process_ended) == ("", 0, False), raw.stderr
    assert {path.name for path in raw.folder.iterdir()} == {"output_0_0.raw", "output_1_0.raw", RESULT_FILE}
    assert (raw.output(0, 0).read_bytes(), raw.output(1, 0).read_bytes()) == (b"12345678", b"abcdefgh")
    # Lines 1 and 4 are warm-up; every line has its time.
    assert latency(raw) == (2.5 * MS, 3.5 * MS, 5.5 * MS, 6.5 * MS)
    report = outcome(raw)
    assert not isinstance(report, Ending)
    assert [one.metric for one in time_measurements(report)] == ["latency"], "it does not say how long the load took"
    assert not describe_differing(report)


def test_it_gets_the_flags_that_the_original_has_and_no_others(run: Callable[..., RawResult]) -> None:
    raw = run(b"good")
    called, environment = raw.stderr.splitlines()[:2]
    flags = dict(word.removeprefix("--").split("=", 1) for word in called.split()[2:])
    assert flags == {
        "model_path": "model.pte",
        "input_list_path": "repeated_list.txt",
        "output_folder_path": f"{called.split()[1].rpartition('/runtime/')[0]}/1/outputs",
        "domain_id": "3",
    }
    folder = called.split()[1].rpartition("/")[0]
    assert environment == f"environment LD_LIBRARY_PATH={folder} ADSP_LIBRARY_PATH={folder}"
    options = RunnerOptions(iterations=1, warm_up=0, timeout_s=30, flags={"htp_performance_mode": "2"}, etdump=True)
    again = run(b"good again", options)
    assert {"--htp_performance_mode=2", "--domain_id=3"} < set(again.stderr.split())
    assert (again.folder / "etdump.etdp").read_bytes() == b"dump\n"


@pytest.mark.parametrize(("what", "expected"), [(b"direct", (2.0 * MS,)), (b"silent", (1.25 * MS,))])
def test_a_mean_alone_is_one_sample(run: Callable[..., RawResult], what: bytes, expected: tuple[float]) -> None:
    assert latency(run(what)) == expected


def test_an_execution_that_gives_something_else_is_named(run: Callable[..., RawResult]) -> None:
    report = outcome(run(b"unsteady"))
    assert not isinstance(report, Ending)
    assert describe_differing(report) == ("execution 2 of 3 (the first is warm-up) gave other outputs than the last")


@pytest.mark.parametrize(
    ("what", "verdict", "stage", "cause", "reason"),
    [
        (b"unloadable", Verdict.FAILED, Stage.LOAD, Cause.REFUSED, "Loading of method forward failed with status 0x20"),
        (b"refused-on-dsp", Verdict.FAILED, Stage.EXECUTE, Cause.REFUSED, "qnn_executorch_execute_all failed"),
        (b"no-dsp", Verdict.INFRA, Stage.LOAD, Cause.DEVICE, "qnn_executorch_open failed: 0x4e"),
        (b"short", Verdict.FAILED, Stage.EXECUTE, Cause.REFUSED, "output_0_0.raw has 1 bytes, the reference 8"),
        (b"nothing", Verdict.INFRA, Stage.EXECUTE, Cause.NONE, "ended well and wrote 0 of 3 outputs"),
        (b"crash", Verdict.FAILED, Stage.EXECUTE, Cause.CRASH, "signal 11"),
        (b"assertion", Verdict.FAILED, Stage.EXECUTE, Cause.CRASH, "signal 6"),
        (b"loader", Verdict.INFRA, Stage.EXECUTE, Cause.RUNTIME, "CANNOT LINK EXECUTABLE"),
    ],
)
def test_every_end_is_judged_as_that_of_a_session(
    run: Callable[..., RawResult], what: bytes, verdict: Verdict, stage: Stage, cause: Cause, reason: str
) -> None:
    raw = run(what)
    ending = outcome(raw)
    assert isinstance(ending, Ending)
    assert (ending.verdict, ending.stage, ending.cause) == (verdict, stage, cause), ending.reason
    assert reason in ending.reason
    # Only a process that ended without a result is tried once more.
    assert raw.process_ended == (cause is Cause.CRASH or what == b"loader")


def test_a_hang_is_ended_in_its_time_and_nothing_is_left_of_it(run: Callable[..., RawResult], storage: Path) -> None:
    raw = run(b"hang", RunnerOptions(iterations=1, warm_up=0, timeout_s=1))
    assert raw.timed_out
    assert raw.process_ended
    ending = outcome(raw)
    assert isinstance(ending, Ending)
    assert ending.cause is Cause.HANG
    [file] = storage.glob("run-r-*/*/hangs")
    assert ends(int(file.read_text()))
    assert run(b"good").exit_code == 0


def test_a_new_owner_ends_a_runner_that_still_runs(
    session: DeviceSession, transport: Watched, make_bundle: Callable[..., Bundle], storage: Path, tmp_path: Path
) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as aside:
        running = aside.submit(session.execute, "s/c", session.stage(make_bundle(b"hang")), tmp_path / "out", OPTIONS)
        found = until(
            lambda: [path for path in storage.glob("run-r-*/*/hangs") if path.read_text().strip()],
            "a runner that hangs",
        )
        pid = int(found[0].read_text())
        take_over(transport, "run-other")
        raw = running.result()
    assert ends(pid)
    assert raw.exit_code == 128 + 9


def test_more_executions_than_there_can_be_are_the_jobs_failure_and_no_doubt_about_the_device(
    run: Callable[..., RawResult],
) -> None:
    raw = run(b"good", RunnerOptions(iterations=1000, warm_up=1, timeout_s=30))
    ending = outcome(raw)
    assert isinstance(ending, Ending)
    assert (ending.verdict, ending.cause) == (Verdict.FAILED, Cause.UNSUPPORTED)
    assert "ask for at most 1000, with --iterations and --warm-up together" in ending.reason
    assert not raw.process_ended
    attempt = Tried("one", ending.verdict, ending.cause, ending.stage, ending.reason)
    assert not classify([attempt], others=2).repeat


def test_of_what_farm_chose_itself_as_many_executions_are_made_as_there_can_be(
    run: Callable[..., RawResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(one_shot_module, "_MOST_OUTPUTS", 4)
    raw = run(b"good", RunnerOptions(iterations=2, warm_up=1, timeout_s=30, reducible=True), [b"12345678", b"abcdefgh"])
    assert latency(raw) == (2.5 * MS, 4.5 * MS)
    [note] = raw.notes
    assert note.startswith("3 executions of each sample were due, and 2 made: ")
    monkeypatch.setattr(one_shot_module, "_MOST_OUTPUTS", 1)
    again = run(b"good too", RunnerOptions(reducible=True), [b"12345678", b"abcdefgh"])
    assert latency(again) == (1.5 * MS, 2.5 * MS), "one of each sample is always possible"


def test_the_heap_is_asked_for_and_read(run: Callable[..., RawResult]) -> None:
    raw = run(b"good", RunnerOptions(iterations=1, warm_up=0, timeout_s=30, heap=True))
    assert (raw.folder / HEAP_FILE).read_text().startswith("DSP:before_context_created")


def test_a_board_behind_ssh_runs_jobs_the_same_way(
    one_shot: Runtime, make_bundle: Callable[..., Bundle], tmp_path: Path
) -> None:
    runtime = msgspec.structs.replace(one_shot, kind="oe-linux", flags={})
    with Supervisor() as supervisor:
        server = SshServer(supervisor, tmp_path / "sshd").start()
        transport = SshTransport("board-1", server.address)
        session = DeviceSession(transport, runtime, "r", "board-1")
        good = session.execute("s/c", session.stage(make_bundle(b"good")), tmp_path / "good", OPTIONS)
        limits = RunnerOptions(iterations=1, warm_up=0, timeout_s=1)
        hung = session.execute("s/c", session.stage(make_bundle(b"hang")), tmp_path / "hang", limits)
        [file] = (server.folder / "storage").glob(f"run-r-{os.getpid()}/*/hangs")
        pid = int(file.read_text())
        session.close()
        assert ends(pid)
        server.stop()
    assert latency(good) == (2.5 * MS, 3.5 * MS), good.stderr
    assert "domain_id" not in good.stderr
    assert hung.timed_out

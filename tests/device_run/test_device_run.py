"""Executions on a device: files, kept files of failures, temperatures, and the same behaviour of every command."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import date
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from attached import Attached, attach
from farm_home import FarmHome
from made import job, write_bundle
from waiting import until

from farm.base.config.runs import FailuresConfig
from farm.base.config.settings import load_config
from farm.base.errors import LeaseLostError, NeedsDeviceError
from farm.base.processes import Supervisor
from farm.builds.bundles.bundle import INPUTS, MODEL, Bundle, Manifest
from farm.builds.compile.debug.protocol import BUNDLE, CompareRequest, CompileRequest, DebugReply
from farm.devices.adb.server import start_adb_server
from farm.devices.connect import open_transport
from farm.devices.device import Device
from farm.devices.execution.raw import RawResult
from farm.devices.transport import Transport
from farm.devices.virtual.boot import boot
from farm.devices.virtual.faults import Fault, FaultKind, clear, fired, inject
from farm.dispatch.device_run import device_run as room
from farm.dispatch.device_run.artifacts import AttemptArtifacts, FailedFiles
from farm.dispatch.device_run.device_run import DeviceRun, Thermometer
from farm.dispatch.device_run.device_worker import Executor
from farm.dispatch.request.profiling import Profile
from farm.dispatch.request.request import RunPlan
from farm.replay.debug import DebugOutcome, DebugRequest, debug
from farm.replay.ready_program import ReadyRequest, plan_ready
from farm.results.attempt import Attempt, Cause, Stage, Verdict
from farm.store.artifacts import ArtifactStore
from farm.store.cluster.records import PlannedJob
from farm.store.store import open_store
from farm.suites.suite import Job, KnownIssue

# Files of executions: each job is judged by its own, also while the next one runs.


# ruff: noqa: ARG002 - the stub has the arguments of the real methods


WAIT_S = 30.0


class StubRun:
    """Device whose output is the name of the job, and which judges a job once the last one has been executed."""

    lacks_heap = ""
    device = SimpleNamespace(serial="stub")

    def __init__(self, last: str) -> None:
        self._last, self._has_run = last, threading.Event()

    def stage_ahead(self, find: object) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(SimpleNamespace(workspace=SimpleNamespace(bundle=None)))
        return done

    def execute(self, job_id: str, staged: object, folder: Path, options: object, *, alone: bool) -> RawResult:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "output").write_text(job_id)
        if job_id == self._last:
            self._has_run.set()
        return RawResult(
            job_id=job_id, serial="stub", workspace=PurePosixPath("/"), folder=folder, started_ms=1, exit_code=0
        )

    def judge(self, job: Job, bundle: object, raw: RawResult, *, operators: bool) -> Attempt:
        assert self._has_run.wait(WAIT_S)
        return Attempt(job.id, Verdict.PASSED, Stage.DONE, (raw.folder / "output").read_text())

    def options(self, job: object, execution: object) -> SimpleNamespace:
        return SimpleNamespace(flags={})

    def keep(self, attempt: Attempt, bundle: object, folder: Path) -> tuple[Attempt, tuple[()]]:
        return attempt, ()

    def keep_crash_logs(self, attempt: Attempt, folder: Path) -> tuple[Attempt, tuple[()]]:
        return attempt, ()

    def abort(self) -> None:
        self._has_run.set()


def test_jobs_that_differ_in_a_slash_and_an_underscore_have_their_own_files(tmp_path: Path) -> None:
    jobs = [job(name, suite=suite) for suite, name in (("ops", "conv_relu"), ("ops_conv", "relu"))]
    planned = [PlannedJob(one, f"{number:064x}", cached=True) for number, one in enumerate(jobs)]
    plan = RunPlan("r", tmp_path, tmp_path, tuple(planned), (), {}, tmp_path)
    worker: Any = SimpleNamespace(run=StubRun(jobs[-1].id))
    executor = Executor(plan, worker)
    try:
        first = executor.run(planned[0], planned[1], lambda: True)
        second = executor.run(planned[1], None, lambda: True)
    finally:
        executor.close()
    assert [attempt.reason for (attempt,), _ in (first, second)] == [one.id for one in jobs]
    assert list((tmp_path / "raw").iterdir()) == []


# Inputs and outputs of failed attempts: kept within a number and a size, so that nothing has to run again.


WRONG = Attempt("s/c[SM8650-htp-8a8w]", Verdict.FAILED, Stage.NUMERICS, "sqnr", cause=Cause.NUMERICS)


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    contents = {MODEL: b"program", f"{INPUTS}/input_0_0.raw": b"input", f"{INPUTS}/input_1_0.raw": b"another"}
    return write_bundle(tmp_path / "bundle", contents, job_id=WRONG.job_id, samples=2)


def keep(
    tmp_path: Path, bundle: Bundle, attempt: Attempt = WRONG, *, attempts: int = 2, mb: int = 1, outputs: bytes = b"out"
) -> tuple[Attempt, dict[str, bytes]]:
    """Keep the files of an attempt as a worker of its own does; return its attempt and the contents by kind."""
    raw = tmp_path / "raw"
    raw.mkdir(exist_ok=True)
    for sample in range(2):
        (raw / f"output_{sample}_0.raw").write_bytes(outputs)
    failed = FailedFiles(FailuresConfig(keep_attempts=attempts, keep_mb=mb), tmp_path / "run")
    kept = AttemptArtifacts(tmp_path / "artifacts", Profile.OFF, failed=failed)
    noted, records = kept.keep(attempt, bundle, raw, lambda: pytest.fail("no session is needed"))
    store = ArtifactStore(tmp_path / "artifacts")
    return noted, {one.kind: store.path(one.sha256).read_bytes() for one in records}


def test_inputs_and_outputs_of_a_failed_attempt_are_kept(tmp_path: Path, bundle: Bundle) -> None:
    attempt, kept = keep(tmp_path, bundle)
    assert attempt == WRONG
    manifest = kept.pop("manifest:manifest.json")
    assert kept == {
        "input:input_0_0.raw": b"input", "input:input_1_0.raw": b"another",
        "output:output_0_0.raw": b"out", "output:output_1_0.raw": b"out",
    }  # fmt: skip
    assert msgspec.json.decode(manifest, type=Manifest).outputs == bundle.manifest.outputs


@pytest.mark.parametrize(
    ("changes", "attempts"),
    [
        ({"verdict": Verdict.PASSED, "cause": Cause.NONE}, 2),
        ({"verdict": Verdict.INFRA, "cause": Cause.DAMAGE}, 2),
        ({"known_issue": "wrong for a year"}, 2),
        # farm.toml wants none.
        ({}, 0),
    ],
)
def test_no_file_of_others_is_kept(tmp_path: Path, bundle: Bundle, changes: dict[str, Any], attempts: int) -> None:
    attempt = msgspec.structs.replace(WRONG, **changes)
    assert keep(tmp_path, bundle, attempt, attempts=attempts) == (attempt, {})


def test_attempts_beyond_the_number_of_a_run_are_noted(tmp_path: Path, bundle: Bundle) -> None:
    counts = [len(keep(tmp_path, bundle)[1]) for _ in range(2)]
    assert counts == [5, 5]
    attempt, kept = keep(tmp_path, bundle)
    assert kept == {}
    assert attempt.notes == (
        "inputs and outputs are not kept: 2 failed attempts have theirs (failures.keep_attempts in farm.toml)",
    )


def test_one_that_is_too_large_is_noted_and_takes_no_place(tmp_path: Path, bundle: Bundle) -> None:
    attempt, kept = keep(tmp_path, bundle, attempts=1, outputs=bytes(600_000))
    assert kept == {}
    assert attempt.notes == ("inputs and outputs are not kept: 2 MiB, at most 1 (failures.keep_mb in farm.toml)",)
    assert len(keep(tmp_path, bundle, attempts=1)[1]) == 5


def test_an_attempt_without_outputs_takes_no_place(tmp_path: Path, bundle: Bundle) -> None:
    (tmp_path / "empty").mkdir()
    failed = FailedFiles(FailuresConfig(keep_attempts=1), tmp_path / "run")
    kept = AttemptArtifacts(tmp_path / "artifacts", Profile.OFF, failed=failed)
    crash = msgspec.structs.replace(WRONG, cause=Cause.CRASH)
    assert kept.keep(crash, bundle, tmp_path / "empty", lambda: pytest.fail("no session is needed")) == (crash, ())
    assert len(keep(tmp_path, bundle, attempts=1)[1]) == 5


# Temperatures of a device before, during and after a long program; errors of the thermometer fail no job.


SOON_S = 0.05


@pytest.fixture(scope="module")
def phone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Device, Transport, Path]]:
    folder = tmp_path_factory.mktemp("warm")
    with Supervisor() as supervisor:
        [device] = boot(supervisor, start_adb_server(supervisor, folder / "adb"), ["SM8650"], folder)
        transport = open_transport(device)
        yield device, transport, folder / device.serial
        transport.close()


def odd(answer: Callable[[], bytes]) -> Thermometer:
    """Return the thermometer of a device with given answers."""
    device: Any = SimpleNamespace(os="android")
    transport: Any = SimpleNamespace(
        serial="odd", storage="/data", run=lambda *_, **__: SimpleNamespace(stdout=answer(), stderr=b"", code=0)
    )
    return Thermometer(device, transport, SOON_S)


def watching() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name == "thermometer"]


def test_a_device_that_gets_warm_is_seen_to(phone: tuple[Device, Transport, Path]) -> None:
    device, transport, root = phone
    with Thermometer(device, transport, SOON_S) as thermometer:
        assert thermometer.readings == (25.0,), "before"
        inject(root, Fault(FaultKind.OVERHEATED, code=44, times=0))
        until(lambda: 44.0 in thermometer.readings)
        clear(root)
    assert thermometer.readings[-1] == 25.0, "and after"
    assert not watching()


def test_a_device_that_is_away_for_a_while_has_readings_before_and_after(phone: tuple[Device, Transport, Path]) -> None:
    device, transport, root = phone
    with Thermometer(device, transport, SOON_S) as thermometer:
        inject(root, Fault(FaultKind.OFFLINE, seconds=0.5))
        until(lambda: any(one["kind"] == FaultKind.OFFLINE for one in fired(root)))
        before = len(thermometer.readings)
        until(lambda: len(thermometer.readings) > before)
    assert set(thermometer.readings) == {25.0}
    assert not watching()


@pytest.mark.parametrize(
    "answer", [b"uid=0\nbattery=temperature: 99999\nzone=0\n", b"no word of it", LeaseLostError("")]
)
def test_a_device_without_a_temperature_or_whose_lease_is_lost_has_no_readings(answer: bytes | Exception) -> None:
    asked: list[int] = []

    def answer_again() -> bytes:
        asked.append(1)
        if isinstance(answer, Exception):
            raise answer
        return answer

    with odd(answer_again) as thermometer:
        until(lambda: len(asked) > isinstance(answer, bytes))
    assert thermometer.readings == ()
    assert not watching()


@pytest.mark.parametrize("interrupt", [None, KeyboardInterrupt])
def test_a_hanging_device_is_waited_for_once(
    monkeypatch: pytest.MonkeyPatch, interrupt: type[BaseException] | None
) -> None:
    monkeypatch.setattr(room, "STATUS_SECONDS", 60.0 if interrupt else 0.2)
    over, asked = threading.Event(), []

    def answer() -> bytes:
        asked.append(1)
        if len(asked) > 1:
            over.wait(60)
        return b"uid=0\nbattery=temperature: 311\n"

    thermometer = odd(answer).__enter__()
    until(lambda: len(asked) == 2)
    thermometer.__exit__(interrupt, None, None)
    assert watching(), "the second answer is not waited for"
    assert (thermometer.readings, len(asked)) == ((31.1,), 2)
    over.set()
    until(lambda: not watching())


# Common behaviour of commands that run a program on an attached device: takeover, fence, heat gate, known issues.


HOT = "limit 45.0 C"
JOB = "exec/conv[SM8650-htp-ready]"


@pytest.fixture(scope="module")
def bench(farm_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attached]:
    """Virtual device that is attached like a phone."""
    folder = tmp_path_factory.mktemp("attached")
    home = FarmHome.make(farm_cache, folder)
    with attach(home, folder / "bench", ["SM8650"]) as attached:
        yield attached


@pytest.fixture(scope="module")
def hot(bench: Attached) -> Attached:
    """Device that stays hot, so that measurements wait a second and then have a note."""
    (bench.home.cwd / "farm.toml").write_text("[health]\ngate_wait_s = 1.0\n")
    inject(bench.root(0), Fault("overheated", times=0))
    return bench


@pytest.fixture(scope="module")
def ran(hot: Attached, models: Path) -> dict[str, Any]:
    """A run of a job on the hot device."""
    return hot.json("exec", str(models / "conv.pte"), "--iterations", "2")


class TestAHotDevice:
    @staticmethod
    def notes(view: dict[str, Any]) -> str:
        return " ".join(view["attempt"]["notes"])

    def test_farm_exec_waits_and_then_says_so(self, ran: dict[str, Any]) -> None:
        assert HOT in self.notes(ran)

    def test_farm_repro_waits_and_then_says_so(self, hot: Attached, ran: dict[str, Any]) -> None:
        again = hot.json("jobs", "rerun", JOB, "--run", ran["run"], "--device", "same")
        assert HOT in self.notes(again["now"])

    def test_farm_perf_confirm_waits_and_then_says_so(self, hot: Attached, models: Path, ran: dict[str, Any]) -> None:
        later = hot.json("exec", str(models / "conv.pte"), "--iterations", "2")
        done = hot.farm(
            "perf", "confirm", JOB, "--good", ran["run"], "--bad", later["run"], "--metric", "latency", "--pairs", "5",
            "--device", hot.devices[0].serial,
        )  # fmt: skip
        assert done.returncode in (0, 3), done.stderr
        assert HOT in done.stderr


def test_a_program_that_only_devices_run_is_refused_before_anything_runs(bench: Attached, models: Path) -> None:
    done = bench.farm("exec", str(models / "conv_sharing.pte"))
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith(
        "no virtual device runs it: contexts that share weights are not simulated; attach a SM8650"
    )
    assert "conv_sharing" not in bench.farm("runs", "list", "--json").stdout


def test_no_command_brings_such_a_program_to_a_virtual_device(bench: Attached, models: Path) -> None:
    bundle = plan_ready(ReadyRequest(model=models / "conv_sharing.pte")).bundle(load_config())
    run = DeviceRun(bench.devices[0], cast("Any", None), "run", takeover=False)
    with run, pytest.raises(NeedsDeviceError, match="share weights"):
        run.stage(bundle)


class CompilerStub:
    """Stands in for the compiler of `farm debug`: a program that is compiled already, and nothing to compare."""

    bundle: Path
    compared: Callable[[], None]

    def __init__(self, *_: object) -> None: ...

    def send(self, request: object) -> None:
        if isinstance(request, CompileRequest):
            shutil.copytree(self.bundle, Path(request.folder) / BUNDLE)
        elif isinstance(request, CompareRequest):
            type(self).compared()

    def receive(self, timeout_s: float) -> DebugReply:
        del timeout_s
        return DebugReply(ok=True)


class TestDebug:
    @pytest.fixture
    def run(self, bench: Attached, models: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., DebugOutcome]:
        """Debugs a program of which no layer can be compared, on the attached device."""
        monkeypatch.setenv("ANDROID_ADB_SERVER_PORT", str(bench.port))
        ready = plan_ready(ReadyRequest(model=models / "conv.pte"))
        monkeypatch.setattr("farm.replay.debug.DebugProcess", CompilerStub)
        monkeypatch.setattr(CompilerStub, "bundle", ready.bundle(load_config()).folder, raising=False)

        def run(*issues: KnownIssue, compared: Callable[[], None] = lambda: None) -> DebugOutcome:
            monkeypatch.setattr(CompilerStub, "compared", staticmethod(compared), raising=False)
            case = msgspec.structs.replace(ready.job.case, known_issues=issues)
            job = msgspec.structs.replace(ready.job, case=case)
            return debug(load_config(), DebugRequest(job=job, virtual=False))

        return run

    def test_nothing_is_recorded_once_the_lease_was_lost(self, run: Callable[..., DebugOutcome]) -> None:
        database = load_config().store_url.removeprefix("sqlite:///")

        def lose() -> None:
            with contextlib.closing(sqlite3.connect(database)) as connection, connection:
                assert connection.execute("UPDATE lease SET fence = fence + 1, token = 'somebody'").rowcount == 1

        with pytest.raises(LeaseLostError):
            run(compared=lose)
        with open_store(load_config().store_url, readonly=True) as store:
            view = store.runs.view(store.runs.resolve("latest", unbegun=True))
        assert [job.attempts for job in view.jobs] == [()]

    @pytest.mark.parametrize("expires", [None, date(2020, 1, 1)])
    def test_files_of_a_former_owner_go_and_a_known_issue_covers_until_it_expires(
        self, bench: Attached, run: Callable[..., DebugOutcome], expires: date | None
    ) -> None:
        left = bench.root(0) / "data/local/tmp/farm/run-of-somebody-1"
        (left / "1").mkdir(parents=True)
        attempt = run(KnownIssue("as ever", expires=expires)).attempt
        assert not left.exists()
        assert attempt is not None
        assert (attempt.verdict, attempt.stage) == (Verdict.FAILED, Stage.NUMERICS)
        assert attempt.reason.startswith("no layer could be compared")
        assert attempt.known_issue == ("" if expires else "as ever")
        assert any("known issue has expired" in note for note in attempt.notes) is bool(expires)

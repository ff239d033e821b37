"""Common behaviour of commands that run a program on an attached device: takeover, fence, heat gate, known issues."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from attached import Attached, attach
from farm_home import FarmHome

from farm.base.config.settings import load_config
from farm.base.errors import LeaseLostError, NeedsDeviceError
from farm.builds.compile.debug.protocol import BUNDLE, CompareRequest, CompileRequest, DebugReply
from farm.devices.virtual.faults import Fault, inject
from farm.dispatch.device_run.device_run import DeviceRun
from farm.replay.debug import DebugOutcome, DebugRequest, debug
from farm.replay.ready_program import ReadyRequest, plan_ready
from farm.results.attempt import Stage, Verdict
from farm.store.store import open_store
from farm.suites.suite import KnownIssue

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
        monkeypatch.setattr("farm.builds.compile.debug.protocol.DebugProcess", CompilerStub)
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

"""Failures of a cell that are debugged, with a stub of `farm debug` and with a wrong operator and the real one."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path
from typing import Any

import pytest
from farm_home import FarmHome
from wrong_operator import FIRST_WRONG, write_wrong_suite

from farm.base.config.settings import Config, load_config
from farm.base.errors import FarmError, InfraError, NoDeviceError
from farm.builds.program.layers import Gap, Layer, LayerStep
from farm.cli.running import cell_steps as module
from farm.cli.running.cell_steps import debug_failures
from farm.devices.device import AdbAddress, Device
from farm.dispatch.nightly.record import CellResult, DebuggedJob
from farm.dispatch.request.choose import jobs_of
from farm.dispatch.request.request import RunRequest
from farm.replay.debug import DebugOutcome
from farm.results.attempt import Attempt, Cause, Stage, Verdict
from farm.results.layers import diagnose
from farm.store.records import RunRecord
from farm.store.store import open_store
from farm.suites.suite import Job

# Failures of a cell that are debugged, their time, and a line for every other; `farm debug` itself is a stub.


LAYERS = (
    Layer("one", "aten.add.Tensor", (), {LayerStep.COMPILER: Gap(1e-5, 41.0, 0.99, 20.0)}),
    Layer("two", "aten.relu.default", ("one",), {LayerStep.COMPILER: Gap(1.0, 4.0, 0.5, 20.0)}, module="block.act"),
)
DEVICE = Device("virtual-SM8650-0", "SM8650", "virtual", "", AdbAddress(5037), product="")
VIRTUAL = RunRequest(socs=("SM8650",), suites=("smoke",), precisions=("8a8w",), virtual=1)


class Bench:
    """A cell with a run in the store, and a stub of `farm debug`."""

    def __init__(self, folder: Path, request: RunRequest) -> None:
        self.folder, self.request = folder, request
        self.config: Config = load_config(folder=folder)
        self.config.state_dir.mkdir(parents=True)
        self.jobs = jobs_of(self.config, request)
        self.run_id = ""
        self.asked: list[tuple[str, bool]] = []
        self.endings: list[FarmError | tuple[Layer, ...]] = []
        self.trouble = ""
        # An earlier run has an earlier id.
        self._starts = itertools.count(1_772_330_400_000, 60_000)

    def run(self, **causes: Cause) -> None:
        """Record a run in which the cases that are named fail, and all others pass."""
        with open_store(self.config.store_url) as store:
            self.run_id = store.begin_run(
                RunRecord("farm nightly", "ada", "bench", {"device_kind": "virtual"}, next(self._starts))
            )
            store.plan_jobs(self.run_id, self.jobs)
            store.record_device(self.run_id, DEVICE)
            for job in self.jobs:
                cause = causes.get(job.case.name)
                verdict, stage = (Verdict.FAILED, Stage.NUMERICS) if cause else (Verdict.PASSED, Stage.DONE)
                attempt = Attempt(
                    job.id, verdict, stage, "sqnr" if cause else "", DEVICE.serial, cause=cause or Cause.NONE
                )
                store.record_attempt(self.run_id, attempt)
            store.finish_run(self.run_id, 1)

    def debug(self, *, most: int = 5, left_s: float | None = None) -> list[DebuggedJob]:
        cell = CellResult(name="cell", socs=("SM8650",), suites=("smoke",), backend="htp", virtual=True,
                          run_id=self.run_id)  # fmt: skip
        end_s = None if left_s is None else time.monotonic() + left_s
        found = debug_failures(self.config, self.request, most, self.folder / "nightly", cell, end_s)
        return list(found)

    def stub(self, _config: Config, job: Job, *, virtual: bool, **_: Any) -> DebugOutcome:
        self.asked.append((job.case.name, virtual))
        ending = self.endings.pop(0) if self.endings else LAYERS
        if isinstance(ending, FarmError):
            raise ending
        diagnosis = diagnose(ending)
        reason = "wrong" if diagnosis.first else self.trouble
        attempt = Attempt(job.id, Verdict.FAILED if reason else Verdict.PASSED, Stage.NUMERICS, reason)
        return DebugOutcome(job.id, self.run_id, 1, attempt, ending, diagnosis, {}, {}, self.folder)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    made = Bench(tmp_path, VIRTUAL)
    monkeypatch.setattr(module, "_debug", made.stub)
    return made


def test_only_new_failures_by_numerics_are_debugged(bench: Bench) -> None:
    bench.run(add=Cause.NUMERICS)
    bench.run(add=Cause.NUMERICS, gelu=Cause.NUMERICS, conv2d=Cause.CRASH)
    [found] = bench.debug()
    assert bench.asked == [("gelu", True)]
    assert found.job_id == "smoke/gelu[SM8650-htp-8a8w]"
    assert found.layer == "two"
    assert found.reason.startswith("first divergence: two (aten.relu.default), likely cause: compiler: SQNR 4.0 dB")
    assert found.reason.endswith("; in module block.act")
    assert "<html" in (bench.folder / "nightly" / found.report).read_text()


def test_what_is_beyond_the_number_or_the_time_has_one_line(bench: Bench) -> None:
    bench.run(add=Cause.NUMERICS, gelu=Cause.NUMERICS, conv2d=Cause.NUMERICS)
    one, rest = bench.debug(most=1)
    assert (len(bench.asked), one.layer) == (1, "two")
    assert rest.job_id == "2 jobs"
    assert rest.reason == "not debugged: at most 1 of a run ([nightly] debug); farm debug JOB"
    [rest] = bench.debug(left_s=0.0)
    assert (rest.job_id, rest.reason) == ("3 jobs", "not debugged: the budget left no time; farm debug JOB")


def test_a_debug_session_that_fails_has_one_line_with_the_next_step(bench: Bench) -> None:
    bench.run(add=Cause.NUMERICS)
    job = "'smoke/add[SM8650-htp-8a8w]'"
    bench.endings = [InfraError("the compiler\ncrashed"), LAYERS[:1]]
    [crashed] = bench.debug()
    assert crashed.reason == f"not debugged: the compiler crashed; farm debug {job} --virtual"
    [fine] = bench.debug()
    assert (fine.reason, fine.layer) == ("no layer diverges", "")
    bench.endings, bench.trouble = [LAYERS[:1]], "compiling took more than 9 s"
    [late] = bench.debug()
    assert late.reason == f"not debugged: compiling took more than 9 s; farm debug {job} --virtual"
    assert late.report, "its page has the log"


def test_without_a_device_the_simulator_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(tmp_path, RunRequest(socs=("SM8650",), suites=("smoke",), precisions=("8a8w",)))
    monkeypatch.setattr(module, "_debug", bench.stub)
    bench.run(add=Cause.NUMERICS)
    bench.endings = [NoDeviceError("no SM8650 is attached")]
    [found] = bench.debug()
    assert bench.asked == [("add", False), ("add", True)]
    assert found.reason.startswith("on the simulator alone (no SM8650 is attached): first divergence: two")


# Nightly run with a wrong operator: `farm debug` runs once by itself, and the page shows the first wrong layer.


JOB = "wrong/broken[SM8650-htp-8a8w]"
NIGHT = """
[nightly]
name = "debug"
[[run]]
name = "wrong"
socs = ["SM8650"]
suites = ["./wrong"]
virtual = 1
"""
LIMIT = "\n[suite.tolerance.8a8w]\nfp32 = { sqnr_db = 20.0 }\n"


def nightly_run(home: FarmHome) -> dict[str, Any]:
    done = home.farm("nightly", "nightly.toml", "--json", timeout_s=580, code=1)
    answer: dict[str, Any] = json.loads(done.stdout)["nightly_run"]
    return answer


@pytest.mark.whole
def test_a_new_numeric_failure_is_debugged_in_its_first_nightly_run_alone(home: FarmHome) -> None:
    suite = write_wrong_suite(home.cwd / "wrong")
    with (suite / "suite.toml").open("a") as file:
        file.write(LIMIT)
    (home.cwd / "nightly.toml").write_text(NIGHT)
    first = nightly_run(home)
    [cell] = first["cells"]
    [debugged] = cell["debugged"]
    assert (debugged["job_id"], debugged["layer"]) == (JOB, FIRST_WRONG)
    assert debugged["reason"].startswith(f"first divergence: {FIRST_WRONG} (aten.convolution.default), likely cause: ")
    assert "; in module two, wrong/models.py:" in debugged["reason"]
    reports = home.state / "nightly" / "debug"
    folder = reports / first["id"]
    assert FIRST_WRONG in (folder / debugged["report"]).read_text()
    for page in (folder / "index.html", reports / "index.html"):
        text = page.read_text()
        section = text[text.index('<section id="layers"') :].partition("</section>")[0]
        assert debugged["reason"].split(" (")[0] in section
        assert f'{debugged["report"]}"' in section
    second = nightly_run(home)
    [cell] = second["cells"]
    assert cell["debugged"] == []
    assert [one["job_id"] for one in cell["still_failing"]] == [JOB]
    assert 'id="layers"' not in (reports / "index.html").read_text()

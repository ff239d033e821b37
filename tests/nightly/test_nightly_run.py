"""Nightly run over stand-ins of its runs: its reaction to their ends."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from farm.base.config.settings import Config, load_config
from farm.base.errors import InfraError, MissingToolError, NoDeviceError
from farm.dispatch.nightly import nightly_run as module
from farm.dispatch.nightly.nightly_run import SUSPECTED_SHARE, run_nightly
from farm.dispatch.nightly.plan import Plan, read_plan
from farm.dispatch.nightly.record import CellResult, DebuggedJob, Findings, JobNote, NightlyRun
from farm.dispatch.request.request import RunOutcome, RunRequest
from farm.store.records import RunView

RUN = '[[run]]\nname = "{}"\nsocs = ["SM8650"]\nsuites = ["smoke"]\n'
FILE = (
    '[nightly]\nname = "n"\nbudget = "1h"\n'
    + RUN.format("first")
    + RUN.format("second")
    + "share = 3\n"
    + RUN.format("third")
)

Ending = int | BaseException


class Stage:
    """Stand-in for runs, with given ends."""

    def __init__(self, config: Config, plan: Plan) -> None:
        self.config, self.plan = config, plan
        self.endings: list[Ending] = []
        self.findings: list[Findings] = []
        self.asked: list[RunRequest] = []
        self.resumed: list[str] = []
        self.now_s = 1000.0
        self.takes_s = 0.0
        self.collect: Callable[[CellResult], CellResult] = lambda cell: cell
        self.debug: Callable[[CellResult, float | None], tuple[DebuggedJob, ...]] = lambda _cell, _left_s: ()
        self.suspected_s: list[float | None] = []

    def nightly_run(self, *endings: Ending, resume: bool = False) -> NightlyRun:
        self.endings = list(endings)
        front: Callable[[], Any] = contextlib.nullcontext
        return run_nightly(self.config, self.plan, front, self.confirm, self.debug_failures, resume=resume)

    def run(self, _config: Config, request: RunRequest, _front: object, *, interrupts: Any, begun: Any) -> RunOutcome:
        self.asked.append(request)
        begun(f"run-{len(self.asked)}")
        return self._end(interrupts)

    def resume(
        self, _config: Config, run_id: str, _front: object, _budget_s: float | None, *, interrupts: Any
    ) -> RunOutcome:
        self.resumed.append(run_id)
        return self._end(interrupts)

    def _end(self, interrupts: Any) -> RunOutcome:
        self.now_s += self.takes_s
        ending = self.endings.pop(0)
        if isinstance(ending, BaseException):
            raise ending
        if ending == 130:
            with interrupts.finishing(lambda: None):
                signal.raise_signal(signal.SIGTERM)
        view = RunView(id="r", command="", started_ms=1, finished_ms=2, exit_code=ending, user="", host="",
                       fingerprint={}, devices=(), jobs=())  # fmt: skip
        return RunOutcome(ending, view, self.plan.path)

    def debug_failures(
        self, _config: Config, _request: RunRequest, _most: int, _folder: Path, cell: CellResult, end_s: float | None
    ) -> tuple[DebuggedJob, ...]:
        return self.debug(cell, None if end_s is None else end_s - self.now_s)

    def confirm(self, _config: Config, _run_id: str, budget_s: float | None) -> Findings:
        self.suspected_s.append(budget_s)
        return self.findings.pop(0) if self.findings else Findings()

    def collect_results(self, _config: Config, _plan: Plan, _folder: Path, cell: CellResult) -> CellResult:
        return self.collect(cell)


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    file = tmp_path_factory.mktemp("plan") / "nightly.toml"
    file.write_text(FILE)
    return read_plan(file, load_config(folder=file.parent))[0]


@pytest.fixture
def stage(tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> Stage:
    stage = Stage(load_config(folder=tmp_path), plan)
    monkeypatch.setattr(module.anywhere, "run", stage.run)
    monkeypatch.setattr(module.anywhere, "resume", stage.resume)
    monkeypatch.setattr(module, "collect_results", stage.collect_results)
    monkeypatch.setattr(module, "monotonic", lambda: stage.now_s)
    return stage


def codes(nightly_run: NightlyRun) -> list[int | None]:
    return [cell.code for cell in nightly_run.cells]


def test_whatever_becomes_of_one_run_the_others_are_run(stage: Stage) -> None:
    nightly_run = stage.nightly_run(NoDeviceError("no phone"), ValueError("a slip"), 0)
    assert (nightly_run.code, codes(nightly_run)) == (4, [4, 4, 0])
    assert [cell.problem for cell in nightly_run.cells] == ["no phone", "this is a bug in farm: ValueError: a slip", ""]
    nightly_run = stage.nightly_run(OSError(28, "No space left on device", "/x"), MissingToolError("no SDK"), 1)
    assert (nightly_run.code, codes(nightly_run)) == (1, [4, 4, 1])
    assert [cell.problem for cell in nightly_run.cells] == ["/x: No space left on device", "no SDK", ""]


def test_what_one_run_leaves_of_the_budget_the_next_ones_have(stage: Stage) -> None:
    stage.takes_s = 120.0
    stage.nightly_run(0, 0, 0)
    # A part of each run's time is kept for suspected regressions.
    runs = [part * (1 - SUSPECTED_SHARE) for part in (720.0, 3480 * 3 / 4, 3360.0)]
    assert [request.budget_s for request in stage.asked] == pytest.approx(runs)
    assert stage.asked[0].wait_s == 1800


def test_debugging_has_half_of_the_time_behind_a_run_and_suspected_changes_have_what_is_left(stage: Stage) -> None:
    left: list[float | None] = []

    def debug(cell: CellResult, left_s: float | None) -> tuple[DebuggedJob, ...]:
        left.append(left_s)
        stage.now_s += 100.0
        return (DebuggedJob("smoke/add", f"first divergence of {cell.name}"),)

    stage.debug, stage.takes_s = debug, 120.0
    nightly_run = stage.nightly_run(1, NoDeviceError("no phone"), 1)
    # 720 s of the hour are for the first run, which takes 120 s of them.
    assert (left[0], stage.suspected_s[0]) == (300.0, 500.0)
    assert [one.reason for one in nightly_run.debugged] == [
        f"first divergence of {name}" for name in ("first", "second", "third")
    ]
    assert (nightly_run.code, nightly_run.sections["First wrong layers"]) == (1, nightly_run.debugged)


def test_an_interrupt_while_debugging_ends_the_nightly_run_after_its_report(stage: Stage) -> None:
    def debug(*_: object) -> tuple[DebuggedJob, ...]:
        raise KeyboardInterrupt

    stage.debug = debug
    nightly_run = stage.nightly_run(1)
    assert (nightly_run.code, codes(nightly_run)) == (130, [1, None, None])
    assert stage.suspected_s == [], "suspected changes are not measured either"


def test_time_that_is_over_leaves_runs_out(stage: Stage) -> None:
    stage.takes_s = 3600.0
    nightly_run = stage.nightly_run(0)
    assert (nightly_run.code, codes(nightly_run)) == (0, [0, 5, 5])
    assert nightly_run.cells[1].problem == "the budget of the nightly run was over before it could begin"


def test_regressions_alone_have_a_code_of_their_own(stage: Stage) -> None:
    found = Findings((JobNote("smoke/add", "8 % slower"),), confirmed=1)
    stage.findings = [found]
    assert stage.nightly_run(0, 4, 0).code == 3
    stage.findings = [found]
    assert stage.nightly_run(0, 1, 0).code == 1


def test_sigterm_ends_the_nightly_run_after_the_run_and_resume_goes_on(stage: Stage) -> None:
    broken = stage.nightly_run(0, 130)
    assert (broken.code, codes(broken)) == (130, [0, 130, None])
    whole = stage.nightly_run(0, 0, resume=True)
    assert (whole.id, whole.code, codes(whole)) == (broken.id, 0, [0, 0, 0])
    assert stage.resumed == ["run-2"]
    assert len(stage.asked) == 3


def test_a_run_that_cannot_be_read_is_trouble_of_the_farm(stage: Stage) -> None:
    def collect(cell: CellResult) -> CellResult:
        if cell.name == "second":
            raise InfraError("the store does not answer")
        return cell

    stage.collect = collect
    nightly_run = stage.nightly_run(0, 0, 0)
    assert (nightly_run.code, codes(nightly_run)) == (4, [0, 4, 0])
    assert nightly_run.cells[1].problem == "the store does not answer"

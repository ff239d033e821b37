"""Nightly run over stand-ins of its runs: its reaction to their ends."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from receivers import web_server

from farm.base.config.settings import Config, load_config
from farm.base.errors import InfraError, MissingToolError, NoDeviceError
from farm.dispatch.nightly.nightly_run import SUSPECTED_SHARE, CellWork, run_nightly
from farm.dispatch.nightly.plan import read_plan
from farm.dispatch.nightly.record import CellResult, DebuggedJob, Findings, JobNote, NightlyRun
from farm.dispatch.request.request import RunOutcome, RunRequest
from farm.store.view import RunView

FILE = """
[nightly]
name = "n"
budget = "1h"
[[run]]
name = "first"
socs = ["SM8650"]
suites = ["smoke"]
[[run]]
name = "second"
socs = ["SM8650"]
suites = ["smoke"]
share = 3
[[run]]
name = "third"
socs = ["SM8650"]
suites = ["smoke"]
"""

Ending = int | BaseException


class Stage(CellWork):
    """Stand-in for runs, with given ends."""

    def __init__(self, config: Config, file: Path) -> None:
        self.config, self.file = config, file
        self.endings: list[Ending] = []
        self.findings: list[Findings] = []
        self.asked: list[RunRequest] = []
        self.resumed: list[str] = []
        self.now_s = 1000.0
        self.takes_s = 0.0
        self.clock = lambda: self.now_s  # type: ignore[method-assign]
        self.collect: Callable[[CellResult], CellResult] = lambda cell: cell
        self.debug: Callable[[CellResult, float | None], tuple[DebuggedJob, ...]] = lambda _cell, _left_s: ()
        self.suspected_s: list[float | None] = []

    def nightly_run(self, *endings: Ending, resume: bool = False, more: str = "") -> NightlyRun:
        self.endings = list(endings)
        self.file.write_text(FILE + more)
        plan, _ = read_plan(self.file, self.config)
        front: Callable[[], Any] = contextlib.nullcontext
        return run_nightly(self.config, plan, front, self, resume=resume)

    def run(self, request: RunRequest, _front: object, interrupts: Any, begun: Any) -> RunOutcome:
        self.asked.append(request)
        begun(f"run-{len(self.asked)}")
        return self._end(interrupts)

    def resume(self, run_id: str, _front: object, interrupts: Any, _budget_s: float | None) -> RunOutcome:
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
        return RunOutcome(ending, view, self.file)

    def debug_failures(self, cell: CellResult, _folder: Path, budget_s: float | None) -> tuple[DebuggedJob, ...]:
        return self.debug(cell, budget_s)

    def confirm_suspected(self, _run_id: str, budget_s: float | None) -> Findings:
        self.suspected_s.append(budget_s)
        return self.findings.pop(0) if self.findings else Findings()

    def collect_results(self, cell: CellResult, _folder: Path) -> CellResult:
        return self.collect(cell)


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(load_config(folder=tmp_path), tmp_path / "nightly.toml")


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


def test_who_wants_to_know_of_changes_is_told_once(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    def collect(cell: CellResult) -> CellResult:
        return msgspec.structs.replace(cell, new_failures=failing.get(cell.name, ()))

    failing: dict[str, tuple[JobNote, ...]] = {}
    stage.collect = collect
    monkeypatch.setenv("no_proxy", "*")
    with web_server() as hook:
        for endings in ((0, 0, 0), (1, 0, 0), (1, 0, 0), (0, 0, 0)):
            monkeypatch.setenv("HOOK_URL", hook.url())
            failing = {"first": (JobNote("smoke/add", "wrong"),)} if endings[0] else {}
            stage.nightly_run(*endings, more='[[notify.webhook]]\nurl_env = "HOOK_URL"\n')
    verdicts = [msgspec.json.decode(body)["verdict"] for body in hook.bodies]
    assert verdicts == ["failed", "passed"]

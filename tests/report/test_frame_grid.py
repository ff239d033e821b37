"""Feasible and infeasible settings in the report: one grid a program, frame rate by clock for each core selection."""

from __future__ import annotations

from collections.abc import Callable
from html import unescape

import msgspec

from farm.report.html.page_of_run import render_html
from farm.report.model.frame_grid import FrameColumn, frame_grids
from farm.report.model.summary import summarize
from farm.report.terminal.run import render_summary
from farm.results.attempt import Attempt, Cause, Direction, Measurement, Stage, Verdict
from farm.store.view import JobView, RunView
from farm.suites.frame_settings import frame_setting, late_flags
from farm.suites.suite import Target

PLACE = "lpai_cases/block[SM8850-lpai-8a8w-{}]"


def executed(latency_ms: float) -> Attempt:
    rows = (Measurement("latency", "ns", Direction.LOWER, (latency_ms * 1e6,)),)
    return Attempt("", Verdict.PASSED, Stage.DONE, "", "phone-1", measurements=rows)


REFUSED = Attempt(
    "", Verdict.SKIPPED, Stage.LOAD, "infeasible: QNN does not keep it", "phone-1", cause=Cause.INFEASIBLE
)
LOST = Attempt("", Verdict.INFRA, Stage.PUSH, "gone", "phone-1", cause=Cause.GONE)


def swept(view: RunView, *settings: tuple[dict[str, str], Attempt]) -> RunView:
    """Return the run with a job of LPAI for each setting, over a stub."""
    [like] = view.jobs

    def job(options: dict[str, str], attempt: Attempt) -> JobView:
        name = PLACE.format("-".join(f"{key}={value}" for key, value in options.items()))
        return msgspec.structs.replace(
            like, id=name, suite="lpai_cases", case="block", soc="SM8850", backend="lpai", precision="8a8w",
            options=options, attempts=(msgspec.structs.replace(attempt, job_id=name),),
        )  # fmt: skip

    facts = {**view.fingerprint, "qnn_product": "stub"}
    return msgspec.structs.replace(view, fingerprint=facts, jobs=tuple(job(*one) for one in settings))


def test_a_grid_has_every_setting_and_tells_infeasible_from_trouble(run_of: Callable[..., RunView]) -> None:
    view = swept(
        run_of((executed(1.0),)),
        ({"lpai_fps": "100"}, REFUSED),
        ({"lpai_fps": "5", "core_selection": "2"}, executed(2.5)),
        ({"lpai_fps": "5"}, executed(1.5)),
        ({"lpai_fps": "100", "lpai_ftrt_ratio": "60"}, LOST),
        ({"affinity": "hard", "lpai_fps": "5"}, executed(4.5)),
    )
    [grid] = frame_grids(summarize(view))
    assert grid.name == "lpai_cases/block[SM8850-lpai-8a8w]", "another affinity has one setting, which is no sweep"
    assert grid.columns == (FrameColumn(0, 10), FrameColumn(0, 60), FrameColumn(2, 10))
    assert [row.fps for row in grid.rows] == [5, 100]
    assert [[job and job.numbers.latency_ms for job in row.jobs] for row in grid.rows] == [
        [1.5, None, 2.5], [None, None, None],
    ]  # fmt: skip
    assert (len(grid.infeasible), grid.text) == (1, "2 feasible, 1 infeasible, 1 not known")
    page = unescape(render_html(view))
    section = page[page.index('<section id="frames"') :].partition("</section>")[0]
    assert section.count("✗ infeasible") == 1
    assert "2.500 ms" in section
    assert "core_selection 2" in section
    assert section.count(">stub<") == 2, "of the section and of the table"
    assert "Which settings are infeasible is a rule of the stub" in section
    output = " ".join(render_summary(view).split())
    assert "frame rates: 2 feasible, 1 infeasible, 1 not known: lpai_cases/block[SM8850-lpai-8a8w]" in output


def test_a_run_without_a_sweep_has_no_grid(run_of: Callable[..., RunView]) -> None:
    view = swept(run_of((executed(1.0),)), ({}, executed(1.0)))
    assert frame_grids(summarize(view)) == ()
    assert 'id="frames"' not in render_html(view)
    assert len(frame_grids(summarize(swept(view, ({}, REFUSED))))) == 1, "but for a refusal"


def test_options_of_run_time_win_and_only_real_time_is_refused() -> None:
    setting = frame_setting("lpai", {"fps": "3", "lpai_fps": "9", "lpai_client_perf_type": "non_real_time"})
    assert setting is not None
    assert (setting.fps, setting.ftrt_ratio, setting.cores, setting.on_time) == (9, 10, 0, False)
    assert frame_setting("htp", {}) is None
    lpai = Target("SM8850", "lpai", "8a8w")
    assert late_flags(lpai) == {"lpai_client_perf_type": "2"}
    for options in ((("client_perf_type", "non_real_time"),), (("direct_mode", "true"),)):
        assert late_flags(msgspec.structs.replace(lpai, options=options)) == {}
    assert late_flags(Target("SM8650", "htp", "8a8w")) == {}

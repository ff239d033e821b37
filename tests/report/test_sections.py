"""The DSP's heap, grids of frame settings and skipped jobs in the report: page, terminal and files."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ET
from html import unescape

import msgspec
import pytest

from farm.report.formats.junit import render_junit
from farm.report.formats.run_json import parse_json, render_json
from farm.report.html.page_of_run import ReportContext, render_html
from farm.report.model.frame_grid import FrameColumn, frame_grids
from farm.report.model.heap import HeapRow, heap_rows
from farm.report.model.summary import Outcome, Tone, skip_words, summarize
from farm.report.terminal.run import render_summary
from farm.results.analysis.history import Point
from farm.results.analysis.scale import Series
from farm.results.attempt import Attempt, Cause, Direction, Measurement, Stage, Verdict
from farm.store.queries.history import JobPast, SeriesPast
from farm.store.view import JobView, RunView, SkipReason
from farm.suites.frame_settings import frame_setting, late_flags
from farm.suites.suite import Target

from .conftest import make_attempts, run_of

JOB = "features/contexts[SM8650-htp-8a8w]"
REASON = "no DSP heap: ExecuTorch wrote no profile of it"


def measured(*kept: float) -> Attempt:
    rows = (Measurement("dsp_heap_difference", "bytes", Direction.LOWER, kept),)
    return Attempt(JOB, Verdict.PASSED, Stage.DONE, "", "phone-1", measurements=rows)


def past(now: str, *runs: tuple[str, str, str, float, float]) -> JobPast:
    """Return runs as (device, SDK, version of the case, before, after), the last of them `now`; NaN without a heap."""
    names = [*(f"r{place}" for place in range(len(runs) - 1)), now]
    points = tuple(
        Point(name, place, math.nan, {"qnn": sdk}, "hardware", case, "", device)
        for place, (name, (device, sdk, case, _, _)) in enumerate(zip(names, runs, strict=True))
    )
    values = {
        "dsp_heap_before": [before for *_, before, _ in runs],
        "dsp_heap_after": [after for *_, after in runs],
        "dsp_heap_difference": [after - before for *_, before, after in runs],
        "partitions": [4.0 for _ in runs],
    }
    series = tuple(
        SeriesPast(number, Series(str(number), name, "bytes", Direction.NONE, exact=False), tuple(column))
        for number, (name, column) in enumerate(values.items())
    )
    return JobPast(JOB, runs[-1][0], points, series)


def test_each_device_and_sdk_has_its_own_baseline_and_noise() -> None:
    view = run_of((measured(4096.0, 8192.0),))
    view = msgspec.structs.replace(view, jobs=(msgspec.structs.replace(view.jobs[0], id=JOB),))
    found = heap_rows(view, [past(
        view.id,
        ("phone-1", "2.51", "old", 1.0, 1e9),
        ("phone-2", "2.51", "new", 900.0, 900.0),
        ("phone-1", "2.47", "new", 1000.0, 9000.0),
        ("phone-1", "2.51", "new", math.nan, math.nan),
        ("phone-1", "2.51", "new", 1000.0, 1000.0),
        ("phone-1", "2.51", "new", 1000.0, 7144.0),
    )])  # fmt: skip
    assert found == (
        HeapRow(JOB, 4, "2.51", "phone-1", 2, 1000.0, 4072.0, 3072.0, 0.0, 8192.0, (4096.0, 8192.0)),
        HeapRow(JOB, 4, "2.47", "phone-1", 1, 1000.0, 9000.0, 8000.0, 8000.0, 8000.0),
        HeapRow(JOB, 4, "2.51", "phone-2", 1, 900.0, 900.0, 0.0, 0.0, 0.0),
    )
    page = unescape(render_html(view, ReportContext(heap=found)))
    section = page[page.index('<section id="heap"') :].partition("</section>")[0]
    assert section.count("<tr>") == 1 + 3
    assert "4,096, 8,192" in section
    assert "0 to 8,192" in section, "samples of this run tell of the noise as well"
    assert "2.47" in section


def test_jobs_without_a_heap_have_their_reason_in_one_line(example_run: RunView) -> None:
    skipped = Attempt(JOB, Verdict.SKIPPED, Stage.EXECUTE, REASON, "phone-1", cause=Cause.REQUEST)
    view = run_of((skipped,), (skipped,))
    page = unescape(render_html(view))
    section = page[page.index('<section id="heap"') :].partition("</section>")[0]
    assert section.count(f"{REASON}; 2 of 2 jobs skipped.") == 1
    assert " ".join(render_summary(view).split()).count(f"{REASON}; 2 of 2 jobs skipped") == 1
    assert 'id="heap"' not in render_html(example_run), "a run that measures times"


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


def test_a_grid_has_every_setting_and_tells_infeasible_from_trouble() -> None:
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


def test_a_run_without_a_sweep_has_no_grid() -> None:
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


DAY_MS = 86_400_000
START_MS = 1_767_261_600_000
NO_TIME = "did not fit into the budget of 2 h 00 min"


def test_it_says_how_old_what_is_known_is() -> None:
    for skipped, words in (
        (SkipReason("no time"), "never run before"),
        (SkipReason("no time", START_MS - 3 * DAY_MS - 5, "passed", "r"), "last run 3 days before, passed"),
        (SkipReason("no time", START_MS - DAY_MS, "failed", "r"), "last run 1 day before, failed"),
        (SkipReason("no time", START_MS - 7_200_000, "known issue", "r"), "last run 2 h 00 min before, known issue"),
        (SkipReason("no time", START_MS + 5, "", ""), "last run 0.0 s before, unknown"),
    ):
        assert skip_words(skipped, START_MS) == f"{words}; no time"


def with_skipped(view: RunView, skipped: SkipReason) -> RunView:
    """Return the run with its last job left out."""
    left_out = msgspec.structs.replace(view.jobs[-1], attempts=(), decisive_attempt=0, skipped=skipped)
    return msgspec.structs.replace(view, jobs=(*view.jobs[:-1], left_out))


@pytest.fixture
def view() -> RunView:
    run = run_of(make_attempts(Verdict.PASSED), (), exit_code=0)
    return with_skipped(run, SkipReason(NO_TIME, run.started_ms - 3 * DAY_MS, "passed", "r"))


def test_a_run_with_skipped_jobs_is_not_green(view: RunView) -> None:
    summary = summarize(view)
    assert (summary.tone, summary.attention) == (Tone.SKIPPED, 1)
    assert summary.verdict_line.endswith("0 infra, 1 SKIPPED - 1 of 2 jobs needs attention")
    for verdict, tone in ((Verdict.FAILED, Tone.FAILED), (Verdict.INFRA, Tone.INFRA)):
        assert summarize(with_skipped(run_of(make_attempts(verdict), ()), SkipReason("no time"))).tone is tone
    attempts = make_attempts(Verdict.PASSED)
    jobs = tuple(msgspec.structs.replace(job, attempts=attempts, decisive_attempt=1) for job in view.jobs)
    after_all = summarize(msgspec.structs.replace(view, jobs=jobs))
    assert (after_all.counts[Outcome.SKIPPED], after_all.tone) == (0, Tone.PASSED)


def test_the_page_shows_it_first_and_in_the_matrix(view: RunView) -> None:
    html = render_html(view)
    top = html[html.index("<header") : html.index("</header>")]
    for text in ('class="top skipped"', "1 job was skipped", "0</strong>: nothing that ran failed, skipped jobs aside"):
        assert text in top
    section = html[html.index('<section id="skipped"') :].partition("</section>")[0]
    assert f"last run 3 days before, passed; {NO_TIME}" in section
    matrix, jobs = html[html.index('<section id="matrix"') :].split('<section id="jobs"')
    assert '<td class="skipped late">' in matrix
    assert "○ SKIPPED" in matrix
    assert 'data-o="skipped"' in jobs
    without = render_html(run_of(make_attempts(Verdict.PASSED)))
    assert "SKIPPED" not in without
    assert 'id="skipped"' not in without


def test_terminal_junit_and_json_name_it_with_its_reason(view: RunView) -> None:
    words = f"last run 3 days before, passed; {NO_TIME}"
    lines = render_summary(view).splitlines()
    place = next(n for n, line in enumerate(lines) if line.startswith("SKIPPED "))
    assert lines[place].endswith(view.jobs[-1].id)
    assert lines[place + 1].strip() == words
    root = ET.fromstring(render_junit(view))  # noqa: S314 - our own output
    [skipped] = root.iter("skipped")
    assert (skipped.get("type"), skipped.get("message"), root.get("skipped")) == ("skipped", f"SKIPPED: {words}", "1")
    document = json.loads(render_json(view))
    assert [job["skipped"] and job["skipped"]["last_outcome"] for job in document["jobs"]] == [None, "passed"]
    assert document["summary"]["counts"]["skipped"] == 1
    assert document["summary"]["outcomes"][view.jobs[-1].id] == "skipped"
    assert parse_json(render_json(view)) == view


def test_what_a_store_says_of_it_breaks_out_of_nothing(view: RunView) -> None:
    evil = "<script>window.pwned=1</script>\u202e"
    html = render_html(with_skipped(view, SkipReason(evil, 1, evil, evil)))
    assert "<script>window.pwned" not in html
    assert "\u202e" not in html
    ET.fromstring(render_junit(with_skipped(view, SkipReason(f"{evil}\x00", 1, evil, evil))))  # noqa: S314

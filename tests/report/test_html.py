"""Page of a run: its sections and labels, and hostile texts."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import stat
import time
import xml.etree.ElementTree as ET
from html import unescape
from pathlib import Path

import msgspec
import pytest
from report_pages import Page, hostile_context, in_full, section, unpacked

from farm.report.formats.github import run_markdown
from farm.report.formats.junit import render_junit, xml_text
from farm.report.formats.run_json import parse_json, render_json
from farm.report.html.page_of_run import ReportContext, render_html, write_html
from farm.report.model import format as fmt
from farm.report.model.diff import diff_runs
from farm.report.model.format import cut_log
from farm.report.model.sections import HeapRow, frame_grids, heap_rows
from farm.report.model.summary import Outcome, Tone, summarize
from farm.report.terminal.compare import diff_lines
from farm.report.terminal.run import job_lines, render_summary
from farm.results.analysis.history import Point
from farm.results.analysis.statistics import Series
from farm.results.attempt import Attempt, Cause, Direction, Measurement, Stage, Verdict
from farm.store.queries.history import JobPast, SeriesPast
from farm.store.records import DeviceView, JobView, RunView, SkipReason
from farm.suites.options import frame_setting, late_flags
from farm.suites.suite import Target

from .conftest import make_attempts, run_of


@pytest.fixture(scope="module")
def example_html(example_run: RunView) -> str:
    return render_html(example_run)


def test_the_page_is_well_formed_and_its_links_lead_somewhere(example_html: str) -> None:
    page = Page(example_html)
    assert len(page.ids) == len(set(page.ids))
    assert {link[1:] for link in page.links} | {f"j{i}" for i in range(101)} <= set(page.ids)


def test_the_page_asks_for_nothing_from_outside(example_html: str) -> None:
    page = Page(example_html)
    for tag, attrs in page.tags:
        assert tag not in {"img", "iframe", "object", "embed", "base"}
        assert "style" not in attrs
        assert not [name for name in attrs if name.startswith("on")]
        assert "src" not in attrs
        assert (attrs.get("href") or "#").startswith(("#", "data:,"))
    assert "@import" not in example_html
    assert "url(" not in example_html


def test_the_policy_allows_exactly_the_inlined_style_and_scripts(example_html: str) -> None:
    page = Page(example_html)
    (policy,) = [meta["content"] for meta in page.all("meta") if meta.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy
    inlined = page.texts["style"] + [page.texts["script"][0], page.texts["script"][-1]]
    data = "application/octet-stream"
    assert [script.get("type") for script in page.all("script")] == [None, data, data, None]
    hashes = {base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in inlined}
    assert hashes == set(re.findall(r"'sha256-([^']+)'", policy))


def test_the_page_says_what_a_reader_needs_first(example_html: str) -> None:
    page = Page(example_html)
    assert page.texts["h1"] == ["96 passed, 2 failed, 2 known issues, 1 infra - 3 of 101 jobs need attention"]
    assert page.texts["p"][1] == "2 failures, 1 job could not be judged and 1 job needed another attempt."
    assert [text.strip() for text in page.texts["h2"]] == [
        "Failures", "Known issues", "Infra trouble", "Notes", "Matrix", "Jobs", "Devices", "Fingerprint", "Keys",
    ]  # fmt: skip
    for text in (
        "a job failed", "2 min 23 s", "VIRTUAL DEVICES", "not comparable with hardware",
        # Every attempt of a job that was tried again.
        "push timed out after 10 s", "adb: error: failed to copy: timeout",
    ):  # fmt: skip
        assert text in example_html


def test_hardware_is_not_labelled_virtual() -> None:
    attempt = Attempt("j", Verdict.PASSED, Stage.DONE, "", device="R5CT1")
    view = msgspec.structs.replace(run_of((attempt,)), devices=(DeviceView("R5CT1", "SM8650", "hardware", "b"),))
    html = render_html(view)
    assert "VIRTUAL" not in Page(html).texts.get("strong", []) and "virtual devices" not in html.lower()  # noqa: PT018
    assert 'class="tag virtual"' not in html


def test_a_baseline_on_the_cpu_is_not_told_to_come_from_a_simulator() -> None:
    attempt = Attempt("j", Verdict.PASSED, Stage.DONE, "", device="virtual-SM8650-0")
    view = run_of((attempt,))
    jobs = tuple(
        msgspec.structs.replace(job, backend="xnnpack", precision="fp32", fallback_ops={"aten.sort.default": 1})
        for job in view.jobs
    )
    html = unescape(in_full(render_html(msgspec.structs.replace(view, jobs=jobs))))
    assert "Everything ran on the host's processor" in html
    assert "Latency and load time on VIRTUAL devices are time of the host's processor" in html
    assert "Not delegated" in html
    for wrong in ("HTP simulator", "of a simulator", "On the CPU", "CPU fallback"):
        assert wrong not in html
        assert wrong in in_full(render_html(view)) or wrong == "On the CPU"
    assert "latency is time of the host's processor" in render_summary(msgspec.structs.replace(view, jobs=jobs), 120)


def test_unfinished_and_empty_runs_are_pages_too() -> None:
    html = render_html(run_of((), finished_ms=None, exit_code=None))
    for text in ("<strong>Unfinished.</strong>", "the run has not finished", "1 not run yet"):
        assert text in html
    html = render_html(msgspec.structs.replace(run_of(exit_code=5), devices=(), fingerprint={}))
    assert Page(html).texts["h1"] == ["no job was selected"]
    assert "nothing was selected" in html


def test_hostile_text_is_text(hostile_run: RunView) -> None:
    html = render_html(hostile_run, hostile_context(hostile_run))
    html.encode()
    page = Page(html)
    assert [script.get("type") for script in page.all("script")] == [None, "application/octet-stream", None]
    assert page.all("img") == []
    for packed in unpacked(html).values():
        assert {"script", "img"}.isdisjoint(tag for tag, _ in Page(packed).tags)
        assert "&lt;script&gt;window.pwned=1" in packed
    assert not any("pwned" in text for text in page.texts["script"])
    assert "<script>window.pwned=3</script>" in "".join(page.texts["pre"])
    assert "{{ 7*7 }}" in html
    html = in_full(html)
    for hidden in ("\x00", "\x1b", "\x07", "\u202e", "\u2066", "\u200b", "\u2028"):
        assert hidden not in html
    assert "\\u202eevil" in html


def test_writing_replaces_the_file_or_leaves_the_old_one(example_run: RunView, tmp_path: Path) -> None:
    path = tmp_path / "runs" / "report.html"
    write_html(example_run, path)
    path.write_text("old", encoding="utf-8")
    write_html(example_run, path)
    assert path.read_text(encoding="utf-8") == render_html(example_run)
    assert [one.name for one in path.parent.iterdir()] == ["report.html"]
    assert stat.S_IMODE(path.stat().st_mode) & 0o400
    taken = tmp_path / "taken" / "report.html"
    (taken / "kept").mkdir(parents=True)
    with pytest.raises(OSError, match="directory"):
        write_html(example_run, taken)
    assert [one.name for one in taken.parent.iterdir()] == ["report.html"]


# The DSP's heap, grids of frame settings and skipped jobs in the report: page, terminal and files.


JOB = "features/contexts[SM8650-htp-8a8w]"
REASON = "no DSP heap: ExecuTorch wrote no profile of it"


def measured(*kept: float) -> Attempt:
    rows = (Measurement("dsp_heap_difference", "bytes", Direction.LOWER, kept),)
    return Attempt(JOB, Verdict.PASSED, Stage.DONE, "", "phone-1", measurements=rows)


def past(now: str, *runs: tuple[str, str, str, float, float]) -> JobPast:
    """Return runs as (device, SDK, version of the case, before, after), the last of them `now`; NaN without a heap."""
    names = [*(f"r{place}" for place in range(len(runs) - 1)), now]
    points = tuple(
        Point(name, place, {"qnn": sdk}, "hardware", case, "", device)
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
    return JobPast(JOB, points, series)


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
    shown = section(page, "heap")
    assert shown.count("<tr>") == 1 + 3
    assert "4,096, 8,192" in shown
    assert "0 to 8,192" in shown, "samples of this run tell of the noise as well"
    assert "2.47" in shown


def test_jobs_without_a_heap_have_their_reason_in_one_line(example_run: RunView) -> None:
    skipped = Attempt(JOB, Verdict.SKIPPED, Stage.EXECUTE, REASON, "phone-1", cause=Cause.REQUEST)
    view = run_of((skipped,), (skipped,))
    page = unescape(render_html(view))
    shown = section(page, "heap")
    assert shown.count(f"{REASON}; 2 of 2 jobs skipped.") == 1
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
    assert (grid.rates, grid.columns) == ([5, 100], [(0, 10), (0, 60), (2, 10)])
    assert {place: job.numbers.latency_ms for place, job in grid.jobs.items()} == {
        (100, 0, 10): None, (5, 2, 10): 2.5, (5, 0, 10): 1.5, (100, 0, 60): None,
    }  # fmt: skip
    assert (len(grid.infeasible), grid.text) == (1, "2 feasible, 1 infeasible, 1 not known")
    page = unescape(render_html(view))
    shown = section(page, "frames")
    assert shown.count("✗ infeasible") == 1
    assert "2.500 ms" in shown
    assert "core_selection 2" in shown
    assert shown.count(">stub<") == 2, "of the section and of the table"
    assert "Which settings are infeasible is a rule of the stub" in shown
    output = " ".join(render_summary(view).split())
    assert "frame rates: 2 feasible, 1 infeasible, 1 not known: lpai_cases/block[SM8850-lpai-8a8w]" in output


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
NO_TIME = "did not fit into the budget of 2 h 00 min"


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
    assert f"last run 3 days before, passed; {NO_TIME}" in section(html, "skipped")
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


# Run over a stub of QNN's libraries: its numbers cannot be taken for numbers of Qualcomm's software or hardware.


def over(view: RunView, product: str, kind: str = "hardware") -> RunView:
    """Return a run whose devices have this kind, with an SDK of this product."""
    devices = tuple(msgspec.structs.replace(one, kind=kind) for one in view.devices)
    facts = {**view.fingerprint, "device_kind": kind, **({"qnn_product": product} if product else {})}
    return msgspec.structs.replace(view, devices=devices, fingerprint=facts)


def texts(view: RunView) -> dict[str, str]:
    """Return what every renderer makes of a run."""
    summary = summarize(view)
    html = render_html(view)
    return {
        "page": html, "page of a job": unpacked(html)[0], "terminal": render_summary(view),
        "job": "\n".join(job_lines(summary, summary.jobs[0], [], {})),
        "github": run_markdown(view), "junit": render_junit(view),
        "diff": "\n".join(diff_lines(diff_runs(view, view), 5)), "json": render_json(view),
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["hardware", "virtual"])
def test_every_text_of_a_run_over_a_stub_has_the_label_and_no_other_run_has_it(example_run: RunView, kind: str) -> None:
    few = msgspec.structs.replace(example_run, jobs=example_run.jobs[:12])
    found = texts(over(few, "stub", kind))
    for where, text in found.items():
        assert "stub" in text.lower(), where
    assert "<strong>STUB.</strong>" in found["page"]
    assert "times are those of a stub of QNN, not comparable with hardware" in found["page of a job"]
    assert "STUB: " in found["terminal"]
    assert "STUB: " in found["job"]
    # Beside each device, and wherever a table has a time.
    assert found["page"].count('<span class="tag virtual">stub</span>') >= len(few.devices)
    assert "host time of a simulator" not in "".join(found.values())
    document = json.loads(found["json"])
    assert (document["summary"]["stub"], document["fingerprint"]["qnn_product"]) == ("stub", "stub")
    assert parse_json(found["json"]) == over(few, "stub", kind)
    for product in ("", "QAIRT"):
        for where, text in texts(over(few, product, kind)).items():
            assert "stub" not in text.lower(), where


def test_numbers_of_a_stub_are_not_compared_with_those_of_qualcomms_libraries(example_run: RunView) -> None:
    found = diff_runs(over(example_run, "stub"), over(example_run, "QAIRT"))
    measured = [job for job in found.jobs if job.not_compared]
    assert measured
    assert {job.not_compared for job in measured} == {"one of the two ran over a stub of QNN"}
    assert not [job for job in found.jobs if job.changes]


def test_xml_text_has_only_what_xml_allows() -> None:
    assert xml_text("a\x00\x0b\ud800\ufffeb\tc\n🙂") == "ab\tc\n🙂"


def test_a_cut_log_says_how_much_is_missing() -> None:
    text = "".join(chr(33 + i % 90) for i in range(100))
    for limit in (0, 1, 10, 99, 100, 101):
        head, cut, tail = cut_log(text, limit)
        assert len(head) + len(tail) <= max(limit, 100 if not cut else 0)
        assert len(head) + cut + len(tail) == 100
        assert (text.startswith(head), text.endswith(tail)) == (True, True)


def test_numbers_read_as_a_person_writes_them() -> None:
    assert fmt.count(1234567.0) == "1,234,567"
    milliseconds = [fmt.milliseconds(value) for value in (0.7312, 12.345, 234.56, 12345.6)]
    assert milliseconds == ["0.731", "12.35", "234.6", "12,346"]
    assert (fmt.decibel(math.inf), fmt.cosine(math.nan)) == ("∞", "NaN")
    assert {fmt.count(None), fmt.small(None), fmt.seconds(None)} == {fmt.NOTHING}
    quantities = [fmt.quantity(*one) for one in ((7_310_000, "ns"), (4096, "bytes"), (0.25, "1"))]
    assert quantities == ["7.310 ms", "4,096 bytes", "0.25"]
    assert [fmt.duration(value) for value in (0.44, 12.2, 185, 3725)] == ["0.4 s", "12 s", "3 min 05 s", "1 h 02 min"]
    assert [fmt.first_of("abc", most, "others") for most in (2, 3)] == ["a, b and 1 others", "a, b, c"]


def test_times_are_local_and_name_their_zone(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        for zone, text in (
            ("Europe/Berlin", "2026-01-01 11:00:00 CET (UTC+01:00)"),
            ("UTC", "2026-01-01 10:00:00 UTC"),
        ):
            monkeypatch.setenv("TZ", zone)
            time.tzset()
            assert fmt.clock(1_767_261_600_000) == text
    finally:
        monkeypatch.undo()
        time.tzset()
    assert fmt.clock(10**18) == "unknown time"

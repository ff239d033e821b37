from __future__ import annotations

import math
from pathlib import Path

import msgspec
from report_context import alert, context, status, with_skipped
from report_pages import unpacked

from farm.report.html.context import ReportContext, artifact_links
from farm.report.html.page_of_run import render_html
from farm.report.html.triage import triage
from farm.report.model.alerts import alert_change
from farm.report.model.summary import summarize
from farm.store.artifacts import ArtifactStore
from farm.store.records import Background, JobFile
from farm.store.view import RunView


def groups(view: RunView, known: ReportContext) -> dict[str, list[str]]:
    found = triage(summarize(view), known)
    return {group.title: [entry.job_id for entry in group.entries] for group in found.groups}


def test_failures_are_new_where_the_job_did_not_fail_before(example_run: RunView) -> None:
    known = ReportContext(status=status(example_run, failed_before="index_select"))
    assert groups(example_run, known) == {
        "New failures": ["quantized_ops/group_norm[SM8650-htp-8a8w]"],
        "Still failing": ["quantized_ops/index_select[SM8750-htp-16a8w]"],
        "Infrastructure trouble": ["quantized_ops/sdpa[SM8750-htp-8a8w]", "quantized_ops/softmax[SM8650-htp-16a8w]"],
    }
    assert triage(summarize(example_run), known).quiet == ("skipped",)


def test_a_job_that_is_new_to_a_line_is_said_to_be_new_to_that_line(example_run: RunView) -> None:
    jobs = status(example_run)
    known = msgspec.structs.replace(jobs, jobs=tuple(msgspec.structs.replace(job, before=None) for job in jobs.jobs))
    output = triage(summarize(example_run), ReportContext(status=known)).standings
    assert set(output.values()) == {"never had a verdict in the default branch before"}


def test_without_a_store_no_failure_is_called_new(example_run: RunView) -> None:
    found = triage(summarize(example_run), ReportContext())
    assert [group.title for group in found.groups] == ["Failures", "Infrastructure trouble"]
    assert found.sentence == "2 failures, 1 job could not be judged and 1 job needed another attempt."
    html = render_html(example_run)
    assert "regression" not in html[html.index("<header") : html.index("</header>")]


def test_all_of_it_in_one_sentence(example_run: RunView) -> None:
    view = with_skipped(example_run)
    assert triage(summarize(view), context(view)).sentence == (
        "1 new failure, 1 job still fails, 1 confirmed regression, 1 job was skipped, 1 job could not be judged, "
        "1 job needed another attempt and 3 jobs are fixed."
    )


def test_a_regression_that_is_confirmed_or_exact_is_on_the_first_screen_and_others_are_not(
    example_run: RunView,
) -> None:
    names = [job.id for job in example_run.jobs]
    alerts = (
        alert(example_run, names[0], state="suspected"),
        alert(example_run, names[1]),
        alert(example_run, names[2], state="exact", metric="pte_size", unit="bytes", low=math.nan, high=math.nan),
        alert(example_run, names[3], finding="improvement"),
        alert(example_run, "gone/job[SM8650-htp-8a8w]"),
    )
    found = triage(summarize(example_run), ReportContext(alerts=alerts))
    (group,) = [group for group in found.groups if group.key == "regressions"]
    assert [(entry.link, entry.text) for entry in group.entries] == [
        (1, "latency +11.6 % (+10.5 % to +12.7 %)"), (2, "pte_size +11.6 %"),
        (None, "latency +11.6 % (+10.5 % to +12.7 %)"),
    ]  # fmt: skip
    html = render_html(example_run, ReportContext(alerts=alerts))
    section = html[html.index('<section id="regressions"') :]
    section = section[: section.index("</section>")]
    assert section.index("confirmed regression") < section.index("suspected regression")
    assert "<strong>runtime</strong>" in section
    assert "Regression, confirmed:" in unpacked(html)[1]
    assert triage(summarize(example_run), ReportContext(alerts=())).quiet == ("confirmed regressions", "skipped")
    assert alert_change(alert(example_run, "j", change=math.nan)) == ""


def test_the_page_of_a_job_has_its_past_its_files_and_how_to_do_it_again(example_run: RunView) -> None:
    page = unpacked(render_html(example_run, context(example_run)))[0]
    assert "before: passed in 20251229-120000-aaaaaa, 3 days before" in page
    assert "executorch 1.5.0 -&gt; 1.5.1" in page
    assert f'href="../../artifacts/ab/ab/{"ab" * 32}"' in page
    assert "cdcdcdcd" in page
    assert "without a link: not on the machine that wrote this page" in page
    assert "farm jobs rerun &#39;quantized_ops/add[SM8650-htp-8a8w]&#39; --run example-7f3a --script repro" in page


def test_what_did_not_compile_has_no_bundle_to_repeat(example_run: RunView) -> None:
    html = render_html(example_run)
    failures = html[html.index('<section id="failures"') : html.index('<section id="known"')]
    assert "Failed to finalize Qnn Graph" in failures
    assert "farm jobs rerun &#39;quantized_ops/group_norm" in failures
    assert "farm jobs rerun &#39;quantized_ops/index_select" not in failures


def test_files_are_linked_where_they_are_from_wherever_the_page_is(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path / "state dir" / "artifacts")
    here = store.put(b"a dump")
    records = (JobFile(here, 6, "etdump"), JobFile("cd" * 32, 6, "output"))
    known = Background(artifacts={"j": records})
    page = tmp_path / "state dir" / "runs" / "r" / "report.html"
    assert artifact_links(known, store, page) == {here: f"../../artifacts/{here[:2]}/{here[2:4]}/{here}"}
    elsewhere = artifact_links(known, store, tmp_path / "out.html")
    assert elsewhere == {here: f"state%20dir/artifacts/{here[:2]}/{here[2:4]}/{here}"}


def test_hostile_text_in_what_the_store_knows_is_text(example_run: RunView) -> None:
    evil = '<script>window.pwned=1</script>"\u202e'
    job = example_run.jobs[0].id
    known = context(example_run)
    hostile = msgspec.structs.replace(
        known,
        alerts=(alert(example_run, job, metric=evil, reason=evil, likely_cause=evil, last_good=evil),),
        background=Background(artifacts={job: (JobFile(evil, 1, evil),)}),
    )
    html = render_html(example_run, hostile)
    for text in (html, unpacked(html)[0]):
        assert "<script>window" not in text
        assert "\u202e" not in text

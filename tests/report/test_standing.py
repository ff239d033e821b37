"""State of runs and jobs with the next step, toolchains and commits."""

from __future__ import annotations

import math
import shlex
from pathlib import Path
from typing import Any

import msgspec
import pytest
from report_pages import alert, context, status, unpacked, with_skipped

from farm.base.errors import FIRST_RUN, UsageError
from farm.dispatch.nightly.render import SAMPLE, nightly_review
from farm.dispatch.pool.inventory import resolve_device
from farm.report.formats.review import FAILING_BEFORE, NEW, NOT_YOURS, REGRESSED, review_markdown, run_review
from farm.report.formats.run_json import parse_json, render_json
from farm.report.html.page_of_run import ReportContext, artifact_links, render_html, triage
from farm.report.html.templates import cells_markup
from farm.report.model.diff import diff_runs
from farm.report.model.grid import may_be_flaky, nightly_runs_of, rows_of, standing_of
from farm.report.model.status import (
    SickDevice,
    Standing,
    alert_change,
    commit_link,
    range_link,
    run_standing,
    standing,
    status_of,
    toolchain_text,
)
from farm.report.model.summary import rerun_command, summarize, ways_again
from farm.report.terminal.compare import diff_lines
from farm.report.terminal.run import render_summary
from farm.report.terminal.status import status_lines
from farm.results.analysis.history import Record, Reliability
from farm.results.attempt import Attempt, Cause, Stage, Verdict
from farm.store.artifacts import ArtifactStore
from farm.store.queries.grid import GridJob, NightlyCell, NightlyRun
from farm.store.records import (
    Background,
    Before,
    JobFile,
    JobStatus,
    JobView,
    RunCommit,
    RunStatus,
    RunToolchain,
    RunView,
    UnfinishedRun,
)
from farm.store.store import open_store

from .conftest import make_job, make_run

# State of runs and jobs with the next step: grid, review, triage, and printed commands.


NOW = 1_795_225_501_000
DAY = 86_400_000


def job(verdict: str, before: str | None = None, *, name: str = "ops/a[SM8650-htp-8a8w]", known: str = "") -> JobStatus:
    issue = before == "known"
    then = before and Before("earlier-run", NOW - 3 * DAY, "failed" if issue else before, "is wrong" if issue else "")
    reason = "" if verdict == "passed" else "output 0 is off"
    return JobStatus(name, verdict, known, "numerics" if verdict else "", reason, before=then or None)


def run(*jobs: JobStatus) -> RunStatus:
    return RunStatus(
        "the-run", "farm run --nightly", "ci", "nightly", "virtual", NOW - 3_600_000, NOW, 1, jobs, purpose="nightly"
    )


def test_how_a_job_stands() -> None:
    for now, before, stands in (
        ("failed", None, Standing.NEW_FAILURE), ("failed", "passed", Standing.NEW_FAILURE),
        ("failed", "known", Standing.NEW_FAILURE), ("failed", "failed", Standing.STILL_FAILING),
        ("passed", "failed", Standing.FIXED), ("passed", "known", Standing.FIXED),
        ("passed", "passed", Standing.PASSED), ("passed", None, Standing.PASSED),
        ("infra", "failed", Standing.INFRA), ("", "passed", Standing.NOT_TESTED),
    ):  # fmt: skip
        assert standing(job(now, before)) is stands, (now, before)
    assert standing(job("failed", "passed", known="is wrong")) is Standing.KNOWN


def test_the_text_has_what_needs_a_look_first_and_fits_80_columns() -> None:
    jobs = [job("passed", "passed", name=f"ops/p{n}") for n in range(20)]
    jobs += [job("failed", "passed", name=f"ops/{'new' * 40}{n}") for n in range(12)]
    jobs += [
        job("", "passed", name="ops/skipped"),
        job("infra", name="ops/infra\x1b[31m"),
        job("passed", "failed", name="ops/ok"),
    ]
    status = status_of(
        [run_standing(run(*jobs))],
        [SickDevice("phone-1\x1b[0m", "quarantined", "the health check was wrong \x07" * 9)],
        [UnfinishedRun("the-run", "ci", "bench", "farm run", NOW), UnfinishedRun("other", "ada", "h", "farm", NOW)],
    )
    lines = status_lines(status, NOW, limit=10)
    text = "\n".join(lines)
    assert max(map(len, lines)) <= 80
    assert lines[0] == "the-run: nightly run of ci, 1 h 00 min ago, exit code 1"
    assert "35 jobs: 12 failed, 21 passed, 1 infra, 1 NOT TESTED on virtual devices" in text
    order = [text.index(title) for title in ("NEW FAILURES: 12", "NOT TESTED: 1", "INFRA: 1", "FIXED: 1", "DEVICES: 1")]
    assert order == sorted(order)
    assert "and 2 more" in text
    assert "    numerics: output 0 is off" in lines
    assert "    before: passed in earlier-run, 3 days ago" in lines
    assert "unfinished: other of ada" in text
    assert "unfinished: the-run" not in text
    assert not {"\x1b", "\x07"} & set(text)
    assert status_lines(status_of([], [], []), NOW, 10) == [f"no run yet: '{FIRST_RUN}' makes one"]


def test_a_job_that_is_new_to_a_line_is_said_to_be_new_to_that_line() -> None:
    for branch, called in (("", "the default branch"), ("nightly-qnn", "branch nightly-qnn")):
        answer = msgspec.structs.replace(run(job("failed")), toolchain=RunToolchain(branch=branch))
        lines = status_lines(status_of([run_standing(answer)], [], []), NOW, limit=10)
        assert f"    never had a verdict in {called} before" in lines


def test_jobs_that_are_newly_flaky_or_were_healed_by_this_run_are_listed() -> None:
    newly, healed = Reliability.NEWLY_FLAKY, Reliability.HEALED
    records = {
        name: Record(18, 20, 0.699, 0.972, reliability, since)
        for name, reliability, since in (
            ("ops/old", newly, "run-1"), ("ops/new", newly, "run-2"), ("ops/healed", healed, "the-run"),
            ("ops/healed before", healed, "run-1"), ("ops/flaky", Reliability.FLAKY, "run-1"),
        )
    }  # fmt: skip
    lines = status_lines(status_of([run_standing(run(job("passed")), records)], [], []), NOW, limit=1)
    assert [line for line in lines[-9:] if line] == [
        "NEWLY FLAKY: 2", "  ops/new", "    passed 18 of 20 (69 to 98 %), newly flaky since run-2",
        "  and 1 more: --limit",
        "HEALED: 1", "  ops/healed", "    passed 18 of 20 (69 to 98 %), flaky before, healed in the-run",
    ]  # fmt: skip


def test_what_was_measured_in_vain_is_not_told_to_be_measured_again() -> None:
    view = RunView("the-run", "farm run", NOW, NOW, 0, "ci", "bench", {}, (), ())
    found = [alert(view, "ops/a", id=number, state=state) for number, state in enumerate(("suspected", "unknown"))]
    text = status_lines(status_of([run_standing(run(job("passed")), found=found)], [], []), NOW, 10)
    assert text[-2:] == [
        "1 number looks different from before: 'farm perf confirm' measures again",
        "1 number looks different, pairs are unsure: 'farm perf confirm' lists which",
    ]


def grid_job(case: str, cells: str) -> GridJob:
    return GridJob(f"s/{case}[x]", "s", case, "SM8650", "htp", "8a8w", cells)


def test_the_newest_result_and_the_verdict_before_it_make_the_state() -> None:
    for state, rows in (
        (Standing.NEW_FAILURE, "fppp f fkp ·fp"), (Standing.STILL_FAILING, "fff f·isf"), (Standing.FIXED, "pf pif pk"),
        (Standing.PASSED, "pp"), (Standing.KNOWN, "kf"), (Standing.INFRA, "iff"), (Standing.NOT_TESTED, "nf sp ··"),
    ):  # fmt: skip
        assert {cells: standing_of(cells) for cells in rows.split()} == dict.fromkeys(rows.split(), state)


def test_the_most_urgent_rows_come_first_and_flaky_ones_before_others() -> None:
    flaky = Record(3, 5, 0.1, 0.9, Reliability.FLAKY)
    steady = Record(5, 5, 0.5, 1.0, Reliability.STEADY)
    jobs = [grid_job("a", "pp"), grid_job("b", "ff"), grid_job("c", "fp"), grid_job("d", "pp"), grid_job("e", "ip")]
    rows = rows_of(jobs, {"s/d[x]": flaky, "s/a[x]": steady})
    assert [row.case for row in rows] == ["c", "b", "e", "d", "a"]
    assert [row.flaky for row in rows] == [None, None, None, flaky, None]
    assert [may_be_flaky(one) for one in jobs] == [False, False, True, False, False]


def test_a_night_has_counts_new_failures_and_changed_tools() -> None:
    def nightly_run(name: str, qnn: str, ended: int | None = 9) -> NightlyRun:
        run = NightlyCell(f"{name}-run", "hardware", 5, ended, "f")
        return NightlyRun(name, (run,), {"qnn": qnn, "commit": name})

    jobs = [grid_job("a", "fp"), grid_job("b", "ff"), grid_job("c", "·k")]
    newest, older = nightly_runs_of([nightly_run("n2", "2.51", None), nightly_run("n1", "2.50")], jobs)
    assert (newest.counts, newest.new, newest.events, newest.finished_ms) == ({"f": 2}, 1, ["qnn 2.50 -> 2.51"], None)
    assert (older.counts, older.new, older.events, older.finished_ms) == ({"f": 1, "k": 1, "p": 1}, 1, [], 9)


def test_cells_are_one_element_for_equal_neighbours() -> None:
    assert cells_markup("ppfk") == "<i class=passed>●●</i><i class=failed>✗</i><i class=known>◇</i>"


def attempt(verdict: Verdict, device: str, reason: str = "") -> Attempt:
    return Attempt("j", verdict, Stage.NUMERICS, reason, device=device)


def job_view(case: str, *attempts: Attempt) -> JobView:
    return make_job("s", case, "SM8650", "8a8w", *attempts)


def run_view(*jobs: JobView) -> RunView:
    return make_run(jobs, (), command="farm run --suite s")


def test_a_run_tells_new_failures_from_old_ones_and_devices() -> None:
    view = run_view(
        job_view("new", attempt(Verdict.FAILED, "d1", "12 dB")),
        job_view("old", attempt(Verdict.FAILED, "d1", "9 dB")),
        job_view("sick", attempt(Verdict.INFRA, "d2", "the device failed its health check")),
        job_view("moved", attempt(Verdict.INFRA, "d2", "cable"), attempt(Verdict.PASSED, "d1")),
        job_view("again", attempt(Verdict.INFRA, "d1", "cable"), attempt(Verdict.PASSED, "d1")),
    )
    review = run_review(view, {view.jobs[1].id: Standing.STILL_FAILING}, [alert(view, view.jobs[4].id)])
    assert review.state == "failed"
    assert [name for name, _ in review.sections[NEW]] == [view.jobs[0].id]
    assert [name for name, _ in review.sections[FAILING_BEFORE]] == [view.jobs[1].id]
    assert review.sections[REGRESSED] == [(view.jobs[4].id, "latency slower: +11.6 % (+10.5 % to +12.7 %)")]
    assert review.sections[NOT_YOURS] == [
        (view.jobs[2].id, "infra on d2: the device failed its health check"),
        (view.jobs[3].id, "passed on another device, d1; on d2: cable"),
    ]
    assert "s/new" in review.commands[0]
    text = review_markdown(review)
    assert text.startswith("### farm run: FAILED")
    assert "#### Not your commit: 2" in text


def test_infra_alone_is_not_held_against_a_commit_and_a_nightly_run_names_commands() -> None:
    assert run_review(run_view(job_view("a", attempt(Verdict.INFRA, "d", "gone"))), {}, []).state == "infra"
    assert run_review(run_view(job_view("a", attempt(Verdict.PASSED, "d"))), {}, []).state == "passed"
    review = nightly_review(SAMPLE)
    assert review.state == "failed"
    assert review.sections[NEW]
    assert review.commands[0].startswith("farm jobs rerun ")
    assert " --run " in review.commands[0]


def test_no_text_of_a_device_is_markdown() -> None:
    hostile = "</td> @all [x](http://x) \x1b[31m\n# h"
    review = run_review(run_view(job_view("a", attempt(Verdict.FAILED, "d", hostile))), {}, [])
    lines = review_markdown(review).splitlines()
    [row] = [line for line in lines if line.startswith("| s/a")]
    assert not set("<>@[]()\x1b").intersection(row)


def test_failures_are_new_where_the_job_did_not_fail_before(example_run: RunView) -> None:
    found = triage(summarize(example_run), status(example_run, failed_before="index_select"))
    assert {group.title: [entry.job_id for entry in group.entries] for group in found.groups} == {
        "New failures": ["quantized_ops/group_norm[SM8650-htp-8a8w]"],
        "Still failing": ["quantized_ops/index_select[SM8750-htp-16a8w]"],
        "Infrastructure trouble": ["quantized_ops/sdpa[SM8750-htp-8a8w]", "quantized_ops/softmax[SM8650-htp-16a8w]"],
    }
    assert found.quiet == ["skipped"]


def test_without_a_store_no_failure_is_called_new(example_run: RunView) -> None:
    found = triage(summarize(example_run))
    assert [group.title for group in found.groups] == ["Failures", "Infrastructure trouble"]
    html = render_html(example_run)
    assert "regression" not in html[html.index("<header") : html.index("</header>")]
    failures = html[html.index('<section id="failures"') : html.index('<section id="known"')]
    assert "Failed to finalize Qnn Graph" in failures
    assert "farm jobs rerun &#39;quantized_ops/group_norm" in failures
    assert "farm jobs rerun &#39;quantized_ops/index_select" not in failures, "without a program there is no bundle"


def test_all_of_it_in_one_sentence(example_run: RunView) -> None:
    view = with_skipped(example_run)
    known = context(view)
    assert triage(summarize(view), known.status, known.alerts).sentence == (
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
    found = triage(summarize(example_run), alerts=alerts)
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
    assert triage(summarize(example_run), alerts=()).quiet == ["confirmed regressions", "skipped"]
    assert alert_change(alert(example_run, "j", change=math.nan)) == ""


def test_the_page_of_a_job_has_its_past_its_files_and_how_to_do_it_again(example_run: RunView) -> None:
    page = unpacked(render_html(example_run, context(example_run)))[0]
    for text in (
        "before: passed in 20251229-120000-aaaaaa, 3 days before", "executorch 1.5.0 -&gt; 1.5.1",
        f'href="../../artifacts/ab/ab/{"ab" * 32}"', "cdcdcdcd",
        "without a link: not on the machine that wrote this page",
        "farm jobs bundle &#39;quantized_ops/add[SM8650-htp-8a8w]&#39; --run example-7f3a --to bundle",
    ):  # fmt: skip
        assert text in page


def test_files_are_linked_where_they_are_from_wherever_the_page_is(tmp_path: Path) -> None:
    state = tmp_path / "state dir"
    store = ArtifactStore(state / "artifacts")
    here = store.put(b"a dump")
    known = Background(artifacts={"j": (JobFile(here, 6, "etdump"), JobFile("cd" * 32, 6, "output"))})
    place = f"artifacts/{here[:2]}/{here[2:4]}/{here}"
    assert artifact_links(known, store, state / "runs" / "r" / "report.html") == {here: f"../../{place}"}
    assert artifact_links(known, store, tmp_path / "out.html") == {here: f"state%20dir/{place}"}


JOB = "s/c[SM8650-htp-8a8w]"


def wrong() -> JobView:
    attempt = Attempt(
        JOB, Verdict.FAILED, Stage.NUMERICS, "sqnr 3 dB < 20 dB", device="virtual-SM8650-0", bundle_key="a" * 64,
        cause=Cause.NUMERICS,
    )  # fmt: skip
    return JobView(JOB, "s", "c", "SM8650", "htp", "8a8w", (attempt,), decisive_attempt=1)


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("farm run --soc SM8650 --suite s --virtual 1", ["--virtual", "1"]),
        ("farm run --soc SM8650 --suite s --virtual=2", ["--virtual", "1"]),
        ("farm run --soc SM8650 --suite s", []),
    ],
)
def test_layers_of_a_failure_are_looked_for_where_the_run_had_its_devices(command: str, expected: list[str]) -> None:
    again = rerun_command(wrong(), virtual=True, run_command=command)
    ways = dict(ways_again(wrong(), again, "run-1"))
    assert shlex.split(ways["Layer by layer"]) == ["farm", "debug", JOB, *expected]


def test_a_debug_session_names_no_command_for_its_program_which_is_not_kept() -> None:
    again = rerun_command(wrong(), virtual=True, run_command=f"farm debug {JOB}")
    assert dict(ways_again(wrong(), again, "run-1")).keys() == {"Run it again", "Layer by layer", "Run by run"}


def test_a_virtual_device_of_a_run_is_known_to_be_gone(tmp_path: Path) -> None:
    with (
        open_store(f"sqlite:///{tmp_path / 'farm.db'}") as store,
        pytest.raises(UsageError, match="unknown device 'virtual-SM8650-0' .*a virtual device of a run ends with it"),
    ):
        resolve_device(store, "virtual-SM8650-0")


# Toolchain of a run on pages and in the terminal, with links to web addresses alone.


OLD_COMMIT, NEW_COMMIT = "a" * 40, "b" * 40
URL = "https://github.com/pytorch/executorch/commit/{commit}"
MAIN = RunToolchain(
    "main", "main", commit=NEW_COMMIT, git_branch="main", subject="Fix <b>pad</b>", before=OLD_COMMIT,
    since=(RunCommit(NEW_COMMIT, "Fix <b>pad</b>"), RunCommit("c" * 40, "Add \x1b[31msoftmax")), more=3, commit_url=URL,
)  # fmt: skip


def view_of(**toolchain: Any) -> RunView:
    """Return a run without jobs, with changes of its toolchain."""
    return make_run((), (), toolchain=msgspec.structs.replace(MAIN, **toolchain))


@pytest.mark.parametrize(
    "template",
    [
        "", "https://example.org/", "javascript:alert('{commit}')", "JAVASCRIPT://x/%0aalert('{commit}')",
        "data:text/html,{commit}", "file:///etc/{commit}", "//example.org/{commit}", "https:///{commit}",
        "https://exa mple.org/{commit}", "https://[bad/{commit}", "https://ada:secret@example.org/{commit}",
        "https://example.org\\@evil.example/{commit}", "https://example.org/\u202e{commit}",
    ],
)  # fmt: skip
def test_only_a_web_address_is_a_link(template: str) -> None:
    assert commit_link(template, NEW_COMMIT) == ""
    page = render_html(view_of(commit_url=template))
    assert 'rel="noreferrer"' not in page
    assert NEW_COMMIT[:10] in page


def test_a_commit_is_a_hash() -> None:
    assert commit_link(URL, NEW_COMMIT) == f"https://github.com/pytorch/executorch/commit/{NEW_COMMIT}"
    assert commit_link(URL, '"><script>') == ""
    assert commit_link(URL, "../../login") == ""
    assert (
        range_link(URL, OLD_COMMIT, NEW_COMMIT)
        == f"https://github.com/pytorch/executorch/compare/{OLD_COMMIT}...{NEW_COMMIT}"
    )
    assert range_link(URL, NEW_COMMIT, NEW_COMMIT) == range_link(URL, "", NEW_COMMIT) == ""
    assert range_link("https://git.example/?c={commit}", OLD_COMMIT, NEW_COMMIT) == ""


def test_the_page_of_a_run_names_its_commit_and_those_since_the_line_s_run_before() -> None:
    page = render_html(view_of())
    for text in (
        f'<a href="https://github.com/pytorch/executorch/commit/{NEW_COMMIT}"',
        f'<a href="https://github.com/pytorch/executorch/compare/{OLD_COMMIT}...{NEW_COMMIT}"',
        "5 new commits since the previous run of its branch", "Fix &lt;b&gt;pad&lt;/b&gt;",
    ):  # fmt: skip
        assert text in page
    for text in ("<b>pad", "\x1b", "PRIVATE"):
        assert text not in page
    page = render_html(view_of(private=True, dirty=True, branch="release", git_branch="fix/pad"))
    for text in (
        "PRIVATE", "Compared with branch release and not part of its history", "<strong>dirty</strong>", "on fix/pad",
    ):  # fmt: skip
        assert text in page


def test_the_terminal_and_json_say_it_and_a_run_without_a_known_toolchain_says_nothing() -> None:
    view = view_of()
    shown = " ".join(render_summary(view, 100).split())
    assert "main, commit bbbbbbbbbb on branch main: Fix <b>pad</b>" in shown
    assert "5 new commits since the previous run of its branch" in shown
    assert parse_json(render_json(view)).toolchain == MAIN
    plain = msgspec.structs.replace(view, toolchain=msgspec.UNSET)
    assert "toolchain" not in msgspec.json.decode(render_json(plain))
    assert "Toolchain" not in render_html(plain)
    assert toolchain_text(plain.toolchain) == ""


def test_two_runs_lead_to_the_commits_between_them() -> None:
    before, after = view_of(commit=OLD_COMMIT), view_of()
    diff = diff_runs(before, after)
    assert diff.commits_url == f"https://github.com/pytorch/executorch/compare/{OLD_COMMIT}...{NEW_COMMIT}"
    assert diff_lines(diff, 5, 60)[-1] == f"commits: {diff.commits_url}"
    assert not diff_runs(before, before).commits_url

from __future__ import annotations

import msgspec
import pytest
from report_context import alert

from farm.base.errors import FIRST_RUN
from farm.report.model.status import SickDevice, Standing, run_standing, standing, status_of
from farm.report.terminal.status import status_lines
from farm.results.analysis.flakiness import Record, Reliability
from farm.store.records import Before, JobStatus, RunStatus, UnfinishedRun
from farm.store.view import RunToolchain, RunView

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


@pytest.mark.parametrize(
    ("now", "before", "stands"),
    [
        ("failed", None, Standing.NEW_FAILURE),
        ("failed", "passed", Standing.NEW_FAILURE),
        ("failed", "known", Standing.NEW_FAILURE),
        ("failed", "failed", Standing.STILL_FAILING),
        ("passed", "failed", Standing.FIXED),
        ("passed", "known", Standing.FIXED),
        ("passed", "passed", Standing.PASSED),
        ("passed", None, Standing.PASSED),
        ("infra", "failed", Standing.INFRA),
        ("", "passed", Standing.NOT_TESTED),
    ],
)
def test_how_a_job_stands(now: str, before: str | None, stands: Standing) -> None:
    assert standing(job(now, before)) is stands


def test_a_known_issue_is_neither_new_nor_still_failing() -> None:
    assert standing(job("failed", "passed", known="is wrong")) is Standing.KNOWN


def test_the_text_has_what_needs_a_look_first_and_fits_80_columns() -> None:
    jobs = [job("passed", "passed", name=f"ops/p{n}") for n in range(20)]
    jobs += [job("failed", "passed", name=f"ops/{'new' * 40}{n}") for n in range(12)]
    jobs += [
        job("", "passed", name="ops/skipped"),
        job("infra", name="ops/infra"),
        job("passed", "failed", name="ops/ok"),
    ]
    status = status_of(
        [run_standing(run(*jobs))],
        [SickDevice("phone-1", "quarantined", "the health check was wrong " * 9)],
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


@pytest.mark.parametrize(("branch", "called"), [("", "the default branch"), ("nightly-qnn", "branch nightly-qnn")])
def test_a_job_that_is_new_to_a_line_is_said_to_be_new_to_that_line(branch: str, called: str) -> None:
    answer = msgspec.structs.replace(run(job("failed")), toolchain=RunToolchain(branch=branch))
    lines = status_lines(status_of([run_standing(answer)], [], []), NOW, limit=10)
    assert f"    never had a verdict in {called} before" in lines


def test_an_empty_store_says_what_to_do() -> None:
    assert status_lines(status_of([], [], []), NOW, 10) == [f"no run yet: '{FIRST_RUN}' makes one"]


def test_names_cannot_write_to_the_terminal() -> None:
    status = status_of(
        [run_standing(run(job("failed", name="ops/\x1b[31mred")))], [SickDevice("\x1b[0m", "suspect", "\x07")], []
    )
    assert not {"\x1b", "\x07"} & set("".join(status_lines(status, NOW, 10)))


def test_jobs_that_are_newly_flaky_or_were_healed_by_this_run_are_listed() -> None:
    def record(reliability: Reliability, since: str) -> Record:
        return Record(18, 20, 0.699, 0.972, reliability, since)

    records = {
        "ops/old": record(Reliability.NEWLY_FLAKY, "run-1"),
        "ops/new": record(Reliability.NEWLY_FLAKY, "run-2"),
        "ops/healed": record(Reliability.HEALED, "the-run"),
        "ops/healed before": record(Reliability.HEALED, "run-1"),
        "ops/flaky": record(Reliability.FLAKY, "run-1"),
    }
    lines = status_lines(status_of([run_standing(run(job("passed")), records)], [], []), NOW, limit=1)
    assert lines[-9:] == [
        "",
        "NEWLY FLAKY: 2",
        "  ops/new",
        "    passed 18 of 20 (69 to 98 %), newly flaky since run-2",
        "  and 1 more: --limit",
        "",
        "HEALED: 1",
        "  ops/healed",
        "    passed 18 of 20 (69 to 98 %), flaky before, healed in the-run",
    ]


def test_what_was_measured_in_vain_is_not_told_to_be_measured_again() -> None:
    view = RunView("the-run", "farm run", NOW, NOW, 0, "ci", "bench", {}, (), ())
    found = [alert(view, "ops/a", id=number, state=state) for number, state in enumerate(("suspected", "unknown"))]
    text = status_lines(status_of([run_standing(run(job("passed")), found=found)], [], []), NOW, 10)
    assert text[2] == "  1 job: 0 failed, 1 passed on virtual devices"
    assert text[-3:] == [
        "",
        "1 number looks different from before: 'farm perf confirm' measures again",
        "1 number looks different, pairs are unsure: 'farm perf confirm' lists which",
    ]

"""A job that a run had no time for is shown as loud as a failure, wherever the run is shown."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from collections.abc import Callable

import msgspec
import pytest

from farm.report.formats.junit import render_junit
from farm.report.formats.run_json import parse_json, render_json
from farm.report.html.page_of_run import render_html
from farm.report.model.summary import Outcome, Tone, skip_words, summarize
from farm.report.terminal.run import render_summary
from farm.results.attempt import Attempt, Verdict
from farm.store.view import RunView, SkipReason

Attempts = Callable[..., tuple[Attempt, ...]]
DAY_MS = 86_400_000
START_MS = 1_767_261_600_000
NO_TIME = "did not fit into the budget of 2 h 00 min"


@pytest.mark.parametrize(
    ("skipped", "words"),
    [
        (SkipReason("no time"), "never run before; no time"),
        (SkipReason("no time", START_MS - 3 * DAY_MS - 5, "passed", "r"), "last run 3 days before, passed; no time"),
        (SkipReason("no time", START_MS - DAY_MS, "failed", "r"), "last run 1 day before, failed; no time"),
        (
            SkipReason("no time", START_MS - 7_200_000, "known issue", "r"),
            "last run 2 h 00 min before, known issue; no time",
        ),
        (SkipReason("no time", START_MS + 5, "", ""), "last run 0.0 s before, unknown; no time"),
    ],
)
def test_it_says_how_old_what_is_known_is(skipped: SkipReason, words: str) -> None:
    assert skip_words(skipped, START_MS) == words


def with_skipped(view: RunView, skipped: SkipReason) -> RunView:
    """Return the run with its last job left out."""
    left_out = msgspec.structs.replace(view.jobs[-1], attempts=(), decisive_attempt=0, skipped=skipped)
    return msgspec.structs.replace(view, jobs=(*view.jobs[:-1], left_out))


@pytest.fixture
def view(run_of: Callable[..., RunView], make_attempts: Attempts) -> RunView:
    run = run_of(make_attempts(Verdict.PASSED), (), exit_code=0)
    return with_skipped(run, SkipReason(NO_TIME, run.started_ms - 3 * DAY_MS, "passed", "r"))


def test_a_run_with_skipped_jobs_is_not_green(
    view: RunView, run_of: Callable[..., RunView], make_attempts: Attempts
) -> None:
    summary = summarize(view)
    assert summary.tone is Tone.SKIPPED
    assert summary.attention == 1
    assert (
        summary.verdict_line == "1 passed, 0 failed, 0 known issues, 0 infra, 1 SKIPPED - 1 of 2 jobs needs attention"
    )
    for verdict, tone in ((Verdict.FAILED, Tone.FAILED), (Verdict.INFRA, Tone.INFRA)):
        assert summarize(with_skipped(run_of(make_attempts(verdict), ()), SkipReason("no time"))).tone is tone


def test_a_job_that_was_run_after_all_is_not_skipped(view: RunView, make_attempts: Attempts) -> None:
    attempts = make_attempts(Verdict.PASSED)
    jobs = tuple(msgspec.structs.replace(job, attempts=attempts, decisive_attempt=1) for job in view.jobs)
    summary = summarize(msgspec.structs.replace(view, jobs=jobs))
    assert summary.counts[Outcome.SKIPPED] == 0
    assert summary.tone is Tone.PASSED


def test_the_terminal_names_it(view: RunView) -> None:
    lines = render_summary(view).splitlines()
    place = next(n for n, line in enumerate(lines) if line.startswith("SKIPPED "))
    assert lines[place].endswith(view.jobs[-1].id)
    assert lines[place + 1].strip() == f"last run 3 days before, passed; {NO_TIME}"


def test_the_page_shows_it_first_and_in_the_matrix(view: RunView) -> None:
    html = render_html(view)
    top = html[html.index("<header") : html.index("</header>")]
    assert 'class="top skipped"' in top
    assert "1 job was skipped" in top
    assert "0</strong>: nothing that ran failed, skipped jobs aside" in top
    section = html[html.index('<section id="skipped"') :]
    assert f"last run 3 days before, passed; {NO_TIME}" in section[: section.index("</section>")]
    matrix = html[html.index('<section id="matrix"') : html.index('<section id="jobs"')]
    assert '<td class="skipped late">' in matrix
    assert "○ SKIPPED" in matrix
    assert 'data-o="skipped"' in html[html.index('<section id="jobs"') :]


def test_a_page_without_skipped_jobs_does_not_speak_of_them(
    run_of: Callable[..., RunView], make_attempts: Attempts
) -> None:
    html = render_html(run_of(make_attempts(Verdict.PASSED)))
    assert "SKIPPED" not in html
    assert 'id="skipped"' not in html


def test_junit_has_it_as_skipped_with_the_reason(view: RunView) -> None:
    root = ET.fromstring(render_junit(view))  # noqa: S314 - our own output
    [skipped] = root.iter("skipped")
    assert skipped.get("type") == "skipped"
    assert skipped.get("message") == f"SKIPPED: last run 3 days before, passed; {NO_TIME}"
    assert root.get("skipped") == "1"


def test_json_has_it_as_data(view: RunView) -> None:
    document = json.loads(render_json(view))
    assert document["jobs"][-1]["skipped"] == {
        "reason": NO_TIME, "last_ms": view.started_ms - 3 * DAY_MS, "last_outcome": "passed", "last_run_id": "r",
    }  # fmt: skip
    assert document["jobs"][0]["skipped"] is None
    assert document["summary"]["counts"]["skipped"] == 1
    assert document["summary"]["outcomes"][view.jobs[-1].id] == "skipped"
    assert parse_json(render_json(view)) == view


def test_what_a_store_says_of_it_breaks_out_of_nothing(view: RunView) -> None:
    evil = "<script>window.pwned=1</script>\u202e"
    html = render_html(with_skipped(view, SkipReason(evil, 1, evil, evil)))
    assert "<script>window.pwned" not in html
    assert "\u202e" not in html
    ET.fromstring(render_junit(with_skipped(view, SkipReason(f"{evil}\x00", 1, evil, evil))))  # noqa: S314

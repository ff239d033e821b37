from __future__ import annotations

from typing import TYPE_CHECKING

from report_context import alert

from farm.dispatch.nightly.render import nightly_review
from farm.dispatch.nightly.templates import SAMPLE
from farm.report.formats.review import (
    FAILING_BEFORE,
    NEW,
    NOT_YOURS,
    REGRESSED,
    review_markdown,
    run_review,
)
from farm.report.model.status import Standing
from farm.results.attempt import Attempt, Stage, Verdict
from farm.store.view import JobView, RunView

if TYPE_CHECKING:
    pass


def attempt(verdict: Verdict, device: str, reason: str = "") -> Attempt:
    return Attempt("j", verdict, Stage.NUMERICS, reason, device=device)


def job(case: str, *attempts: Attempt) -> JobView:
    name = f"s/{case}[SM8650-htp-8a8w]"
    return JobView(name, "s", case, "SM8650", "htp", "8a8w", attempts, decisive_attempt=len(attempts))


def run(*jobs: JobView) -> RunView:
    return RunView(id="r", command="farm run --suite s", started_ms=1, finished_ms=2, exit_code=1, user="u", host="h",
                   fingerprint={}, devices=(), jobs=jobs)  # fmt: skip


def test_a_run_tells_new_failures_from_old_ones_and_devices() -> None:
    view = run(
        job("new", attempt(Verdict.FAILED, "d1", "12 dB")),
        job("old", attempt(Verdict.FAILED, "d1", "9 dB")),
        job("sick", attempt(Verdict.INFRA, "d2", "the device failed its health check")),
        job("moved", attempt(Verdict.INFRA, "d2", "cable"), attempt(Verdict.PASSED, "d1")),
        job("again", attempt(Verdict.INFRA, "d1", "cable"), attempt(Verdict.PASSED, "d1")),
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


def test_infra_alone_is_not_held_against_a_commit() -> None:
    assert run_review(run(job("a", attempt(Verdict.INFRA, "d", "gone"))), {}, []).state == "infra"
    assert run_review(run(job("a", attempt(Verdict.PASSED, "d"))), {}, []).state == "passed"


def test_a_nightly_run_names_commands_for_its_findings() -> None:
    review = nightly_review(SAMPLE)
    assert review.state == "failed"
    assert review.sections[NEW]
    assert review.commands[0].startswith("farm jobs rerun ")
    assert " --run " in review.commands[0]


def test_no_text_of_a_device_is_markdown() -> None:
    hostile = "</td> @all [x](http://x) \x1b[31m\n# h"
    review = run_review(run(job("a", attempt(Verdict.FAILED, "d", hostile))), {}, [])
    lines = review_markdown(review).splitlines()
    [row] = [line for line in lines if line.startswith("| s/a")]
    assert not set("<>@[]()\x1b").intersection(row)

from __future__ import annotations

import itertools

import pytest

from farm.dispatch.request.ending import exit_code_of
from farm.results.attempt import Attempt, Stage, Verdict
from farm.store.view import JobView, RunView, SkipReason

PASSED = Attempt("j", Verdict.PASSED, Stage.DONE, "")
FAILED = Attempt("j", Verdict.FAILED, Stage.NUMERICS, "wrong")
SKIPPED = Attempt("j", Verdict.SKIPPED, Stage.EXECUTE, "the device cannot run it")
KNOWN = Attempt("j", Verdict.FAILED, Stage.NUMERICS, "wrong", known_issue="understood")
INFRA = Attempt("j", Verdict.INFRA, Stage.PUSH, "cable")
NO_TIME = SkipReason("no time")


def view(*jobs: tuple[Attempt, ...] | SkipReason) -> RunView:
    def job(number: int, found: tuple[Attempt, ...] | SkipReason) -> JobView:
        names = (f"s/c{number}[SM8650-htp-8a8w]", "s", f"c{number}", "SM8650", "htp", "8a8w")
        if isinstance(found, SkipReason):
            return JobView(*names, (), skipped=found)
        return JobView(*names, found, decisive_attempt=1 if found == (FAILED, INFRA) else len(found))

    # Judged before the run is recorded as finished.
    views = tuple(job(number, found) for number, found in enumerate(jobs))
    return RunView("r", "farm run", 1, None, None, "u", "h", {}, (), views)


@pytest.mark.parametrize(
    ("jobs", "code"),
    [
        ([(PASSED,), (PASSED,)], 0),
        ([(PASSED,), (KNOWN,)], 0),
        ([(PASSED,), (FAILED,)], 1),
        ([(PASSED,), (INFRA,)], 4),
        ([(PASSED,), ()], 4),
        ([(INFRA,), (FAILED,), (KNOWN,)], 1),
        ([(INFRA, PASSED), (PASSED,)], 0),
        ([(FAILED, INFRA)], 1),
        # Skipped jobs are no failures; but a run that executed no job is no success.
        ([(PASSED,), NO_TIME], 0),
        ([(FAILED,), NO_TIME], 1),
        ([(), NO_TIME], 4),
        ([NO_TIME, NO_TIME], 5),
        ([(PASSED,), (SKIPPED,)], 0),
        ([NO_TIME, (SKIPPED,)], 5),
        ([], 0),
    ],
)
def test_the_worst_job_decides_whatever_the_order(jobs: list[tuple[Attempt, ...] | SkipReason], code: int) -> None:
    assert {exit_code_of(view(*order)) for order in itertools.permutations(jobs)} == {code}

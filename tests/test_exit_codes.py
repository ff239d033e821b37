"""Exit codes: of a run by its jobs, and 2 for usage and configuration alone."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
from sqlalchemy.exc import OperationalError

from farm.base import errors
from farm.base.errors import ENDED_EARLY, ExitCode
from farm.dispatch.request.records import exit_code_of
from farm.results.attempt import Attempt, Stage, Verdict
from farm.store.problems import store_error
from farm.store.records import JobView, RunView, SkipReason

# Exit code 2 means usage and configuration alone; services are started again only where waiting may help.


UNITS = Path(__file__).parents[1] / "examples/shared_farm"


def test_only_usage_errors_end_with_the_code_of_usage() -> None:
    kinds = [one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, errors.FarmError)]
    assert all(issubclass(one, errors.UsageError) for one in kinds if one.exit_code == ExitCode.USAGE)
    assert all(isinstance(one.exit_code, ExitCode) for one in kinds)
    assert {*range(6, 12), 2, 4, 130} == ENDED_EARLY


@pytest.mark.parametrize("name", ["farm-agent", "farm-build", "farm-serve"])
def test_a_service_is_started_again_if_waiting_may_help(name: str) -> None:
    [row] = re.findall(r"^RestartPreventExitStatus=(.*)$", (UNITS / f"{name}.service").read_text(), re.MULTILINE)
    final = {ExitCode(int(code)) for code in row.split()} | {ExitCode.AGENT_REFUSED}
    kept = {ExitCode.USAGE, ExitCode.MISSING_TOOL, ExitCode.REFUSED, ExitCode.NO_STORE, ExitCode.AGENT_REFUSED}
    assert final == kept


def test_a_server_without_an_answer_has_its_own_code() -> None:
    refused = OperationalError("", None, Exception("connection to server at 127.0.0.1, port 1 failed: refused"))
    signed_in = OperationalError("", None, Exception("connection failed: password authentication failed for user"))
    assert store_error("farm", refused).exit_code == ExitCode.STORE_UNREACHABLE
    assert store_error("farm", signed_in).exit_code == ExitCode.INFRA


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

"""Choice of jobs by `--resume`: the undecided jobs of a run."""

from __future__ import annotations

import msgspec
import pytest
from made import job

from farm.base.errors import UsageError
from farm.dispatch.request.resume import missing_jobs, require_same_conditions, require_same_runtimes
from farm.results.attempt import Attempt, Stage, Verdict
from farm.store.view import DeviceView, JobView, RunView

PASSED = Attempt("j", Verdict.PASSED, Stage.DONE, "")
FAILED = Attempt("j", Verdict.FAILED, Stage.NUMERICS, "wrong")
KNOWN = Attempt("j", Verdict.FAILED, Stage.NUMERICS, "wrong", known_issue="understood")
INFRA = Attempt("j", Verdict.INFRA, Stage.PUSH, "cable")
JOB = job()


def test_a_run_goes_on_with_the_runtimes_that_its_devices_had() -> None:
    """The store has one runtime of a device for all attempts of a run."""
    then = DeviceView(
        "a1", "SM8650", "hardware", "b", runtime={"qnn": "2.40", "runtime": "x", "soc_reported": "SM8650P"}
    )
    same, other = {"qnn": "2.40", "runtime": "x"}, {"qnn": "2.40", "runtime": "y"}
    unknown = DeviceView("b2", "SM8650", "hardware", "b")
    require_same_runtimes([then, unknown], lambda _: [other, same], "r")
    require_same_runtimes([then, unknown], lambda one: [other] if one is unknown else [], "r")
    with pytest.raises(UsageError, match=r"run r cannot be resumed.*: runtime of a1 \(x, now y\): start anew"):
        require_same_runtimes([then], lambda _: [other], "r")


def test_the_kind_of_device_is_open_until_a_run_has_one() -> None:
    guessed = RunView("r", "farm run", 0, None, None, "ann", "bench", {"device_kind": "hardware", "qnn": "2"}, (), ())
    now = {"device_kind": "virtual", "qnn": "2"}
    require_same_conditions(guessed, now)
    with pytest.raises(UsageError, match=r"resumed.*: qnn \(2, now 3\): start anew"):
        require_same_conditions(guessed, {**now, "qnn": "3"})
    known = msgspec.structs.replace(guessed, devices=(DeviceView("a1", "SM8650", "hardware", "b"),))
    with pytest.raises(UsageError, match=r"device_kind \(hardware, now virtual\): start anew"):
        require_same_conditions(known, now)


@pytest.mark.parametrize(
    ("attempts", "decisive", "missing"),
    [
        ((), 0, True),
        ((INFRA,), 1, True),
        ((INFRA, INFRA), 2, True),
        ((PASSED,), 1, False),
        ((INFRA, FAILED), 2, False),
        # Trouble with the farm takes no verdict back.
        ((FAILED, INFRA), 1, False),
        ((KNOWN, INFRA, INFRA), 1, False),
    ],
)
def test_a_job_is_missing_until_it_is_judged(attempts: tuple[Attempt, ...], decisive: int, missing: bool) -> None:
    seen = JobView(JOB.id, "s", "c", "SM8650", "htp", "8a8w", attempts, decisive_attempt=decisive)
    view = RunView("r", "farm run", 1, None, None, "u", "h", {}, (), (seen,))
    assert missing_jobs(view, [JOB]) == ((JOB,) if missing else ())

"""Selection of a run's jobs: the rules, `-k`, `--resume`, and a run without time for all of its jobs."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from in_process import refusal
from made import job
from stub_home import StubHome, make_stub_home, write_stub_suite

from farm.base.errors import MissingToolError, NothingSelectedError, UsageError
from farm.builds.bundles.reuse import FoundBundle
from farm.dispatch.request import choose
from farm.dispatch.request.choose import narrow
from farm.dispatch.request.keyword import matching
from farm.dispatch.request.records import missing_jobs, require_same_conditions, require_same_runtimes
from farm.dispatch.request.request import RunRequest
from farm.dispatch.request.selection import (
    Budget,
    Cost,
    Shard,
    Version,
    by_value,
    changed,
    costs,
    in_shard,
    parse_shard,
    schedule,
    total_seconds,
)
from farm.results.attempt import Attempt, Stage, Verdict
from farm.store.cluster.records import PlannedJob
from farm.store.records import DeviceView, ExpectedJob, JobView, LastVerdict, RunRecord, RunView
from farm.store.store import Store
from farm.store.values import judged_by
from farm.suites.suite import Job

# Selection of a run's jobs: the rules, and a run without time for all of its jobs.


MAIN = ("run", "--soc", "SM8650", "--virtual", "1")

SUITE = """
[suite]
name = "mine"
description = "two jobs of a stub"
tolerance.8a8w.fp32.sqnr_db = 20.0

[case]
good = { module = "stub:Stub", kwargs.words = "pass 20", inputs = [{ shape = [16] }] }
[case.wrong]
module = "stub:Stub"
kwargs.words = "wrong 20"
inputs = [{ shape = [16] }]
tolerance.8a8w.fp32.sqnr_db = 60.0
"""

# As long as a machine with much else to do may take.
drawn = settings(deadline=None, max_examples=30)
weights = st.dictionaries(st.text("abcdef", min_size=1), st.floats(0, 1e4), max_size=40)


def past(time_ms: int = 1, outcome: str = "passed", key: str = "k", **seconds: float | None) -> ExpectedJob:
    took = {"build_seconds": 2.0, "run_seconds": 1.0, "total_seconds": 3.0, **seconds}
    return ExpectedJob(last=LastVerdict("run", time_ms, outcome, key, "limits"), **took)  # type: ignore[arg-type]


def same(*job_ids: str) -> dict[str, Version]:
    return dict.fromkeys(job_ids, Version("k", "limits"))


@drawn
@given(weights, st.integers(1, 9), st.randoms(use_true_random=False))
def test_every_job_is_in_one_shard_whatever_the_order(seconds: dict[str, float], count: int, random: Random) -> None:
    names = list(seconds)
    random.shuffle(names)
    shuffled = {name: seconds[name] for name in names}
    shards = [in_shard(seconds, Shard(index, count)) for index in range(1, count + 1)]
    assert shards == [in_shard(shuffled, Shard(index, count)) for index in range(1, count + 1)]
    assert sorted(job for shard in shards for job in shard) == sorted(seconds)
    loads = [sum(seconds[job] for job in shard) for shard in shards]
    assert max(loads) - min(loads) <= max(seconds.values(), default=0.0) * (1 + 1e-9)


def test_a_job_that_was_never_judged_takes_the_median_of_the_others() -> None:
    known = {"a": past(total_seconds=1.0), "b": past(total_seconds=5.0), "c": past(total_seconds=2.0)}
    assert total_seconds(["a", "b", "c", "new"], known) == {"a": 1.0, "b": 5.0, "c": 2.0, "new": 2.0}
    nothing = total_seconds([f"j{n}" for n in range(10)], {})
    assert [len(in_shard(nothing, Shard(index, 3))) for index in (1, 2, 3)] == [4, 3, 3]


def test_only_a_shard_as_it_is_shown_is_read() -> None:
    assert str(parse_shard(" 2/8 ")) == "2/8"
    for text in ("3/2", "0/2", "0/0", "a/b", "1", "1/", "-1/2", "1.0/2", "1/2/3", "", "½/2", "²/2"):
        with pytest.raises(UsageError, match="expected I/N"):
            parse_shard(text)


def test_changed_is_another_bundle_other_limits_or_no_verdict() -> None:
    now = {**same("same", "none"), "code": Version("other", "limits"), "limits": Version("k", "others")}
    then = {name: past().last for name in ("same", "code", "limits", "gone")}
    assert changed(now, then) == {"none", "code", "limits"}


def test_the_most_valuable_are_new_or_changed_then_failed_then_longest_not_run() -> None:
    now = {**same("recent", "old", "failed", "known", "new"), "changed": Version("other", "limits")}
    known = {
        "recent": past(9), "old": past(1), "failed": past(8, "failed"), "known": past(5, "known issue"),
        "changed": past(7),
    }  # fmt: skip
    assert by_value(now, known) == ["new", "changed", "failed", "old", "known", "recent"]
    assert by_value(now, known, {"recent", "failed"}) == ["failed", "recent", "new", "changed", "old", "known"]
    assert by_value(same("b", "a"), {}) == ["b", "a"]


def test_what_is_not_known_of_a_job_is_the_median_and_a_bundle_that_is_there_costs_nothing() -> None:
    jobs = [PlannedJob(job(name), name, cached=name == "a") for name in ("a", "b", "new")]
    seconds = [past(build_seconds=4.0, run_seconds=1.0), past(build_seconds=None, run_seconds=3.0)]
    known = {one.job.id: took for one, took in zip(jobs, seconds, strict=False)}
    assert [(cost.build, cost.run) for cost in costs(jobs, known)] == [(0.0, 1.0), (4.0, 3.0), (4.0, 2.0)]
    assert [(cost.build, cost.run) for cost in costs(jobs, {})] == [(0, 0)] * 3


def cost(job_id: str, build: float, run: float, soc: str = "S", bundle: str = "") -> Cost:
    return Cost(job_id=job_id, soc=soc, bundle=bundle or job_id, build=build, run=run)


def test_a_device_takes_what_is_compiled_while_the_more_valuable_is_being_compiled() -> None:
    ordered = [cost("new", 5, 1), cost("also new", 5, 1), cost("there", 0, 2), cost("there too", 0, 2)]
    assert schedule(ordered, devices={"S": 1}, builders=1) == {"there": 2, "there too": 4, "new": 6, "also new": 11}
    assert list(schedule(ordered, devices={"S": 1}, builders=2)) == ["there", "there too", "new", "also new"]
    assert schedule(ordered, devices={"S": 2}, builders=2)["also new"] == 6


def test_jobs_with_one_bundle_are_compiled_once_and_socs_do_not_wait_for_each_other() -> None:
    ordered = [cost("a", 5, 1, bundle="k"), cost("b", 5, 1, bundle="k"), cost("c", 0, 1, "T"), cost("d", 0, 1, "none")]
    assert schedule(ordered, devices={"S": 1, "T": 1}, builders=1) == {"c": 1, "a": 6, "b": 7}


jobs = st.lists(st.tuples(st.floats(0, 50), st.floats(0, 50), st.sampled_from("ST")), max_size=30)


@drawn
@given(jobs, st.integers(1, 3), st.integers(1, 3))
def test_jobs_wait_for_compile_and_device(works: list[tuple[float, float, str]], devices: int, builders: int) -> None:
    ordered = [cost(f"j{n}", build, run, soc) for n, (build, run, soc) in enumerate(works)]
    ends = schedule(ordered, devices={"S": devices, "T": devices}, builders=builders)
    assert ends.keys() == {one.job_id for one in ordered}
    assert all(ends[one.job_id] >= one.build + one.run - 1e-9 for one in ordered)
    # No device does two things at once.
    for soc in "ST":
        work = sum(one.run for one in ordered if one.soc == soc)
        last = max((ends[one.job_id] for one in ordered if one.soc == soc), default=0.0)
        assert work <= devices * last + 1e-6


def planned(name: str) -> PlannedJob:
    return PlannedJob(job(name), name, cached=True)


@drawn
@given(st.lists(st.floats(1, 100), max_size=20), st.integers(1, 3), st.floats(1, 10), st.floats(1, 10))
def test_more_time_has_all_that_less_time_had(seconds: list[float], devices: int, less: float, more: float) -> None:
    every = [planned(f"c{n}") for n in range(len(seconds))]
    known = {one.job.id: past(n, run_seconds=took) for n, (one, took) in enumerate(zip(every, seconds, strict=True))}
    # Each job fits into the budget by itself: a job that does not fit would make room for others.
    budgets = [Budget(max(seconds, default=0.0) + 1 + 10 * extra) for extra in sorted((less, less + more))]
    small, large = (
        {one.job.id for one in budget.cut(every, known, devices={"SM8650": devices}, builders=1)[0]}
        for budget in budgets
    )
    assert small <= large


def test_what_does_not_fit_is_skipped_with_what_was_known_of_it() -> None:
    every = [planned(name) for name in ("old", "recent", "endless", "new")]
    took = {"old": 3000.0, "recent": 3000.0, "endless": 90_000.0}
    known = {one.job.id: past(n + 1, run_seconds=took[one.job.case.name]) for n, one in enumerate(every[:3])}

    fitting, skipped = Budget(7200).cut(every, known, devices={"SM8650": 1}, builders=1)

    # No job has the bundle or the limits of its last verdict, so that all are changed; `new` was never run.
    assert [one.job.case.name for one in fitting] == ["new", "old"]
    reasons = {job_id.partition("/")[2].partition("[")[0]: one for job_id, one in skipped.items()}
    assert reasons["recent"].reason == "did not fit into the budget of 2 h 00 min"
    assert (reasons["recent"].last_ms, reasons["recent"].last_outcome) == (2, "passed")
    assert reasons["endless"].reason == "takes about 25 h 00 min, more than the rest of the budget of 2 h 00 min"
    none, all_of_them = Budget(0.0).cut(every, known, devices={"SM8650": 1}, builders=1)
    assert none == []
    assert "was over before anything could begin" in all_of_them[every[0].job.id].reason


@pytest.mark.parametrize("kind", ["virtual", "hardware"])
def test_another_runner_or_library_changes_every_job(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The verdict of a run holds for what executed it: the key of a bundle has no file of the device."""
    one = job()
    device = DeviceView("a1", "SM8650", kind, "b", runtime={"runner": "r1", "qnn": "2.51", "soc_reported": "SM8650P"})
    seen = JobView(one.id, "s", "c", "SM8650", "htp", "8a8w", ())
    had = {"device_kind": kind, "native_runner": "r1"}
    view = RunView("before", "farm run", 1, 2, 0, "u", "h", had, (device,), (seen,))
    verdict = LastVerdict("before", 1, "passed", "key", judged_by(one))
    runs = SimpleNamespace(resolve=lambda ref: ref, view=lambda _: view, verdicts=lambda _: {one.id: verdict})
    find_bundles = "farm.dispatch.request.choose.find_bundles_for"
    monkeypatch.setattr(find_bundles, lambda jobs, *_: {job.id: FoundBundle("key", True) for job in jobs})
    request = RunRequest(socs=("SM8650",), suites=("s",), changed_since="before")

    def left(runner: str) -> tuple[Job, ...]:
        def attached(*_: object, linux: bool) -> SimpleNamespace:
            if linux:
                raise MissingToolError("no files for Linux")
            return SimpleNamespace(versions={"runner": runner, "qnn": "2.51"})

        monkeypatch.setattr("farm.dispatch.request.choose.attached_runtime", attached)
        # The host's own runner is no part of an attached device.
        facts = {"native_runner": runner if kind == "virtual" else "another"}
        tools: Any = SimpleNamespace(versions={}, fingerprint=lambda _: facts)
        store: Any = SimpleNamespace(runs=runs)
        config: Any = SimpleNamespace(cache_dir=Path("cache"))
        monkeypatch.setattr("farm.builds.toolchains.selection.prepare", lambda *_, **__: tools)
        monkeypatch.setattr("farm.builds.toolchains.selection.branch_of", lambda _: "")
        return narrow(config, request, (one,), store, lambda: kind)

    assert left("r2") == (one,)
    with pytest.raises(NothingSelectedError, match="no job has changed since run before"):
        left("r1")


def test_nothing_begins_any_more_when_the_time_is_over() -> None:
    stopped = threading.Event()
    budget = Budget(0.0)
    with budget.watched(stopped.set):
        assert stopped.wait(30)
    assert budget.is_over
    assert budget.unbegun(["j"], {})["j"].reason.startswith("had not begun when the budget of")
    endless = Budget(None)
    with endless.watched(stopped.clear):
        assert stopped.is_set()
    assert not endless.is_over


@pytest.fixture
def stub_home(tmp_path: Path) -> StubHome:
    return make_stub_home(tmp_path / "stub")


@pytest.mark.whole
def test_selecting_by_what_was_run_before(stub_home: StubHome) -> None:
    home = stub_home
    folder = home.cwd / "mine"
    folder.mkdir()
    manifest = folder / "suite.toml"
    manifest.write_text(SUITE)
    mine = (*MAIN, "--suite", "./mine")

    def listed(*selection: str) -> list[str]:
        done = home.farm(*mine, "--collect-only", *selection)
        assert done.returncode in (0, 5), done.stderr
        return [job.partition("/")[2].partition("[")[0] for job in done.stdout.splitlines()]

    run_id = home.json(*mine, "--budget", "1h30m", timeout_s=300, code=1)["id"]
    assert listed("--lf") == ["wrong"]
    assert listed("--changed-since", run_id) == []
    assert sorted(listed("--shard", "1/2") + listed("--shard", "2/2")) == ["good", "wrong"]

    # Limits are no part of a bundle, but a change of them selects the job.
    manifest.write_text(SUITE.replace("sqnr_db = 20.0", "sqnr_db = 21.0"))
    assert listed("--changed-since", run_id) == ["good"]
    manifest.write_text(SUITE)

    # A job skipped for lack of time is no failure and no success, and leaves earlier results in place.
    view = home.json(*mine, "--ff", "--budget", "0.001s", timeout_s=300, code=5)
    assert (view["exit_code"], view["summary"]["counts"]["skipped"]) == (5, 2)
    skipped = [(job["attempts"], job["skipped"]["last_run_id"], job["skipped"]["last_outcome"]) for job in view["jobs"]]
    assert skipped == [([], run_id, "passed"), ([], run_id, "failed")]
    assert listed("--lf") == ["wrong"]

    # The report lists skipped jobs later, and a resumed run executes them, failed ones first.
    assert "2 SKIPPED" in home.farm("report", view["id"], "--junitxml", "j.xml").stdout
    assert (home.cwd / "j.xml").read_text().count('type="skipped"') == 2
    resumed = home.farm("run", "--resume", view["id"], "--budget", "1h", timeout_s=300, code=1)
    assert "[1/2] FAILED mine/wrong" in resumed.stderr
    assert "1 passed, 1 failed" in resumed.stdout
    assert "SKIPPED" not in resumed.stdout


@pytest.mark.whole
def test_what_has_not_begun_when_the_time_is_over_is_skipped(stub_home: StubHome) -> None:
    write_stub_suite(stub_home, "mine", {"good": 20, "slow": 20}, {"slow": 600.0})

    # The long budget is for a machine that does much else.
    for budget in ("10s", "90s"):
        view = stub_home.json(*MAIN, "--suite", "./mine", "--budget", budget, timeout_s=300, code=None)
        if view["summary"]["outcomes"]["mine/good[SM8650-htp-8a8w]"] == "passed":
            break

    assert view["exit_code"] == 0
    assert view["summary"]["outcomes"] == {
        "mine/good[SM8650-htp-8a8w]": "passed",
        "mine/slow[SM8650-htp-8a8w]": "skipped",
    }
    assert view["summary"]["tone"] == "skipped"
    assert "1 passed, 0 failed, 0 known issues, 0 infra, 1 SKIPPED" in view["summary"]["verdict_line"]


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("--shard", "a/b"), 2, "--shard a/b: expected I/N"),
        (("--shard", "9/9"), 5, "the 8 jobs are all in other shards"),
        (("--budget", "1h30"), 2, "'1h30': expected a time of at most 30 days, such as 90s"),
        (("--budget", "2h", "--collect-only"), 2, "leave --budget out to list the jobs"),
        (("--toolchain", "1.5.0", "--toolchain", "1.5.1", "--collect-only"), 2, "leave a second --toolchain out"),
        (("--changed-since", "latest"), 2, "has no run yet"),
        (("--changed-since", "latest~1", "--shard", "1/2"), 2, "with --shard, name the run by its id"),
    ],
)
def test_bad_input_is_one_line(arguments: tuple[str, ...], code: int, says: str) -> None:
    refused_code, said = refusal(*MAIN, "--suite", "smoke", *arguments)
    assert (refused_code, says in said, "\n" in said) == (code, True, False), said


def test_a_run_of_another_soc_is_nothing_to_compare_with(store: Store) -> None:
    for kind, reason in (
        ("virtual", "was smoke for SM8850 on htp, this one is smoke for SM8650 on htp"),
        ("hardware", "was on hardware, this one is for virtual devices"),
    ):
        run_id = store.begin_run(RunRecord("farm run", "ada", "bench", {"device_kind": kind}))
        store.plan_jobs(run_id, [job("conv2d", "SM8850", suite="smoke")])
        code, said = refusal(*MAIN, "--suite", "smoke", "--changed-since", run_id)
        assert (code, f"run {run_id} {reason}" in said) == (2, True), said


# Selection of jobs by `-k`.


JOBS = [
    "smoke/add[SM8650-htp-8a8w]",
    "smoke/conv2d[SM8650-htp-8a8w]",
    "smoke/conv2d[SM8550-htp-fp16]",
    "smoke/Softmax_large[SM8650-htp-8a8w]",
]


@pytest.mark.parametrize(
    ("expression", "numbers"),
    [
        ("add", [0]),
        ("conv2d", [1, 2]),
        ("conv2d and 8550", [2]),
        ("not conv2d", [0, 3]),
        ("add or (conv2d and fp16)", [0, 2]),
        # pytest does not distinguish capitals.
        ("SOFTMAX", [3]),
        ("smoke", [0, 1, 2, 3]),
        ("nothing_of_that_name", []),
        # Names of pytest's own, and of the folder of its session.
        ("jobs", []),
        ("farm-select", []),
    ],
)
def test_an_expression_selects_jobs_by_their_ids_in_their_order(expression: str, numbers: list[int]) -> None:
    assert matching(JOBS, expression) == [JOBS[number] for number in numbers]


def test_one_word_selects_what_pytest_would_select_without_its_import() -> None:
    jobs = [*JOBS, "mine/ü_None[SM8650-htp-fp16]"]
    selected = {}
    for word in ("add", "CONV2D", "softmax_", "8550", "and8a8w", "None", "nothing", "jobs", "ü", "fp16"):
        request = RunRequest(socs=("SM8650",), suites=("smoke",), keyword=word)
        selected[word] = []
        with contextlib.suppress(NothingSelectedError):
            selected[word] = [job.id for job in choose._select(request, [SimpleNamespace(id=one) for one in jobs])]
    assert selected == {word: matching(jobs, word) for word in selected}


@pytest.mark.parametrize("expression", ["(", "add or", "and", "a b"])
def test_an_invalid_expression_is_named(capfd: pytest.CaptureFixture[str], expression: str) -> None:
    with pytest.raises(UsageError) as refused:
        matching(JOBS, expression)
    assert str(refused.value).startswith(f"pytest does not understand -k {expression}: at column ")
    assert "\n" not in str(refused.value)
    assert capfd.readouterr() == ("", "")


def test_settings_and_files_of_the_user_have_no_effect_and_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --no-such-option\npython_files = *\n")
    (tmp_path / "conftest.py").write_text("raise SystemExit('the conftest of the user')\n")
    (tmp_path / "knows.py").write_text("raise SystemExit('the plugin of the user')\n")
    (tmp_path / "test_mine.py").write_text("def test_add(): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTEST_ADDOPTS", "--deselect=smoke --no-such-option")
    monkeypatch.setenv("PYTEST_PLUGINS", "knows")
    monkeypatch.delenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", raising=False)
    before = sorted(tmp_path.iterdir()), dict(os.environ)
    assert matching(JOBS, "add or nothing") == [JOBS[0]]
    assert capfd.readouterr() == ("", "")
    assert (sorted(tmp_path.iterdir()), dict(os.environ)) == before


def test_thousands_of_jobs_with_odd_names_are_selected() -> None:
    jobs = [f"suite/case-{number}::a b[SM8650-htp-{'ü' if number % 2 else '8a8w'}]" for number in range(3_000)]
    expected = [job for job in jobs if "8a8w" in job and not job.startswith("suite/case-2")]
    assert matching(jobs, "8a8w and not case-2") == expected


# Choice of jobs by `--resume`: the undecided jobs of a run.


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

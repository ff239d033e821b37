"""Runs of several toolchains in one store: each branch has its own history, and a private run belongs to none."""

from __future__ import annotations

import json
import random
import sqlite3
from pathlib import Path
from typing import Any

import msgspec
import pytest
from old_store import make_old_store, snapshot
from sqlalchemy import text

from farm.base.config.runs import Rules
from farm.base.errors import StoreError, UnknownNameError, UsageError
from farm.dispatch.history_comparison import record_comparison
from farm.numbers.regressions.baseline import accept, levels
from farm.report.model.history import drift_of
from farm.report.model.status import read_status
from farm.results.analysis.history import Reliability
from farm.results.attempt import Verdict
from farm.store.records import BuildRecord, RunCommit, RunRecord, RunToolchain, SkipReason
from farm.store.schema import REVISION
from farm.store.store import Store, open_store
from farm.store.transfer.runs import LineFile, import_runs, runs_in
from farm.store.values import COMMITS_LIMIT
from farm.suites.suite import Job

from . import make

Result = tuple[Job, Verdict, float]
P, F = Verdict.PASSED, Verdict.FAILED
MAIN = RunToolchain("main", "main", commit="a" * 40)
MINE = RunToolchain("/home/ada/executorch", "main", private=True, commit="a" * 40, dirty=True)


def night(store: Store, days: float, toolchain: RunToolchain, *results: Result, key: str = "", **more: Any) -> str:
    """Record a run of days ago with verdicts and latencies in ms of jobs, and look back from it as `farm run` does."""
    bundle = key or f"{toolchain.branch}{toolchain.private}".encode().hex().ljust(64, "0")

    def fields(value: float) -> dict[str, Any]:
        samples = tuple(value * 1e6 * share for share in (0.99, 1.0, 1.01))
        measured = (make.latency(*samples), make.counter(round(1000 * value)))
        return {"measurements": measured, "bundle_key": bundle, "seconds": value}

    more = {"kind": "hardware", "user": "ci", "priority": "nightly", "commit": toolchain.commit, **more}
    found = [(job, verdict, fields(value)) for job, verdict, value in results]
    run_id = make.run(store, 24 * days, *found, toolchain=toolchain, **more)
    for job, _, value in results:
        store.record_builds(
            run_id, [BuildRecord(job.id, seconds=3 * value, cached=False, bundle_key=bundle, program="c" * 64)]
        )
    record_comparison(store, run_id)
    return run_id


def quiet(store: Store, toolchain: RunToolchain, job: Job, level: float, first: float) -> list[str]:
    """Record ten nightly runs on a level."""
    return [night(store, first - n, toolchain, (job, P, level)) for n in range(10)]


def test_two_branches_are_two_histories(store: Store) -> None:
    job = make.job("conv")
    default = quiet(store, RunToolchain(), job, 1.0, 30)
    main = quiet(store, MAIN, job, 2.0, 29.5)
    # Twice as long as the runs right before it, and as ever in its branch.
    assert store.alerts.of_run(main[-1]) == store.alerts.of_run(default[-1]) == []

    assert {point.run_id for point in store.history.points(job.id)} == set(default)
    assert {point.run_id for point in store.history.points(job.id, branch="main")} == set(main)
    assert {point.run_id for point in store.history.points(job.id, branch=None)} == {*default, *main}
    assert [(one.metric, one.median) for one in levels(store, job.id, None, ["latency"])] == [("latency", 1e6)]
    [level] = levels(store, job.id, None, ["latency"], "main")
    assert (level.median, level.runs, level.enough) == (2e6, 10, True)

    assert store.status.run_to_show() == default[-1]
    assert store.status.run_to_show("main") == main[-1]
    assert store.runs.resolve("latest", own=False) == main[-1]
    assert store.runs.resolve("latest@default") == default[-1]
    assert store.runs.resolve("latest~1@main") == main[-2]
    with pytest.raises(UnknownNameError, match=r"mian.*main"):
        store.runs.resolve("latest@mian")
    with pytest.raises(UsageError, match="latest~10@main: branch main has 10 runs"):
        store.runs.resolve("latest~10@main")

    assert store.status.of_run(main[-1]).jobs[0].before.run_id == main[-2]  # type: ignore[union-attr]
    trend = store.history.background(main[-1]).trends[job.id][0]
    assert [point.run_id for point in trend.points] == main
    [found] = store.status.job_results([job.id], branch="main")
    assert found.result.run_id == main[-1]
    assert store.selection.expected([job.id], "hardware")[job.id].run_seconds == 1.0
    assert store.selection.expected([job.id], "hardware", "main")[job.id].run_seconds == 2.0
    # A branch without a verdict takes durations of others, and no verdict.
    found = store.selection.expected([job.id], "hardware", "release")[job.id]
    assert (found.run_seconds, found.build_seconds) == (2.0, 6.0)
    assert (found.last.outcome, found.last.run_id, found.last.bundle_key) == ("", "", "")


def test_commits_of_a_branch_are_one_series_and_a_regression_is_of_the_branch(store: Store) -> None:
    job = make.job("conv")
    replace = msgspec.structs.replace
    runs = [night(store, 20 - n, replace(MAIN, commit=f"{n:040x}"), (job, P, 1.0)) for n in range(9)]
    for branch in ("", "release"):
        night(store, 5, RunToolchain(branch, branch), (job, P, 3.0))
    worse = night(store, 1, replace(MAIN, commit="f" * 40), (job, P, 1.5))
    found = {one.metric: one for one in store.alerts.of_run(worse)}
    assert found["latency"].last_good == runs[0]
    assert found["pte_size"].branch == "main"
    assert [one.metric for one in store.alerts.open(branch="main")] == ["pte_size"]
    assert store.alerts.open(branch="") == store.alerts.open(branch="release") == []
    assert [one.metric for one in read_status(store, branch="main").regressions] == ["pte_size"]
    assert read_status(store, branch="default").regressions == ()
    assert [one.metric for one in read_status(store).regressions] == ["pte_size"], "a night is that of all lines"

    # A user accepts the change, for this branch alone.
    done = accept(store, job.id, None, (), None, user="ada", note="a better rounding", branch="main")
    assert {one.metric for one in done} == {"latency", "pte_size"}
    assert store.alerts.open() == []
    with pytest.raises(UsageError, match=f"run {worse} is of branch main: name it with --branch main"):
        accept(store, job.id, None, (), worse, user="ada", note="x")


def test_a_job_that_is_flaky_in_one_branch_is_steady_in_another(sqlite_store: Store) -> None:
    store, job = sqlite_store, make.job("conv")
    for n in range(8):
        night(store, 20 - n, RunToolchain(), (job, P, 1.0), key="b" * 64)
        night(store, 19.5 - n, MAIN, (job, (P, F)[n % 2], 1.0), key="b" * 64)
    reliability = store.history.reliability
    assert reliability([job.id], "hardware")[job.id].reliability is Reliability.STEADY
    assert reliability([job.id], "hardware", branch="main")[job.id].reliability is Reliability.NEWLY_FLAKY


def test_a_private_run_is_compared_with_its_branch_and_raises_no_alert(store: Store) -> None:
    job = make.job("conv")
    main = quiet(store, MAIN, job, 1.0, 20)
    mine = night(store, 1, MINE, (job, P, 1.5), user="ada", priority="person")
    comparison = record_comparison(store, mine)
    assert comparison.summary_lines() == [
        f"1 deterministic metric changed: 'farm report {mine}' shows what got worse",
        f"1 number looks different from its branch: 'farm perf confirm --run {mine}' measures again",
    ]
    found = {one.metric: one for one in store.alerts.of_run(mine)}
    assert found["pte_size"].last_good == main[-1]
    assert found["pte_size"].private is True
    assert store.alerts.open() == store.alerts.open(branch="main") == []
    assert [point.run_id for point in store.history.background(mine).trends[job.id][0].points] == [*main, mine]
    assert store.status.of_run(mine).jobs[0].before.run_id == main[-1]  # type: ignore[union-attr]
    with pytest.raises(UsageError, match=f"run {mine} was only compared with branch main"):
        accept(store, job.id, None, (), mine, user="ada", note="x", branch="main")
    # A job's last failure in a local run is reported to the user of that run alone.
    night(store, 0.5, MINE, (job, F, 1.5), user="ada")
    failed_last = store.selection.failed_last
    assert failed_last([job.id], "hardware", "ada", "main", private=True) == {job.id}
    assert failed_last([job.id], "hardware", "ada", "main") == set()


def answers(store: Store, jobs: list[Job], branch: str, runs: list[str]) -> dict[str, Any]:
    """Return all that can be asked about a branch."""
    names = [job.id for job in jobs]
    history, alerts, selection, status = store.history, store.alerts, store.selection, store.status
    found = {
        "status": read_status(store, branch=branch or "default"),
        "points": history.points("*", limit=100, branch=branch),
        "pasts": [msgspec.to_builtins(past) for past in history.pasts_of_jobs("*", branch=branch)],
        "levels": levels(store, "*", None, (), branch),
        "reliability": history.reliability(names, "hardware", branch=branch),
        "red": history.reliability(names, "hardware", runs[-1], failed_of_late=True, branch=branch),
        "open": alerts.open(branch=branch),
        "steps": alerts.of_jobs(names, branch),
        "expected": selection.expected(names, "hardware", branch),
        "failed": sorted(selection.failed_last(names, "hardware", "ci", branch)),
        "results": status.job_results(names, branch=branch),
        "shown": (status.run_to_show(branch), status.unfinished_runs(branch)),
        "latest": store.runs.resolve(f"latest@{branch or 'default'}"),
        "runs": [(store.runs.view(run), status.of_run(run), history.background(run)) for run in runs],
        "pasts of runs": [history.pasts_of_run(run) for run in runs],
        "drift": drift_of([], store.browse.on_device("virtual-1", "hardware", 1000)),
        "kept": {run: why for run, why in store.pruning.decide(Rules(1, None, 3, 2)).items() if run in runs},
    }
    # NaN is not equal to itself; its text is.
    return {name: repr(dict(sorted(one.items())) if isinstance(one, dict) else one) for name, one in found.items()}


@pytest.mark.parametrize("seed", range(2))
def test_a_private_run_changes_no_answer_about_its_branch(sqlite_store: Store, seed: int) -> None:
    draw, store = random.Random(seed), sqlite_store
    jobs = [make.job(name, precision, suite="mine") for name in ("conv", "pad") for precision in ("8a8w", "16a4w")]

    def results(scale: float = 1.0) -> list[Result]:
        chosen = draw.sample(jobs, draw.randint(1, len(jobs)))
        verdicts = (P, P, F, Verdict.INFRA)
        return [(job, draw.choice(verdicts), scale * draw.uniform(1.0, 1.02)) for job in chosen]

    branches = {"": RunToolchain(), "main": MAIN}
    runs: dict[str, list[str]] = {"": [], "main": []}
    for n in range(12):
        for branch, toolchain in branches.items():
            finished = n < 11 or branch == ""
            runs[branch].append(night(store, 12 - n, toolchain, *results(1 + (n > 8)), finished=finished))
    before = {branch: answers(store, jobs, branch, runs[branch]) for branch in branches}

    other = make.job("softmax", suite="mine")
    for n in range(6):
        mine = RunToolchain("mine", draw.choice(["", "main"]), private=True, commit="d" * 40, dirty=bool(n % 2))
        more = [(other, F, 9.0)] * (n % 2)
        user, priority = draw.choice([("ci", "nightly"), ("ada", "person")])
        found, days = results(draw.choice([0.5, 3.0])), draw.choice([0.01, 0.2, 5.5, 30])
        run_id = night(store, days, mine, *found, *more, user=user, priority=priority, finished=n > 0)
        assert store.runs.view(run_id).toolchain == mine
    for branch, was in before.items():
        now = answers(store, jobs, branch, runs[branch])
        assert [name for name in was if was[name] != now[name]] == []


def test_the_toolchain_of_a_run_is_kept_and_bounded(sqlite_store: Store) -> None:
    store = sqlite_store
    since = tuple(RunCommit(f"{n:040x}", f"Fix \0 pad {n}" + "x" * 300) for n in range(COMMITS_LIMIT + 7))
    whole = RunToolchain(
        "main", "main", commit="a" * 40, git_branch="main", subject="Fix pad", committed_ms=5, since=since, more=2,
        commit_url="https://git.example/c/{commit}",
    )  # fmt: skip
    run_id = night(store, 1, whole, (make.job(), P, 1.0))
    view = store.runs.view(run_id)
    kept = view.toolchain
    assert kept
    assert (kept.commit, kept.git_branch, kept.subject, kept.committed_ms) == ("a" * 40, "main", "Fix pad", 5)
    assert (len(kept.since), kept.more) == (COMMITS_LIMIT, 9)
    assert "\0" not in kept.since[0].subject
    assert len(kept.since[0].subject) <= 256
    assert view.jobs[0].program == "c" * 64
    assert store.status.newest_toolchain("main") == kept
    assert store.status.newest_toolchain("") == RunToolchain()


def test_where_only_named_branches_have_runs_the_newest_is_shown(store: Store) -> None:
    assert store.status.branch_to_show(None) == ""
    job = make.job("conv")
    night(store, 9, RunToolchain("1.5.0", "1.5.0"), (job, P, 1.0))
    night(store, 2, MAIN, (job, P, 1.0))
    night(store, 1, msgspec.structs.replace(MINE, branch=""), (job, P, 1.0))
    assert store.status.branch_to_show(None) == "main"
    assert read_status(store).branch == "main"
    assert store.status.branches() == ["1.5.0", "main"]
    assert store.status.branch_to_show("1.5.0") == "1.5.0"
    assert store.status.branch_to_show("default") == ""
    with pytest.raises(UnknownNameError, match=r"'1.5.1'.*1\.5\.0"):
        store.status.branch_to_show("1.5.1")
    night(store, 20, RunToolchain(), (job, P, 1.0))
    assert store.status.branch_to_show(None) == ""


def test_an_older_store_is_of_the_default_branch_and_an_older_farm_goes_on_recording(empty_address: str) -> None:
    old = make_old_store(empty_address)
    with open_store(empty_address) as store:
        assert store.status.branches() == [""]
        assert all(not store.runs.view(row[0]).toolchain for row in old["run"][1:])
        # An older farm that has the store open names none of the new columns.
        columns = [name for name in old["run"][0] if name != "id"]
        listed = ", ".join(columns)
        insert = f"INSERT INTO run (id, {listed}) SELECT '20260101-000000-dddddd', {listed} FROM run WHERE id = :id"  # noqa: S608
        store._database.write(lambda connection: connection.execute(text(insert), {"id": old["run"][1][0]}))
        assert store.runs.branch("20260101-000000-dddddd") == ("", False)
        assert store.status.branches() == [""]
    assert set(snapshot(empty_address, like=old)["run"]) > set(old["run"])


def test_an_older_farm_refuses_the_newer_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address = tmp_path / "farm.db"
    open_store(address).close()
    monkeypatch.setattr("farm.store.database.REVISIONS", ["0015", "0016"])
    monkeypatch.setattr("farm.store.database.REVISION", "0016")
    with pytest.raises(StoreError, match="newer"):
        open_store(address)
    with sqlite3.connect(address) as connection:
        assert connection.execute("SELECT version_num FROM farm_schema").fetchone() == (REVISION,)


def older(exported: bytes) -> bytes:
    """Return an export in layout 3, with the older names of members."""
    names = {"nightly_run": "night", "skipped": "stale"}
    of_toolchain = {"branch": "line", "git_branch": "branch"}
    rows = []
    for line in exported.splitlines():
        row = {names.get(name, name): value for name, value in json.loads(line).items()}
        if "toolchain" in row:
            row["toolchain"] = {of_toolchain.get(name, name): value for name, value in row["toolchain"].items()}
        rows.append({**row, "layout": 3} if row["kind"] == "farm-export" else row)
    return b"".join(json.dumps(row, separators=(",", ":")).encode() + b"\n" for row in rows)


def test_branches_go_into_another_store_also_from_an_export_with_older_names(
    sqlite_store: Store, tmp_path: Path
) -> None:
    job = make.job("conv")
    cell = RunRecord(
        "farm run", "ci", "bench", {}, 1_790_000_000_000, name="ci/8650", nightly_run="20260921-130000-abcdef"
    )
    plain = sqlite_store.begin_run(cell)
    sqlite_store.plan_jobs(plain, [job])
    since = (RunCommit("e" * 40, "Fix pad"),)
    toolchain = msgspec.structs.replace(MINE, git_branch="fix-pad", since=since)
    mine = night(sqlite_store, 3, toolchain, (job, P, 1.0))
    sqlite_store.mark_skipped(plain, {job.id: SkipReason("no time was left: --budget 90m")})
    exported = b"".join(sqlite_store.transfer.export([plain, mine]))
    old = older(exported)
    assert all(part in old for part in (b'"line":"main"', b'"branch":"fix-pad"', b'"night":"2026', b'"stale":{'))
    with open_store(tmp_path / "other.db") as other:
        # The second file has exports of both layouts, one after the other.
        for expected, content in ((2, old), (0, exported + old)):
            (tmp_path / "runs.jsonl").write_bytes(content)
            with LineFile(str(tmp_path / "runs.jsonl")) as lines:
                assert len(import_runs(other.transfer, runs_in([lines]))[0]) == expected
        assert other.runs.view(mine) == sqlite_store.runs.view(mine)
        assert other.runs.view(mine).toolchain.since == since  # type: ignore[union-attr]
        assert other.history.points(job.id, branch="main") == []
        assert b"".join(other.transfer.export([plain, mine])) == exported

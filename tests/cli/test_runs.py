"""Nightly and local runs: lists, names, runs that never began, removal and `farm runs prune`."""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Sequence
from typing import Any

import pytest
from farm_home import FarmHome
from log_lines import LogLines
from made_runs import FACTS, HOUR_MS, attempt_of, made_job, measured, record_run
from sqlalchemy import update

from farm.base.config.settings import load_config
from farm.base.errors import UsageError
from farm.builds.toolchains.toolchain import Compiler, Toolchain
from farm.dispatch.history_comparison import record_comparison
from farm.dispatch.request.records import in_progress, run_record
from farm.results.attempt import Verdict
from farm.serve.pages.status import StatusQuery, status_page
from farm.serve.render import Address, html_of
from farm.store import schema
from farm.store.artifacts import GRACE_S, ArtifactStore
from farm.store.records import ArtifactRecord, RunToolchain
from farm.store.rows import now_ms
from farm.store.store import Store, open_store

# Nightly and local runs: the morning's pages, names of runs, runs that never began, `farm runs list` and `delete`.


def record(
    store: Store,
    hours: float,
    verdicts: Sequence[Verdict] = (),
    *,
    purpose: str = "nightly",
    size: float = 1000.0,
    branch: str = "",
    **more: Any,
) -> str:
    """Record a run of `hours` ago that ended; without verdicts it found no device."""
    return record_run(
        store,
        JOBS,
        verdicts,
        started_ms=round(now_ms() - hours * HOUR_MS),
        attempt={"measurements": (measured("pte_size", size, "bytes", exact=True),)},
        exit_code=4 if not verdicts else int(Verdict.FAILED in verdicts),
        priority="nightly" if purpose == "nightly" else "person",
        toolchain=RunToolchain(branch, branch, private=purpose == "local"),
        fingerprint={**FACTS, "device_kind": "hardware"},
        **more,
    )


JOBS = tuple(made_job(case) for case in ("add", "conv", "relu", "softmax"))
GREEN = (Verdict.PASSED,) * len(JOBS)
RED = (Verdict.FAILED,) * len(JOBS)


def test_a_nightly_run_is_red_where_its_first_cell_was(home: FarmHome, store: Store) -> None:
    with store:
        record(store, 26, (Verdict.PASSED, *RED[1:]), name="phones/htp", nightly_run="n1")
        red = record(store, 3, RED, name="phones/htp", nightly_run="n2")
        green = record(store, 2, GREEN, name="phones/cpu", nightly_run="n2")
        absent = record(store, 1, name="phones/gpu", nightly_run="n2")
        tried = record(store, 0.5, GREEN, purpose="local", name="mine")
        html = html_of(status_page(store, StatusQuery()), None, Address("/", {}))
    shown = home.farm("status").stdout
    lines = shown.splitlines()
    assert lines[0] == "the nightly run: 3 runs, 8 jobs: 4 failed, 4 passed"
    heads = [line for line in lines if line.startswith("2")]
    assert [head.split(":")[0] for head in heads] == [red, absent, green]
    assert heads[1].endswith("NEVER BEGAN")
    assert max(map(len, lines)) <= 80
    assert {"NEW FAILURES: 1", "STILL FAILING: 3"} <= set(lines)
    assert tried not in shown
    triage = home.farm("alerts", "list").stdout
    assert f"RED in {red} phones/htp: 4" in triage
    assert "NEVER BEGAN: 1" in triage
    assert "8 jobs: 4 failed, 4 passed" in html
    assert html.index(f'/runs/{red}"') < html.index(f'/runs/{green}"')


def test_cells_of_other_lines_and_nightly_runs_of_cron_are_of_the_nightly_run(home: FarmHome, store: Store) -> None:
    with store:
        before = record(store, 25, RED, command="farm run --suite a --nightly")
        red = record(store, 2, RED, branch="main", command="farm run --suite a --nightly --toolchain main")
        again = record(store, 3, RED, command="farm run --suite b --nightly")
        fine = record(store, 1, GREEN, command="farm run --suite b --nightly")
    runs = home.json("status")["status"]["runs"]
    assert [one["run"]["run_id"] for one in runs] == [red, fine]
    assert not {before, again} & {one["run"]["run_id"] for one in runs}
    of_branch = home.json("status", "--branch", "main")["status"]["runs"]
    assert [one["run"]["run_id"] for one in of_branch] == [red]


def test_a_local_run_is_compared_and_shown_beside_the_history(home: FarmHome, store: Store) -> None:
    with store:
        nightly_runs = [record(store, 24 * days, GREEN) for days in (3, 2, 1)]
        mine = record(store, 0.5, GREEN, size=2000.0, purpose="local")
        assert len(record_comparison(store, mine).judged.exact) == len(JOBS)
        assert store.alerts.open() == []
    found = home.json("history", "s/relu")
    points = {point["run_id"]: point.get("local", False) for point in found["points"]}
    assert points == {**dict.fromkeys(nightly_runs, False), mine: True}
    assert [one["record"]["tries"] for one in found["reliability"]] == [3]
    assert "passed, local run" in home.farm("history", "s/relu").stdout
    plain = home.json("history", "s/relu", "--no-local")["points"]
    assert {point["run_id"] for point in plain} == set(nightly_runs)
    own = home.farm("status", mine).stdout
    assert "compared with the default branch and not part of its history" in own


def test_who_never_runs_a_nightly_run_sees_what_local_runs_did(home: FarmHome, store: Store) -> None:
    with store:
        record(store, 2, GREEN, purpose="local")
        mine = record(store, 1, GREEN, purpose="local")
        record(store, 0.5, GREEN, purpose="local", user="ada")
    done = home.farm("history", "s/relu")
    assert (done.returncode, done.stdout.count("passed, local run")) == (0, 2), done.stderr
    assert "only your local runs are listed" in done.stderr
    assert home.farm("status").stdout.startswith(f"{mine}: local run of")
    with open_store(home.state / "farm.db") as again:
        names = [job.id for job in JOBS]
        assert {found.result.run_id for found in again.status.job_results(names)} == {mine}
        nightly_run = record(again, 4, GREEN[:1])
        assert [found.result.run_id for found in again.status.job_results(names)].count(nightly_run) == 1


def test_latest_is_ones_own_and_that_of_a_nightly_run(home: FarmHome, store: Store) -> None:
    with store:
        nightly_run = record(store, 5, GREEN, user="ci")
        record(store, 4, GREEN, purpose="local", name="pad-fix")
        named = record(store, 3, GREEN, purpose="local", name="pad-fix")
        mine = record(store, 2, GREEN, purpose="local")
        record(store, 1, GREEN, purpose="local", user="ada")
        record(store, 0.5, purpose="local")
        for name, run_id in {
            "latest": mine,
            "latest~1": named,
            "latest@nightly": nightly_run,
            "latest@default": nightly_run,
            "pad-fix": named,
        }.items():
            assert store.runs.resolve(name) == run_id
    assert "latest: grace has no run yet" in home.farm("report", "latest", env={"LOGNAME": "grace"}, code=2).stderr


def test_an_unbegun_run_is_listed_and_nothing_else_tells_of_it(home: FarmHome, store: Store) -> None:
    with store:
        good = record(store, 3, GREEN, purpose="local", name="good")
        absent = record(store, 2, purpose="local")
        assert store.runs.resolve("latest", unbegun=True) == absent
    status = home.farm("status").stdout
    assert good in status
    assert "NOT TESTED" not in status
    assert home.json("report", "latest")["id"] == good
    head, *lines = home.farm("runs", "list", code=0).stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.split()[0] for line in lines] == [absent, good]
    assert [line[head.index("jobs") :].split("  ")[0] for line in lines] == ["NEVER BEGAN", "4"]
    assert lines[1][head.index("name") :] == "good"
    with open_store(home.state / "farm.db") as again:
        # The steps of `farm run --resume`.
        again.plan_jobs(absent, JOBS)
        again.record_attempt(absent, attempt_of(JOBS[0]))
        again.finish_run(absent, 4)
        assert again.runs.resolve("latest") == absent


def test_an_unbegun_run_is_found_by_its_name_where_it_is_meant(home: FarmHome, store: Store) -> None:
    with store:
        good = record(store, 4, GREEN, purpose="local", name="pads")
        absent = record(store, 3, purpose="local", name="broken")
        again = record(store, 2, purpose="local", name="pads")
        assert [store.runs.resolve("pads"), store.runs.resolve("pads", unbegun=True)] == [good, again]
        with pytest.raises(UsageError, match="unknown run 'broken'"):
            store.runs.resolve("broken")
    assert home.json("report", "broken")["id"] == absent
    assert home.json("runs", "remove", "broken", "--yes")["removed"] == absent


def test_a_run_that_is_not_known_is_answered_with_the_nearest_name_or_the_newest(store: Store) -> None:
    with store:
        ids = [record(store, hours, GREEN, name=f"mine-{hours}") for hours in range(1, 11)]
        record(store, 0.5, GREEN, name="broken")
        with pytest.raises(UsageError, match=r"unknown run 'brken': did you mean 'broken'\?$"):
            store.runs.resolve("brken")
        with pytest.raises(UsageError) as raised:
            store.runs.resolve("zz")
        shown = str(raised.value).partition("known are ")[2].split(", ")
        assert shown[1:] == [*ids[:7], "..."]


def test_a_name_that_another_run_has_already_is_said_to_mean_the_new_one(store: Store) -> None:
    config, tools = load_config(None), Toolchain({"executorch": "1.5.1"}, Compiler("", {}), "")
    output = LogLines()
    with store:
        record(store, 3, GREEN, name="pads")
        before = record(store, 2, name="pads")
        record(store, 1, GREEN, name="pads", user="ada")
        record(store, 1, GREEN, name="others", user="ada")
        for name, nightly_run in (("", ""), ("others", ""), ("pads", "n1"), ("pads", "")):
            run_record(config, store, tools, command="farm run", facts={}, name=name, nightly_run=nightly_run)
    assert output == [f"'pads' means this run from now on: it meant {before}"]


def test_a_run_is_removed_with_all_that_is_of_it_alone(home: FarmHome, store: Store) -> None:
    artifacts = ArtifactStore(home.state / "artifacts")
    shared, own = (ArtifactRecord(artifacts.put(text), len(text), "etdump") for text in (b"shared", b"own"))
    with store:
        nightly_run = record(store, 30, GREEN, artifacts=(shared,))
        mine = record(store, 1, GREEN, purpose="local", size=2000.0, artifacts=(shared, own))
        record_comparison(store, mine)
    folder = home.state / "runs" / mine
    folder.mkdir(parents=True)
    (folder / "report.html").write_text("a page")
    for one in (shared, own):
        # Younger artifacts may still get a name.
        os.utime(artifacts.path(one.sha256), (now_ms() / 1000 - 700,) * 2)

    assert "--yes does it" in home.farm("runs", "remove", mine, code=2).stderr
    home.farm("runs", "remove", "latest", "--yes", code=0)
    assert not folder.exists()
    assert artifacts.find(shared.sha256)
    assert artifacts.find(own.sha256) is None
    with sqlite3.connect(home.state / "farm.db") as database:
        assert database.execute("SELECT id FROM run").fetchall() == [(nightly_run,)]
        assert database.execute("SELECT count(*) FROM alert").fetchone() == (0,)
        assert database.execute("SELECT DISTINCT run_id FROM run_job").fetchall() == [(nightly_run,)]


def test_a_run_that_goes_on_or_that_an_alert_names_is_not_removed(home: FarmHome, store: Store) -> None:
    with store:
        good = record(store, 30, GREEN)
        bad = record(store, 2, GREEN, size=2000.0)
        record_comparison(store, bad)
        elsewhere, here = (
            record_run(store, verdicts=(), started_ms=now_ms(), exit_code=None, host=host)
            for host in ("lab-7", "bench")
        )
        with in_progress(home.state / "runs" / here):
            for run_id, why in (
                (good, "named by alert #1"), (bad, "named by alert #1"),
                (elsewhere, "may be going on, on lab-7"), (here, "is still running"),
            ):  # fmt: skip
                done = home.farm("runs", "remove", run_id, "--yes")
                assert (done.returncode, done.stdout) == (2, ""), run_id
                assert why in done.stderr
        home.farm("runs", "remove", here, "--yes", code=0)


# `farm runs prune`: its list of deletions, and the deletions themselves.


DAY_S = 86_400


def record_days_ago(home: FarmHome, store: Store, days: int, priority: str = "person") -> tuple[str, str]:
    """Record a run `days` ago with its folder and an artifact; return the ids of run and artifact."""
    then = int(time.time() - days * DAY_S)
    artifacts = ArtifactStore(home.state / "artifacts")
    sha256 = artifacts.put(f"{days} days ago".encode())
    os.utime(artifacts.path(sha256), (then, then))
    kept = [ArtifactRecord(sha256, 10, "etdump")]
    run_id = record_run(store, started_ms=then * 1000, priority=priority, artifacts=kept)
    folder = home.state / "runs" / run_id
    folder.mkdir(parents=True)
    (folder / "report.html").write_bytes(bytes(100))
    return run_id, sha256


def let_pass(store: Store) -> None:
    """Move the times of all records to before today."""
    store._database.write(lambda c: c.execute(update(schema.attempt).values(recorded_ms=schema.attempt.c.started_ms)))


def test_a_preview_changes_nothing_and_says_what_does(home: FarmHome, store: Store) -> None:
    with store:
        runs = [record_days_ago(home, store, days) for days in (200, 150, 100, 20)]
        let_pass(store)
    before = (home.state / "farm.db").read_bytes()
    done = home.farm("runs", "prune", "--keep", "90d", "--keep-results", "2", code=0)
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert f"would remove 2 of 4 runs, {runs[0][0]} to {runs[1][0]}" in done.stdout
    assert "artifacts    2 on this machine, 24 B" in done.stdout
    assert "folders      2 on this machine, 200 B" in done.stdout
    assert "kept 1: with one of the newest results of a job" in done.stdout
    assert "nothing was removed: farm runs prune --keep 90d --keep-results 2 --yes" in done.stdout
    assert (home.state / "farm.db").read_bytes() == before

    done = home.farm("runs", "prune", "--keep=90d", "--keep-results=2", "--yes", code=0)
    assert f"removed 2 of 4 runs, {runs[0][0]} to {runs[1][0]}" in done.stdout
    artifacts = ArtifactStore(home.state / "artifacts")
    assert "nothing was removed" not in home.farm("runs", "prune", "--keep=90d", "--keep-results=2").stdout
    assert [(home.state / "runs" / run_id).exists() for run_id, _ in runs] == [False, False, True, True]
    assert [artifacts.size(sha256) for _, sha256 in runs] == [None, None, 12, 11]
    with open_store(home.state / "farm.db", readonly=True) as now:
        assert now.pruning.run_ids() == {run_id for run_id, _ in runs[2:]}


def test_comparisons_and_searches_among_commits_go_by_age(home: FarmHome, store: Store) -> None:
    store.close()
    then = time.time() - 100 * DAY_S
    for kind, old, young in (
        ("compares", "20260801-010101-aaaaaa", "20260801-010101-bbbbbb"),
        ("bisects", "a" * 64, "b" * 64),
    ):
        for name in (old, young, "mine"):
            state = home.state / kind / name / "state.json"
            state.parent.mkdir(parents=True)
            state.write_bytes(bytes(10))
            if name != young:
                for path in (state, state.parent):
                    os.utime(path, (then, then))
    assert "folders      2 on this machine, 20 B" in home.farm("runs", "prune", "--keep", "90d").stdout
    home.farm("runs", "prune", "--keep", "90d", "--yes", code=0)
    left = {kind: sorted(path.name for path in (home.state / kind).iterdir()) for kind in ("compares", "bisects")}
    assert left == {"compares": ["20260801-010101-bbbbbb", "mine"], "bisects": ["b" * 64, "mine"]}


def test_rules_come_from_farm_toml_and_options_override_them(home: FarmHome, store: Store) -> None:
    with store:
        night, _ = record_days_ago(home, store, 200, "nightly")
        person, _ = record_days_ago(home, store, 199)
        newest, _ = record_days_ago(home, store, 100)
        let_pass(store)
    config = home.cwd / "farm.toml"
    config.write_text('[retention]\nkeep = "90d"\nkeep_nightly = "365d"\nkeep_results = 1\n')
    answer = json.loads(home.farm("runs", "prune", "--json").stdout)
    assert answer["schema"] == 2
    assert answer["prune"]["runs"] == {newest: "results", person: None, night: "age"}
    assert (answer["prune"]["removed"], answer["prune"]["freed"]["runs"]) == (False, 1)
    answer = json.loads(home.farm("runs", "prune", "--json", "--keep-nightly", "30d").stdout)
    assert answer["prune"]["runs"] == {newest: "results", person: None, night: None}
    config.write_text('[retention]\nkeep = "90 moons"\n')
    assert "retention.keep: is '90 moons', expected an age such as '90d'" in home.farm("runs", "prune", code=2).stderr


def test_files_of_runs_that_the_store_does_not_have_go_only_when_asked(home: FarmHome, store: Store) -> None:
    with store:
        run_id, _ = record_days_ago(home, store, 200)
    artifacts = ArtifactStore(home.state / "artifacts")
    lost, fresh = artifacts.put(b"lost"), artifacts.put(b"fresh")
    folder, new = home.state / "runs" / "20200101-000000-abcdef", home.state / "runs" / "20260101-000000-abcdef"
    for one in (folder, new):
        one.mkdir()
    for path in (folder, artifacts.path(lost)):
        os.utime(path, (time.time() - GRACE_S - 60,) * 2)
    assert home.farm("runs", "prune", "--keep-runs=5", "--yes").returncode == 0
    assert "folders      1 on this machine" in home.farm("runs", "prune", "--orphans").stdout
    assert folder.exists()
    assert home.farm("runs", "prune", "--orphans", "--yes").returncode == 0
    assert (folder.exists(), new.exists(), (home.state / "runs" / run_id).exists()) == (False, True, True)
    assert (artifacts.size(lost), artifacts.size(fresh)) == (None, 5)

"""`farm runs prune`: its list of deletions, and the deletions themselves."""

from __future__ import annotations

import json
import os
import time

from farm_home import FarmHome
from made_runs import record_run
from sqlalchemy import update

from farm.store import schema
from farm.store.artifacts import GRACE_S, ArtifactStore
from farm.store.records import ArtifactRecord
from farm.store.store import Store, open_store

DAY_S = 86_400


def record(home: FarmHome, store: Store, days: int, priority: str = "person") -> tuple[str, str]:
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
        runs = [record(home, store, days) for days in (200, 150, 100, 20)]
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
        night, _ = record(home, store, 200, "nightly")
        person, _ = record(home, store, 199)
        newest, _ = record(home, store, 100)
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


def test_rules_that_cannot_be_are_refused_in_one_line(home: FarmHome) -> None:
    for arguments, message in {
        (): "no rule for runs to keep: give --keep 90d or --keep-runs 500",
        ("--keep-nightly", "90d"): "no rule for runs to keep",
        ("--keep", "soon"): "expected an age such as 90d",
        ("--keep-runs", "0"): "0 is not in the range",
    }.items():
        assert message in home.farm("runs", "prune", *arguments, code=2).stderr


def test_files_of_runs_that_the_store_does_not_have_go_only_when_asked(home: FarmHome, store: Store) -> None:
    with store:
        run_id, _ = record(home, store, 200)
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

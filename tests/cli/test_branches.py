"""Answers of commands and pages for a store with two branches and a private run."""

from __future__ import annotations

import json

from farm_home import FarmHome

from farm.base.user import user_name
from farm.devices.device import AdbAddress, Device
from farm.results.attempt import Attempt, Direction, Measurement, Stage, Verdict
from farm.serve.address import Address
from farm.serve.pages.history import HistoryQuery, history_page
from farm.serve.pages.runs import RunsQuery, runs_page
from farm.serve.pages.status import StatusQuery, status_page
from farm.serve.render import html_of
from farm.store.records import RunRecord
from farm.store.rows import now_ms
from farm.store.store import Store, open_store
from farm.store.view import RunToolchain
from farm.suites.suite import Case, InputSpec, Job, Target

JOB = Job(Case("s", "c", module="torch.nn:ReLU", inputs=(InputSpec(shape=(1, 3)),)), Target("SM8650", "htp", "8a8w"))
PHONE = Device(serial="phone-1", soc="SM8650", kind="hardware", build="b", address=AdbAddress(5037), product="phone")
URL = "https://git.example/executorch/commit/{commit}"
OLD, NEW = "a" * 40, "b" * 40


def record(store: Store, hours_ago: int, toolchain: RunToolchain, verdict: Verdict = Verdict.PASSED) -> str:
    started_ms = now_ms() - hours_ago * 3_600_000
    facts = {"executorch": "1.6.0", "qnn": "2.51", "device_kind": "hardware", "commit": toolchain.commit}
    run_id = store.begin_run(RunRecord("farm run", user_name(), "bench", facts, started_ms, toolchain=toolchain))
    store.plan_jobs(run_id, [JOB])
    latency = Measurement("latency", "ns", Direction.LOWER, (2e6,))
    attempt = Attempt(
        JOB.id, verdict, Stage.DONE, "", device=PHONE.serial, started_ms=started_ms, measurements=(latency,)
    )
    store.record_attempt(run_id, attempt, PHONE)
    store.finish_run(run_id, 0)
    return run_id


def test_lines_are_asked_for_by_name_and_private_runs_by_their_id(home: FarmHome) -> None:
    home.state.mkdir(exist_ok=True)
    with open_store(home.state / "farm.db") as store:
        before = record(store, 9, RunToolchain("main", "main", commit=OLD, commit_url=URL))
        default = record(store, 8, RunToolchain())
        main = record(store, 7, RunToolchain("main", "main", commit=NEW, before=OLD, commit_url=URL))
        mine = record(
            store, 1, RunToolchain("main", "main", private=True, commit=NEW, dirty=True), verdict=Verdict.FAILED
        )
        pages = {
            "status": status_page(store, StatusQuery(branch="main")),
            "history": history_page(store, HistoryQuery(job="s/c", branch="main")),
            "runs": runs_page(store, RunsQuery()),
        }
        shown = {name: html_of(facts, None, Address("/", {}), may=lambda _: False) for name, facts in pages.items()}
        assert runs_page(store, RunsQuery(branch="main")).total == 2
    assert f'href="https://git.example/executorch/commit/{NEW}"' in shown["history"]
    assert '<span class="tag">local run</span>' in shown["history"]
    assert main in shown["status"]
    assert mine in shown["runs"]
    assert "<td>local</td>" in shown["runs"]

    done = home.farm("history", "s/c", "--branch", "main")
    assert (done.returncode, "farm: branch main" in done.stderr) == (0, True), done.stderr
    assert "commits aaaaaaaaaa..bbbbbbbbbb" in done.stdout
    assert f"https://git.example/executorch/compare/{OLD}...{NEW}" in done.stdout
    assert max(len(line) for line in done.stdout.splitlines() if "https" not in line) <= 80
    answer = json.loads(home.farm("history", "s/c", "--branch", "main", "--json").stdout)
    assert answer["branch"] == "main"
    points = {(point["run_id"], point["commit"]) for point in answer["points"]}
    assert points == {(before, OLD), (main, NEW), (mine, NEW)}
    plain = json.loads(home.farm("history", "s/c", "--json").stdout)
    assert "branch" not in plain
    assert {point["run_id"] for point in plain["points"]} == {default}

    status = home.farm("status", "--branch", "main").stdout
    assert status.splitlines()[:2] == ["branch main", status.splitlines()[1]]
    assert status.splitlines()[1].startswith(main)
    assert json.loads(home.farm("status", "--json").stdout)["status"]["runs"][0]["run"]["run_id"] == default
    own = home.farm("status", mine).stdout
    assert "compared with branch main and not part of its history" in own
    assert "NEW FAILURES" in own
    assert "main" in home.farm("alerts", "list", "--branch", "mian", code=2).stderr
    assert json.loads(home.farm("report", "latest@main", "--json").stdout)["id"] == main
    assert json.loads(home.farm("report", "--json").stdout)["id"] == mine

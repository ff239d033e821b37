"""Answers of commands and pages for a store with two branches and a private run."""

from __future__ import annotations

from farm_home import FarmHome
from made_runs import HOUR_MS, measured, record_run

from farm.results.attempt import Verdict
from farm.serve.pages.history import HistoryQuery, history_page
from farm.serve.pages.runs import RunsQuery, runs_page
from farm.serve.pages.status import StatusQuery, status_page
from farm.serve.render import Address, html_of
from farm.store.rows import now_ms
from farm.store.store import Store, open_store
from farm.store.view import RunToolchain

URL = "https://git.example/executorch/commit/{commit}"
OLD, NEW = "a" * 40, "b" * 40


def record(store: Store, hours_ago: int, toolchain: RunToolchain, verdict: Verdict = Verdict.PASSED) -> str:
    return record_run(
        store, verdicts=[verdict], started_ms=now_ms() - hours_ago * HOUR_MS, toolchain=toolchain,
        attempt={"measurements": (measured("latency", 2e6),)},
        fingerprint={"executorch": "1.6.0", "qnn": "2.51", "device_kind": "hardware", "commit": toolchain.commit},
    )  # fmt: skip


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

    done = home.farm("history", "s/c", "--branch", "main", code=0)
    assert "farm: branch main" in done.stderr
    assert "commits aaaaaaaaaa..bbbbbbbbbb" in done.stdout
    assert f"https://git.example/executorch/compare/{OLD}...{NEW}" in done.stdout
    assert max(len(line) for line in done.stdout.splitlines() if "https" not in line) <= 80
    points = home.json("history", "s/c", "--branch", "main")["points"]
    assert {(point["run_id"], point["commit"]) for point in points} == {(before, OLD), (main, NEW), (mine, NEW)}
    assert {point["run_id"] for point in home.json("history", "s/c")["points"]} == {default}

    head, run, *_ = home.farm("status", "--branch", "main").stdout.splitlines()
    assert (head, run.startswith(main)) == ("branch main", True)
    assert home.json("status")["status"]["runs"][0]["run"]["run_id"] == default
    own = home.farm("status", mine).stdout
    assert "compared with branch main and not part of its history" in own
    assert "main" in home.farm("alerts", "list", "--branch", "mian", code=2).stderr
    assert [home.json("report", *words)["id"] for words in (["latest@main"], [])] == [main, mine]

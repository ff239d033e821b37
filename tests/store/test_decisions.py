"""What is decided when it is recorded: which attempt counts, what a run was for, and on what devices."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from old_store import make_old_store
from store_template import place_store

from farm.results.attempt import Verdict, final_attempt
from farm.store.records import RunRecord
from farm.store.store import Store, open_store

if TYPE_CHECKING:
    from conftest import Make

_DECIDED = """
    SELECT job.name, run_job.decisive_verdict, attempt.started_ms
    FROM run_job JOIN job ON job.id = run_job.job_id LEFT JOIN attempt ON attempt.id = run_job.decisive_attempt_id
"""


def rows(address: str, query: str) -> list[tuple[Any, ...]]:
    with open_store(address, readonly=True) as reader:
        return reader.ask(query, 1000)[1]


def test_the_attempt_that_decides_is_the_one_that_a_report_shows(address: str, make: type[Make]) -> None:
    orders = [order for count in range(4) for order in itertools.product(Verdict, repeat=count)]
    jobs = {make.job(f"case_{number}").id: order for number, order in enumerate(orders)}
    with open_store(address) as store:
        run_id = make.begin(store, *(make.job(f"case_{number}") for number in range(len(orders))))
        for number, order in enumerate(orders):
            for when, verdict in enumerate(order, start=1):
                store.record_attempt(run_id, make.attempt(make.job(f"case_{number}"), verdict=verdict, started_ms=when))
        shown = {job.id: final_attempt(job.attempts) for job in store.runs.view(run_id).jobs}
    found = {name: (verdict, when) for name, verdict, when in rows(address, _DECIDED)}
    assert found == {job: (None, None) if one is None else (one.verdict, one.started_ms) for job, one in shown.items()}
    assert len(found) == len(jobs) == 85


@pytest.mark.parametrize(
    ("command", "facts", "kind"),
    [
        ("farm run --soc SM8650", {}, "suite"),
        ("farm pytest tests", {}, "tests"),
        ("farm exec ops/relu --virtual 1", {}, "exec"),
        ("farm repro ops/relu", {}, "repro"),
        ("farm debug ops/relu", {"debug": "intermediate outputs"}, "debug"),
        ("somebody's own", {}, "suite"),
    ],
)
def test_a_run_is_recorded_and_imported_with_its_kind_and_that_of_its_devices(
    tmp_path: Path, command: str, facts: dict[str, str], kind: str
) -> None:
    addresses = [str(tmp_path / name) for name in ("home.db", "elsewhere.db")]
    for address in addresses:
        place_store(Path(address))
    with open_store(addresses[0]) as home, open_store(addresses[1]) as elsewhere:
        run_id = home.begin_run(RunRecord(command, "ada", "bench", {"device_kind": "virtual", **facts}))
        _carry(home, elsewhere, run_id, tmp_path / "runs.jsonl")
    for address in addresses:
        assert rows(address, "SELECT run_kind, run_device_kind FROM run") == [(kind, "virtual")]


def _carry(home: Store, elsewhere: Store, run_id: str, file: Path) -> None:
    from farm.store.transfer.line_files import LineFile, import_runs, runs_in

    file.write_bytes(b"".join(home.transfer.export([run_id])))
    with LineFile(str(file)) as lines:
        import_runs(elsewhere.transfer, runs_in([lines]))


def test_what_an_old_store_has_is_decided_when_it_is_brought_up_to_date(empty_address: str) -> None:
    make_old_store(empty_address)
    with open_store(empty_address) as store:
        ids = [run.id for run in store.transfer.runs()]
        views = [store.runs.view(run_id) for run_id in ids]
    found = rows(empty_address, f"{_DECIDED} ORDER BY run_job.run_id, run_job.position, run_job.id")
    shown = [(job.id, final_attempt(job.attempts)) for view in views for job in view.jobs]
    assert found == [(job, None, None) if one is None else (job, one.verdict, one.started_ms) for job, one in shown]
    assert set(rows(empty_address, "SELECT run_kind, run_device_kind FROM run")) == {("suite", None)}

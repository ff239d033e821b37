"""Decisions at the time of recording: the deciding attempt, the kind of a run, and its kind of devices."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, select
from store_template import place_store

from farm.results.attempt import Verdict
from farm.store import schema
from farm.store.records import RunRecord
from farm.store.rows import NewAttempt, insert_attempt_rows
from farm.store.store import open_store
from farm.store.transfer.line_files import LineFile, import_runs, runs_in

if TYPE_CHECKING:
    from conftest import Make

_DECIDED = """
    SELECT job.name, run_job.decisive_verdict, attempt.started_ms
    FROM run_job JOIN job ON job.id = run_job.job_id LEFT JOIN attempt ON attempt.id = run_job.decisive_attempt_id
"""


def rows(address: str, query: str) -> list[tuple[Any, ...]]:
    with open_store(address, readonly=True) as reader:
        return reader.ask(query, 1000)[1]


def judged(order: Sequence[Verdict]) -> int:
    """Return the number of the attempt that decides: the last without trouble of the farm, else the last."""
    numbers = [number for number, verdict in enumerate(order, 1) if verdict is not Verdict.INFRA]
    return numbers[-1] if numbers else len(order)


def test_the_last_verdict_about_the_code_decides_in_the_store_and_in_reports(address: str, make: type[Make]) -> None:
    orders = [order for count in range(4) for order in itertools.product(Verdict, repeat=count)]
    jobs = [make.job(f"case_{number}") for number in range(len(orders))]
    expected = {job.id: (judged(order), order) for job, order in zip(jobs, orders, strict=True)}
    with open_store(address) as store:
        run_id = make.begin(store, *jobs)
        for job, order in zip(jobs, orders, strict=True):
            for when, verdict in enumerate(order, start=1):
                store.record_attempt(run_id, make.attempt(job, verdict=verdict, started_ms=when))
        shown = {job.id: (job.decisive_attempt, job.decisive) for job in store.runs.view(run_id).jobs}
    found = {name: (verdict, when) for name, verdict, when in rows(address, _DECIDED)}
    assert found == {
        job: (order[number - 1], number) if number else (None, None) for job, (number, order) in expected.items()
    }
    assert {job: (number, one and one.started_ms) for job, (number, one) in shown.items()} == {
        job: (number, number or None) for job, (number, _) in expected.items()
    }
    assert len(found) == 85


def test_of_two_recorders_at_the_same_time_the_store_and_reports_choose_the_same(
    address: str, make: type[Make]
) -> None:
    job = make.job("together")
    known = {"recorded_ms": 1, "device_id": None, "digest": None}

    def record(connection: Connection, number: int, verdict: Verdict) -> None:
        run_job = connection.execute(select(schema.run_job)).one()
        row = {**known, "id": number, "run_job_id": run_job.id}
        attempt = make.attempt(job, verdict=verdict)
        insert_attempt_rows(connection, [NewAttempt(row, run_job.job_id, attempt, ())])

    with open_store(address) as store:
        run_id = make.begin(store, job)
        # PostgreSQL gives ids before rows are there: the attempt with the greater id may be the first.
        store._database.write(lambda connection: record(connection, 20, Verdict.PASSED))
        store._database.write(lambda connection: record(connection, 10, Verdict.FAILED))
        [shown] = store.runs.view(run_id).jobs
        assert shown.decisive is not None
        assert shown.decisive.verdict == store.runs.verdicts(run_id)[job.id].outcome == Verdict.FAILED


KINDS = {
    "farm run --soc SM8650": "suite",
    "farm pytest tests": "tests",
    "farm exec ops/relu --virtual 1": "exec",
    "farm jobs rerun ops/relu": "repro",
    "farm debug ops/relu": "debug",
    "somebody's own": "suite",
}


def test_a_run_is_recorded_and_imported_with_its_kind_and_that_of_its_devices(tmp_path: Path) -> None:
    addresses, file = [str(tmp_path / name) for name in ("home.db", "elsewhere.db")], tmp_path / "runs.jsonl"
    for address in addresses:
        place_store(Path(address))
    with open_store(addresses[0]) as home, open_store(addresses[1]) as elsewhere:
        for command in KINDS:
            facts = {"device_kind": "virtual", **({"debug": "intermediate outputs"} if "debug" in command else {})}
            home.begin_run(RunRecord(command, "ada", "bench", facts))
        file.write_bytes(b"".join(home.transfer.export([run.id for run in home.transfer.runs()])))
        with LineFile(str(file)) as lines:
            import_runs(elsewhere.transfer, runs_in([lines]))
    for address in addresses:
        found = rows(address, "SELECT command, run_kind, run_device_kind FROM run")
        assert sorted(found) == sorted((command, kind, "virtual") for command, kind in KINDS.items())

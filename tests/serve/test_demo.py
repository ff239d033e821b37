"""Demo store of `farm serve --demo`."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import text

from farm.serve import demo
from farm.store.artifacts import ArtifactStore
from farm.store.database import Database
from farm.store.queries.grid import JobFilter
from farm.store.store import Store

SMALL = demo.Size(nights=12, cases=90)


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> list[Store]:
    found = []
    for number in range(2):
        folder = tmp_path_factory.mktemp(f"demo{number}")
        database = Database(folder / "farm.db")
        found.append(Store(database))
        demo.fill(found[-1], database, ArtifactStore(folder / "artifacts"), SMALL)
    return found


def test_the_demo_has_what_a_farm_has(stores: list[Store]) -> None:
    store = stores[0]
    nights = store.grid.nightly_runs(None, 100)
    jobs = store.grid.jobs(nights, JobFilter())
    assert (len(nights), len(jobs), len({job.soc for job in jobs})) == (12, 360, 4)
    letters = "".join(job.cells for job in jobs)
    assert {*"pfkis"} <= set(letters)
    assert letters.count("p") > 0.9 * len(letters)
    new = [job for job in jobs if job.cells.startswith("fp")]
    assert {job.case.rpartition("_")[0] for job in new} >= {"layer_norm"}
    mixed = [job.job_id for job in jobs if "fp" in job.cells]
    assert {"flaky", "newly flaky"} & {
        one.reliability for one in store.history.reliability(mixed, "hardware", branch="main").values()
    }
    assert {one.metric for one in store.alerts.open()} == {"latency"}
    assert {device.health for device in store.devices.all()} == {"healthy", "quarantined"}
    worse = store.alerts.open()[0].job_id
    [past] = store.history.pasts_of_jobs(worse, branch="main")
    latency = next(one for one in past.series if one.series.metric == "latency").values
    before = SMALL.nights * 3 // 4 - 1
    assert 1.1 < latency[-1] / latency[before] < 1.3


def test_every_run_and_device_says_that_it_is_a_demo(stores: list[Store]) -> None:
    store = stores[0]
    with store._database.reading() as connection:
        facts = connection.scalars(text("SELECT facts FROM fingerprint")).all()
        serials = connection.scalars(text("SELECT serial FROM device")).all()
        hosts = set(connection.scalars(text("SELECT host FROM run")))
    assert all(demo.FACT in one for one in facts)
    assert all(one.startswith("DEMO") for one in serials)
    assert hosts == {"demo"}


def test_an_equal_seed_makes_equal_results(stores: list[Store]) -> None:
    found = []
    for store in stores:
        with store._database.reading() as connection:
            query = "SELECT run_job_id, verdict, reason FROM attempt ORDER BY id"
            numbers = "SELECT attempt_id, p50 FROM measurement ORDER BY attempt_id, position"
            found.append([connection.execute(text(one)).all() for one in (query, numbers)])
    assert found[0] == found[1]


def test_the_run_of_today_has_files(stores: list[Store], tmp_path: Path) -> None:
    del tmp_path
    store = stores[0]
    run_id = store.runs.latest_id()
    assert run_id is not None
    view = store.runs.view(run_id)
    assert view.finished_ms is None
    assert any(attempt.operators and attempt.layers for job in view.jobs for attempt in job.attempts)
    assert {one.kind for one in store.runs.artifacts(run_id)} == {"log", "layer_graph", "output"}


def test_a_firmware_update_changes_the_builds_of_one_soc(stores: list[Store]) -> None:
    with stores[0]._database.reading() as connection:
        query = "SELECT soc, count(DISTINCT build) FROM device JOIN run_device ON device_id = id GROUP BY soc"
        assert sorted(tuple(row) for row in connection.execute(text(query))) == [
            ("SM8550", 2), ("SM8650", 1), ("SM8750", 1), ("SM8850", 1),
        ]  # fmt: skip

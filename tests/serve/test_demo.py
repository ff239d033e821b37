"""Demo store of `farm serve --demo`."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import pytest
from sqlalchemy import text

from farm.base.config.settings import Config, load_config
from farm.serve import demo
from farm.store.artifacts import ArtifactStore
from farm.store.database import Database
from farm.store.queries.grid import JobFilter
from farm.store.store import Store

from .conftest import running

SMALL = demo.Size(nights=12, cases=90)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    folder = tmp_path_factory.mktemp("demo")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FARM_CACHE_DIR", str(folder / "cache"))
        patch.setenv("FARM_STATE_DIR", str(folder))
        return load_config(folder=folder)


@pytest.fixture(scope="module")
def store(config: Config) -> Store:
    database = Database(config.state_dir / "farm.db")
    store = Store(database)
    demo.fill(store, database, ArtifactStore(config.state_dir / "artifacts"), SMALL)
    return store


def test_the_demo_has_what_a_farm_has(store: Store) -> None:
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


def rows(store: Store, query: str) -> list[tuple[Any, ...]]:
    with store._database.reading() as connection:
        return [tuple(row) for row in connection.execute(text(query))]


def test_every_run_and_device_says_that_it_is_a_demo(store: Store) -> None:
    assert all(demo.FACT in facts for (facts,) in rows(store, "SELECT facts FROM fingerprint"))
    assert all(serial.startswith("DEMO") for (serial,) in rows(store, "SELECT serial FROM device"))
    assert set(rows(store, "SELECT host FROM run")) == {("demo",)}


def test_the_demo_has_files_and_a_firmware_update_of_one_soc(store: Store) -> None:
    run_id = store.runs.latest_id()
    assert run_id is not None
    view = store.runs.view(run_id)
    assert view.finished_ms is None
    assert any(attempt.operators and attempt.layers for job in view.jobs for attempt in job.attempts)
    assert {one.kind for one in store.runs.artifacts(run_id)} == {"log", "output"}
    query = "SELECT soc, count(DISTINCT build) FROM device JOIN run_device ON device_id = id GROUP BY soc"
    assert dict(rows(store, query)) == {"SM8550": 2, "SM8650": 1, "SM8750": 1, "SM8850": 1}


def test_a_job_with_layers_has_a_page_with_them(config: Config, store: Store) -> None:
    view = store.runs.view(store.runs.latest_id() or "")
    layers = {job.id: attempt.layers for job in view.jobs for attempt in job.attempts if attempt.layers}
    job, [layer, *_] = next(iter(layers.items()))
    with running(config) as server:
        page = server.get(f"/jobs/{quote(job, safe='')}")
    assert (page.status, layer.layer in page.text) == (200, True)

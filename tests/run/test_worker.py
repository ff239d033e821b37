"""What a worker does when the store does not take what it has to say."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
from run_model import Script, World

from farm.errors import RowRefusedError, StoreError
from farm.results.attempt import Cause, Verdict
from farm.run.worker import Outfit, Returned, Worker

if TYPE_CHECKING:
    from pathlib import Path


class Refusing:
    """A store that does not take attempts."""

    def __init__(self, error: StoreError) -> None:
        self.error = error

    def record_attempt(self, *_: Any, **__: Any) -> None:
        raise self.error


def worker(folder: Path, error: StoreError, monkeypatch: pytest.MonkeyPatch) -> tuple[World, Worker]:
    world = World(folder, Script())
    monkeypatch.setattr("time.sleep", world.sleep)
    monkeypatch.setattr("time.monotonic", lambda: world.now_s)

    def outfit(*_: Any) -> Outfit:
        process: Any = world.session.nodemanager.setup_node(None, None)
        real = process._outfit(world.plan, 0, lambda: False)
        store: Any = Refusing(error)
        return Outfit(store, real.device_worker, real.executor)

    return world, Worker(world.plan, 0, os.getppid(), outfit)


def test_a_row_that_the_database_refuses_costs_one_job_and_no_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, one = worker(tmp_path, RowRefusedError("the database refuses what is to be written"), monkeypatch)
    with pytest.raises(RowRefusedError):
        one.run(world.plan.jobs[0])
    assert world.now_s == 0


def test_a_store_that_stays_away_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world, one = worker(tmp_path, StoreError("no answer"), monkeypatch)
    done = one.run(world.plan.jobs[0])
    assert isinstance(done, Returned)
    assert done.halt == "the store: no answer"
    assert world.now_s >= world.plan.health.store_wait_s


def test_what_a_virtual_device_skips_is_run_by_hardware_of_the_same_run(tmp_path: Path) -> None:
    world = World(tmp_path, Script(virtual=(0, 1)), devices=3)
    world.run()
    assert set(world.verdicts.values()) == {"passed"}
    assert "skipped" in {one.verdict for attempts in world.recorded.values() for one in attempts}


@pytest.mark.parametrize("script", [Script(virtual=(0, 1)), Script(virtual=(0, 1), hopeless=(2,))])
def test_what_no_hardware_is_left_for_stays_skipped(tmp_path: Path, script: Script) -> None:
    world = World(tmp_path, script, devices=2 + len(script.hopeless))
    world.run()
    assert set(world.verdicts.values()) == {"skipped"}
    assert len(world.verdicts) == len(world.plan.jobs)


@pytest.mark.parametrize("first", range(12, 51, 3))
def test_an_adb_server_that_ends_twice_costs_no_job(tmp_path: Path, first: int) -> None:
    away = (range(first, first + 12), range(first + 30, first + 42))
    world = World(tmp_path, Script(no_server=away))
    world.run()
    assert world.points > first
    assert [one.verdict for attempts in world.recorded.values() for one in attempts] == [Verdict.PASSED] * 6


def test_a_job_that_ends_the_adb_server_each_time_ends_and_costs_no_other(tmp_path: Path) -> None:
    world = World(tmp_path, Script(ends_server=(2,)))
    world.run()
    assert sorted(world.verdicts.values()) == ["passed"] * 5
    [lost] = [attempts for job, attempts in world.recorded.items() if job not in world.verdicts]
    assert {one.cause for one in lost} == {Cause.ADB_SERVER}

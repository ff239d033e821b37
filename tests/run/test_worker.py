"""Jobs that virtual devices skip, and jobs that meet the end of the adb server or of the connection to their device."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_model import Script, World

from farm.results.attempt import Cause, Verdict


def test_what_a_virtual_device_skips_is_run_by_hardware_of_the_same_run(tmp_path: Path) -> None:
    world = World(tmp_path, Script(virtual=(0, 1)), devices=3)
    world.run()
    assert set(world.verdicts.values()) == {"passed"}
    assert "skipped" in {one.verdict for attempts in world.recorded.values() for one in attempts}


@pytest.mark.parametrize("script", [Script(virtual=(0, 1)), Script(virtual=(0, 1), is_unrecoverable=(2,))])
def test_what_no_hardware_is_left_for_stays_skipped(tmp_path: Path, script: Script) -> None:
    world = World(tmp_path, script, devices=2 + len(script.is_unrecoverable))
    world.run()
    assert set(world.verdicts.values()) == {"skipped"}
    assert len(world.verdicts) == len(world.plan.jobs)


@pytest.mark.parametrize("first", range(9, 39, 3))
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


@pytest.mark.parametrize("devices", [1, 2])
def test_a_job_that_its_device_lost_runs_again_and_without_another_device_there(tmp_path: Path, devices: int) -> None:
    world = World(tmp_path, Script(losing={0: 1}), devices=devices)
    world.run()
    assert [attempts[-1].verdict for attempts in world.recorded.values()] == [Verdict.PASSED] * 6
    [(lost, last)] = [attempts for attempts in world.recorded.values() if len(attempts) > 1]
    assert (lost.verdict, lost.cause, lost.device) == (Verdict.INFRA, Cause.CONNECTION, "device-0")
    before = "before" if devices == 1 else "before, on other devices"
    assert (last.device, last.notes) == (f"device-{devices - 1}", (f"{before}: connection lost on device-0",))


def test_a_job_that_its_only_device_loses_twice_is_infra_and_costs_no_other(tmp_path: Path) -> None:
    world = World(tmp_path, Script(losing={0: 2}), devices=1)
    world.run()
    assert sorted(world.verdicts.values()) == ["passed"] * 5
    [lost] = [attempts for job, attempts in world.recorded.items() if job not in world.verdicts]
    assert [one.cause for one in lost] == [Cause.CONNECTION] * 2


def test_a_job_whose_only_device_does_not_come_back_keeps_what_befell_it(tmp_path: Path) -> None:
    world = World(tmp_path, Script(losing={0: 1}, is_lost=True), devices=1)
    world.run()
    assert [[one.cause for one in attempts] for attempts in world.recorded.values()] == [[Cause.CONNECTION]]

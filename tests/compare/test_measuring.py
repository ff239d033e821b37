"""Result of a comparison after failed devices or Ctrl-C. The benches are stubs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from log_lines import LogLines

from farm.base.errors import InfraError, NoDeviceError
from farm.numbers.compare import measuring
from farm.numbers.compare.compare import run_differently
from farm.numbers.compare.measuring import JobToRun, MeasuringPool
from farm.numbers.compare.pairing import JobOutcome
from farm.numbers.compare.request import ComparisonRequest, SideRequest
from farm.suites.suite import Target

NAMES = [f"job {number}" for number in range(6)]
# The name of a job stands for the program of a side.
JOBS = [JobToRun(name=name, target=Target("SM8650", "htp", "8a8w"), a=None, b=cast("Any", name)) for name in NAMES]


class BenchStubs:
    """Benches that know which jobs take the device with them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.devices, self.opened = 2, 0
        self.broken: set[str] = set()
        self.ran: list[str] = []
        self.stop, self.stop_at = threading.Event(), ""
        self.said = LogLines()
        monkeypatch.setattr(measuring, "InterleavedBench", lambda *_, **__: self._bench())
        monkeypatch.setattr(measuring, "other_runtime", lambda *_: None)
        monkeypatch.setattr(measuring, "run_job", self._run)

    def run(self, virtual: int = 1) -> MeasuringPool:
        sides = SideRequest(toolchain="a"), SideRequest(toolchain="b")
        request = ComparisonRequest(sides=sides, socs=("SM8650",), suites=("s",), virtual=virtual)
        nothing = cast("Any", None)
        pool = MeasuringPool((nothing, nothing), nothing, request, self.stop)
        pool.run(JOBS)
        return pool

    @contextmanager
    def _bench(self) -> Iterator[object]:
        self.opened += 1
        if self.opened > self.devices:
            raise NoDeviceError("no SM8650 became free in time")
        yield SimpleNamespace(device=SimpleNamespace(serial="one"), runtime=None)

    def _run(self, bench: Any, _a: object, name: str, *_: object) -> JobOutcome:
        self.ran.append(name)
        if name == self.stop_at:
            self.stop.set()
        if name in self.broken:
            raise InfraError("the device is gone")
        return JobOutcome(device=bench.device.serial)


@pytest.fixture
def benches(monkeypatch: pytest.MonkeyPatch) -> BenchStubs:
    return BenchStubs(monkeypatch)


@pytest.mark.parametrize("devices", [2, 1])
def test_every_job_is_run_once_also_where_one_device_of_two_is_there(benches: BenchStubs, devices: int) -> None:
    benches.devices = devices
    pool = benches.run(virtual=2)
    assert sorted(benches.ran) == NAMES
    assert (sorted(pool.outcomes), pool.left_out) == (NAMES, {})


def test_a_job_that_takes_the_device_with_it_twice_counts_against_nobody_and_the_others_are_run(
    benches: BenchStubs,
) -> None:
    benches.devices, benches.broken = 10, {"job 2"}
    pool = benches.run()
    assert benches.ran.count("job 2") == 2
    assert sorted(pool.outcomes) == NAMES
    assert pool.outcomes["job 2"].problem == "the device is gone"
    assert not pool.outcomes["job 3"].problem


def test_without_a_device_no_job_is_run_and_each_says_why(benches: BenchStubs) -> None:
    benches.devices = 0
    pool = benches.run()
    assert pool.outcomes == {}
    assert pool.left_out == dict.fromkeys(NAMES, "no SM8650 became free in time")
    assert benches.said == ["no SM8650 became free in time"]


def test_after_an_interrupt_no_job_begins(benches: BenchStubs) -> None:
    benches.stop_at = "job 1"
    pool = benches.run()
    assert sorted(pool.outcomes) == ["job 0", "job 1"]
    assert pool.left_out == dict.fromkeys(NAMES[2:], "interrupted")


def test_the_same_program_is_measured_where_another_runner_or_other_options_run_it() -> None:
    plain, direct, burst = (
        Target("SM8650", "htp", "fp16", options)
        for options in ((), (("direct_mode", "true"),), (("htp_performance_mode", "burst"),))
    )
    assert run_differently(plain, direct)
    assert run_differently(plain, burst)
    assert not run_differently(direct, direct)
    # The option is printed, and needs no other runner.
    assert not run_differently(plain, msgspec.structs.replace(plain, options=(("direct_mode", "false"),)))

"""Workers of one session: their devices, a second device for a failure, and the programs of a test."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any, cast

import made
import msgspec
import numpy as np
import pytest
from farm_home import FarmHome
from pytest_sessions import jobs_of, run_tests

from farm.base.config.settings import LeaseConfig
from farm.base.errors import NoDeviceError
from farm.builds.bundles import ready
from farm.builds.bundles.bundle import Bundle, TensorSpec
from farm.builds.program.pte import Program, read_pte
from farm.devices.device import AdbAddress, Device
from farm.devices.execution.content_store import program_flags
from farm.devices.execution.raw import RESULT_FILE, RawResult
from farm.dispatch.pytest_plugin.lease import DeviceLease, release_of
from farm.dispatch.pytest_plugin.runner import Bundles, DeviceProgram, Runner
from farm.dispatch.pytest_plugin.worker import WrongNumbersError
from farm.policy.situation import Priority
from farm.results.attempt import Attempt, Cause, Stage, Verdict
from farm.store.leases.registry import Seen
from farm.store.store import open_store
from farm.suites.suite import InputSpec, Job

# Devices of the workers of one session.


class PlanStub:
    """Plan of two devices, with the fields that a lease reads."""

    def __init__(self, folder: Path) -> None:
        self.lease_store = f"sqlite:///{folder / 'leases.db'}"
        self.lease_times, self.purpose, self.leased = LeaseConfig(), "farm pytest tests", True
        self.devices = tuple(
            Device(f"virtual-{n}", "SM8650", "virtual", "", AdbAddress(5037), "", host="here") for n in range(2)
        )
        self.left: dict[str, str] = {}

    def devices_left(self) -> dict[str, str]:
        return self.left


@pytest.fixture
def plan(tmp_path: Path) -> PlanStub:
    plan = PlanStub(tmp_path)
    with open_store(plan.lease_store) as store:
        store.devices.see([Seen(device, "device", None) for device in plan.devices])
    return plan


Worker = Callable[..., DeviceLease]


@pytest.fixture
def worker(plan: PlanStub) -> Iterator[Worker]:
    """Function that makes the lease of a worker; with `index` it has that device."""
    made: list[DeviceLease] = []

    def make(index: int | None = None, **options: Any) -> DeviceLease:
        any_plan: Any = plan
        made.append(DeviceLease(any_plan, **options))
        assert index is None or made[-1].acquire([plan.devices[index]])
        return made[-1]

    yield make
    for lease in made:
        lease.close()


def test_each_worker_has_a_device_of_its_own(plan: PlanStub, worker: Worker) -> None:
    first, second, third = worker(), worker(), worker()
    devices = [first.acquire(first.usable()), second.acquire(second.usable())]
    assert {device.serial for device in devices if device} == {"virtual-0", "virtual-1"}
    assert (first.is_ours, second.is_ours) == (True, True)
    assert third.acquire(third.usable(), 0.0) is None
    # The device of a dead worker is free at once.
    any_plan: Any = plan
    release_of(any_plan, os.getpid())
    assert third.acquire(plan.devices[:1], 30.0) == plan.devices[0]


def test_a_device_of_another_worker_may_run_a_test_again_and_of_another_command_not(
    plan: PlanStub, worker: Worker
) -> None:
    first, _ = worker(0), worker(1)
    assert first.others({"virtual-0"}) == [plan.devices[1]]
    assert first.others({"virtual-0", "virtual-1"}) == []
    plan.purpose = "farm pytest more_tests"
    assert first.others({"virtual-0"}) == []


def test_a_worker_exchanges_its_device_for_a_free_one(plan: PlanStub, worker: Worker) -> None:
    lease = worker(0)
    assert lease.wanted_elsewhere() == []
    with open_store(plan.lease_store) as store:
        words = {"count": 1, "user": store.user, "priority": Priority.PERSON, "ttl_s": 30.0}
        mine = {"host": socket.gethostname(), "pid": os.getpid() + 1, "purpose": plan.purpose}
        store.leases.request([plan.devices[0].id], **words, **mine)
        assert lease.wanted_elsewhere() == [plan.devices[1]]
        worker(1)
        assert lease.wanted_elsewhere() == [], "no device is free"


def test_with_dist_each_a_worker_keeps_its_device(plan: PlanStub, worker: Worker) -> None:
    lease = worker(1, exchanges=False)
    assert (lease.usable(), lease.others(set())) == ([plan.devices[1]], [])
    plan.left = {plan.devices[1].id: "it is gone"}
    assert lease.usable() == []


def test_a_device_out_of_service_is_not_waited_for(plan: PlanStub, worker: Worker) -> None:
    with open_store(plan.lease_store) as store:
        store.devices.set_service(plan.devices[0].id, in_service=False, note="bench is moved", user="ada")
    with pytest.raises(NoDeviceError, match="bench is moved"):
        worker(0)


# A failure that may be the device's is tried on another device, as in a run: real workers, no program.


SUITE = """
from pathlib import Path

import pytest

from farm.base.errors import ProgramError

REFUSED = ProgramError("load: refused", stage="load", cause="refused")


@pytest.mark.parametrize("n", range(3))
def test_refused_by_one(device, n):
    first = Path(f"first-{n}")
    if not first.exists():
        first.write_text(device.serial)
    if first.read_text() == device.serial:
        raise REFUSED


def test_refused_by_all(device):
    raise REFUSED


def test_refused_and_caught(device):
    with pytest.raises(ProgramError):
        raise REFUSED
    assert device.soc == "SM8650"
"""


def attempts(home: FarmHome) -> dict[str, list[tuple[Verdict, Cause]]]:
    """Return verdicts and causes by the names of the tests, which no device tried twice."""
    jobs = jobs_of(home)
    for job in jobs.values():
        assert len({attempt.device for attempt in job.attempts}) == len(job.attempts), job.id
    return {name: [(attempt.verdict, attempt.cause) for attempt in job.attempts] for name, job in jobs.items()}


@pytest.mark.whole
def test_another_device_decides_whether_a_refusal_is_the_code(home: FarmHome) -> None:
    done = run_tests(home, SUITE, devices=2, code=1)
    refused, passed = (Verdict.INFRA, Cause.REFUSED), (Verdict.PASSED, Cause.NONE)
    assert attempts(home) == {
        **{f"test_refused_by_one[{number}]": [refused, passed] for number in range(3)},
        "test_refused_by_all": [refused, (Verdict.FAILED, Cause.REFUSED)],
        "test_refused_and_caught": [passed],
    }
    assert "1 failed, 4 passed, 4 rerun" in done.stdout, done.stdout[-3000:]


MOVES = """
import subprocess
from pathlib import Path

import pytest

from farm.base.errors import DeviceGoneError


@pytest.mark.xfail(reason="ticket 7")
def test_expected(device):
    first = Path("expected")
    if not first.exists():
        first.write_text(device.serial)
        raise DeviceGoneError(device.serial, "its cable is loose")
    assert device.serial == first.read_text(), "as expected"


def test_moves(device):
    first = Path("first")
    if not first.exists():
        first.write_text(device.serial)
        subprocess.run(["adb", "reboot"], check=True, timeout=60)
        raise AssertionError("this says nothing of the code")
    assert device.serial != first.read_text()
    said = subprocess.run(["adb", "shell", "getprop", "ro.product.name"], capture_output=True, text=True, timeout=60)
    assert said.stdout.strip() == device.serial


def test_after(device):
    assert device.run(["true"]).code == 0
"""


@pytest.mark.parametrize("workers", ["0", pytest.param("1", marks=pytest.mark.whole)])
def test_a_test_that_lost_its_device_runs_again_on_the_next(home: FarmHome, workers: str) -> None:
    done = run_tests(home, MOVES, "-n", workers, devices=2, code=0)
    found = attempts(home)
    assert [verdict for verdict, _ in found["test_expected"]] == [Verdict.INFRA, Verdict.FAILED]
    assert found["test_expected"][1][1] is Cause.NONE, "a lost device is expected by no test"
    assert [verdict for verdict, _ in found["test_moves"]] == [Verdict.INFRA, Verdict.PASSED]
    assert found["test_after"] == [(Verdict.PASSED, Cause.NONE)]
    assert "2 passed, 1 xfailed, 2 rerun" in done.stdout, done.stdout[-3000:]


# `bundle.pte`: the file of a ready program decides the executed method and its features.


@pytest.fixture
def bundle(models: Path, tmp_path: Path) -> Bundles:
    plan = SimpleNamespace(suite_folders=(), backend="htp", soc="SM8650", cache_root=tmp_path)
    worker: Any = SimpleNamespace(plan=plan, scratch=tmp_path / "scratch", test_folder=models)
    return Bundles(worker)


def test_forward_is_executed_also_where_it_is_not_the_first_method(
    bundle: Bundles, monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_encode(path: Path) -> Program:
        program = read_pte(path)
        [forward] = program.methods
        encode = msgspec.structs.replace(forward, name="encode")
        return msgspec.structs.replace(program, methods=(encode, msgspec.structs.replace(forward, index=1)))

    monkeypatch.setattr(ready, "read_pte", with_encode)
    manifest = bundle.pte("conv.pte").bundle.manifest
    assert manifest.method == "forward"
    assert program_flags(manifest, "simulator") == {"method_index": "1"}


def test_it_is_executed_with_the_features_that_it_was_compiled_with(bundle: Bundles) -> None:
    shared, dump = (bundle.pte(f"conv_{name}.pte").bundle.manifest for name in ("shared", "dump"))
    assert program_flags(shared, "android") == {"shared_buffer": "true"}
    assert program_flags(shared, "simulator") == {}, "ordinary memory stands in for what a DSP shares"
    assert dump.features == ("dump_intermediate_outputs",)


# Fixture `runner` with a stub of its worker: an execution is judged while its files are on the device.


SPEC = TensorSpec((2,), "float32")
REPORT = {
    "schema": 1, "ok": True, "exit_code": 0, "load_ns": 5, "outputs": [{"shape": [2], "dtype": "float32", "nbytes": 8}],
    "inferences": [{"line": 0, "iterations_ns": [5], "differing": {"count": 0, "executions": []}}],
}  # fmt: skip


class StubRun:
    """Run on a device that has the files of the last execution alone."""

    runtime = SimpleNamespace(one_shot=False, runner="farm_runner")

    def flags(self, *_: object) -> dict[str, str]:
        return {}

    def run(self, job_id: str, _: Bundle, folder: Path, *__: object, **___: object) -> RawResult:
        folder.mkdir(parents=True)
        np.zeros(2, np.float32).tofile(folder / "output_0_0.raw")
        (folder / RESULT_FILE).write_text(json.dumps(REPORT))
        self.last = folder
        return RawResult(
            job_id=job_id, serial="s", workspace=PurePosixPath("/w"), folder=folder, started_ms=1, exit_code=0,
            run_seconds=1.0,
        )  # fmt: skip

    def judge(self, job: Job, _: Bundle, raw: RawResult) -> Attempt:
        if raw.folder != self.last:
            return Attempt(job.id, Verdict.INFRA, Stage.EXECUTE, "the files are gone", device="s", cause=Cause.DAMAGE)
        return Attempt(job.id, Verdict.FAILED, Stage.NUMERICS, "wrong", device="s", cause=Cause.NUMERICS)


def test_a_wrong_number_stays_one_after_later_executions(tmp_path: Path) -> None:
    worker = SimpleNamespace(
        scratch=tmp_path, info=SimpleNamespace(soc="SM8650", serial="s"), run=StubRun(),
        plan=SimpleNamespace(soc="SM8650", backend="htp"), executed=lambda *_: None, checked=lambda attempt, _: attempt,
    )  # fmt: skip
    bundle = Bundle(tmp_path, made.manifest(inputs=(SPEC,), outputs=(SPEC,)))
    runner, program = Runner(cast("Any", worker)), DeviceProgram(bundle, made.job(inputs=(InputSpec((2,)),)))
    first, _ = runner(program), runner(program)
    with pytest.raises(WrongNumbersError, match="wrong"):
        first.check()

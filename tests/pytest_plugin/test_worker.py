"""Workers of one session: distribution of tests, devices, a second device for a failure, and the programs of a test."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any, cast

import made
import msgspec
import numpy as np
import pytest
from farm_home import FarmHome
from made_runs import ask
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
from farm.dispatch.pytest_plugin.scheduling import GroupScheduling
from farm.dispatch.pytest_plugin.worker import WrongNumbersError
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
        mine = {"user": store.user, "host": socket.gethostname(), "pid": os.getpid() + 1, "purpose": plan.purpose}
        ask(store.leases, plan.devices[0].id, **mine)
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


# Tests go to workers that have a device, and every mode of distribution ends, also when workers die.


DYING_SUITE = """
import os
import signal

import pytest

pytestmark = pytest.mark.xdist_group("{name}")


@pytest.mark.parametrize("n", range(3))
def test_one(n):
    if n == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def test_after():
    pass
"""
CONFTEST = """
def pytest_xdist_make_scheduler(config):
    from farm.dispatch.pytest_plugin.scheduling import GroupScheduling

    return GroupScheduling(config)
"""


@pytest.mark.parametrize(
    "mode", ["loadfile", *(pytest.param(one, marks=pytest.mark.whole) for one in ("loadgroup", "worksteal", "each"))]
)
def test_every_mode_ends_when_workers_are_killed(mode: str, tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    for name in "abc":
        (tmp_path / f"test_{name}.py").write_text(DYING_SUITE.format(name=name))
    words = ["-m", "pytest", "-p", "xdist", "-p", "no:cacheprovider", "-n", "2", "--max-worker-restart=50", "--dist"]

    done = subprocess.run(
        [sys.executable, *words, mode], cwd=tmp_path, env={"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip

    times = 2 if mode == "each" else 1
    assert re.search(f"{3 * times} failed, {9 * times} passed in", done.stdout), done.stdout + done.stderr
    assert done.returncode == 1


class NodeStub:
    """Worker of pytest-xdist for a scheduler: it starts a test only when it has the next one or has to shut down."""

    def __init__(self) -> None:
        self.shutting_down = False
        self.given: list[int] = []
        self.asked_back: list[int] = []

    def send_runtest_some(self, indices: Sequence[int]) -> None:
        assert not self.shutting_down
        self.given += indices

    def send_steal(self, indices: Sequence[int]) -> None:
        self.asked_back += indices

    def shutdown(self) -> None:
        self.shutting_down = True


TESTS = [f"test_{name}.py::test_{n}" for name in "abcd" for n in range(5)]


def started(mode: str, *tests: Sequence[str], hook: object = None) -> tuple[GroupScheduling, list[NodeStub]]:
    """Return a scheduler and its workers, each with `tests` of its own."""
    tests = tests or (TESTS, TESTS)
    config: Any = SimpleNamespace(getoption={"dist": mode, "tx": ["popen"] * len(tests)}.get, hook=hook)
    sched, nodes = GroupScheduling(config), [NodeStub() for _ in tests]
    for node, collected in zip(nodes, tests, strict=True):
        sched.add_node(node)
        sched.add_node_collection(node, collected)
    assert sched.collection_is_completed
    sched.schedule()
    return sched, nodes


def run_all(sched: GroupScheduling, node: NodeStub) -> list[int]:
    """Let a worker run its tests until it waits for more; return their numbers."""
    done: list[int] = []
    while node.given and (len(node.given) > 1 or node.shutting_down):
        done.append(node.given.pop(0))
        sched.mark_test_complete(node, done[-1])
    return done


def test_the_files_of_a_group_stay_together() -> None:
    sched, nodes = started("loadfile")
    ran = [run_all(sched, node) for node in nodes]
    ran = [one + run_all(sched, node) for one, node in zip(ran, nodes, strict=True)]
    files = [{TESTS[index].partition("::")[0] for index in one} for one in ran]
    assert not files[0] & files[1]
    assert sorted(ran[0] + ran[1]) == list(range(len(TESTS)))
    assert sched.tests_finished


def test_a_group_is_in_the_name_behind_the_parameters() -> None:
    sched, [node] = started("loadgroup", ["t.py::a@one", "t.py::b[x@y]", "t.py::c[x]@one"])
    assert node.given == [0, 2]
    assert run_all(sched, node) == [0, 2, 1]


def test_with_each_the_rest_of_two_dead_workers_is_for_one_worker_each() -> None:
    sched, nodes = started("each")
    for node in nodes:
        sched.remove_node(node)
    new = [NodeStub(), NodeStub()]
    for node in new:
        sched.add_node(node)
        sched.add_node_collection(node, TESTS)
        sched.schedule()
        assert run_all(sched, node) == list(range(1, len(TESTS)))
    assert sched.tests_finished


@pytest.mark.parametrize("mode", ["load", "loadfile"])
def test_what_a_dead_worker_had_is_for_the_others(mode: str) -> None:
    sched, (dead, well) = started(mode)
    held = list(dead.given)
    assert sched.remove_node(dead) == TESTS[held[0]]
    new = NodeStub()
    sched.add_node(new)
    sched.add_node_collection(new, TESTS)
    sched.schedule()
    ran = run_all(sched, well) + run_all(sched, new) + run_all(sched, well)
    assert sorted(ran) == [index for index in range(len(TESTS)) if index != held[0]]
    assert sched.tests_finished


@pytest.mark.parametrize("mode", ["load", "loadfile"])
def test_a_worker_that_lost_its_device_leaves_its_tests_to_the_others(mode: str) -> None:
    sched, (broken, well) = started(mode)
    sched.give_up(broken)
    sched.give_up(broken)
    assert len(broken.asked_back) == len(set(broken.asked_back)), "asked for once"
    back, broken.given = broken.asked_back, [one for one in broken.given if one not in broken.asked_back]
    if back:
        sched.remove_pending_tests_from_node(broken, back)
    assert broken.shutting_down
    assert len(run_all(sched, broken)) <= 2
    sched.remove_node(broken)
    # The broken worker has ended, and gives nothing back.
    sched.remove_pending_tests_from_node(broken, [])
    run_all(sched, well)
    assert sched.tests_finished


def test_tests_end_where_no_device_is_left() -> None:
    sched, nodes = started("load")
    ran: list[int] = []
    for node in nodes:
        sched.give_up(node)
        ran += run_all(sched, node)
    assert sorted(ran) == list(range(len(TESTS)))
    assert sched.tests_finished


def test_a_worker_with_other_tests_gets_none() -> None:
    output: list[pytest.CollectReport] = []
    hook = SimpleNamespace(pytest_collectreport=lambda report: output.append(report))
    sched, nodes = started("load", TESTS, TESTS[1:], hook=hook)
    assert [one.failed for one in output] == [True]
    assert nodes[1].shutting_down
    assert run_all(sched, nodes[0]) == list(range(len(TESTS)))

"""Jobs that devices skip, refuse or lose: dead sessions, one or every device, the adb server. Real workers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from run_model import Script, World
from stub_farm import fill_bundle, stub_case

from farm.base.config.settings import HealthConfig
from farm.base.errors import DeviceError
from farm.base.processes import Supervisor
from farm.builds.bundles.bundle import load_bundle
from farm.builds.bundles.cache import BundleCache
from farm.builds.runtime.runtime import Runtime
from farm.devices.adb.server import start_adb_server
from farm.devices.device import Device, Event, HealthEvent
from farm.devices.virtual.boot import boot
from farm.dispatch.device_process import Worker
from farm.dispatch.messages import Grant, JobReturned
from farm.dispatch.pool.fleet import AcquiredDevice
from farm.dispatch.pytest_plugin.runner import DeviceProgram, ProgramResult, Runner
from farm.dispatch.pytest_plugin.worker import SuiteWorker
from farm.dispatch.request.profiling import Profile
from farm.dispatch.request.request import RunPlan
from farm.policy.retries import Tried
from farm.replay.one_off import OneOffRequest, OneOffTries
from farm.results.attempt import Attempt, Cause, Verdict
from farm.store.cluster.records import PlannedJob
from farm.suites.suite import Job, OptionSet, Target

# Jobs that virtual devices skip, and jobs that meet the end of the adb server or of the connection to their device.


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


# Programs that a live runner refuses: by a dead session, by one device, by every device. Real workers and sessions.


STUB = Path(__file__).with_name("refusing_runner_stub.py")
NEVER = "process 1000\nnothing"
NO_WORDS = "Fail to initialize Qnn Manager"
NO_SKEL = "<E> DspTransport.openSession qnn_open failed, 0x80000406, prio 100"
RESTARTED = "SSR Detected - You must free and recreate affected QNN API handles"
NOT_FINAL = "process 1000\n[ERROR] [Qnn ExecuTorch]: Failed to finalize Qnn Graph with error: 1000"
TOO_LARGE = 'A single op, "q::Add" (Op ID: 12), requires 0x2400000 bytes of TCM, which is greater than 0x800000!'


@pytest.fixture(scope="module")
def devices(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Device]]:
    folder = tmp_path_factory.mktemp("refusals")
    with Supervisor() as supervisor:
        yield boot(supervisor, start_adb_server(supervisor, folder / "adb"), ["SM8650", "SM8650"], folder / "devices")


def runtime(folder: Path, dies: str) -> Runtime:
    """Stub, with a file that sets the beginning of its refusals."""
    folder.mkdir()
    (folder / "dies.txt").write_text(dies)
    files = {STUB.name: STUB, "dies.txt": folder / "dies.txt"}
    hashes = {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()}
    return Runtime(files, "d" * 64, STUB.name, {}, "simulator", False, hashes)


def planned(cache: BundleCache, number: int, model: str) -> PlannedJob:
    """Return a job with its program in the cache; the program returns its input."""
    key = hashlib.sha256(f"{number} {model}".encode()).hexdigest()
    cache.folder(key).mkdir(parents=True)
    fill_bundle(cache.folder(key), key, model)
    return PlannedJob(Job(stub_case(f"case{number}"), Target("SM8650", "htp", "8a8w")), key, cached=True)


class StubFarm:
    """Workers of a run in one process; the controller's part, and the store's, is this class."""

    def __init__(self, folder: Path, devices: Sequence[Device], dies: Sequence[str], models: Sequence[str]) -> None:
        cache = BundleCache(folder / "cache")
        self.jobs = tuple(planned(cache, number, model) for number, model in enumerate(models))
        self.plan = RunPlan(
            f"run-{hashlib.sha256(str(folder).encode()).hexdigest()[:8]}", folder / "run", cache.root, self.jobs,
            tuple(devices),
            {device.serial: runtime(folder / device.serial, how) for device, how in zip(devices, dies, strict=True)},
            folder / "artifacts", health_checks=(planned(cache, 99, "health_check"),), iterations=1, warm_up=0,
            timeout_s=30.0, leased=True, profile=Profile.OFF,
        )  # fmt: skip
        self.plan.prepare_folder()
        self.attempts: list[Attempt] = []
        self.events: list[tuple[str, str]] = []
        self.outvoted: list[str] = []
        self.workers = [self._worker(number, device.serial) for number, device in enumerate(devices)]

    def _worker(self, number: int, serial: str) -> Worker:
        others = tuple(device.serial for device in self.plan.devices if device.serial != serial)
        grant = Grant(go=True, others=others)
        return Worker(self.plan, number, lambda: grant, record_health=self._record_health, is_orphan=lambda: False)

    def _record_health(self, event: HealthEvent) -> None:
        if event.event == Event.OUTVOTED:
            self.outvoted.append(event.device)

    def run(self) -> dict[str, Verdict]:
        """Run every job on the first device, and on others if another try is due; return the last verdicts."""
        for number, job in enumerate(self.jobs):
            following = self.jobs[number + 1] if number + 1 < len(self.jobs) else None
            history: tuple[Tried, ...] = ()
            for place, worker in enumerate(self.workers):
                again = msgspec.structs.replace(job, history=history)
                done = worker.run(again, following if not place else None)
                if isinstance(done, JobReturned):
                    # The device has to be recovered, or is given up: others do its jobs.
                    self.events.append((self.plan.devices[place].serial, done.unfit or done.given_up))
                    continue
                self.attempts += done.attempts
                if not done.repeat:
                    break
                history = done.repeat
        last = {attempt.job_id: attempt for attempt in self.attempts}
        assert len(last) == len(self.jobs), self.events
        return {one.case.name: last[one.id].verdict for one in (job.job for job in self.jobs)}

    def of(self, number: int) -> list[Attempt]:
        """Return the attempts of a job."""
        return [one for one in self.attempts if one.job_id == self.jobs[number].job.id]

    def close(self) -> None:
        for worker in self.workers:
            worker._executor.close()
            worker._device_worker.close()


@pytest.fixture
def farm(devices: list[Device], tmp_path: Path) -> Iterator[Any]:
    made: list[StubFarm] = []

    def make(*dies: str, models: Sequence[str] = ("good",) * 8) -> StubFarm:
        made.append(StubFarm(tmp_path, devices[: len(dies)], dies, models))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_a_session_that_dies_costs_no_job_its_verdict_even_on_the_only_device(farm: Any) -> None:
    # The health check and the start of a session count as jobs of the process as well.
    one = farm(f"process 6\n{NO_WORDS}")
    assert set(one.run().values()) == {Verdict.PASSED}
    lost = [attempt for attempt in one.attempts if attempt.verdict is not Verdict.PASSED]
    assert lost, "one session took fewer than six jobs: the test shows nothing"
    assert {attempt.verdict for attempt in lost} == {Verdict.INFRA}
    assert all("was refused in a session, not in a process of its own" in attempt.reason for attempt in lost)


@pytest.mark.parametrize(("words", "failed_before"), [(NO_SKEL, False), (NO_WORDS, True)])
def test_a_dead_dsp_costs_no_verdict_while_another_device_is_free(farm: Any, words: str, failed_before: bool) -> None:
    one = farm(f"device 6\n{words}", NEVER)
    one.jobs = tuple(msgspec.structs.replace(job, failed_before=failed_before) for job in one.jobs)
    assert set(one.run().values()) == {Verdict.PASSED}
    assert Verdict.FAILED not in {attempt.verdict for attempt in one.attempts}
    dead, free = (device.serial for device in one.plan.devices)
    assert {attempt.device for attempt in one.attempts if attempt.verdict is Verdict.PASSED} == {dead, free}
    # The health check of the dead device fails as well: it gets no other job before its recovery.
    assert {device for device, _ in one.events} == {dead}
    tried = [attempt for attempt in one.attempts if attempt.device == dead and attempt.verdict is Verdict.INFRA]
    assert len({attempt.job_id for attempt in tried}) == 1


PICKY = f"program\n{NO_WORDS}"
BY_BOTH, BY_FIRST = "0 infra, 0 infra, 1 infra, 1 failed", "0 infra, 0 infra, 1 passed"


def told(attempts: Sequence[Attempt], devices: Sequence[Device]) -> str:
    """Return the attempts as "NUMBER VERDICT" each, with the number of the device."""
    numbers = {device.serial: number for number, device in enumerate(devices)}
    return ", ".join(f"{numbers[one.device]} {one.verdict}" for one in attempts)


@pytest.mark.parametrize(
    ("dies", "model", "failed_before", "expected", "note"),
    [
        pytest.param(NEVER, "refused", False, BY_BOTH, "refused on {0} and on {1}", id="both devices are healthy"),
        pytest.param(PICKY, "picky", False, BY_FIRST, "before, on other devices: refused on {0}", id="one refuses it"),
        pytest.param(NEVER, "refused", True, "0 infra, 0 failed", "", id="it was red before"),
    ],
)
def test_a_program_that_devices_refuse(
    farm: Any, dies: str, model: str, failed_before: bool, expected: str, note: str
) -> None:
    one = farm(dies, NEVER, models=("good", model, "good"))
    one.jobs = tuple(msgspec.structs.replace(job, failed_before=failed_before) for job in one.jobs)
    one.run()
    serials = [device.serial for device in one.plan.devices]
    assert [told(one.of(number), one.plan.devices) for number in range(3)] == ["0 passed", expected, "0 passed"]
    assert (note.format(*serials) in one.of(1)[-1].notes) is bool(note)
    assert one.events == [], "both health checks passed"
    assert one.outvoted == (serials[:1] if expected == BY_FIRST else [])


def test_a_program_that_no_device_can_run_is_refused_once(farm: Any) -> None:
    one = farm(f"device 3\n{TOO_LARGE}", NEVER, models=("good", "good"))
    one.run()
    failed = [attempt for attempt in one.attempts if attempt.verdict is Verdict.FAILED]
    assert {attempt.cause for attempt in failed} == {Cause.UNSUPPORTED}
    assert len(failed) == len({attempt.job_id for attempt in failed}), "no second try, here or elsewhere"
    assert "an operator needs 0x2400000 bytes" in failed[0].reason


def in_settings(farm: StubFarm, *options: OptionSet) -> None:
    """Give each job of `farm` a target of LPAI with options."""
    lpai = [Target("SM8650", "lpai", "8a8w", chosen) for chosen in options]
    jobs = (msgspec.structs.replace(one.job, target=target) for one, target in zip(farm.jobs, lpai, strict=True))
    farm.jobs = tuple(msgspec.structs.replace(one, job=job) for one, job in zip(farm.jobs, jobs, strict=True))


def test_a_program_that_is_refused_for_its_frame_rate_alone_counts_against_neither_code_nor_device(farm: Any) -> None:
    one = farm(NOT_FINAL, NEVER, models=("good", "late", "good"))
    in_settings(one, (), (("fps", "30"), ("lpai_ftrt_ratio", "20")), ())
    assert list(one.run().values()) == [Verdict.PASSED, Verdict.SKIPPED, Verdict.PASSED]
    [attempt] = one.of(1)
    assert (attempt.cause, attempt.stage) == (Cause.INFEASIBLE, "load")
    assert attempt.reason.startswith(
        "infeasible: QNN does not keep fps 30, ftrt_ratio 20, core_selection 0 (finalize ended with error 1000; "
    )
    assert (one.events, one.outvoted) == ([], [])


@pytest.mark.parametrize(
    ("model", "log", "options"),
    [
        # The program is refused without the demand for real time as well.
        ("refused", NOT_FINAL, (("fps", "30"),)),
        # Refused for another reason.
        ("late", f"process 1000\n{NO_WORDS}", (("fps", "30"),)),
        # No time has to be kept.
        ("refused", NOT_FINAL, (("client_perf_type", "non_real_time"),)),
    ],
)
def test_a_refusal_that_is_not_for_the_frame_rate_counts(farm: Any, model: str, log: str, options: OptionSet) -> None:
    one = farm(log, models=("good", model))
    in_settings(one, (), options)
    assert list(one.run().values()) == [Verdict.PASSED, Verdict.FAILED]
    assert one.of(1)[-1].cause is Cause.REFUSED


def test_a_health_check_that_fails_by_the_runtime_counts_against_the_runtime(farm: Any) -> None:
    one = farm(f"device 6\n{NO_WORDS}\nhealth check {NO_SKEL}", NEVER)
    assert set(one.run().values()) == {Verdict.PASSED}
    dead = one.plan.devices[0].serial
    [refused] = [a for a in one.attempts if a.device == dead and "fails its health check as well" in a.reason]
    assert (refused.verdict, refused.cause) == (Verdict.INFRA, Cause.RUNTIME)
    assert "the skel is not visible to the DSP" in refused.reason


@pytest.mark.parametrize("refusing", [(1,), (0, 1)])
def test_a_run_ends_with_every_job_decided_whoever_refuses(tmp_path: Path, refusing: tuple[int, ...]) -> None:
    world = World(tmp_path, Script(refusing=refusing))
    world.run()
    assert set(world.verdicts.values()) == {Verdict.PASSED if len(refusing) == 1 else Verdict.FAILED}
    assert len(world.verdicts) == len(world.plan.jobs)


def test_a_device_with_unfit_libraries_is_left_out(farm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    one = farm(f"device 1\n{NO_SKEL}", models=("good",))
    [worker] = one.workers
    returned = worker.run(one.jobs[0])
    assert isinstance(returned, JobReturned)
    assert "the skel is not visible to the DSP" in returned.unfit
    device_worker = worker._device_worker
    monkeypatch.setattr(type(device_worker.run.transport), "reboot", lambda _: pytest.fail("a reboot changes nothing"))
    assert "the skel is not visible to the DSP" in device_worker.recover()
    assert not device_worker.given_up, "no quarantine"


class OneOff:
    """Tries of `farm exec` over stubs, with this class in place of the store and the search for devices."""

    def __init__(
        self, folder: Path, devices: Sequence[Device], dies: Sequence[str], model: str, **request: Any
    ) -> None:
        cache = BundleCache(folder / "cache")
        self.acquired = [
            AcquiredDevice(device, runtime(folder / device.serial, how), (device.id, 1))
            for device, how in zip(devices, dies, strict=True)
        ]
        job, self._health_check = planned(cache, 0, model), planned(cache, 99, "health_check")
        self.attempts: list[Attempt] = []
        self.health: list[tuple[str, str, str]] = []
        store: Any = SimpleNamespace(
            record_attempt=lambda _, attempt, **__: self.attempts.append(attempt),
            devices=SimpleNamespace(record_health=lambda e: self.health.append((e.device, e.event, e.state))),
        )
        self.tries = OneOffTries(
            store, OneOffRequest(job=job.job, virtual=False, profile=Profile.OFF, timeout_s=30.0, **request),
            load_bundle(cache.folder(job.key)), f"exec-{folder.name[-9:]}", folder / "raw",
            artifacts=folder / "artifacts", health=HealthConfig(), look=lambda _, attempt: attempt,
            another=lambda used: next((one for one in self.acquired if one.device.id not in used), None),
            health_check=lambda: (self._health_check.job, load_bundle(cache.folder(self._health_check.key))),
        )  # fmt: skip


@pytest.mark.parametrize(
    ("dies", "model", "failed_before", "expected", "health"),
    [
        pytest.param(f"once 1\n{RESTARTED}", "good", False, "0 infra, 0 passed", [], id="a new session runs it"),
        pytest.param(
            f"device 1\n{NO_WORDS}", "good", False, BY_FIRST, [("check_failed", "suspect")], id="the health check fails"
        ),
        pytest.param(PICKY, "picky", False, BY_FIRST, [("outvoted", "suspect")], id="one device refuses it"),
        pytest.param(NEVER, "refused", False, BY_BOTH, [], id="both refuse it"),
        pytest.param(NEVER, "refused", True, "0 infra, 0 failed", [], id="it failed before"),
    ],
)
def test_a_program_of_farm_exec_that_devices_refuse(
    devices: list[Device],
    tmp_path: Path,
    dies: str,
    model: str,
    failed_before: bool,
    expected: str,
    health: list[tuple[str, str]],
) -> None:
    one = OneOff(tmp_path, devices, [dies, NEVER], model, failed_before=failed_before)
    assert one.tries.run(one.acquired[0]) == one.attempts[-1]
    assert told(one.attempts, devices) == expected
    assert one.health == [(devices[0].id, *event) for event in health]


class Suite:
    """The fixture `runner` of `farm pytest` on one device, without pytest."""

    def __init__(self, folder: Path, device: Device, dies: str, model: str) -> None:
        cache = BundleCache(folder / "cache")
        job, health_check = planned(cache, 0, model), planned(cache, 99, "health_check")
        plan: Any = SimpleNamespace(
            devices=(device,), folder=folder, runtimes={device.serial: runtime(folder / device.serial, dies)},
            token=f"suite{folder.name[-6:]}", health=HealthConfig(), soc="SM8650", backend="htp", leased=False,
        )  # fmt: skip
        lease: Any = SimpleNamespace(device=device, require=lambda: None, fence=0)
        self.worker = SuiteWorker(plan, lease)
        self.worker.use(device)
        self.worker.begin_test(folder)
        self.runner = Runner(self.worker, lambda: (health_check.job, load_bundle(cache.folder(health_check.key))))
        self.program = DeviceProgram(load_bundle(cache.folder(job.key)), job.job)

    def run(self) -> ProgramResult:
        try:
            return self.runner(self.program, profile="off", timeout_s=30.0)
        finally:
            self.worker.run.close()
            self.worker.supervisor.close()


@pytest.mark.usefixtures("own_environment")
def test_a_test_of_farm_pytest_gets_a_new_session(devices: list[Device], tmp_path: Path) -> None:
    result = Suite(tmp_path, devices[0], f"once 1\n{RESTARTED}", "good").run()
    result.check()
    assert any("was refused in a session, not in a process of its own" in note for note in result.notes)


@pytest.mark.usefixtures("own_environment")
def test_a_test_on_a_device_whose_health_check_fails_is_infra(devices: list[Device], tmp_path: Path) -> None:
    suite = Suite(tmp_path, devices[0], f"device 1\n{NO_WORDS}\nhealth check {NO_SKEL}", "good")
    with pytest.raises(DeviceError, match="fails its health check as well") as raised:
        suite.run()
    assert suite.worker.classify(raised.value), "the farm or the device, not the test"
    assert suite.worker.facts().cause is Cause.RUNTIME

"""Programs that a live runner refuses: by a dead session, by one device, by every device. Real workers and sessions."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from run_model import Script, World

from farm.base.config.settings import HealthConfig
from farm.base.errors import DeviceError, ProgramError
from farm.base.processes import Supervisor
from farm.builds.bundles.bundle import INPUTS, MANIFEST, MODEL, Manifest, TensorSpec, load_bundle
from farm.builds.bundles.cache import BundleCache
from farm.builds.runtime.runtime import Runtime
from farm.devices.adb.server import start_adb_server
from farm.devices.device import Device
from farm.devices.health import Event, HealthEvent
from farm.devices.virtual.boot import boot
from farm.dispatch.messages import Grant, JobReturned
from farm.dispatch.pool.acquire import AcquiredDevice
from farm.dispatch.pytest_plugin.runner import DeviceProgram, ProgramResult, Runner
from farm.dispatch.pytest_plugin.worker import SuiteWorker
from farm.dispatch.request.plan import RunPlan
from farm.dispatch.request.profiling import Profile
from farm.dispatch.worker import Worker
from farm.policy.retries import Tried
from farm.replay.one_off_request import OneOffRequest
from farm.replay.one_off_tries import OneOffTries
from farm.results.attempt import Attempt, Cause, Verdict
from farm.store.cluster.records import PlannedJob
from farm.suites.suite import Case, InputSpec, Job, Limits, OptionSet, Target, Tolerance

STUB = Path(__file__).with_name("refusing_runner_stub.py")
NEVER = "process 1000\nnothing"
NO_WORDS = "Fail to initialize Qnn Manager"
NO_SKEL = "<E> DspTransport.openSession qnn_open failed, 0x80000406, prio 100"
RESTARTED = "SSR Detected - You must free and recreate affected QNN API handles"
FIRMWARE = "Error 0x8000054f: remote_handle64_open failed for file:///libQnnHtpV75Skel.so"
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


def planned(cache: BundleCache, number: int, model: bytes) -> PlannedJob:
    """Return a job with its program in the cache; the program returns its input."""
    values = np.random.default_rng(number).standard_normal(8).astype("float32").tobytes()
    key = hashlib.sha256(f"{number} {model!r}".encode()).hexdigest()
    tolerances = {"8a8w": Tolerance(fp32=Limits(sqnr_db=20.0))}
    case = Case("mine", f"case{number}", "torch.nn:Identity", (InputSpec((8,)),), tolerances=tolerances)
    job = Job(case, Target("SM8650", "htp", "8a8w"))
    folder = cache.folder(key)
    contents = {MODEL: model, f"{INPUTS}/input_0_0.raw": values}
    contents |= {f"reference_{kind}/output_0_0.raw": values for kind in ("fp32", "quantized")}
    for name, data in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    tensor = TensorSpec((8,), "float32")
    manifest = Manifest(
        key=key, job_id=job.id, soc="SM8650", backend="htp", precision="8a8w", samples=1, inputs=(tensor,),
        outputs=(tensor,), pte_bytes=len(model), delegates={"QnnBackend": 1}, delegated_ops=1, fallback_ops={},
        seconds={}, versions={},
        files={name: hashlib.sha256(data).hexdigest() for name, data in contents.items()},
    )  # fmt: skip
    (folder / MANIFEST).write_bytes(msgspec.json.encode(manifest))
    return PlannedJob(job, key, cached=True)


class StubFarm:
    """Workers of a run in one process; the controller's part, and the store's, is this class."""

    def __init__(self, folder: Path, devices: Sequence[Device], dies: Sequence[str], models: Sequence[bytes]) -> None:
        cache = BundleCache(folder / "cache")
        self.jobs = tuple(planned(cache, number, model) for number, model in enumerate(models))
        self.plan = RunPlan(
            f"run-{hashlib.sha256(str(folder).encode()).hexdigest()[:8]}", folder / "run", cache.root, self.jobs,
            tuple(devices),
            {device.serial: runtime(folder / device.serial, how) for device, how in zip(devices, dies, strict=True)},
            folder / "artifacts", health_checks=(planned(cache, 99, b"health_check"),),
            iterations=1, warm_up=0, timeout_s=30.0,
            leased=True, profile=Profile.OFF,
        )  # fmt: skip
        self.plan.prepare_folder()
        self.attempts: list[Attempt] = []
        self.events: list[tuple[str, str]] = []
        self.outvoted: list[tuple[str, str, str]] = []
        self.workers = []
        serials = [device.serial for device in devices]
        for number, serial in enumerate(serials):
            others = tuple(other for other in serials if other != serial)
            grant = Grant(go=True, others=others)
            self.workers.append(
                Worker(
                    self.plan, number, lambda grant=grant: grant, record_health=self._record_health,
                    is_orphan=lambda: False,
                )
            )  # fmt: skip

    def _record_health(self, event: HealthEvent) -> None:
        if event.event == Event.OUTVOTED:
            self.outvoted.append((event.device, event.state, event.reason))

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
                    serial = self.plan.devices[place].serial
                    self.events.append((serial, done.unfit or done.given_up))
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

    def make(*dies: str, models: Sequence[bytes] = (b"good",) * 8) -> StubFarm:
        made.append(StubFarm(tmp_path, devices[: len(dies)], dies, models))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("words", [NO_WORDS, RESTARTED])
def test_a_session_that_dies_costs_no_job_its_verdict_even_on_the_only_device(farm: Any, words: str) -> None:
    # The health check and the start of a session count as jobs of the process as well.
    one = farm(f"process 6\n{words}")
    assert set(one.run().values()) == {Verdict.PASSED}
    lost = [attempt for attempt in one.attempts if attempt.verdict is not Verdict.PASSED]
    assert lost, "one session took fewer than six jobs: the test shows nothing"
    assert {attempt.verdict for attempt in lost} == {Verdict.INFRA}
    assert all("was refused in a session, not in a process of its own" in attempt.reason for attempt in lost)


@pytest.mark.parametrize("words", [NO_SKEL, FIRMWARE])
def test_a_device_whose_dsp_dies_for_good_costs_no_verdict_while_another_is_free(farm: Any, words: str) -> None:
    one = farm(f"device 6\n{words}", NEVER)
    assert set(one.run().values()) == {Verdict.PASSED}
    assert Verdict.FAILED not in {attempt.verdict for attempt in one.attempts}
    dead, free = (device.serial for device in one.plan.devices)
    assert {attempt.device for attempt in one.attempts if attempt.verdict is Verdict.PASSED} == {dead, free}
    # The health check of the dead device fails as well: it gets no other job before its recovery.
    assert {device for device, _ in one.events} == {dead}
    tried = [attempt for attempt in one.attempts if attempt.device == dead and attempt.verdict is Verdict.INFRA]
    assert len({attempt.job_id for attempt in tried}) == 1


def test_a_program_that_two_healthy_devices_refuse_is_the_codes_fault(farm: Any) -> None:
    one = farm(NEVER, NEVER, models=(b"good", b"refused", b"good"))
    assert list(one.run().values()) == [Verdict.PASSED, Verdict.FAILED, Verdict.PASSED]
    first, second = (device.serial for device in one.plan.devices)
    attempts = one.of(1)
    assert [(a.device, a.verdict) for a in attempts] == [
        (first, Verdict.INFRA), (first, Verdict.INFRA), (second, Verdict.INFRA), (second, Verdict.FAILED),
    ]  # fmt: skip
    assert attempts[-1].reason == "load: Loading of method forward failed"
    assert f"refused on {first} and on {second}" in attempts[-1].notes
    assert one.events == [], "both health checks passed"


def test_a_program_that_one_device_refuses_and_another_runs_is_the_devices_fault(farm: Any) -> None:
    one = farm(f"program\n{NO_WORDS}", NEVER, models=(b"good", b"picky", b"good"))
    assert set(one.run().values()) == {Verdict.PASSED}
    first, second = (device.serial for device in one.plan.devices)
    assert [(a.device, a.verdict) for a in one.of(1)] == [
        (first, Verdict.INFRA), (first, Verdict.INFRA), (second, Verdict.PASSED),
    ]  # fmt: skip
    assert f"before, on other devices: refused on {first}" in one.of(1)[-1].notes
    assert [device for device, _, _ in one.outvoted] == [first]


def test_a_dead_device_is_found_out_by_a_job_that_was_red_before_as_well(farm: Any) -> None:
    one = farm(f"device 6\n{NO_WORDS}", NEVER)
    one.jobs = tuple(msgspec.structs.replace(job, failed_before=True) for job in one.jobs)
    assert set(one.run().values()) == {Verdict.PASSED}
    assert Verdict.FAILED not in {attempt.verdict for attempt in one.attempts}


def test_a_program_that_was_red_before_needs_no_second_device(farm: Any) -> None:
    one = farm(NEVER, NEVER, models=(b"refused",))
    one.jobs = tuple(msgspec.structs.replace(job, failed_before=True) for job in one.jobs)
    assert list(one.run().values()) == [Verdict.FAILED]
    assert {attempt.device for attempt in one.attempts} == {one.plan.devices[0].serial}


def test_a_program_that_no_device_can_run_is_refused_once(farm: Any) -> None:
    one = farm(f"device 3\n{TOO_LARGE}", NEVER, models=(b"good", b"good"))
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
    one = farm(NOT_FINAL, NEVER, models=(b"good", b"late", b"good"))
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
        (b"refused", NOT_FINAL, (("fps", "30"),)),
        # Refused for another reason.
        (b"late", f"process 1000\n{NO_WORDS}", (("fps", "30"),)),
        # No time has to be kept.
        (b"refused", NOT_FINAL, (("client_perf_type", "non_real_time"),)),
    ],
)
def test_a_refusal_that_is_not_for_the_frame_rate_counts(farm: Any, model: bytes, log: str, options: OptionSet) -> None:
    one = farm(log, models=(b"good", model))
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


def test_a_device_whose_libraries_do_not_fit_is_left_out_and_neither_rebooted_nor_quarantined(
    farm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = farm(f"device 1\n{NO_SKEL}", models=(b"good",))
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
        self, folder: Path, devices: Sequence[Device], dies: Sequence[str], model: bytes, **request: Any
    ) -> None:
        cache = BundleCache(folder / "cache")
        self.acquired = [
            AcquiredDevice(device, runtime(folder / device.serial, how), (device.id, 1))
            for device, how in zip(devices, dies, strict=True)
        ]
        job, self._health_check = planned(cache, 0, model), planned(cache, 99, b"health_check")
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

    def run(self) -> list[tuple[str, Verdict, Cause]]:
        last = self.tries.run(self.acquired[0])
        assert last == self.attempts[-1]
        return [(one.device, one.verdict, one.cause) for one in self.attempts]


def test_exec_tries_a_refused_program_in_a_new_session(devices: list[Device], tmp_path: Path) -> None:
    one = OneOff(tmp_path, devices[:1], [f"once 1\n{RESTARTED}"], b"good")
    assert [verdict for _, verdict, _ in one.run()] == [Verdict.INFRA, Verdict.PASSED]
    assert "was refused in a session, not in a process of its own" in one.attempts[0].reason


def test_exec_asks_another_device_where_the_health_check_fails(devices: list[Device], tmp_path: Path) -> None:
    one = OneOff(tmp_path, devices, [f"device 1\n{NO_WORDS}", NEVER], b"good")
    dead, free = (device.serial for device in devices)
    assert one.run() == [
        (dead, Verdict.INFRA, Cause.REFUSED), (dead, Verdict.INFRA, Cause.DEVICE), (free, Verdict.PASSED, Cause.NONE),
    ]  # fmt: skip
    assert "fails its health check as well" in one.attempts[1].reason
    assert one.health == [(devices[0].id, "check_failed", "suspect")]


def test_exec_counts_a_refusal_of_one_device_as_infra(devices: list[Device], tmp_path: Path) -> None:
    one = OneOff(tmp_path, devices, [f"program\n{NO_WORDS}", NEVER], b"picky")
    first, second = (device.serial for device in devices)
    assert [(device, verdict) for device, verdict, _ in one.run()] == [
        (first, Verdict.INFRA), (first, Verdict.INFRA), (second, Verdict.PASSED),
    ]  # fmt: skip
    assert one.health == [(devices[0].id, "outvoted", "suspect")]
    assert f"before, on other devices: refused on {first}" in one.attempts[-1].notes


def test_exec_counts_refusals_of_two_devices_against_the_program(devices: list[Device], tmp_path: Path) -> None:
    one = OneOff(tmp_path, devices, [NEVER, NEVER], b"refused")
    found = one.run()
    assert found[-1][1:] == (Verdict.FAILED, Cause.REFUSED)
    assert {device for device, _, _ in found} == {device.serial for device in devices}
    assert one.health == []


def test_repro_of_a_failure_needs_no_second_device(devices: list[Device], tmp_path: Path) -> None:
    one = OneOff(tmp_path, devices, [NEVER, NEVER], b"refused", failed_before=True)
    assert {device for device, _, _ in one.run()} == {devices[0].serial}
    assert one.attempts[-1].verdict is Verdict.FAILED


class Suite:
    """The fixture `runner` of `farm pytest` on one device, without pytest."""

    def __init__(self, folder: Path, device: Device, dies: str, model: bytes) -> None:
        cache = BundleCache(folder / "cache")
        job, health_check = planned(cache, 0, model), planned(cache, 99, b"health_check")
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
    result = Suite(tmp_path, devices[0], f"once 1\n{RESTARTED}", b"good").run()
    result.check()
    assert any("was refused in a session, not in a process of its own" in note for note in result.notes)


@pytest.mark.usefixtures("own_environment")
def test_a_test_on_a_device_whose_health_check_fails_is_infra(devices: list[Device], tmp_path: Path) -> None:
    suite = Suite(tmp_path, devices[0], f"device 1\n{NO_WORDS}\nhealth check {NO_SKEL}", b"good")
    with pytest.raises(DeviceError, match="fails its health check as well") as raised:
        suite.run()
    assert suite.worker.classify(raised.value), "the farm or the device, not the test"
    assert suite.worker.facts().cause is Cause.RUNTIME


@pytest.mark.usefixtures("own_environment")
def test_a_program_that_a_fit_device_refuses_fails_the_test(devices: list[Device], tmp_path: Path) -> None:
    suite = Suite(tmp_path, devices[0], NEVER, b"refused")
    with pytest.raises(ProgramError, match="Loading of method forward failed"):
        suite.run()

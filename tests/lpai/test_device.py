"""Root, files, options and skels on virtual devices with an LPAI runtime, whose library is a stub."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from attached import Attached, attach
from builder_runs import request_of, run_builders
from farm_home import FarmHome
from forked_command import call
from hardware_stub import WITH_HARDWARE
from lpai_sdk_stub import StubSdk, make_stub_sdk
from skel_stub import AUDIO, allow_unsigned, build_skel_stub, make_skel, make_skel_sdk, trust

from farm.base.config.settings import load_config
from farm.base.errors import NoDeviceError
from farm.base.processes import Supervisor
from farm.base.socs import find_soc
from farm.builds.bundles.bundle import Bundle, load_bundle, read_tensor
from farm.builds.bundles.cache import BundleCache
from farm.builds.compile.pool import MemoryLimits
from farm.builds.runtime.runtime import virtual_runtime
from farm.builds.runtime.signing import adopt
from farm.builds.toolchains.selection import prepare
from farm.builds.toolchains.toolchain import Compiler
from farm.devices.adb.transport import AdbTransport
from farm.devices.connect import open_transport
from farm.devices.execution.raw import RunnerOptions
from farm.devices.execution.session import DeviceSession
from farm.devices.virtual import boot as boot_module
from farm.dispatch.device_run.artifacts import AttemptArtifacts
from farm.dispatch.device_run.device_run import DeviceRun
from farm.dispatch.pool.fleet import Fleet, virtual_fleet
from farm.dispatch.pytest_plugin.lease import DeviceLease
from farm.dispatch.pytest_plugin.plan import SuitePlan
from farm.dispatch.pytest_plugin.worker import SuiteWorker
from farm.dispatch.request.profiling import Profile
from farm.results.attempt import Cause, Verdict
from farm.store.leases.registry import Seen
from farm.store.records import RunRecord
from farm.store.store import open_store
from farm.suites.manifests import load_suite
from farm.suites.options import runtime_flags
from farm.suites.suite import Job, Target

# Root, files and options on a virtual device with an LPAI runtime, whose library is a stub.


SUITE = Path(__file__).with_name("lpai_cases")

COMPILED_IN = (
    ("affinity", "hard"), ("client_perf_type", "non_real_time"), ("core_selection", "2"), ("fps", "9"),
    ("ftrt_ratio", "30"),
)  # fmt: skip
AT_RUN_TIME = (
    ("lpai_affinity", "soft"), ("lpai_client_perf_type", "real_time"), ("lpai_core_selection", "1"), ("lpai_fps", "4"),
    ("lpai_ftrt_ratio", "20"),
)  # fmt: skip


@pytest.fixture(scope="module")
def bundle(farm_cache: Path, stub_sdk: StubSdk, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """The case `block`, compiled by a real builder process for the LPAI of a virtual SM8850."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FARM_CACHE_DIR", str(farm_cache))
        patch.setenv("QNN_SDK_ROOT", str(stub_sdk.root))
        tools = prepare(load_config(), virtual=True)
        case = next(case for case in load_suite(SUITE / "suite.toml").cases if case.name == "block")
        folder = tmp_path_factory.mktemp("bundle")
        request = request_of(Job(case, Target("SM8850", "lpai", "8a8w", COMPILED_IN)), tools.versions, folder)
        [reply] = run_builders([request], tools.compiler, farm_cache, folder)
    assert reply.ok, reply.reason
    return load_bundle(BundleCache(farm_cache).folder(reply.key))


@pytest.fixture
def give_devices(
    stub_sdk: StubSdk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str], Fleet]]:
    """Allocates one virtual SM8850 of a build, as a run with the lpai backend does."""
    monkeypatch.setenv("QNN_SDK_ROOT", str(stub_sdk.root))
    start = boot_module.boot
    with Supervisor() as supervisor:

        def give(build: str) -> Fleet:
            monkeypatch.setattr(boot_module, "boot", partial(start, build=build))
            return virtual_fleet(load_config(), [find_soc("SM8850")], 1, "lpai", supervisor, tmp_path / "devices")

        yield give


def test_a_device_with_a_production_build_is_refused(give_devices: Callable[[str], Fleet]) -> None:
    with pytest.raises(NoDeviceError, match=r"virtual-SM8850-0.*root is needed.*production build"):
        give_devices("user")


def test_files_and_options_arrive(
    give_devices: Callable[[str], Fleet], bundle: Bundle, stub_sdk: StubSdk, tmp_path: Path
) -> None:
    fleet = give_devices("userdebug")
    [device] = fleet.devices
    runtime = fleet.runtimes[device.serial]
    assert runtime.needs_root
    assert open_transport(device).ensure_root()
    assert open_transport(device).user_id() == 0
    session = DeviceSession(AdbTransport(device.serial, device.address), runtime, "run", device.serial)
    try:
        stub_sdk.forget()
        plain = RunnerOptions(iterations=1, warm_up=0)
        first = session.execute("first", session.stage(bundle), tmp_path / "first", plain)
        assert first.error == "", first.stderr
        [folder] = (tmp_path / "devices" / device.serial).glob("data/local/tmp/farm/run-*/runtime")
        on_device = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
        # The last lets the DSP log.
        assert on_device == {*runtime.files, "farm_runner.farf"}
        # The libraries of LPAI and none of HTP's; the stub has HTP's from this machine.
        assert {name for name in on_device if name.startswith("libQnn")} == {
            "libQnnLpai.so", "libQnnLpaiSkel.so", "libQnnSystem.so",
        }  # fmt: skip
        assert stub_sdk.told("farm_runner") == [
            "backend_create target=0 hardware=6",
            "graph_set_config fps=9 ftrt_ratio=30 client_perf_type=2",
            "graph_set_config affinity=2 core_selection=2",
            "graph_finalize",
        ]
        stub_sdk.forget()
        flags = runtime_flags(Target("SM8850", "lpai", "8a8w", (*COMPILED_IN, *AT_RUN_TIME)))
        options = RunnerOptions(iterations=1, warm_up=0, flags=flags)
        second = session.execute("second", session.stage(bundle), tmp_path / "second", options)
        assert second.error == "", second.stderr
        assert stub_sdk.told("farm_runner")[1:3] == [
            "graph_set_config fps=4 ftrt_ratio=20 client_perf_type=1",
            "graph_set_config affinity=1 core_selection=1",
        ]
    finally:
        session.close()
    [spec] = bundle.manifest.outputs
    step = np.abs(bundle.reference("quantized", 0, 0)).max() / 100
    for name in ("first", "second"):
        output = read_tensor(tmp_path / name / "output_0_0.raw", spec)
        np.testing.assert_allclose(output, bundle.reference("quantized", 0, 0), atol=step)


@pytest.mark.usefixtures("own_environment")
def test_a_worker_of_farm_pytest_gets_root_by_su_before_its_first_test(
    give_devices: Callable[[str], Fleet], tmp_path: Path
) -> None:
    fleet = give_devices("rooted-by-su")
    plan = SuitePlan(
        token="t", folder=tmp_path / "plan", soc="SM8850", backend="lpai", devices=tuple(fleet.devices), workers=1,
        runtimes=fleet.runtimes, leased=False, record=RunRecord("farm pytest", "", "", {}), cache_root=tmp_path,
        suite_folders=(), versions={}, compiler=Compiler("", {}), build_timeout_s=1.0, build_limits=MemoryLimits(1, 1),
        leases=f"sqlite:///{tmp_path / 'leases.db'}",
    )  # fmt: skip
    plan.folder.mkdir()
    with open_store(plan.leases) as store:
        store.devices.see([Seen(device, "device", None) for device in fleet.devices])
    worker = SuiteWorker(plan, DeviceLease(plan))
    try:
        worker.get_ready()
        assert worker.run.transport.user_id() == 0
        assert worker.device.run(["id", "-u"]).stdout == b"0\n"
    finally:
        worker.close()


# Skels on devices whose DSP checks them: its user, its own signature, another signature, and no signature at all.


RUN = ("run", "--soc", "SM8850", "--suite", str(SUITE), "--backend", "lpai", "-k", "block", "--json")
SKEL = "libQnnLpaiSkel.so"
OURS, THEIRS = b"key of our devices", b"key of another company"


@pytest.fixture(scope="module")
def checking_sdk(farm_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SDK whose LPAI requires root and a skel with a signature that the device accepts."""
    sdk = make_stub_sdk(tmp_path_factory.mktemp("checking") / "stub-sdk", farm_cache)
    behind = sdk.root.with_name("liblpai_stub.so")
    sdk.library.rename(behind)
    build_skel_stub(sdk.library, behind, SKEL, AUDIO)
    return sdk.root


def sign(sdk: Path, key: bytes) -> None:
    """Put a skel with a signature of `key` into an SDK, and adopt it."""
    signed = sdk / "lib/lpai-v6/signed" / SKEL
    signed.write_bytes(make_skel(0x81, key))
    adopt(None, signed)


def run(attached: Attached, sdk: Path) -> tuple[subprocess.CompletedProcess[str], list[dict[str, Any]]]:
    """Run one job and return its attempts as well."""
    done = attached.home.farm(*RUN, env={**attached.env, "QNN_SDK_ROOT": str(sdk)}, timeout_s=300)
    assert done.stdout, done.stderr
    jobs = json.loads(done.stdout)["jobs"]
    return done, [attempt for job in jobs for attempt in job["attempts"]]


def boot_id(attached: Attached) -> str:
    return (attached.root(0) / "proc/sys/kernel/random/boot_id").read_text()


def health(home: FarmHome) -> dict[str, str]:
    with open_store(f"sqlite:///{home.state / 'farm.db'}") as store:
        return {one.serial: one.health for one in store.devices.all()}


@pytest.mark.whole
def test_a_wrong_signature_counts_against_neither_code_nor_device_and_the_devices_own_runs(
    home: FarmHome, checking_sdk: Path, tmp_path: Path
) -> None:
    with attach(home, tmp_path, ["SM8850"]) as attached:
        trust(attached.root(0), OURS)
        sign(checking_sdk, THEIRS)
        started = boot_id(attached)
        done, attempts = run(attached, checking_sdk)
        assert (done.returncode, attempts) == (4, []), done.stderr
        assert (
            "by the device's logs the DSP does not accept the signature of the skel: have it signed for this device "
            "(farm setup sign; docs/guides/lpai_and_signing.md), or use another device"
        ) in done.stderr
        assert "libQnnHtpV" not in done.stderr, "LPAI has another skel"
        assert boot_id(attached) == started, "no restart of a device changes a signature"
        assert health(home) == {"virtual-SM8850-0": "suspect"}, "its next health check decides"
        sign(checking_sdk, OURS)
        done, [attempt] = run(attached, checking_sdk)
        assert (done.returncode, attempt["verdict"]) == (0, "passed"), done.stderr
        assert f"skel stub: {SKEL} loaded" in attempt["log"]
        assert health(home) == {"virtual-SM8850-0": "healthy"}


@pytest.mark.whole
def test_a_job_runs_on_the_device_that_accepts_the_signature(
    home: FarmHome, checking_sdk: Path, tmp_path: Path
) -> None:
    sign(checking_sdk, OURS)
    with attach(home, tmp_path, ["SM8850", "SM8850"]) as attached:
        for number, key in enumerate((THEIRS, OURS)):
            trust(attached.root(number), key)
        done, [attempt] = run(attached, checking_sdk)
        assert (done.returncode, attempt["verdict"], attempt["device"]) == (0, "passed", "virtual-SM8850-1")
        assert health(home) == {"virtual-SM8850-0": "suspect", "virtual-SM8850-1": "healthy"}


@pytest.mark.whole
def test_a_user_who_is_not_root_is_refused_by_the_dsp(
    home: FarmHome, checking_sdk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sign(checking_sdk, OURS)
    with attach(home, tmp_path / "debug", ["SM8850"]) as attached:
        trust(attached.root(0), OURS)
        done, [passed] = run(attached, checking_sdk)
        assert done.returncode == 0, done.stderr
    monkeypatch.setenv("QNN_SDK_ROOT", str(checking_sdk))
    monkeypatch.setenv("FARM_CACHE_DIR", str(home.cache))
    config = load_config()
    # Without it the device would be refused before anything runs.
    runtime = msgspec.structs.replace(virtual_runtime(config, find_soc("SM8850"), "lpai"), needs_root=False)
    bundle = load_bundle(BundleCache(config.cache_dir).folder(passed["bundle_key"]))
    case = next(case for case in load_suite(SUITE / "suite.toml").cases if case.name == "block")
    job = Job(case, Target("SM8850", "lpai", "8a8w"))
    artifacts = AttemptArtifacts(tmp_path / "artifacts", Profile.OFF)
    with attach(home, tmp_path / "production", ["SM8850"], build="user") as attached:
        trust(attached.root(0), OURS)
        with DeviceRun(attached.devices[0], runtime, "user", takeover=False, artifacts=artifacts) as device_run:
            raw = device_run.run(job.id, bundle, tmp_path / "raw", RunnerOptions(iterations=1, warm_up=0))
            refused, _ = device_run.keep_crash_logs(device_run.judge(job, bundle, raw), tmp_path / "logs")
    assert (refused.verdict, refused.cause) == (Verdict.INFRA, Cause.RUNTIME)
    assert "by the device's logs this user may not open a signed process domain of the DSP: run as root" in (
        refused.reason
    )


@pytest.fixture(scope="module")
def htp_sdk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_skel_sdk(tmp_path_factory.mktemp("htp") / "stub-sdk", 75)


@pytest.mark.whole
@pytest.mark.parametrize("allowed", [True, False])
def test_an_unsigned_skel_runs_where_the_firmware_has_unsigned_process_domains(
    home: FarmHome, htp_sdk: Path, tmp_path: Path, *, allowed: bool
) -> None:
    with attach(home, tmp_path, ["SM8650"]) as attached:
        if allowed:
            allow_unsigned(attached.root(0))
        done = call(
            [*WITH_HARDWARE, "run", "--soc", "SM8650", "--suite", "smoke", "-k", "add", "--json"],
            env={**home.env, **attached.env, "QNN_SDK_ROOT": str(htp_sdk)}, cwd=home.cwd, timeout_s=300,
        )  # fmt: skip
        attempts = [attempt for job in json.loads(done.stdout)["jobs"] for attempt in job["attempts"]]
        if allowed:
            assert [one["verdict"] for one in attempts] == ["passed"], done.stderr
        else:
            assert (done.returncode, attempts) == (4, []), done.stderr
            assert "supports no unsigned process domain: use a device whose firmware does" in done.stderr

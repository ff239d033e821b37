"""Root, files and options on a virtual device with an LPAI runtime, whose library is a stub."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from builder_runs import request_of, run_builders
from lpai_sdk_stub import StubSdk

from farm.base.config.settings import load_config
from farm.base.errors import NoDeviceError
from farm.base.processes import Supervisor
from farm.base.socs import find_soc
from farm.builds.bundles.bundle import Bundle, load_bundle, read_tensor
from farm.builds.bundles.cache import BundleCache
from farm.builds.compile.pool import MemoryLimits
from farm.builds.toolchains.selection import prepare
from farm.builds.toolchains.toolchain import Compiler
from farm.devices.adb.transport import AdbTransport
from farm.devices.connect import open_transport
from farm.devices.execution.raw import RunnerOptions
from farm.devices.execution.session import DeviceSession
from farm.devices.virtual import boot as boot_module
from farm.dispatch.pool.fleet import Fleet, virtual_fleet
from farm.dispatch.pytest_plugin.lease import DeviceLease
from farm.dispatch.pytest_plugin.plan import SuitePlan
from farm.dispatch.pytest_plugin.worker import SuiteWorker
from farm.store.leases.registry import Seen
from farm.store.records import RunRecord
from farm.store.store import open_store
from farm.suites.manifests import load_suite
from farm.suites.options import runtime_flags
from farm.suites.suite import Job, Target

SUITE = Path(__file__).with_name("lpai_cases") / "suite.toml"

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
        case = next(case for case in load_suite(SUITE).cases if case.name == "block")
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

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from built_stub import qnn_stub

from farm.base.config.settings import load_config
from farm.base.errors import MissingToolError
from farm.builds.runtime import runtime, simulator
from farm.builds.runtime.native.build import build_native, native_of
from farm.builds.runtime.runtime import simulator_runtime
from farm.builds.runtime.simulator import host_sdk


@pytest.fixture
def stub_sdk(tmp_path: Path) -> Path:
    """A folder like a QNN SDK, without a library."""
    root = tmp_path / "stub-sdk"
    (root / "lib" / "x86_64-linux-clang").mkdir(parents=True)
    (root / "lib" / "aarch64-android").mkdir()
    (root / "sdk.yaml").touch()
    return root


def test_the_wheel_becomes_an_sdk_with_the_bridge_in_front(farm_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/mine")
    sdk = host_sdk(farm_cache)
    assert sdk == host_sdk(farm_cache)
    assert sdk.bridged
    assert sdk.qnn_version.startswith("v2.")
    assert sdk.lib_dir == sdk.root / "lib" / "x86_64-linux-clang"
    assert sdk.env["QNN_SDK_ROOT"] == str(sdk.root)
    assert sdk.env["LD_LIBRARY_PATH"] == f"{sdk.lib_dir}:/opt/mine"
    bridge, real = sdk.lib_dir / "libQnnHtp.so", sdk.lib_dir / "real" / "libQnnHtp.so"
    assert bridge.stat().st_size < 1 << 20 < real.stat().st_size
    for name in ("libQnnSystem.so", "libHtpPrepare.so"):
        assert (sdk.lib_dir / name).is_file()


def test_a_command_identifies_the_native_runner_once_for_its_parts(
    farm_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = simulator_runtime(farm_cache)

    def build_again(*_: object, **__: object) -> None:
        raise AssertionError("the runner is here")

    monkeypatch.setattr(simulator, "build_native", build_again)
    assert simulator_runtime(farm_cache) == expected
    native = build_native(farm_cache)
    assert host_sdk(farm_cache, native=native).bridged
    assert native_of(farm_cache, native.key) == native
    monkeypatch.setattr(runtime, "build_native", build_again)
    assert simulator_runtime(farm_cache, native=native) == expected


def test_an_sdk_that_needs_no_bridge_is_used_as_it_is(farm_cache: Path, stub_sdk: Path) -> None:
    shutil.copy(qnn_stub(farm_cache, 26), stub_sdk / "lib" / "x86_64-linux-clang")
    sdk = host_sdk(farm_cache, sdk_root=stub_sdk)
    assert (sdk.root, sdk.bridged, sdk.qnn_version) == (stub_sdk, False, "v2.stub")


def test_a_newer_sdk_gets_the_bridge_and_keeps_the_rest(farm_cache: Path, stub_sdk: Path) -> None:
    shutil.copy(qnn_stub(farm_cache, 40), stub_sdk / "lib" / "x86_64-linux-clang")
    sdk = host_sdk(farm_cache, sdk_root=stub_sdk)
    assert sdk.bridged
    assert sdk.root != stub_sdk
    real = sdk.lib_dir / "real" / "libQnnHtp.so"
    assert real.resolve() == stub_sdk / "lib" / "x86_64-linux-clang" / "libQnnHtp.so"
    assert (sdk.root / "sdk.yaml").is_file()
    assert (sdk.root / "lib" / "aarch64-android").is_dir()


def test_in_a_process_with_our_own_sdk_the_bridge_is_not_put_in_front_twice(
    farm_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sdk = host_sdk(farm_cache)
    for name, value in sdk.env.items():
        monkeypatch.setenv(name, value)
    again = host_sdk(farm_cache, sdk_root=load_config(folder=farm_cache).sdk_root)
    assert again == sdk


def test_a_root_that_is_named_is_used_or_refused(
    farm_cache: Path, stub_sdk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An SDK for Android only cannot compile; the wheel in its place would be another QNN than the devices have."""
    with pytest.raises(MissingToolError, match=r"^sdk_root in the .qnn. table .* has no lib/x86_64-linux-clang/libQnn"):
        host_sdk(farm_cache, sdk_root=stub_sdk)
    monkeypatch.setenv("QNN_SDK_ROOT", "/nope")
    with pytest.raises(MissingToolError, match=r"^QNN_SDK_ROOT=/nope: there is no such folder"):
        host_sdk(farm_cache, sdk_root=load_config(folder=farm_cache).sdk_root)


def test_a_library_that_does_not_load_is_named(farm_cache: Path, stub_sdk: Path) -> None:
    library = stub_sdk / "lib" / "x86_64-linux-clang" / "libQnnHtp.so"
    library.write_bytes(b"\x7fELF")
    with pytest.raises(MissingToolError, match=r"libQnnHtp\.so cannot be loaded: .*QNN_SDK_ROOT"):
        host_sdk(farm_cache, sdk_root=stub_sdk)


def test_without_wheel_and_sdk_both_ways_out_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(package: str, _marker: str, extra: str) -> Path:
        raise MissingToolError(f"the Python package {package} is needed: snapdragon-farm[{extra}]")

    monkeypatch.setattr(simulator, "package_folder", missing)
    with pytest.raises(MissingToolError, match=r"onnxruntime_qnn .*\[simulator\].* QNN_SDK_ROOT"):
        host_sdk(tmp_path)


def test_a_replaced_library_makes_a_new_layout_whatever_its_times_say(farm_cache: Path, stub_sdk: Path) -> None:
    shutil.copy(qnn_stub(farm_cache, 40), stub_sdk / "lib" / "x86_64-linux-clang")
    first = host_sdk(farm_cache, sdk_root=stub_sdk)
    library = stub_sdk / "lib" / "x86_64-linux-clang" / "libQnnHtp.so"
    stat = library.stat()
    os.utime(library, ns=(stat.st_atime_ns, stat.st_mtime_ns + 10**9))
    assert host_sdk(farm_cache, sdk_root=stub_sdk) == first
    content = library.read_bytes()
    assert content.count(b"v2.stub\0") == 1
    library.write_bytes(content.replace(b"v2.stub\0", b"v2.late\0"))
    os.utime(library, ns=(stat.st_atime_ns, stat.st_mtime_ns + 10**9))
    again = host_sdk(farm_cache, sdk_root=stub_sdk)
    assert again.root != first.root
    assert again.qnn_version == "v2.late"
    # A process that was given the first layout meets the library that it leads to now.
    assert host_sdk(farm_cache, sdk_root=first.root).qnn_version == "v2.late"
    shutil.rmtree(stub_sdk)

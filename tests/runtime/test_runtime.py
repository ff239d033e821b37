"""Runtimes of devices and of this machine's simulator."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

import msgspec
import pytest
from built_stub import qnn_stub

from farm.base.config.settings import Config, load_config
from farm.base.errors import MissingToolError
from farm.base.socs import find_soc
from farm.builds.runtime import qnn_sdk
from farm.builds.runtime.kept import find_kept, keep
from farm.builds.runtime.native import ANDROID, TARGETS
from farm.builds.runtime.qnn_sdk import host_sdk
from farm.builds.runtime.runtime import Runtime, require_backend, simulator_runtime, staged_runtime


def _android(config: Config, backend: str = "htp") -> Runtime:
    return staged_runtime(config, find_soc("SM8650"), backend, TARGETS[ANDROID])


def test_the_simulator_runtime_is_the_same_each_time_and_complete(farm_cache: Path) -> None:
    made = simulator_runtime(farm_cache)
    assert made == simulator_runtime(farm_cache)
    assert made.kind == "simulator"
    assert made.runner in made.files
    assert {"executorch", "qnn", "runner"} == set(made.versions)
    for name, path in made.files.items():
        assert path.is_file()
        assert not name.startswith("/")
        assert ".." not in name
    # Files that only compiling needs are 100 MB large, and are not staged.
    assert "libHtpPrepare.so" not in made.files


def test_the_digest_follows_names_and_contents(config: Config, sdk: Path, tmp_path: Path) -> None:
    first = _android(config)
    shutil.copytree(sdk, tmp_path / "copy")
    assert _android(msgspec.structs.replace(config, sdk_root=tmp_path / "copy")).digest == first.digest
    assert _android(config, "gpu").digest != first.digest
    library = sdk / "lib" / "aarch64-android" / "libQnnHtp.so"
    library.write_bytes(library.read_bytes() + b"newer")
    assert _android(config).digest != first.digest


def test_every_missing_file_is_named_at_once(config: Config, sdk: Path, tmp_path: Path) -> None:
    libraries, build = sdk / "lib" / "aarch64-android", tmp_path / "stub-build-android"
    missing = [libraries / "libQnnHtp.so", libraries / "libQnnHtpV75Stub.so"]
    missing.append(build / "backends/qualcomm/libqnn_executorch_backend.so")
    for path in missing:
        path.unlink()
    with pytest.raises(MissingToolError) as raised:
        _android(config)
    message = str(raised.value)
    assert all(str(path) in message for path in missing)
    assert "libQnnSystem.so" not in message
    assert "3 files" in message
    assert "QNN_SDK_ROOT" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("soc", "backend", "library", "wrong"),
    [
        ("SM8650", "gpu", "libQnnGpu.so", "QNN 2.51 is newer than 2.46"),
        ("SM8850", "lpai", "libQnnLpai.so", "QNN 2.31 is older than 2.39"),
    ],
)
def test_gpu_and_lpai_say_in_one_line_what_they_need(
    sdk: Path, soc: str, backend: str, library: str, wrong: str
) -> None:
    def refused(root: Path | None) -> str:
        with pytest.raises(MissingToolError, match=f"the {backend} backend of {soc} needs") as raised:
            require_backend(find_soc(soc), backend, root)
        assert "\n" not in str(raised.value)
        assert ": set QNN_SDK_ROOT to a QNN SDK" in str(raised.value)
        return str(raised.value)

    require_backend(find_soc(soc), "htp", None)
    refused(None)
    host = sdk / "lib" / "x86_64-linux-clang"
    assert f"(looked for {host / library})" in refused(sdk)
    (host / library).touch()
    require_backend(find_soc(soc), backend, sdk)
    (sdk / "sdk.yaml").write_text(f"version: {wrong.split()[1]}.0.1\n")
    assert wrong in refused(sdk)
    (host / library).unlink()
    assert wrong in refused(sdk)
    assert f"the QNN SDK folder {sdk / 'nowhere'} does not exist" in refused(sdk / "nowhere")


VERSIONS = {"qnn": "2.50", "runner": "1"}


def make_runtime(folder: Path, digest: str, **versions: str) -> Runtime:
    folder.mkdir(exist_ok=True)
    files = {name: folder / name for name in ("farm_runner", "libQnnHtp.so")}
    for name, path in files.items():
        path.write_bytes(f"content of {name}".encode())
    hashes = {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()}
    return Runtime(files, digest * 64, "farm_runner", VERSIONS | versions, "android", False, hashes)


@pytest.mark.parametrize("damage", ["record", "changed", "lost"])
def test_a_damaged_runtime_is_kept_anew(tmp_path: Path, damage: str) -> None:
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o755)
    mine, other = make_runtime(tmp_path / "files", "a"), make_runtime(tmp_path / "files", "b", qnn="2.51")
    keep(cache, mine)
    found = find_kept(cache, mine.versions)
    assert found is not None
    file = found.files["libQnnHtp.so"]
    if damage == "record":
        (file.parent.parent / "runtime.json").write_text("{")
    elif damage == "lost":
        file.unlink()
    else:
        file.write_bytes(b"something else")
    assert find_kept(cache, mine.versions) is None
    # Equal files are links to one file, unless it is damaged.
    for one in (other, mine):
        keep(cache, one)
        found = find_kept(cache, one.versions)
        assert found is not None
        assert {name: path.read_bytes() for name, path in found.files.items()} == {
            name: path.read_bytes() for name, path in one.files.items()
        }


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

    monkeypatch.setattr(qnn_sdk, "package_folder", missing)
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

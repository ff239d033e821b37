"""Native builds for this machine and others, and the ExecuTorch that they are made of."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from log_lines import LogLines

from farm.base.config.settings import Config, load_config
from farm.base.config.toolchains import ToolchainConfig
from farm.base.errors import InfraError, MissingToolError, UnknownNameError, UsageError
from farm.base.files import published
from farm.builds.runtime import native, packages
from farm.builds.runtime.native import AndroidKit, build_native, default_executorch, planned_native, runner_executorch
from farm.builds.runtime.packages import fetch_wheel, package_folder, package_version, packaged_tool
from farm.builds.runtime.parts import AARCH64, read_elf, required_versions
from farm.builds.runtime.qnn_sdk import host_sdk
from farm.builds.runtime.runtime import Runtime, linux_runtime, virtual_runtime

ROOT = Path(__file__).resolve().parent.parent.parent


def test_it_is_built_once_and_without_a_warning(farm_cache: Path) -> None:
    first = build_native(farm_cache)
    lines = LogLines()
    assert build_native(farm_cache) == first
    assert lines == []
    assert {"build.log", "farm_runner", "libQnnHtp.so"} <= {path.name for path in first.folder.iterdir()}
    log = (first.folder / "build.log").read_text()
    assert "Linking CXX executable farm_runner" in log
    assert "warning" not in log.lower()


def test_another_compiler_or_flag_is_another_build(farm_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = set()

    def remember(folder: Path, _fill: object) -> Path:
        keys.add(folder.name)
        return folder

    monkeypatch.setattr(native, "published", remember)
    build_native(farm_cache)
    monkeypatch.setenv("CXXFLAGS", "-O1")
    build_native(farm_cache)
    monkeypatch.setenv("CXX", "/bin/true")
    build_native(farm_cache)
    assert len(keys) == 3


def test_a_compiler_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(MissingToolError, match=r"C\+\+ compiler .* apt-get install g\+\+"):
        build_native(tmp_path / "cache")
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(MissingToolError, match="CXX is 'no-such-compiler'"):
        build_native(tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(("module", "extra"), [("executorch", "build"), ("cmake", "simulator"), ("ninja", "simulator")])
def test_a_package_that_is_not_there_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, extra: str
) -> None:
    find, describe = packages.importlib.util.find_spec, packages.importlib.metadata.distribution

    def describe_others(name: str) -> object:
        if name == module:
            raise packages.importlib.metadata.PackageNotFoundError(name)
        return describe(name)

    monkeypatch.setattr(packages.importlib.util, "find_spec", lambda name: None if name == module else find(name))
    monkeypatch.setattr(packages.importlib.metadata, "distribution", describe_others)
    with pytest.raises(MissingToolError, match=rf"{module} .*pip install 'snapdragon-farm\[{extra}\]'"):
        build_native(tmp_path / "cache")


def test_sources_that_do_not_build_say_why_and_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sources = tmp_path / "native_runner"
    shutil.copytree(ROOT / "native_runner", sources)
    (sources / "bridge" / "qnn_bridge.cpp").write_text("#error this does not compile\n")
    for source in (sources / "src").glob("*.cpp"):
        source.write_text("#error nor does this\n")
    monkeypatch.setattr(native, "data_folder", lambda _name: sources)
    with caplog.at_level("DEBUG", "farm"), pytest.raises(InfraError, match=r"this does not compile|nor does this"):
        build_native(tmp_path / "cache")
    assert caplog.messages[0].startswith("building the native runner for linux-x86_64, once")
    assert any("error" in line for line in caplog.messages)
    assert [path.suffix for path in (tmp_path / "cache" / "native").iterdir()] == [".lock"]


def test_the_bridge_builds_without_executorch_and_from_read_only_sources(tmp_path: Path) -> None:
    sources, tree = tmp_path / "native_runner", tmp_path / "tree"
    shutil.copytree(ROOT / "native_runner", sources)
    for path in [sources, *sources.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    ninja = packages.packaged_tool("ninja", "simulator")
    options = ["-DFARM_BUILD_RUNNER=OFF", "-DCMAKE_DISABLE_FIND_PACKAGE_executorch=ON", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
    for argv in (
        [packages.packaged_tool("cmake", "simulator"), "-G", "Ninja", "-S", sources, "-B", tree, *options],
        [ninja, "-C", tree],
    ):
        subprocess.run(argv, check=True, capture_output=True, timeout=300)
    assert (tree / "libQnnHtp.so").is_file()
    assert not (tree / "farm_runner").exists()
    for path in [sources, *sources.rglob("*")]:
        path.chmod(0o755)


# ExecuTorch for the build of the native runner: a toolchain's own C++ if it ships one, else farm's.


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """The C++ of farm's own ExecuTorch in another environment: links to its libraries, copies of its headers."""
    root, source = tmp_path / "site-packages" / "executorch", default_executorch().root
    shutil.copytree(source / "include", root / "include")
    shutil.copytree(source / "share", root / "share")
    shutil.copytree(source / "lib", root / "lib", copy_function=lambda one, other: Path(other).symlink_to(one))
    (root / "version.py").write_text('__version__ = "1.6.0a0"\n')
    return root


def _with(executorch: Path | None, cache: Path, **fields: object) -> Config:
    toolchain = ToolchainConfig(name="main", executorch=executorch, **fields)  # type: ignore[arg-type]
    return msgspec.structs.replace(load_config(), cache_dir=cache, toolchain=toolchain)


def test_a_toolchain_that_ships_the_libraries_has_a_runner_of_its_own(farm_cache: Path, package: Path) -> None:
    config = _with(package, farm_cache)
    own = runner_executorch(config)
    assert (own.root, own.version, own.own) == (package, "1.6.0a0", True)
    # The same content is the same build, wherever it lies.
    first = build_native(farm_cache, executorch=own)
    assert first == build_native(farm_cache)
    files = virtual_runtime(config, backend="xnnpack").files
    assert files["farm_runner"] == first.runner
    assert files["libexecutorch.so"] == package / "lib" / "libexecutorch.so"
    assert virtual_runtime(config, backend="xnnpack").versions["executorch"] == "1.6.0a0"


@pytest.mark.parametrize("name", ["include/executorch/runtime/executor/method.h", "lib/libexecutorch.so"])
def test_a_rebuilt_checkout_makes_another_runner(farm_cache: Path, package: Path, name: str) -> None:
    before = planned_native(farm_cache, executorch=runner_executorch(_with(package, farm_cache)))
    file = package / name
    content = file.read_bytes()
    file.unlink()
    file.write_bytes(content + b"\n")
    after = planned_native(farm_cache, executorch=runner_executorch(_with(package, farm_cache)))
    assert after.key != before.key
    file.write_bytes(content)
    assert planned_native(farm_cache, executorch=runner_executorch(_with(package, farm_cache))).key == before.key


def test_a_toolchain_without_libraries_runs_on_the_default_runner_and_the_run_can_tell(
    farm_cache: Path, tmp_path: Path
) -> None:
    (tmp_path / "executorch").mkdir()
    borrowed = runner_executorch(_with(tmp_path / "executorch", farm_cache))
    default = default_executorch()
    assert borrowed == msgspec.structs.replace(default, own=False)
    assert runner_executorch(_with(None, farm_cache)) == default


def test_where_neither_has_libraries_it_says_what_is_missing(
    farm_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_arguments: str) -> Path:
        raise MissingToolError("the Python package executorch is needed and it is not installed: pip install it")

    monkeypatch.setattr(native, "package_folder", missing)
    with pytest.raises(MissingToolError, match=r"^the toolchain main ships no C\+\+ .* own environment has none"):
        runner_executorch(_with(tmp_path, farm_cache))


def test_a_native_folder_of_this_machine_is_used_or_refused(farm_cache: Path, package: Path, tmp_path: Path) -> None:
    config = _with(tmp_path, farm_cache, native={"linux-x86_64": package})
    assert runner_executorch(config).root == package
    config = _with(tmp_path, farm_cache, native={"linux-x86_64": tmp_path})
    with pytest.raises(UsageError, match=r"^toolchain\.main: native\.linux-x86_64: there is no executorch-c"):
        runner_executorch(config)


# The runner for aarch64 Linux, run by qemu; and what an Android build asks for, up to the NDK that cannot be had.


HERE = Path(__file__).parent
NATIVE = HERE.parent.parent / "native_runner"
SYSROOT = Path("/usr/aarch64-linux-gnu")

# Read before the fixture that hides settings: CI has the tools, and a skip there would be a hole.
REQUIRED = os.environ.get("FARM_REQUIRE_CROSS") == "1"
LACKING = [tool for tool in ("aarch64-linux-gnu-g++", "qemu-aarch64") if not shutil.which(tool)]
has_tools = pytest.mark.skipif(
    bool(LACKING) and not REQUIRED, reason=f"apt-get install g++-aarch64-linux-gnu qemu-user ({', '.join(LACKING)})"
)


def cross(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test that needs a runner for another machine, which takes long to build."""
    return pytest.mark.whole(has_tools(test))


@pytest.fixture(scope="module")
def model(farm_cache: Path) -> Path:
    script = HERE / "compile_xnnpack.py"
    versions = package_version("executorch") + package_version("torch")
    key = hashlib.sha256(script.read_bytes() + versions.encode()).hexdigest()[:16]

    def compile_it(folder: Path) -> None:
        done = subprocess.run([sys.executable, str(script), str(folder)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-4000:]

    return published(farm_cache / "cross-test-model" / key, compile_it)


@pytest.fixture(scope="module")
def runtime(farm_cache: Path) -> Runtime:
    return linux_runtime(farm_cache)


@pytest.fixture
def device(runtime: Runtime, model: Path, tmp_path: Path) -> Path:
    """A folder as a device has it: copies, so that nothing is found by accident."""
    folder = tmp_path / "device"
    (folder / "outputs").mkdir(parents=True)
    for name, path in runtime.files.items():
        shutil.copy(path, folder / name)
    for path in model.iterdir():
        shutil.copy(path, folder)
    (folder / "input_list.txt").write_text("x0.raw\nx1.raw\n")
    return folder


def _emulate(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["qemu-aarch64", "-L", str(SYSROOT), "-E", f"LD_LIBRARY_PATH={folder}", str(folder / "farm_runner"), *flags],
        cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


@cross
def test_an_xnnpack_program_gives_on_aarch64_what_torch_gives_here(device: Path) -> None:
    done = _emulate(device, "--model_path=conv.pte", "--iteration=2", "--etdump_path=etdump.etdp")
    assert done.returncode == 0, done.stderr
    result = json.loads((device / "result.json").read_text())
    assert result["ok"]
    assert [len(one["iterations_ns"]) for one in result["inferences"]] == [2, 2]
    for i in range(2):
        ours = np.fromfile(device / "outputs" / f"output_{i}_0.raw", np.float32)
        eager = np.fromfile(device / f"y{i}.raw", np.float32)
        assert np.abs(eager).max() > 0.01
        np.testing.assert_allclose(ours, eager, rtol=1e-5, atol=1e-6)
    assert (device / "etdump.etdp").stat().st_size > 0


@cross
def test_failures_are_the_same_on_aarch64_and_a_program_for_qnn_is_one(device: Path) -> None:
    for flag, code, stage in (
        ("--input_list_path=nowhere.txt", 5, "inputs"),
        ("--model_path=nowhere.pte", 4, "load"),
        ("--no_such_flag", 2, "flags"),
        ("--htp_performance_mode=2", 3, "options"),
    ):
        done = _emulate(device, "--model_path=conv.pte", flag)
        assert (done.returncode, f"farm_runner: {stage}:" in done.stderr) == (code, True), done.stderr
    assert list((device / "outputs").iterdir()) == []


@cross
def test_every_file_is_for_aarch64_and_nothing_of_this_machine_is_in_it(runtime: Runtime, farm_cache: Path) -> None:
    assert runtime.kind == "linux"
    assert "libexecutorch_backend_qnn.so" not in runtime.files
    assert {"libexecutorch.so", "libexecutorch_backend_xnnpack.so"} < set(runtime.files)
    assert {read_elf(path).machine for path in runtime.files.values()} == {AARCH64}
    assert str(farm_cache).encode() not in runtime.files["farm_runner"].read_bytes()
    needed = required_versions(runtime.files.values())
    assert set(needed) == {"GLIBC", "GLIBCXX"}
    assert linux_runtime(farm_cache) == runtime


@cross
def test_it_is_built_without_a_warning_and_apart_from_the_one_for_this_machine(
    runtime: Runtime, farm_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Flags for programs of this machine do not reach the cross compiler.
    monkeypatch.setenv("CXXFLAGS", "-march=native")
    build = planned_native(farm_cache, "linux-aarch64")
    assert build.runner == runtime.files["farm_runner"]
    assert build.key != planned_native(farm_cache).key
    assert sorted(path.name for path in build.folder.iterdir()) == ["build.log", "farm_runner"]
    log = (build.folder / "build.log").read_text()
    assert "this executorch package has no backend_qnn" in log
    assert "warning" not in log.lower()


def test_without_the_cross_compiler_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingToolError, match=r"aarch64-linux-gnu-g\+\+ .*: apt-get install g\+\+-aarch64-linux-gnu$"):
        build_native(tmp_path / "cache", "linux-aarch64")
    assert not (tmp_path / "cache").exists()


def test_a_wheel_that_cannot_be_reached_is_named_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(MissingToolError, match=r"the aarch64 wheel of executorch==1\.\S+ cannot be fetched.*PIP_FIND"):
        fetch_wheel(tmp_path / "cache", "executorch")
    assert [path.suffix for path in (tmp_path / "cache" / "wheels").iterdir()] == [".lock"]


def test_a_wheel_that_is_damaged_is_no_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stub_download(_installed: object, folder: Path, *_more: object) -> Path:
        wheel = folder / "stub.whl"
        wheel.write_bytes(b"PK\x03\x04 and no more")
        return wheel

    monkeypatch.setattr("farm.builds.runtime.packages._download", stub_download)
    with pytest.raises(InfraError, match=r"stub\.whl is damaged"):
        fetch_wheel(tmp_path / "cache", "executorch")


def test_a_target_that_is_unknown_is_named_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match=r"unknown target 'linux-arm64': did you mean 'linux-aarch64'"):
        build_native(tmp_path, "linux-arm64")


def test_another_machine_is_told_that_it_cannot_build_for_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native.platform, "machine", lambda: "aarch64")
    for build in (build_native, host_sdk):
        with pytest.raises(MissingToolError, match="x86_64 Linux, this is Linux aarch64"):
            build(tmp_path)


@pytest.fixture
def stub_ndk(tmp_path: Path) -> Path:
    """Folder like an NDK, with a toolchain file that only prints its arguments, and ends."""
    root = tmp_path / "stub-ndk"
    (root / "build" / "cmake").mkdir(parents=True)
    (root / "source.properties").write_text("Pkg.Revision = 0.0.stub\n")
    (root / "build" / "cmake" / "android.toolchain.cmake").write_text(
        'message(FATAL_ERROR "stub NDK: ABI=${ANDROID_ABI} API=${ANDROID_PLATFORM} ET=${executorch_DIR}")\n'
    )
    return root


@pytest.fixture
def stub_prefix(tmp_path: Path) -> Path:
    """A folder like an ExecuTorch install prefix: the static libraries' names without the libraries."""
    root = tmp_path / "stub-prefix"
    folder = root / "lib" / "cmake" / "ExecuTorch"
    folder.mkdir(parents=True)
    names = ("executorch", "extension_module_static", "extension_data_loader", "extension_tensor", "etdump")
    names += ("portable_ops_lib", "xnnpack_backend", "qnn_executorch_backend")
    lines = [f'set(EXECUTORCH_INCLUDE_DIRS "{root}/include")']
    for name in names:
        (root / "lib" / f"lib{name}.a").touch()
        lines += [
            f"add_library({name} STATIC IMPORTED)",
            f'set_target_properties({name} PROPERTIES IMPORTED_LOCATION "{root}/lib/lib{name}.a")',
        ]
    (folder / "executorch-config.cmake").write_text("\n".join(lines) + "\n")
    return root


def test_android_says_which_variable_is_missing_and_where_it_looked(
    tmp_path: Path, stub_ndk: Path, stub_prefix: Path
) -> None:
    def refused(kit: AndroidKit | None) -> str:
        with pytest.raises(MissingToolError) as raised:
            build_native(tmp_path / "cache", "android-arm64", android=kit)
        return str(raised.value)

    assert "ANDROID_NDK_ROOT is not set: set ANDROID_NDK_ROOT to the folder" in refused(None)
    assert str(tmp_path / "build/cmake/android.toolchain.cmake") in refused(AndroidKit(tmp_path, stub_prefix))
    assert "FARM_ANDROID_EXECUTORCH is not set" in refused(AndroidKit(stub_ndk))
    elsewhere = refused(AndroidKit(stub_ndk, tmp_path))
    assert str(tmp_path / "lib/cmake/ExecuTorch") in elsewhere
    assert str(tmp_path / "share/cmake") in elsewhere
    assert not (tmp_path / "cache").exists()


def test_android_starts_cmake_with_the_ndk_and_the_prefix(tmp_path: Path, stub_ndk: Path, stub_prefix: Path) -> None:
    package = stub_prefix / "lib" / "cmake" / "ExecuTorch"
    with pytest.raises(InfraError) as raised:
        build_native(tmp_path / "cache", "android-arm64", android=AndroidKit(stub_ndk, stub_prefix))
    output = " ".join(str(raised.value).split())
    assert "stub NDK: ABI=arm64-v8a API=android-30" in output
    assert f"ET={package}" in output
    first = planned_native(tmp_path, "android-arm64", android=AndroidKit(stub_ndk, stub_prefix))
    (stub_prefix / "lib" / "libexecutorch.a").write_text("newer")
    assert planned_native(tmp_path, "android-arm64", android=AndroidKit(stub_ndk, stub_prefix)).key != first.key
    assert [path.suffix for path in (tmp_path / "cache" / "native").iterdir()] == [".lock"]


def test_a_prefix_of_static_libraries_is_linked_whole_where_it_registers_itself(
    tmp_path: Path, stub_prefix: Path
) -> None:
    tree, ninja = tmp_path / "tree", packaged_tool("ninja", "simulator")
    headers = package_folder("executorch", "include/executorch", "build") / "include"
    argv = [packaged_tool("cmake", "simulator"), "-G", "Ninja", "-S", NATIVE, "-B", tree, "-DFARM_BUILD_BRIDGE=OFF"]
    argv += [f"-Dexecutorch_DIR={stub_prefix / 'lib/cmake/ExecuTorch'}", f"-DFARM_EXECUTORCH_HEADERS={headers}"]
    subprocess.run([*argv, f"-DCMAKE_MAKE_PROGRAM={ninja}"], check=True, capture_output=True, timeout=300)
    rules = (tree / "build.ninja").read_text()
    whole = re.findall(r"--push-state,--whole-archive,(\S+),--pop-state", rules)
    assert {Path(path).stem for path in whole} == {
        "libportable_ops_lib",
        "libxnnpack_backend",
        "libqnn_executorch_backend",
    }
    assert f"{stub_prefix}/lib/libexecutorch.a" in rules
    assert f"-idirafter {headers}" in rules

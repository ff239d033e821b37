"""farm doctor: targets that can be compiled, staged and run, and suggested steps that really help."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import pytest
from elf_maker import make_elf

from farm.base.config.settings import Config
from farm.base.errors import MissingToolError
from farm.base.socs import find_soc
from farm.builds.runtime import inventory as doctor_module
from farm.builds.runtime.inventory import Ability, Doctor, backends_of, list_tools, runnable
from farm.builds.runtime.native import build_native


@pytest.fixture
def built(config: Config, farm_cache: Path, tmp_path: Path) -> Config:
    """The stubs of SDK and builds, and farm's runner built: for this machine a real one, for Android a stub."""
    build_native(farm_cache)
    runner = tmp_path / "stub-android-runner"
    runner.write_bytes(make_elf(183, wide=True) + b"farm_runner: %s: ")
    return msgspec.structs.replace(config, cache_dir=farm_cache, android_runner=runner)


def _examine(config: Config, soc: str, backend: str, attached: dict[str, list[str]] | None = None) -> Ability:
    return Doctor(config, attached).examine(find_soc(soc), backend)


def test_with_pip_alone_the_simulator_compiles_stages_and_runs(built: Config) -> None:
    bare = msgspec.structs.replace(
        built, sdk_root=None, executorch_build=None, executorch_linux_build=None, android_runner=None
    )
    for soc in map(find_soc, ("QCM6490", "SM8650", "SM8850")):
        for backend in backends_of(soc):
            assert runnable(Doctor(bare).examine(soc, backend)) == (backend in ("htp", "xnnpack"))
    htp = _examine(bare, "SM8650", "htp")
    assert (htp.compile.where, htp.compile.gaps) == (("here",), ())
    assert htp.stage.where == ("simulator",)
    assert (htp.run.where, htp.run.gaps) == (("simulator",), ())
    # The gaps for other devices are listed, and every gap has a next step.
    assert {"ANDROID_NDK_ROOT", "FARM_EXECUTORCH_BUILD", "QNN_SDK_ROOT", "FARM_EXECUTORCH_LINUX_BUILD"} <= {
        gap.repair.split()[1] for gap in htp.stage.gaps
    }
    lpai = _examine(bare, "SM8850", "lpai")
    assert (lpai.compile.where, lpai.stage.where, lpai.run.where) == ((), (), ())
    assert all(gap.repair for answer in (lpai.compile, lpai.stage, lpai.run) for gap in answer.gaps)


def test_with_sdk_builds_and_a_phone_there_is_nothing_to_repair(built: Config, sdk_for_host: Path) -> None:
    attached = {"SM8850": ["PHONE1", "PHONE2"]}
    assert sdk_for_host == built.sdk_root
    for backend in ("htp", "lpai"):
        ability = _examine(built, "SM8850", backend, attached)
        assert ability.compile.where == ("here",)
        assert ability.stage.where == ("simulator", "android", "oe-linux")
        assert ability.run.where == ("simulator", "PHONE1", "PHONE2")
        assert ability.compile.gaps + ability.stage.gaps + ability.run.gaps == ()
    assert Doctor(built).direct(find_soc("SM8850"), "htp") == ()
    assert "farm setup sign --lpai v6 --direct --htp v81" in {
        gap.repair for gap in Doctor(built).direct(find_soc("SM8850"), "lpai")
    }


def test_gpu_runs_on_a_phone_only(built: Config, sdk: Path) -> None:
    (sdk / "lib/x86_64-linux-clang/libQnnGpu.so").touch()
    alone = _examine(built, "SM8650", "gpu")
    assert (alone.compile.where, alone.stage.where, alone.run.where) == (("here",), ("android", "oe-linux"), ())
    assert [gap.repair for gap in alone.run.gaps] == ["adb start-server"]
    other = _examine(built, "SM8650", "gpu", {"SM8850": ["PHONE"]})
    assert [gap.repair for gap in other.run.gaps] == ["attach one; 'adb devices' lists attached devices"]
    assert runnable(_examine(built, "SM8650", "gpu", {"SM8650": ["PHONE"]}))


def test_upstreams_runner_stages_and_runs_no_job(built: Config, sdk: Path) -> None:
    with_upstream = msgspec.structs.replace(built, android_runner=None)
    ability = _examine(with_upstream, "SM8650", "htp", {"SM8650": ["PHONE"]})
    assert "android" in ability.stage.where
    assert ability.run.where == ("simulator",)
    host = sdk / "lib/x86_64-linux-clang"
    (host / "libQnnGpu.so").touch()
    gpu = _examine(with_upstream, "SM8650", "gpu", {"SM8650": ["PHONE"]})
    assert gpu.run.where == ()
    (gap,) = gpu.run.gaps
    assert gap.what == "qnn_executor_runner: takes no jobs in a session"
    assert gap.repair == "farm setup runtime build --target android-arm64"


def test_a_repair_closes_its_gap(built: Config, sdk: Path) -> None:
    skel = sdk / "lib/lpai-v6/signed/libQnnLpaiSkel.so"
    record = skel.with_name(f"{skel.name}.farm-sign.json")
    kept = record.read_bytes()
    record.unlink()
    repairs = {gap.repair: gap.what for gap in _examine(built, "SM8850", "lpai").stage.gaps}
    assert repairs["farm setup sign --lpai v6 --adopt"] == "libQnnLpaiSkel.so (foreign)"
    record.write_bytes(kept)
    assert "android" in _examine(built, "SM8850", "lpai").stage.where
    shutil.rmtree(sdk / "lib/hexagon-v75")
    assert _examine(built, "SM8850", "htp").stage.gaps == ()
    assert {gap.what for gap in _examine(built, "SM8650", "htp").stage.gaps} == {"libQnnHtpV75Skel.so"}


def test_signing_is_the_repair_only_where_there_is_something_to_sign(built: Config, sdk: Path) -> None:
    lpai = sdk / "lib/lpai-v6"
    shutil.rmtree(lpai / "signed")
    assert "farm setup sign --lpai v6" in {gap.repair for gap in _examine(built, "SM8850", "lpai").stage.gaps}
    shutil.rmtree(lpai)
    repairs = {gap.what: gap.repair for gap in _examine(built, "SM8850", "lpai").stage.gaps}
    assert repairs["libQnnLpaiSkel.so"].startswith("set QNN_SDK_ROOT to a QNN SDK")
    assert repairs["libQnnLpaiSkel.so"].endswith(" with lib/lpai-v6/unsigned")
    direct = {gap.repair for gap in Doctor(built).direct(find_soc("SM8850"), "lpai")}
    assert "farm setup sign --lpai v6 --direct --htp v81" in direct
    assert repairs["libQnnLpaiSkel.so"] in direct


def test_what_pip_would_bring_is_told(built: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_module, "package_version", lambda _name: "")
    ability = _examine(built, "SM8650", "htp")
    assert ability.compile.where == ability.run.where == ()
    assert {gap.repair for gap in ability.compile.gaps} == {
        "pip install 'snapdragon-farm[build]'",
        "pip install 'snapdragon-farm[simulator]'",
    }
    assert "the Python package torch" in {gap.what for gap in ability.compile.gaps}

    def no_compiler(*_arguments: object, **_options: object) -> None:
        raise MissingToolError("a C++ compiler is needed: apt-get install g++")

    monkeypatch.undo()
    monkeypatch.setattr(doctor_module, "planned_runner", no_compiler)
    assert [gap.repair for gap in _examine(built, "SM8650", "htp").compile.gaps] == ["apt-get install g++"]


def test_the_tools_are_found_with_their_versions_and_what_is_wrong_with_them(built: Config, tmp_path: Path) -> None:
    tools = {tool.name: tool for tool in list_tools(built)}
    assert tools["executorch"].version.startswith("1.")
    assert tools["QNN SDK"].version == "2.40.0.1 (x86_64-linux-clang, aarch64-android, aarch64-oe-linux-gcc11.2)"
    assert tools["Hexagon SDK"].version == ""
    assert not any(tool.problem for tool in tools.values())
    ndk = tmp_path / "ndk"
    ndk.mkdir()
    (ndk / "source.properties").write_text("Pkg.Desc = stub\nPkg.Revision = 26.1.1\n")
    wrong = msgspec.structs.replace(built, android_ndk_root=ndk, hexagon_sdk_root=tmp_path / "5.5.0.1")
    tools = {tool.name: tool for tool in list_tools(wrong)}
    assert tools["Android NDK"].version == "26.1.1"
    assert tools["Android NDK"].problem == "has no build/cmake/android.toolchain.cmake"
    assert (tools["Hexagon SDK"].version, tools["Hexagon SDK"].problem) == (
        "5.5.0.1",
        "has no tools/elfsigner/elfsigner.py",
    )
    nowhere = msgspec.structs.replace(built, sdk_root=tmp_path / "nowhere")
    assert {tool.name: tool.problem for tool in list_tools(nowhere)}["QNN SDK"] == "does not exist"
